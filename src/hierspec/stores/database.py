"""What a history needs of the place where its documents outlive the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hierspec.stores.archive import Usage


class Database(Protocol):
    """Token documents by namespace: one SQLite file (`Archive`), or a server that many processes share."""

    def write(self, documents: Sequence[tuple[bytes, bytes]]) -> None:
        """Adds all of these (namespace, tokens) or, on any error, none. There may be `batch_size(documents)`."""

    def batch_size(self, documents: Sequence[tuple[bytes, bytes]]) -> int:
        """How many of these, from the first on, one `write` takes."""

    def holds(self, namespace: bytes, tokens: bytes) -> bool:
        """Whether this document need not be written again."""

    def read(self, namespace: bytes, max_bytes: int | None = None) -> Iterator[bytes]:
        """The documents of one namespace, oldest first; only about the newest `max_bytes` where that is given."""

    def usage(self, namespace: bytes | None = None) -> Usage:
        """How much there is of one namespace, or in all."""

    def file_bytes(self) -> int:
        """What its limit applies to."""

    def drop(self, namespace: bytes | None = None) -> None:
        """Deletes one namespace, or all."""

    def close(self) -> None: ...
