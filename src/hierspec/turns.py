"""Turns at one model: its caches and stores serve one thread at a time, a pass each."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hierspec.core.request import Request

_GIVE_WAY_SECONDS = 2e-4  # in which a thread that waits wakes up


class _Hold:
    """Lives as long as a turn: in the frame that has it, so that no interrupt can end the one without the other."""


class Turns:
    """The lock of a model. A thread that has a turn may take another one inside it.

    Threads that wait are served before the one that just had its turn: without that, a thread that goes from pass to
    pass would take the lock again before any other wakes up.
    """

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._waiting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._mine = threading.local()  # the turn that this thread has
        self._left: deque[Request] = deque()  # to be cancelled when the turn is over

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self._is_mine():
            yield
            return
        hold, me = _Hold(), threading.current_thread()
        if any(thread is not me for thread in list(self._waiting)):
            time.sleep(_GIVE_WAY_SECONDS)
        self._waiting.add(me)
        try:
            # Python looks for signals neither between taking the lock and the body of `with`, nor between its end and
            # giving the lock back. With acquire() and release() Ctrl-C could leave the lock taken for ever.
            with self._busy:
                self._waiting.discard(me)
                self._mine.turn = weakref.ref(hold)
                try:
                    yield
                finally:
                    self._cancel_left()
        finally:
            self._waiting.discard(me)

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
