"""Turns at one model: its caches and stores serve one thread at a time, a pass each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hierspec.core.request import Request


class Turns:
    """The lock of a model. A thread that has a turn may take another one inside it.

    Threads that wait are served before the one that just had its turn: without that, a thread that goes from pass to
    pass would take the lock again before any other wakes up.
    """

    def __init__(self) -> None:
        self._busy, self._next = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._left: deque[Request] = deque()  # to be cancelled when the turn is over

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self._is_mine():
            yield
            return
        taken = False
        try:
            with self._next:  # whoever waits for the lock holds this one, so all others queue behind it
                taken = self._busy.acquire()
            self._owner = threading.get_ident()
            yield
        finally:
            if taken:
                try:
                    while self._left:
                        self._left.popleft().cancel()
                finally:
                    self._owner = None
                    self._busy.release()

    def cancel(self, request: Request) -> None:
        """End a request. Where this thread is in the middle of a turn, when that is over: Python may drop a stream that
        nobody holds any more at any line, also where a cache is half changed."""
        if self._is_mine():
            self._left.append(request)
            return
        with self.turn():
            request.cancel()

    def _is_mine(self) -> bool:
        return self._owner == threading.get_ident() and self._busy.locked()
