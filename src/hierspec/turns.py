"""Turns at one model: its caches and stores serve one thread at a time, a pass each."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from hierspec.core.request import Request


class _Hold:
    """A lock is held for as long as this lives in the frame that took it: Ctrl-C can end a frame at any line, also
    within `finally` and before the end of a `with`, and a lock that is never freed would stop all other threads."""


class Turns:
    """The lock of a model. A thread that has a turn may take another one inside it.

    Threads that wait are served before the one that just had its turn: without that, a thread that goes from pass to
    pass would take the lock again before any other wakes up.
    """

    def __init__(self) -> None:
        self._busy, self._next = threading.Lock(), threading.Lock()
        self._free_busy, self._free_next = _freeing(self._busy), _freeing(self._next)
        self._mine = threading.local()  # what this thread holds
        self._left: deque[Request] = deque()  # to be cancelled when the turn is over

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self._is_mine():
            yield
            return
        queued: _Hold | None = _Hold()
        turn: _Hold | None = _Hold()
        try:
            # Whoever waits for its turn holds the first of the two, so all others queue behind it. Taking a lock and
            # noting who holds it is one line: the end of a hold frees its lock, whatever its reason.
            self._mine.queued = self._next.acquire() and weakref.ref(queued, self._free_next)
            self._mine.turn = self._busy.acquire() and weakref.ref(turn, self._free_busy)
            queued = None
            yield
        finally:
            if self._is_mine():
                self._cancel_left()
            queued = turn = None

    def cancel(self, request: Request) -> None:
        """End a request. Where this thread is in the middle of a turn, when that is over: Python may drop a stream that
        nobody holds any more at any line, also where a cache is half changed."""
        if self._is_mine():
            self._left.append(request)
            return
        with self.turn():
            request.cancel()

    def _cancel_left(self) -> None:
        while self._left:
            self._left[0].cancel()
            self._left.popleft()

    def _is_mine(self) -> bool:
        turn = getattr(self._mine, "turn", None)
        return turn is not None and turn() is not None


def _freeing(lock: threading.Lock) -> Callable[[object], None]:
    """What frees the lock, whatever it is given. It is no function of Python's: an interrupt finds no line in it."""
    return cast(Callable[[object], None], lock.__exit__)
