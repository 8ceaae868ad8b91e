"""Drafts from earlier answers of this model: finished requests, by namespace, within a limit of bytes."""

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
from hierspec.stores.tree import draft_from_index

SHARED = "shared"  # the namespace that all may read; requests never write it, only `add` does

_MAX_MATCHES = 32  # that a draft is made from
PROMPT_TAIL = 8  # tokens of the prompt stored before the output, so that the first output tokens can be matched
_MIN_OUTPUT = 8  # tokens; shorter answers are not worth their space
_BATCH = 64  # documents written to the file at once, fewer if the limit is small,
_BATCH_SECONDS = 5.0  # or whatever there is after this time


class HistoryStore(Store):
    """Earlier answers, in memory as `Rings` and, where a path is given, on disk as an `Archive`.

    The limit applies to memory and, separately, to the files. A namespace is read from the file when its first request
    begins; those that do not fit into memory stay in the file. Once the store is open, an error of the file does not
    make a request fail: `info` reports it. Thread-safe.
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
            raise HierspecError(f"A history of {limit} bytes is too small: allow at least {LEAST_LIMIT}.")
        self.name, self.path, self.limit, self.shared = name, path, limit, shared
        # An eighth of the limit is for unsaved documents, and for a copy of the text while a ring grows.
        self._rings = Rings(limit - limit // 8, SHARED)
        self._archive = Archive(path, limit, vocabulary_hash, SHARED) if path is not None else None
        self._max_document = limit // 256  # tokens; longer documents are split
        self._batch_size = min(_BATCH, limit >> 16)
        self._pending: list[tuple[str, bytes]] = []  # not in the file yet
        self._saving: list[tuple[str, bytes]] = []  # being written
        self._last_flush = time.monotonic()
        self._last_error = ""
        self._views: WeakSet[HistoryView] = WeakSet()
        # Acquired in this order. While a batch is written only `_disk_lock` is held, so that other threads can draft.
        self._disk_lock, self._lock = threading.RLock(), threading.RLock()

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
                draft = draft_from_index(ring.index, context, budget, budget, self.name, _MAX_MATCHES)
                # Better evidence comes first; on a tie, the request's namespace before the shared one.
                better = draft.evidence[:1] > best.evidence[:1]
                best = draft.merge(best, budget) if better else best.merge(draft, budget)
        return best

    def learn(self, tokens: Sequence[int]) -> None:
        """Does nothing: requests learn through the view that `begin` returns, whole documents are added by `add`."""

    def add(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> None:
        """Adds a document, unless it equals a recent one of the same namespace."""
        document = np.array(tokens, "<i4")
        if len(document) and int(document.min()) < 0:
            raise ValueError("a document holds a negative token id")
        # Pieces overlap, so that the first tokens of each can be matched.
        for start in range(0, max(1, len(document) - PROMPT_TAIL), self._max_document - PROMPT_TAIL):
            self._add(document[start : start + self._max_document].tobytes(), namespace)
        if self._is_due():
            try:
                self.flush()
            except HierspecError as error:  # the next batch tries again
                self._last_error = str(error)

    def documents(self, namespace: str) -> Iterator[np.ndarray]:
        """A namespace's documents in the file, oldest first; none without a file."""
        if self._archive is not None:
            for document in self._archive.read(namespace):
                yield np.frombuffer(document, "<i4")

    def flush(self) -> None:
        """Writes unsaved documents to the file."""
        with self._disk_lock:
            with self._lock:
                if self._archive is None:
                    return
                archive, batch = self._archive, self._pending
                self._pending, self._saving, self._last_flush = [], batch, time.monotonic()
            try:
                archive.write(batch)
                self._last_error = ""
            except HierspecError:
                with self._lock:
                    self._pending = _newest(batch + self._pending, self.limit // 32)
                raise
            finally:
                with self._lock:
                    self._saving = []

    def drop(self, namespace: str | None = None) -> None:
        """Deletes the documents of one namespace, or of all. Requests that run there now are not learnt either."""
        with self._disk_lock, self._lock:
            if self._archive is not None:
                self._archive.drop(namespace)
            self._pending = [unsaved for unsaved in self._pending if namespace not in (None, unsaved[0])]
            for name in [name for name, _ in self._rings if namespace in (None, name)]:
                self._rings.remove(name)
            for view in self._views:
                if namespace in (None, view.namespace):
                    view.forget()

    def info(self) -> dict[str, Any]:
        """Counts: of the file where there is one, else of memory. `bytes` is always memory."""
        with self._lock:
            unsaved_bytes = sum(len(document) for _, document in self._pending)
            if self._archive is None:
                counts = [ring.counts() for _, ring in self._rings]
                namespaces = len(counts)
                documents, tokens = sum(count[0] for count in counts), sum(count[1] for count in counts)
            else:
                usage = self._archive.usage()
                new = {name for name, _ in self._pending if not self._archive.usage(name).documents}
                namespaces = usage.namespaces + len(new)
                documents, tokens = usage.documents + len(self._pending), (usage.bytes + unsaved_bytes) // 4
            return {
                "documents": documents,
                "tokens": tokens,
                "namespaces": namespaces,
                "bytes": self._rings.memory + unsaved_bytes,
                "limit": self.limit,
                "path": None if self.path is None else str(self.path),
                "file_bytes": 0 if self._archive is None else self._archive.file_bytes(),
                "unsaved": len(self._pending),
                "trouble": self._last_error,
            }

    def close(self) -> None:
        """Writes unsaved documents and closes the file. What is learnt afterwards stays in memory."""
        with self._disk_lock:
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
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
        """The namespace's ring, read from the file if it is not in memory; None if there is none. Needs the lock."""
        ring = self._rings.use(namespace)
        if ring is not None or self._archive is None:
            return ring
        unsaved = [document for name, document in self._saving + self._pending if name == namespace]
        try:
            saved = self._archive.usage(namespace)
            if not saved.documents and not unsaved:
                return None
            # Every document is followed by a separator.
            tokens = saved.bytes // 4 + saved.documents + sum(len(document) // 4 + 1 for document in unsaved)
            ring = self._rings.make(namespace, tokens)
            ring.fill(self._archive.read(namespace, 4 * ring.index.capacity))
        except HierspecError as error:
            self._last_error = str(error)
        if ring is not None:
            ring.fill(unsaved)
        return ring

    def _is_due(self) -> bool:
        with self._lock:
            late = time.monotonic() - self._last_flush > _BATCH_SECONDS
            size = sum(len(document) for _, document in self._pending)
            full = len(self._pending) >= self._batch_size or size >= self.limit // 64
            return bool(size) and (late or (full and not self._last_error))


class HistoryView(Store):
    """The history for one request: drafts from its namespace, and adds its output when it ends."""

    def __init__(self, store: HistoryStore, prompt: np.ndarray, namespace: str) -> None:
        self.name, self.namespace = store.name, namespace
        self._store: HistoryStore | None = store
        self._tokens = array("i", prompt[-PROMPT_TAIL:].tolist())
        self._prompt_tokens = len(self._tokens)
        self._learns = namespace != SHARED

    def begin(self, prompt: np.ndarray, namespace: str = "") -> HistoryView:
        raise HierspecError("A request's view of the history cannot begin another request: use the store's begin().")

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        return self._store.propose(context, budget, self.namespace) if self._store is not None else Proposal()

    def learn(self, tokens: Sequence[int]) -> None:
        if self._learns:
            self._tokens.extend(tokens)

    def forget(self) -> None:
        """Stops learning this request, and drops what was learnt."""
        self._learns = False
        self._tokens = array("i")

    def end(self) -> None:
        """Adds the output to the history, also of a cancelled request. Only the first call counts."""
        store, self._store = self._store, None
        if store is not None and self._learns and len(self._tokens) - self._prompt_tokens >= _MIN_OUTPUT:
            store.add(np.frombuffer(self._tokens, np.int32), self.namespace)


def _newest(documents: list[tuple[str, bytes]], max_bytes: int) -> list[tuple[str, bytes]]:
    """As many of the newest as fit into `max_bytes`."""
    first, size = len(documents), 0
    while first and size + len(documents[first - 1][1]) <= max_bytes:
        first -= 1
        size += len(documents[first][1])
    return documents[first:]
