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
from hierspec.stores.archive import LEAST_LIMIT, Archive, Usage, namespace_key
from hierspec.stores.database import Database
from hierspec.stores.rings import Ring, Rings
from hierspec.stores.tree import draft_from_index
from hierspec.stores.unsaved import Unsaved

SHARED = "shared"  # the namespace that all may read; requests never write it, only `add` does
SHARED_KEY = namespace_key(SHARED)

_MAX_MATCHES = 32  # matches that a draft is made from
PROMPT_TAIL = 8  # tokens of the prompt stored before the output, so that the first output tokens can be matched
_MIN_OUTPUT = 8  # tokens; shorter answers are not worth their space
_MAX_PIECES = 3  # newest pieces of a long document that are kept; more would only push each other out
_BATCH = 64  # documents written to the file at once, fewer if the limit is small
_BATCH_SECONDS = 5.0  # after this time a smaller batch is written too
_LARGEST_ID = 2**31 - 1
_FAILURES = (HierspecError, OSError, MemoryError)  # of the file, or out of memory: requests do not fail by these


class HistoryStore(Store):
    """Earlier answers, in memory as `Rings` and, where a path is given, on disk as an `Archive`.

    The limit applies to memory and, separately, to the files. A namespace is read from the file when its first request
    begins; those that do not fit into memory stay in the file. Once the store is open, neither an error of the file nor
    a lack of memory makes a request fail: `info` reports it. Thread-safe.
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
        self._rings = Rings(limit - limit // 8, SHARED_KEY)
        self._unsaved = Unsaved(limit // 16)
        self._archive: Database | None = None
        if path is not None:
            self._archive = Archive(path, limit, vocabulary_hash, SHARED_KEY)
        self._max_document = limit // 256  # tokens; longer documents are split
        self._batch_size = min(_BATCH, limit >> 16)
        self._last_flush = time.monotonic()
        self._last_error = ""
        self._views: WeakSet[HistoryView] = WeakSet()
        # Acquired in this order. While a batch is written only `_disk_lock` is held, so that other threads can draft.
        self._disk_lock, self._lock = threading.RLock(), threading.RLock()

    def begin(self, prompt: np.ndarray, namespace: str = "") -> HistoryView:
        """The history as one request of this namespace sees it."""
        with self._lock:
            if self.shared:
                self._ring(SHARED_KEY)
            self._ring(namespace_key(namespace))
            view = HistoryView(self, prompt, namespace)
            self._views.add(view)
        return view

    def propose(self, context: np.ndarray, budget: int, namespace: str = "") -> Proposal:
        best, key = Proposal(), namespace_key(namespace)
        with self._lock:
            for name in (key, SHARED_KEY) if self.shared and key != SHARED_KEY else (key,):
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
        """Adds a document, or the newest part of a very long one, unless its namespace has an equal recent one."""
        document, key = _document(tokens)[-_MAX_PIECES * self._max_document :], namespace_key(namespace)
        # Pieces overlap, so that the first tokens of each can be matched.
        for start in range(0, max(1, len(document) - PROMPT_TAIL), self._max_document - PROMPT_TAIL):
            self._add(document[start : start + self._max_document].tobytes(), key)
        self._save_if_due()

    def documents(self, namespace: str) -> Iterator[np.ndarray]:
        """A namespace's documents in the file, oldest first; none without a file."""
        if self._archive is not None:
            for document in self._archive.read(namespace_key(namespace)):
                yield np.frombuffer(document, "<i4")

    def flush(self) -> None:
        """Writes unsaved documents to the file. Whatever stops it, those that are not in the file stay unsaved."""
        with self._disk_lock:
            if self._archive is not None:
                self._last_flush = time.monotonic()
                self._unsaved.save(self._archive)
                self._last_error = ""

    def drop(self, namespace: str | None = None) -> None:
        """Deletes the documents of one namespace, or of all. Requests that run there now are not learnt either."""
        key = None if namespace is None else namespace_key(namespace)
        with self._disk_lock, self._lock:
            self._unsaved.drop(key)
            for name in [name for name, _ in self._rings if key in (None, name)]:
                self._rings.remove(name)
            for view in self._views:
                if namespace in (None, view.namespace):
                    view.forget()
            if self._archive is not None:
                self._archive.drop(key)

    def info(self) -> dict[str, Any]:
        """Counts of the file if there is one, else of memory. `bytes` is always memory."""
        with self._lock:
            file_bytes = 0 if self._archive is None else self._archive.file_bytes()
            return self._described(self._counts(), None if self.path is None else str(self.path), file_bytes)

    def close(self) -> None:
        """Writes unsaved documents and closes the file. What is learnt afterwards stays in memory.

        If writing fails, the file stays open and what is unsaved is kept: close it again.
        """
        with self._disk_lock:
            self.flush()
            with self._lock:
                archive, self._archive = self._archive, None
            if archive is not None:
                archive.close()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _described(self, counts: Usage, path: str | None, file_bytes: int) -> dict[str, Any]:
        return {
            "documents": counts.documents,
            "tokens": counts.bytes // 4,
            "namespaces": counts.namespaces,
            "bytes": self._rings.memory + self._unsaved.memory,
            "limit": self.limit,
            "path": path,
            "file_bytes": file_bytes,
            "unsaved": len(self._unsaved),
            "trouble": self._last_error,
        }

    def _counts(self) -> Usage:
        if self._archive is None:
            return self._counts_in_memory()
        usage, unsaved = self._archive.usage(), list(self._unsaved)
        new = {name for name in {name for name, _ in unsaved} if not self._archive.usage(name).documents}
        size = usage.bytes + sum(len(document) for _, document in unsaved)
        return Usage(usage.documents + len(unsaved), size, usage.namespaces + len(new))

    def _counts_in_memory(self) -> Usage:
        counts = [ring.counts() for _, ring in self._rings]
        return Usage(sum(count[0] for count in counts), 4 * sum(count[1] for count in counts), len(counts))

    def _save_if_due(self) -> None:
        if self._is_due():
            try:
                self.flush()
            except _FAILURES as error:  # the next batch tries again
                self._last_error = _sentence(error)

    def _add(self, document: bytes, key: bytes) -> None:
        with self._lock:
            ring = self._ring(key)
            if ring is not None and ring.is_recent(document):
                return
            if self._archive is not None:
                self._unsaved.add(key, document)  # first: what is only in a ring may be lost
            try:
                if ring is None:
                    self._rings.make(key, len(document) // 4 + 1)
                self._rings.append(key, document)
            except MemoryError as error:
                self._last_error = _sentence(error)

    def _ring(self, key: bytes) -> Ring | None:
        """The namespace's ring, read from the file if it is not in memory; None if there is none. Needs the lock."""
        ring = self._rings.use(key)
        if ring is not None or self._archive is None:
            return ring
        unsaved = [document for name, document in self._unsaved if name == key]
        try:
            saved = self._archive.usage(key)
            if not saved.documents and not unsaved:
                return None
            # Every document is followed by a separator.
            tokens = saved.bytes // 4 + saved.documents + sum(len(document) // 4 + 1 for document in unsaved)
            ring = self._rings.make(key, tokens)
            try:
                ring.fill(self._archive.read(key, 4 * ring.index.capacity))
            except HierspecError as error:  # damaged: use what was read before
                self._last_error = _sentence(error)
            ring.fill(unsaved)
        except BaseException as error:  # Ctrl-C too: a ring that lacks documents would not be read again
            self._rings.remove(key)
            if not isinstance(error, _FAILURES):
                raise
            self._last_error = _sentence(error)
            return None
        return ring

    def _is_due(self) -> bool:
        with self._lock:
            late = time.monotonic() - self._last_flush > _BATCH_SECONDS
            full = len(self._unsaved) >= self._batch_size or self._unsaved.memory >= self.limit // 64
            return len(self._unsaved) > 0 and (late or (full and not self._last_error))


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
        """Stops learning from this request, and drops what was learnt."""
        self._learns = False
        self._tokens = array("i")

    def end(self) -> None:
        """Adds the output to the history, also of a cancelled request. Only the first call counts."""
        store = self._store
        if store is not None and self._learns and len(self._tokens) - self._prompt_tokens >= _MIN_OUTPUT:
            store.add(np.frombuffer(self._tokens, np.int32), self.namespace)
        self._store = None  # last, so that a call that was interrupted can be made again


def _document(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError):
        ids = np.array(0.0)
    if not ids.size and ids.ndim == 1:
        return np.zeros(0, "<i4")
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > _LARGEST_ID:
        raise HierspecError("A document of a history must be a list of token ids, which are whole numbers from 0 up.")
    return ids.astype("<i4")


def _sentence(error: BaseException) -> str:
    if isinstance(error, HierspecError):
        return str(error)
    if isinstance(error, MemoryError):
        return "Memory is short, so the history holds less than was written: close other programs or lower its limit."
    return "The file of the history cannot be read or written, so new answers wait in memory: check the disk."
