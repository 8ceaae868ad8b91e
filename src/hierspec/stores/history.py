"""Guesses from what this model wrote before: finished requests, by namespace, within a limit of bytes."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.core.proposal import Proposal
from hierspec.stores.archive import LEAST_LIMIT, Archive
from hierspec.stores.rings import Ring, Rings
from hierspec.stores.tree import grow_after

SHARED = "shared"  # the namespace that others may see; requests only read it, `add` alone writes it

_PLACES = 32  # places that a guess is made from
PROMPT_TAIL = 8  # tokens of the prompt that go before the output, so that the output's beginning can be found
_SHORTEST = 8  # tokens of output; less teaches nothing that is worth a place
_BATCH = 64  # documents that are written to the file in one go, fewer if it is small,
_BATCH_SECONDS = 5.0  # or what there is after this time


class HistoryStore(Store):
    """What was written, in memory as `Rings` and, where there is a path, on the disk as an `Archive`.

    The limit holds for the memory and, separately, for the files. Namespaces that memory has no room for stay in the
    file; one is read from it when its first request begins. After it has been opened, no trouble with the file makes a
    request fail: `info` tells of it. May be used from several threads.
    """

    def __init__(
        self,
        path: Path | None = None,
        limit: int = 64 << 20,
        vocabulary_hash: str = "",
        name: str = "history",
        shared: bool = False,
    ) -> None:
        if limit < LEAST_LIMIT:
            raise HierspecError(f"A history within {limit} bytes is of no use: allow at least {LEAST_LIMIT}.")
        self.name, self.path, self.limit, self.shared = name, path, limit, shared
        # The rest of the limit is for unsaved documents, and for a copy of the text while a ring grows.
        self._rings = Rings(limit - limit // 8, SHARED)
        self._archive = Archive(path, limit, vocabulary_hash, SHARED) if path is not None else None
        self._longest = limit // 256  # tokens of one document; longer ones are cut into pieces
        self._batch = min(_BATCH, limit >> 16)
        self._pending: list[tuple[str, bytes]] = []  # not in the file yet
        self._saving: list[tuple[str, bytes]] = []  # being written to it
        self._flushed = time.monotonic()
        self._trouble = ""
        self._views: WeakSet[HistoryView] = WeakSet()
        # Taken in this order. Only `_disk` is held while a batch is written, so that other threads can guess meanwhile.
        self._disk, self._lock = threading.RLock(), threading.RLock()

    def begin(self, prompt: np.ndarray, namespace: str = "") -> HistoryView:
        """The history as one request of this namespace sees it."""
        with self._lock:
            if self.shared:
                self._ring(SHARED)
            self._ring(namespace)
            view = HistoryView(self, prompt, namespace)
            self._views.add(view)
        return view

    def propose(self, context: np.ndarray, budget: int, namespace: str = "") -> Proposal:
        best = Proposal()
        with self._lock:
            for name in (namespace, SHARED) if self.shared and namespace != SHARED else (namespace,):
                ring = self._rings.get(name)
                if ring is None:
                    continue
                found = grow_after(ring.index, context, budget, budget, self.name, _PLACES)
                # The better reason comes first; of equals the request's own namespace.
                first = found.evidence[:1] > best.evidence[:1]
                best = found.merge(best, budget) if first else best.merge(found, budget)
        return best

    def learn(self, tokens: Sequence[int]) -> None:
        """Nothing: requests learn through what `begin` returns, whole documents come through `add`."""

    def add(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> None:
        """One document. A copy of a recent one of the same namespace is not kept twice."""
        document = np.array(tokens, "<i4")
        if len(document) and int(document.min()) < 0:
            raise ValueError("a document holds a negative token id")
        # Pieces overlap, so that the beginning of each can be found.
        for start in range(0, max(1, len(document) - PROMPT_TAIL), self._longest - PROMPT_TAIL):
            self._add(document[start : start + self._longest].tobytes(), namespace)
        if self._is_due():
            try:
                self.flush()
            except HierspecError as error:  # the next batch tries again
                self._trouble = str(error)

    def documents(self, namespace: str) -> Iterator[np.ndarray]:
        """What the file holds of a namespace, oldest first; nothing without a file."""
        if self._archive is not None:
            for document in self._archive.read(namespace):
                yield np.frombuffer(document, "<i4")

    def flush(self) -> None:
        """Writes to the file what is not in it yet."""
        with self._disk:
            with self._lock:
                if self._archive is None:
                    return
                archive, batch = self._archive, self._pending
                self._pending, self._saving, self._flushed = [], batch, time.monotonic()
            try:
                archive.write(batch)
                self._trouble = ""
            except HierspecError:
                with self._lock:
                    self._pending = _newest(batch + self._pending, self.limit // 32)
                raise
            finally:
                with self._lock:
                    self._saving = []

    def drop(self, namespace: str | None = None) -> None:
        """Forgets all documents of one namespace, or of all. What is running there now is not learnt either."""
        with self._disk, self._lock:
            if self._archive is not None:
                self._archive.drop(namespace)
            self._pending = [kept for kept in self._pending if namespace not in (None, kept[0])]
            for name in [name for name, _ in self._rings if namespace in (None, name)]:
                self._rings.remove(name)
            for view in self._views:
                if namespace in (None, view.namespace):
                    view.forget()

    def info(self) -> dict[str, Any]:
        """What is held: in the file where there is one, else in memory. `bytes` are always those of memory."""
        with self._lock:
            unsaved = sum(len(document) for _, document in self._pending)
            if self._archive is None:
                rings = [ring.held() for _, ring in self._rings]
                documents, tokens, namespaces = (
                    sum(held[0] for held in rings),
                    sum(held[1] for held in rings),
                    len(rings),
                )
            else:
                held = self._archive.held()
                new = {name for name, _ in self._pending if not self._archive.held(name).documents}
                namespaces = held.namespaces + len(new)
                documents, tokens = held.documents + len(self._pending), (held.bytes + unsaved) // 4
            return {
                "documents": documents,
                "tokens": tokens,
                "namespaces": namespaces,
                "bytes": self._rings.memory + unsaved,
                "limit": self.limit,
                "path": None if self.path is None else str(self.path),
                "file_bytes": 0 if self._archive is None else self._archive.file_bytes(),
                "unsaved": len(self._pending),
                "trouble": self._trouble,
            }

    def close(self) -> None:
        """Writes what is not in the file yet and closes it. What is learnt afterwards is kept in memory only."""
        with self._disk:
            try:
                self.flush()
            finally:
                with self._lock:
                    archive, self._archive, self._pending = self._archive, None, []
                if archive is not None:
                    archive.close()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, document: bytes, namespace: str) -> None:
        with self._lock:
            ring = self._ring(namespace)
            if ring is None:
                self._rings.make(namespace, len(document) // 4 + 1)
            elif ring.is_recent(document):
                return
            self._rings.append(namespace, document)
            if self._archive is not None:
                self._pending.append((namespace, document))

    def _ring(self, namespace: str) -> Ring | None:
        """The namespace's text, from the file if need be; None if there is none. Called with the lock held."""
        ring = self._rings.use(namespace)
        if ring is not None or self._archive is None:
            return ring
        unsaved = [document for name, document in self._saving + self._pending if name == namespace]
        try:
            held = self._archive.held(namespace)
            if not held.documents and not unsaved:
                return None
            # A separator a document.
            tokens = held.bytes // 4 + held.documents + sum(len(document) // 4 + 1 for document in unsaved)
            ring = self._rings.make(namespace, tokens)
            ring.fill(self._archive.read(namespace, 4 * ring.index.capacity))
        except HierspecError as error:
            self._trouble = str(error)
        if ring is not None:
            ring.fill(unsaved)
        return ring

    def _is_due(self) -> bool:
        with self._lock:
            late = time.monotonic() - self._flushed > _BATCH_SECONDS
            size = sum(len(document) for _, document in self._pending)
            full = len(self._pending) >= self._batch or size >= self.limit // 64
            return bool(size) and (late or (full and not self._trouble))


class HistoryView(Store):
    """The history for one request: guesses from its namespace, and adds what it wrote when it ends."""

    def __init__(self, store: HistoryStore, prompt: np.ndarray, namespace: str) -> None:
        self.name, self.namespace = store.name, namespace
        self._store: HistoryStore | None = store
        self._tokens = array("i", prompt[-PROMPT_TAIL:].tolist())
        self._before = len(self._tokens)  # tokens that are not the request's own
        self._learns = namespace != SHARED

    def begin(self, prompt: np.ndarray, namespace: str = "") -> HistoryView:
        raise HierspecError("A request's view of the history cannot begin another request: begin it from the store.")

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        return self._store.propose(context, budget, self.namespace) if self._store is not None else Proposal()

    def learn(self, tokens: Sequence[int]) -> None:
        if self._learns:
            self._tokens.extend(tokens)

    def forget(self) -> None:
        """This request is not to be learnt."""
        self._learns = False
        self._tokens = array("i")

    def end(self) -> None:
        """Hands over what was written, also by a request that was cancelled. Only the first call counts."""
        store, self._store = self._store, None
        if store is not None and self._learns and len(self._tokens) - self._before >= _SHORTEST:
            store.add(np.frombuffer(self._tokens, np.int32), self.namespace)


def _newest(documents: list[tuple[str, bytes]], most: int) -> list[tuple[str, bytes]]:
    """As many of the newest as fit into `most` bytes."""
    kept, size = len(documents), 0
    while kept and size + len(documents[kept - 1][1]) <= most:
        kept -= 1
        size += len(documents[kept][1])
    return documents[kept:]
