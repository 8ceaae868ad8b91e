"""A history that many servers share: drafts come from memory, a Redis server keeps what all of them learn."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.stores.archive import Usage, namespace_key
from hierspec.stores.courier import Courier
from hierspec.stores.history import SHARED_KEY, HistoryStore, HistoryView
from hierspec.stores.redis_address import RedisAddress
from hierspec.stores.redis_database import News, RedisDatabase
from hierspec.stores.rings import Ring

_LOG = logging.getLogger("hierspec")
_PATIENCE = 0.05  # seconds that a request waits for its namespace; usually it takes one or two thousandths


class SharedHistory(HistoryStore):
    """Earlier answers of all servers that name the same database.

    When a request begins, what its namespace has that is not in memory is fetched; when it ends, its answer is sent in
    the background. A database that is down or slow delays nobody: drafts come from what is in memory, and unsaved
    answers wait there, the newest of them up to a sixteenth of the limit. The limit applies to memory and, separately,
    to the database. The server must answer when it is opened: a mistake in its name would not be noticed later.
    """

    def __init__(
        self,
        address: RedisAddress | str,
        limit: int = 64 << 20,
        vocabulary_hash: str = "",
        model: str = "",
        name: str = "history",
        shared: bool = False,
        patience: float = _PATIENCE,
    ) -> None:
        super().__init__(None, limit, vocabulary_hash, name, shared)
        self.address = RedisAddress.of(address) if isinstance(address, str) else address
        self._database = RedisDatabase(self.address, limit, (model, vocabulary_hash), SHARED_KEY)
        if not self._database.is_durable():
            _LOG.warning("%s keeps no append-only file: histories are lost when it stops.", self.address)
        self._archive = self._database
        self._courier = Courier(self, patience)

    def begin(self, prompt: np.ndarray, namespace: str = "") -> HistoryView:
        """The history as one request of this namespace sees it, with what other servers have written by now."""
        self._courier.fetch([*([SHARED_KEY] if self.shared else []), namespace_key(namespace)])
        return super().begin(prompt, namespace)

    def fetch(self, namespace: bytes) -> None:
        """Reads what is new in the database. If that fails it raises, and what is in memory stays."""
        with self._disk_lock:  # nothing is saved meanwhile, so what is unsaved now is not in the news
            with self._lock:
                ring = self._rings.get(namespace)
                known = (ring.birth, ring.last) if ring is not None else (b"", b"")
            news = self._database.news(namespace, *known, max_bytes=self.limit)
            try:
                with self._lock:
                    if self._rings.get(namespace) is not ring:  # evicted, or made by an answer: the next request tries
                        return
                    if news.whole:
                        self._replace(namespace, news)
                    elif ring is not None:
                        self._extend(namespace, ring, news)
            except MemoryError:
                with self._lock:
                    self._rings.remove(namespace)
                raise HierspecError("Memory is short, so the history holds less than was written.") from None

    def info(self) -> dict[str, Any]:
        """As for a file; while the database is down, counts of what is in memory."""
        try:
            usage, charged = self._database.usage(), self._database.file_bytes()
        except HierspecError as error:
            usage, charged, self._last_error = None, 0, str(error)
        with self._lock:
            unsaved = list(self._unsaved)
            counts = usage or self._counts_in_memory()
            if usage is not None:
                size = usage.bytes + sum(len(document) for _, document in unsaved)
                counts = Usage(usage.documents + len(unsaved), size, usage.namespaces)
            return self._described(counts, str(self.address), charged)

    def save(self) -> bool:
        """Writes what is unsaved, for the courier."""
        if not len(self._unsaved):
            return False
        self.flush()
        return True

    def close(self) -> None:
        """Writes unsaved answers and closes the connection. If writing fails it stays open: close it again."""
        super().close()
        self._courier.stop()

    def _replace(self, namespace: bytes, news: News) -> None:
        """Replaces a ring by one with all that the database has and what is unsaved. Needs the lock."""
        written = set(news.documents)
        unsaved = [document for name, document in self._unsaved if name == namespace and document not in written]
        self._rings.remove(namespace)
        if not news.documents and not unsaved:
            return
        tokens = sum(len(document) // 4 + 1 for document in (*news.documents, *unsaved))
        ring = self._rings.make(namespace, tokens)
        ring.fill(news.documents)
        ring.fill(unsaved)
        ring.birth, ring.last = news.birth, news.last

    def _extend(self, namespace: bytes, ring: Ring, news: News) -> None:
        for document in news.documents:
            if not ring.is_recent(document):
                self._rings.append(namespace, document)
        ring.last = news.last

    def _ring(self, key: bytes) -> Ring | None:
        return self._rings.use(key)  # `begin` has fetched it where it could be

    def _save_if_due(self) -> None:
        self._courier.save_soon()
