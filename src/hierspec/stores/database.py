"""What a history needs of the database in which its documents outlive the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hierspec.stores.archive import Usage


class Database(Protocol):
    """Token documents by namespace: one SQLite file (`Archive`), or a server that many processes share."""

    def write(self, documents: Sequence[tuple[bytes, bytes]]) -> None:
        """Adds all of these (namespace, tokens) or, on any error, none: at most `batch_size(documents)` of them."""

    def batch_size(self, documents: Sequence[tuple[bytes, bytes]]) -> int:
        """How many of these, from the first on, one `write` takes."""

    def holds(self, namespace: bytes, tokens: bytes) -> bool:
        """Whether this document is known to be there, so that it need not be written again."""

    def read(self, namespace: bytes, max_bytes: int | None = None) -> Iterator[bytes]:
        """The documents of one namespace, oldest first; with `max_bytes`, about the newest that many bytes."""

    def usage(self, namespace: bytes | None = None) -> Usage:
        """How much there is of one namespace, or in all."""

    def file_bytes(self) -> int:
        """The bytes that its limit applies to."""

    def drop(self, namespace: bytes | None = None) -> None:
        """Deletes one namespace, or all."""

    def close(self) -> None: ...
