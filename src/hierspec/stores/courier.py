"""One thread that fetches and saves for a history, so that no request waits long for a database."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from hierspec.core.errors import HierspecError

_LOG = logging.getLogger("hierspec")
_RETRY_SECONDS = 1.0  # between attempts while the database is down
_MOST_WANTED = 64  # namespaces that wait to be fetched; requests of older ones are long over


class Carried(Protocol):
    """The history that a courier works for."""

    def fetch(self, namespace: bytes) -> None: ...

    def save(self) -> bool:
        """Writes what is unsaved; False: there was nothing."""


class Courier:
    """Fetches namespaces when they are asked for, and saves when it is told that there is something to save.

    While the database is down it tries again every second, and nobody waits. It logs once that the database is down,
    and once that it is back. It ends with the history that it works for.
    """

    def __init__(self, carried: Carried, patience: float) -> None:
        self._carried = weakref.ref(carried)
        self._patience = patience  # seconds that a request waits for its namespace
        self._wanted: dict[bytes, threading.Event] = {}  # set: fetched, or it cannot be
        self._to_save = self._stopped = False
        self._fetched_last = False
        self._is_down = self._is_slow = False
        self._changed = threading.Condition()
        weakref.finalize(carried, self.stop)
        self._thread = threading.Thread(target=self._work, name="hierspec-history", daemon=True)
        self._thread.start()

    def fetch(self, namespaces: Sequence[bytes]) -> None:
        """Waits until these are fetched, unless the database is down or slow: then they are fetched later."""
        with self._changed:
            events = [self._wanted.setdefault(namespace, threading.Event()) for namespace in namespaces]
            while len(self._wanted) > _MOST_WANTED:
                self._wanted.pop(next(iter(self._wanted))).set()
            self._changed.notify()
            nobody_waits = self._is_down or self._is_slow or self._stopped
        if nobody_waits:
            return
        until = time.monotonic() + self._patience
        if not all(event.wait(max(0.0, until - time.monotonic())) for event in events):
            self._note_slow(True)

    def save_soon(self) -> None:
        with self._changed:
            self._to_save = True
            self._changed.notify()

    def stop(self) -> None:
        """Stop, without waiting for work that is under way."""
        with self._changed:
            self._stopped = True
            for event in self._wanted.values():
                event.set()
            self._changed.notify()

    def _work(self) -> None:
        while self._wait():
            began = time.monotonic()
            try:
                namespace = self._do_next()
                if namespace is not None and time.monotonic() - began < self._patience:
                    self._note_slow(False)
                self._note_down("")
            except HierspecError as error:
                self._note_down(str(error))
            except Exception as error:  # whatever it is, requests go on
                self._note_down(f"The history's database could not be used ({type(error).__name__}).")

    def _wait(self) -> bool:
        """Waits until there is something to do; False once it was stopped."""
        with self._changed:
            if self._is_down:
                self._changed.wait_for(lambda: self._stopped, _RETRY_SECONDS)
            self._changed.wait_for(lambda: self._stopped or self._wanted or self._to_save)
            return not self._stopped

    def _do_next(self) -> bytes | None:
        """Fetches a namespace and returns it, or saves; takes turns if there is both to do."""
        carried = self._carried()
        if carried is None:
            return None
        with self._changed:
            namespace = None if self._to_save and self._fetched_last else next(iter(self._wanted), None)
            self._fetched_last = namespace is not None
            if namespace is None:
                self._to_save = False  # before saving: what arrives meanwhile is saved next time
        if namespace is None:
            try:
                carried.save()
            except BaseException:
                self._to_save = True
                raise
            return None
        try:
            carried.fetch(namespace)
        finally:  # if it cannot be fetched, drop it so that others need not wait: its next request asks again
            with self._changed:
                if (event := self._wanted.pop(namespace, None)) is not None:
                    event.set()
        return namespace

    def _note_down(self, why: str) -> None:
        with self._changed:
            was_down, self._is_down = self._is_down, bool(why)
            if self._is_down:
                for event in self._wanted.values():
                    event.set()
        if why and not was_down and not self._is_slow:
            _LOG.warning("%s Answers go on without the history; new ones are kept for it in memory.", why)
        elif was_down and not why:
            _LOG.info("The history's database answers again.")

    def _note_slow(self, is_slow: bool) -> None:
        was_slow, self._is_slow = self._is_slow, is_slow
        if is_slow and not was_slow and not self._is_down:
            _LOG.warning(
                "The history's database took longer than %.0f ms: answers begin without it until it is faster.",
                1000 * self._patience,
            )
