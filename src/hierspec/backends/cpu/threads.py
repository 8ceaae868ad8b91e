"""Threads that run one compiled function together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

# Places in `sync`: threads that have come to a meeting; a cache line further, meetings so far and whether to pass by.
ARRIVED, MEETINGS, BROKEN = 0, 8, 9

_Jobs = SimpleQueue[Any]  # (job, function, arguments), or None: no more
_Answers = SimpleQueue[tuple[object, int, BaseException | None]]


class ThreadTeam:
    """Runs function(number, threads, *arguments) on all its threads at once; the function releases the GIL.

    The caller is number 0: a thread less to wake and to wait for is a tenth of a millisecond. `sync` is for the
    function's meetings. Control-C can reach the caller just before it joins the others, who would wait for it for
    ever: so meetings can be broken, which lets everyone pass, and what was computed goes with the exception.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.sync = np.zeros(16, np.int64)
        self._busy = threading.Lock()
        self._answers: _Answers = SimpleQueue()
        self._jobs: list[_Jobs] = [SimpleQueue() for _ in range(threads - 1)]
        for number, jobs in enumerate(self._jobs, 1):
            threading.Thread(target=_follow, args=(number, threads, jobs, self._answers), daemon=True).start()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        with self._busy:  # one job at a time, whoever asks
            job, error = object(), None
            try:
                for jobs in self._jobs:
                    jobs.put((job, function, arguments))
                function(0, self.threads, *arguments)
                ready = 0
                while ready < len(self._jobs):
                    answered, _, raised = self._answers.get()
                    ready += answered is job
                    error = error or raised
            except BaseException:
                self._break_up()
                raise
        if error is not None:
            raise error

    def _break_up(self) -> None:
        """Wait until nobody works any more, whatever happens: memory they write to must not go before."""
        job, waiting = object(), set(range(1, self.threads))
        while waiting:
            try:
                self.sync[BROKEN] = 1
                for number in waiting:  # jobs are done in turn, so an empty one is done last; two do no harm
                    self._jobs[number - 1].put((job, _nothing, ()))
                while waiting:
                    answered, number, _ = self._answers.get()
                    if answered is job:
                        waiting.discard(number)
            except KeyboardInterrupt:
                continue
        self.sync[:] = 0

    def __del__(self) -> None:
        for jobs in getattr(self, "_jobs", []):
            jobs.put(None)


def _follow(number: int, threads: int, jobs: _Jobs, answers: _Answers) -> None:
    """A thread's life. It does not know the team, so that a team that nobody uses can go, and its threads with it."""
    while (given := jobs.get()) is not None:
        job, function, arguments = given
        error: BaseException | None = None
        try:
            function(number, threads, *arguments)
        except BaseException as raised:  # told to the caller
            error = raised
        given = function = arguments = None  # let go of what the caller may want to free
        answers.put((job, number, error))


def _nothing(number: int, threads: int) -> None:
    """A job that only shows that those before it are done."""
