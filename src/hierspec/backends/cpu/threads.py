"""Threads that run one compiled function together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

# Indices into `sync`, the state of a barrier: the number of threads that have arrived and, in the next cache line, the
# number of barriers passed and whether the barrier is broken. Then, in a line for each thread, how many parts of its
# share of the work have been taken, by itself or by others.
ARRIVED, GENERATION, BROKEN, TAKEN = 0, 8, 9, 16
LINE = 8  # integers in a cache line

_Jobs = SimpleQueue[Any]  # (job, function, arguments), or None to end the thread
_Answers = SimpleQueue[tuple[object, int, BaseException | None]]


class ThreadTeam:
    """Runs function(number, threads, *arguments) on all its threads at once; the function releases the GIL.

    The caller is thread 0: one thread less to wake and to wait for saves a tenth of a millisecond. `sync` is for the
    function's barriers. Control-C can reach the caller just before it joins the others, which would wait for it
    forever. So a barrier can be broken: all threads pass it, and the exception discards the results.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sync = np.zeros(TAKEN + LINE * threads, np.int64)
        self._busy = threading.Lock()
        self._answers: _Answers = SimpleQueue()
        self._jobs: list[_Jobs] = [SimpleQueue() for _ in range(threads - 1)]
        for number, jobs in enumerate(self._jobs, 1):
            threading.Thread(target=_run_jobs, args=(number, threads, jobs, self._answers), daemon=True).start()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        with self._busy:  # one job at a time, from any thread
            job, error = object(), None
            self.sync[:] = 0  # Ctrl-C may have left a barrier broken
            try:
                for jobs in self._jobs:
                    jobs.put((job, function, arguments))
                function(0, self.threads, *arguments)
                done = 0
                while done < len(self._jobs):
                    answered, _, raised = self._answers.get()
                    if answered is job:
                        done += 1
                        error = error or raised
            except BaseException:
                self._stop()
                raise
        if error is not None:
            raise error

    def _stop(self) -> None:
        """Waits until no thread is working, whatever happens: their memory must not be freed before."""
        job, waiting = object(), set(range(1, self.threads))
        while waiting:
            try:
                self.sync[BROKEN] = 1
                for number in waiting:  # jobs run in order, so an empty job runs last; a second one is harmless
                    self._jobs[number - 1].put((job, _no_op, ()))
                while waiting:
                    answered, number, _ = self._answers.get()
                    if answered is job:
                        waiting.discard(number)
            except KeyboardInterrupt:
                continue

    def __del__(self) -> None:
        for jobs in getattr(self, "_jobs", []):
            jobs.put(None)


def _run_jobs(number: int, threads: int, jobs: _Jobs, answers: _Answers) -> None:
    """The main function of a thread. It holds no reference to the team, so an unused team is freed and its threads
    end."""
    while (entry := jobs.get()) is not None:
        job, function, arguments = entry
        error: BaseException | None = None
        try:
            function(number, threads, *arguments)
        except BaseException as raised:  # raised again in the caller
            error = raised
        entry = function = arguments = None  # release them: the caller may want to free them
        answers.put((job, number, error))


def _no_op(number: int, threads: int) -> None:
    """A job that only signals that the jobs before it are done."""
