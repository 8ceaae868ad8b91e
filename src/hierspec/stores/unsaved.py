"""Documents of a history that are not in its database yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from hierspec.stores.database import Database

_OVERHEAD = 256  # bytes of memory that a document takes besides its tokens and its namespace's key, an upper bound


class Unsaved:
    """Documents by namespace, oldest first, within a limit of bytes.

    A document leaves only once it is in the file: if a write is interrupted, by Ctrl-C for example, it is written the
    next time. Only if the file cannot be written for long, the oldest are dropped. Thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._documents: dict[int, tuple[bytes, bytes]] = {}  # number -> namespace and tokens; numbers count up
        self._next = 0
        self._tried = -1  # a write of the documents up to this number was begun
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            return iter(list(self._documents.values()))

    @property
    def memory(self) -> int:
        return sum(len(namespace) + len(tokens) + _OVERHEAD for namespace, tokens in self)

    def add(self, namespace: bytes, tokens: bytes) -> None:
        with self._lock:
            self._documents[self._next] = namespace, tokens
            self._next += 1
            size = self.memory if len(self._documents) > 1 else 0
            while size > self._max_bytes:
                oldest = next(iter(self._documents))
                size -= len(self._documents[oldest][1]) + len(self._documents[oldest][0]) + _OVERHEAD
                del self._documents[oldest]

    def drop(self, namespace: bytes | None) -> None:
        """Forgets what one namespace wrote, or all."""
        with self._lock:
            for number, document in list(self._documents.items()):
                if namespace in (None, document[0]):
                    del self._documents[number]

    def save(self, database: Database) -> None:
        """Writes all of them, in batches that fit into a transaction. One thread at a time may call this."""
        self._leave_out_saved(database)
        while batch := self._first(database):
            self._tried = max(batch)  # set before writing: an interrupt may come right after the last byte
            database.write(list(batch.values()))
            self._take_off(batch)

    def _leave_out_saved(self, database: Database) -> None:
        """Drops what is in the file already: a write that was interrupted may have been complete."""
        with self._lock:
            tried = {number: document for number, document in self._documents.items() if number <= self._tried}
        self._take_off({number: document for number, document in tried.items() if database.holds(*document)})

    def _first(self, database: Database) -> dict[int, tuple[bytes, bytes]]:
        with self._lock:
            documents = list(self._documents.items())
        return dict(documents[: database.batch_size([document for _, document in documents])])

    def _take_off(self, saved: dict[int, tuple[bytes, bytes]]) -> None:
        with self._lock:
            for number in saved:
                self._documents.pop(number, None)
