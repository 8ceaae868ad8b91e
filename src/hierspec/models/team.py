"""Threads that run one compiled function together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Team:
    """Runs function(number, threads, *arguments) on all its threads at once; the function releases the GIL.

    The caller is not one of them. Control-C reaches only the main thread: were it part of the team, it could leave
    while the others wait for it at a barrier. So it waits outside until the function has ended, whatever happens.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._followers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(threads - 1)]
        threading.Thread(target=self._lead, daemon=True).start()
        for number, jobs in enumerate(self._followers, 1):
            threading.Thread(target=self._follow, args=(number, jobs), daemon=True).start()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        try:
            self._jobs.put((function, arguments, done))
            error = done.get()
        except KeyboardInterrupt:
            self._finish()
            raise
        if error is not None:
            raise error

    def _finish(self) -> None:
        """Wait until nothing runs. Jobs are done in turn, so an empty one is done last."""
        while True:
            try:
                done: SimpleQueue[BaseException | None] = SimpleQueue()
                self._jobs.put((_nothing, (), done))
                done.get()
                return
            except KeyboardInterrupt:
                continue  # memory that the team writes to must not go before it is ready

    def _lead(self) -> None:
        answers: SimpleQueue[BaseException | None] = SimpleQueue()
        while True:
            function, arguments, done = self._jobs.get()
            for jobs in self._followers:
                jobs.put((function, arguments, answers))
            error = self._attempt(0, function, arguments)
            for _ in self._followers:
                error = answers.get() or error
            function = arguments = None  # let go of what the caller may want to free
            done.put(error)

    def _follow(self, number: int, jobs: SimpleQueue[Any]) -> None:
        while True:
            function, arguments, answers = jobs.get()
            error = self._attempt(number, function, arguments)
            function = arguments = None
            answers.put(error)

    def _attempt(self, number: int, function: Callable[..., None], arguments: Any) -> BaseException | None:
        try:
            function(number, self.threads, *arguments)
        except BaseException as error:  # told to the caller
            return error
        return None


def _nothing(number: int, threads: int) -> None:
    """A job that only shows that those before it are done."""
