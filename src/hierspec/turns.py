"""Turns at one model: its caches and stores serve one thread at a time, for one pass each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hierspec.core.request import Request

_LOOK_SECONDS = 1e-4  # between two looks at who still waits: less than any pass
_MOST_LOOKS = 5000  # for those that never come: an interrupt ended their wait


class Turns:
    """The lock of a model. A thread that has a turn may take another one inside it.

    Threads that wait are served before the one that just had its turn: without that, a thread that goes from pass to
    pass would take the lock again before any other wakes up.
    """

    def __init__(self) -> None:
        # It knows its owner as soon as it is taken: a stream that is collected right then must not wait for it.
        self._busy = threading.RLock()
        self._waiting: set[int] = set()  # threads
        self._taken = False  # while a thread has a turn
        self._left: deque[Request] = deque()  # to be cancelled when the turn is over

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self._is_mine():
            yield
            return
        me = threading.get_ident()
        self._let_others_go_first(me)
        self._waiting.add(me)
        try:
            # Python looks for signals neither between taking the lock and the body of `with`, nor between its end and
            # giving the lock back. With acquire() and release() Ctrl-C could leave the lock taken for ever.
            with self._busy:
                self._waiting.discard(me)
                self._taken = True
                try:
                    yield
                finally:
                    self._taken = False
        finally:
            self._waiting.discard(me)
            if self._left:
                with self._busy:
                    self._cancel_left()

    def _let_others_go_first(self, me: int) -> None:
        ahead = self._waiting - {me}
        for _ in range(_MOST_LOOKS):
            if not ahead & self._waiting:
                return
            time.sleep(_LOOK_SECONDS)
        self._waiting -= ahead

    def cancel(self, request: Request) -> None:
        """End a request; if this thread has a turn, once that is over.

        Python may collect a stream that nobody holds any more at any line, even while a cache is half changed.
        """
        if self._is_mine():
            self._left.append(request)
            return
        with self.turn():
            request.cancel()

    def leave(self, request: Request) -> None:
        """End a request that a thread other than its own has dropped: without waiting, if any thread has a turn.

        Python collects a stream in whatever thread it happens to be, even in a server's event loop. Whoever has the
        turn cancels the request after it.
        """
        self._left.append(request)
        if not (self._taken or self._is_mine()):
            with self.turn():
                self._cancel_left()

    def _cancel_left(self) -> None:
        while self._left:
            self._left[0].cancel()
            self._left.popleft()

    def _is_mine(self) -> bool:
        return self._busy._is_owned()  # type: ignore[attr-defined]  # as threading.Condition asks it
