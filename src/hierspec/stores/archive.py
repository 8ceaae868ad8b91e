"""Token documents in one SQLite file, by namespace, within a limit of bytes. Needs neither numpy nor torch.

A namespace goes by its key (`namespace_key`). Every batch is one transaction, so after a crash the file holds whole
batches only. Several processes may have the file open; SQLite's lock lets one of them write at a time.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec.sqlite_file import LOG_INDEX, PAGE, SqliteFile

FORMAT = 1
LEAST_LIMIT = 1 << 19  # bytes; below this, SQLite's overhead would be most of the file
ACTIVE = 64  # most recently used namespaces, which are not evicted whole
_APPLICATION = 0x68737068  # "hsph": SQLite's application_id, which identifies the file as ours
_ROW_OVERHEAD = 32  # bytes of a document, an upper bound
_NAMESPACE_OVERHEAD = 96  # bytes of a namespace besides its key, which is stored twice: in its row and for searching
_LONGEST_KEY = 256  # bytes; longer names are hashed, so that names take no more space than documents
_LARGEST_BATCH = 256  # documents

# A document's id is its namespace's id times 2^32 plus its number there. So a namespace's documents are neighbours on
# disk, and deleting the oldest frees whole pages.
_SCHEMA = (
    "CREATE TABLE origin (vocabulary TEXT NOT NULL)",
    # next: the number of the next document. used: number of the last batch that wrote to the namespace.
    "CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, documents INTEGER NOT NULL, "
    "bytes INTEGER NOT NULL, next INTEGER NOT NULL, used INTEGER NOT NULL)",
    "CREATE TABLE documents (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, checksum INTEGER NOT NULL)",
)
_ADD_NAMESPACE = "INSERT OR IGNORE INTO namespaces (name, documents, bytes, next, used) VALUES (?, 0, 0, 0, 0)"
_COUNT_ADDED = (
    "UPDATE namespaces SET documents = documents + 1, bytes = bytes + ?, next = next + 1, used = ? WHERE id = ?"
)
_COUNT_DELETED = "UPDATE namespaces SET documents = documents - ?, bytes = bytes - ? WHERE id = ?"
_HOLDS = "SELECT 1 FROM documents WHERE id > ? AND id < ? AND checksum = ? AND tokens = ? LIMIT 1"
_NAMESPACE_USAGE = "SELECT documents, bytes, 1 FROM namespaces WHERE name = ?"
_ALL_DOCUMENTS = (
    "SELECT name, documents, bytes, tokens, checksum FROM documents LEFT JOIN namespaces "
    "ON namespaces.id = documents.id >> 32 ORDER BY documents.id"
)
_OLDEST = (
    "SELECT max(id), sum(length(tokens)) FROM (SELECT id, tokens FROM documents WHERE id > ? AND id < ? "
    "ORDER BY id LIMIT ?)"
)
_NEXT_DOCUMENTS = "SELECT id, tokens, checksum FROM documents WHERE id > ? AND id < ? ORDER BY id LIMIT 64"


@dataclass(frozen=True)
class Usage:
    """How much the file holds, of one namespace or of all."""

    documents: int = 0
    bytes: int = 0  # of the documents alone
    namespaces: int = 0


class Archive:
    """The file at `path`, created if missing. The limit covers the file and its write-ahead log.

    The namespace `protected` is not evicted while it takes less than half of the file.
    """

    def __init__(self, path: Path, limit: int, vocabulary_hash: str = "", protected: bytes | None = None) -> None:
        if limit < LEAST_LIMIT:
            raise HierspecError(f"{path} cannot be limited to {limit} bytes: allow at least {LEAST_LIMIT}.")
        self.path, self.limit = path, limit
        self._max_file = limit - limit // 4 - LOG_INDEX  # bytes; the rest is for the log
        self._protected = protected
        self._file = SqliteFile(path, limit)
        try:
            written = [
                *((statement, ()) for statement in _SCHEMA),
                ("INSERT INTO origin VALUES (?)", (vocabulary_hash,)),
            ]
            self._file.prepare(_APPLICATION, FORMAT, written)
            self._check_vocabulary(vocabulary_hash)
            self._check()
            self._shrink()
        except BaseException:
            self._file.close()
            raise

    def write(self, documents: Sequence[tuple[bytes, bytes]]) -> None:
        """Adds all of these (namespace, tokens) or, on any error, none. Evicts the oldest where space is missing.

        There may be at most `batch_size(documents)` of them.
        """
        if not documents:
            return
        new_bytes = self._bytes_of(documents)
        if 4 * new_bytes > self._max_file:
            raise ValueError(f"a batch of {new_bytes} bytes is too much for a file of {self.limit}")
        self._make_room_for_log(2 * new_bytes)
        self._write(documents, new_bytes)
        if self.file_bytes() > self.limit:  # many namespaces were evicted, which touches a page for each
            self._file.truncate_log(wait=False)

    def batch_size(self, documents: Sequence[tuple[bytes, bytes]]) -> int:
        """How many of these, from the first on, one transaction may write."""
        count = min(len(documents), _LARGEST_BATCH)
        while count > 1 and 16 * self._bytes_of(documents[:count]) > self._max_file:
            count //= 2
        return count

    def holds(self, namespace: bytes, tokens: bytes) -> bool:
        """Whether the file has this document."""
        with self._file.transaction("BEGIN") as run:
            row = run("SELECT id FROM namespaces WHERE name = ?", (namespace,)).fetchone()
            if row is None:
                return False
            wanted = (*_id_range(*row), document_checksum(namespace, tokens), tokens)
            return run(_HOLDS, wanted).fetchone() is not None

    def read(self, namespace: bytes, max_bytes: int | None = None) -> Iterator[bytes]:
        """The documents of one namespace, oldest first; with `max_bytes`, about the newest that many bytes."""
        with self._file.transaction("BEGIN") as run:
            row = run("SELECT id FROM namespaces WHERE name = ?", (namespace,)).fetchone()
            low, high = _id_range(*row) if row else (0, 0)
            if max_bytes is not None:
                size = 0
                newest = "SELECT id, length(tokens) FROM documents WHERE id > ? AND id < ? ORDER BY id DESC"
                for document, length in run(newest, (low, high)):
                    low, size = document - 1, size + length
                    if size >= max_bytes:
                        break
        rows = [(low, b"", 0)] if row else []
        while rows:  # a few at a time, so that no lock is held while the caller works
            with self._file.transaction("BEGIN") as run:
                rows = run(_NEXT_DOCUMENTS, (rows[-1][0], high)).fetchall()
            for _, tokens, checksum in rows:
                if document_checksum(namespace, tokens) != checksum:
                    raise self._file.damaged("a document is not what was written")
                yield tokens

    def usage(self, namespace: bytes | None = None) -> Usage:
        """How much there is of one namespace, or in all."""
        with self._file.transaction("BEGIN") as run:
            if namespace is None:
                row = run("SELECT sum(documents), sum(bytes), count(*) FROM namespaces").fetchone()
            else:
                row = run(_NAMESPACE_USAGE, (namespace,)).fetchone()
        return Usage(*(value or 0 for value in row)) if row else Usage()

    def file_bytes(self) -> int:
        """Size on disk of the file and its log."""
        return self._file.bytes()

    def drop(self, namespace: bytes | None = None) -> None:
        """Deletes one namespace, or all, and overwrites the bytes on disk, free pages included."""
        with self._file.overwriting():
            while self._drop_some(namespace):
                self._file.truncate_log(wait=False)
        if not self._file.truncate_log():
            raise HierspecError(
                f"What was dropped is still among the bytes of {self.path}, which another process is reading: drop it "
                "again when that has ended."
            )

    def close(self) -> None:
        self._file.close()

    def _bytes_of(self, documents: Sequence[tuple[bytes, bytes]]) -> int:
        """What these may add to the file: a namespace's key is stored twice."""
        names = {name for name, _ in documents}
        return sum(len(tokens) + _ROW_OVERHEAD for _, tokens in documents) + sum(
            2 * len(name) + _NAMESPACE_OVERHEAD for name in names
        )

    def _write(self, documents: Sequence[tuple[bytes, bytes]], new_bytes: int) -> None:
        with self._file.transaction() as run:
            # A page fits only one document of a little over half its size, hence twice the bytes.
            if self._file.used_bytes() + 2 * new_bytes > self._max_file:
                self._evict(self._max_file - self._max_file // 32 - 2 * new_bytes)
            (batch_number,) = run("SELECT coalesce(max(used), 0) + 1 FROM namespaces").fetchone()
            for name, tokens in documents:
                run(_ADD_NAMESPACE, (name,))
                namespace, number = run("SELECT id, next FROM namespaces WHERE name = ?", (name,)).fetchone()
                row = ((namespace << 32) + number, tokens, document_checksum(name, tokens))
                run("INSERT INTO documents (id, tokens, checksum) VALUES (?, ?, ?)", row)
                run(_COUNT_ADDED, (len(tokens), batch_number, namespace))

    def _make_room_for_log(self, wanted: int) -> None:
        """A checkpoint lets the log start over, but not while another process reads it."""
        if self.file_bytes() + wanted + self.limit // 8 <= self.limit or self._file.truncate_log(wait=False):
            return
        if self.file_bytes() + wanted > self.limit:
            raise HierspecError(
                f"{self.path} has reached its limit while another process reads it: new answers wait in memory."
            )

    def _drop_some(self, namespace: bytes | None) -> bool:
        """Deletes some documents: overwriting all at once would double the file. False: none were left."""
        with self._file.transaction() as run:
            which = "SELECT id, documents, bytes FROM namespaces WHERE ?1 IS NULL OR name = ?1 LIMIT 1"
            row = run(which, (namespace,)).fetchone()
            if row is None:
                return False
            dropped, documents, size = row
            number = max(1, documents * (self.limit // 16) // max(1, size))
            if number >= documents:
                self._delete_namespace(dropped)
            else:
                self._delete_oldest(dropped, number)
            return True

    def _shrink(self) -> None:
        """For a file that was written with a larger limit."""
        if os.stat(self.path).st_size > self._max_file + PAGE:
            with suppress(HierspecError):  # another process uses it, or there is no space for a copy: next time
                with self._file.transaction():
                    self._evict(self._max_file - self._max_file // 32)
                self._file.give_back_free_pages()

    def _check_vocabulary(self, vocabulary: str) -> None:
        """Token ids mean nothing under another vocabulary."""
        with self._file.transaction("BEGIN") as run:
            (found,) = run("SELECT vocabulary FROM origin").fetchone() or ("",)
        if found != vocabulary:
            raise HierspecError(
                f"{self.path} was written with another vocabulary ({found or 'not named'}, the model has "
                f"{vocabulary or 'none named'}): delete it or choose another file for this model."
            )

    def _check(self) -> None:
        """Reads everything once, so that damage is refused here and not in the middle of a request."""
        namespaces, current, missing = 0, None, (0, 0)  # missing: documents and bytes of the current namespace
        with self._file.transaction("BEGIN") as run:
            (verdict,) = run("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise self._file.damaged("its pages contradict each other")
            for key, documents, size, tokens, checksum in run(_ALL_DOCUMENTS):
                if document_checksum(key, tokens) != checksum:
                    raise self._file.damaged("a document is not what was written")
                if key != current:
                    if missing != (0, 0):
                        break
                    namespaces, current, missing = namespaces + 1, key, (documents, size)
                missing = missing[0] - 1, missing[1] - len(tokens)
            if missing != (0, 0) or namespaces != run("SELECT count(*) FROM namespaces").fetchone()[0]:
                raise self._file.damaged("documents are missing")

    def _evict(self, goal: int) -> None:
        """Deletes old documents until the file uses at most `goal` bytes. Runs inside a transaction.

        Least recently written namespaces go first, until only `ACTIVE` are left. Then the largest ones lose their
        oldest documents, so that a namespace that writes a lot evicts its own documents and not those of others.
        """
        run = self._file.run
        (idle,) = run(
            "SELECT max(0, count(*) - ?) FROM namespaces WHERE name IS NOT ?", (ACTIVE, self._protected)
        ).fetchone()
        while idle > 0 and self._file.used_bytes() > goal:
            least_recent = "SELECT id FROM namespaces WHERE name IS NOT ? ORDER BY used LIMIT ?"
            victims = run(least_recent, (self._protected, min(idle, 16))).fetchall()
            for (namespace,) in victims:
                self._delete_namespace(namespace)
            idle -= len(victims)
        if idle > 0:
            return
        evictable = "SELECT id, documents, bytes FROM namespaces WHERE name IS NOT ? OR bytes > ?"
        sizes = {row[0]: row[1:] for row in run(evictable, (self._protected, self._max_file // 2))}
        while sizes and (excess := self._file.used_bytes() - goal) > 0:
            namespace = max(sizes, key=lambda name: sizes[name][1])
            documents, size = sizes.pop(namespace)
            if documents < 2:
                self._delete_namespace(namespace)
                continue
            number = min(documents // 2, 1 + documents * excess // max(1, size))  # then another may be the largest
            sizes[namespace] = documents - number, size - self._delete_oldest(namespace, number)

    def _delete_namespace(self, namespace: int) -> None:
        self._file.run("DELETE FROM documents WHERE id > ? AND id < ?", _id_range(namespace))
        self._file.run("DELETE FROM namespaces WHERE id = ?", (namespace,))

    def _delete_oldest(self, namespace: int, number: int) -> int:
        """Deletes this many documents and returns how many bytes they had."""
        run, (low, high) = self._file.run, _id_range(namespace)
        last, size = run(_OLDEST, (low, high, number)).fetchone()
        run("DELETE FROM documents WHERE id > ? AND id <= ?", (low, last))
        run(_COUNT_DELETED, (number, size, namespace))
        return int(size)


def _id_range(namespace: int) -> tuple[int, int]:
    """Exclusive bounds of the ids of a namespace's documents."""
    return (namespace << 32) - 1, (namespace + 1) << 32


def document_checksum(key: object, tokens: object) -> int:
    """Covers a document and its namespace's name; -1 where either is missing or of the wrong type."""
    if not isinstance(key, bytes) or not isinstance(tokens, bytes):
        return -1
    return zlib.crc32(tokens, zlib.crc32(key))


def namespace_key(namespace: str) -> bytes:
    """The key of a namespace: its name, or a hash of a long one. Different names have different keys."""
    if not isinstance(namespace, str):
        raise HierspecError("A namespace must be a text: the name of a user, for example.")
    name = namespace.encode("utf-8", "surrogatepass")
    # No encoded text holds the byte 255.
    return name if len(name) <= _LONGEST_KEY else b"\xff" + hashlib.sha256(name).digest()
