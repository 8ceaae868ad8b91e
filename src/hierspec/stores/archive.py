"""Token documents in one SQLite file, by namespace, within a limit of bytes. Needs neither numpy nor torch.

Every batch is one transaction, so after a crash the file holds whole batches only. Several processes may have the file
open; SQLite's lock lets one of them write at a time.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec.paths import make_folder

FORMAT = 1
LEAST_LIMIT = 1 << 19  # bytes; below this, SQLite's overhead would be most of the file
ACTIVE = 64  # most recently used namespaces, which are not evicted whole
_APPLICATION = 0x68737068  # "hsph": SQLite's application_id, which identifies the file as ours
_PAGE = 4096  # bytes, SQLite's default
_MIN_FILE = 512  # bytes of any SQLite file
_WAL_INDEX = 1 << 15  # bytes of the -shm file
_BUSY_SECONDS = 10.0  # how long to wait for another process that writes
_ROW_OVERHEAD = 32  # bytes, an upper bound
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

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

    def __init__(self, path: Path, limit: int, vocabulary_hash: str = "", protected: str | None = None) -> None:
        if limit < LEAST_LIMIT:
            raise HierspecError(f"{path} cannot be limited to {limit} bytes: allow at least {LEAST_LIMIT}.")
        self.path, self.limit = path, limit
        self._max_file = limit - limit // 4 - _WAL_INDEX  # bytes; the rest is for the log
        self._protected = None if protected is None else _encoded(protected)
        self._files = tuple(str(path) + suffix for suffix in ("", "-wal", "-shm"))
        self._lock = threading.RLock()
        make_folder(path.parent)
        if path.is_file() and 0 < path.stat().st_size < _MIN_FILE:  # SQLite would treat it as empty
            raise self._damaged("it is too short")
        with self._readable_errors():
            # No implicit transactions: `_transaction` does them. The lock lets threads share the connection.
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with self._readable_errors():
                self._prepare(vocabulary_hash)
                self._check()
        except BaseException:
            self._connection.close()
            raise

    def write(self, documents: Sequence[tuple[str, bytes]]) -> None:
        """Adds all of these (namespace, tokens) or, on any error, none. Evicts the oldest where space is missing."""
        if not documents:
            return
        batch_bytes = sum(len(tokens) + _ROW_OVERHEAD for _, tokens in documents)
        if 4 * batch_bytes > self._max_file:
            raise ValueError(f"a batch of {batch_bytes} bytes is too much for a file of {self.limit}")
        with self._transaction() as run:
            # A page fits only one document of a little over half its size, hence twice the bytes.
            if self._used_bytes() + 2 * batch_bytes > self._max_file:
                self._evict(self._max_file - self._max_file // 32 - 2 * batch_bytes)
            (batch_number,) = run("SELECT coalesce(max(used), 0) + 1 FROM namespaces").fetchone()
            for name, tokens in documents:
                key = _encoded(name)
                run(_ADD_NAMESPACE, (key,))
                namespace, number = run("SELECT id, next FROM namespaces WHERE name = ?", (key,)).fetchone()
                row = ((namespace << 32) + number, tokens, _checksum(key, tokens))
                run("INSERT INTO documents (id, tokens, checksum) VALUES (?, ?, ?)", row)
                run(_COUNT_ADDED, (len(tokens), batch_number, namespace))

    def read(self, namespace: str, max_bytes: int | None = None) -> Iterator[bytes]:
        """The documents of one namespace, oldest first; only about the newest `max_bytes` where that is given."""
        key = _encoded(namespace)
        with self._transaction("BEGIN") as run:
            row = run("SELECT id FROM namespaces WHERE name = ?", (key,)).fetchone()
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
            with self._transaction("BEGIN") as run:
                rows = run(_NEXT_DOCUMENTS, (rows[-1][0], high)).fetchall()
            for _, tokens, checksum in rows:
                if _checksum(key, tokens) != checksum:
                    raise self._damaged("a document is not what was written")
                yield tokens

    def usage(self, namespace: str | None = None) -> Usage:
        """How much there is of one namespace, or in all."""
        with self._transaction("BEGIN") as run:
            if namespace is None:
                row = run("SELECT sum(documents), sum(bytes), count(*) FROM namespaces").fetchone()
            else:
                row = run(_NAMESPACE_USAGE, (_encoded(namespace),)).fetchone()
        return Usage(*(value or 0 for value in row)) if row else Usage()

    def file_bytes(self) -> int:
        """Size on disk of the file and its log."""
        size = 0
        for file in self._files:
            with suppress(FileNotFoundError):
                size += os.stat(file).st_size
        return size

    def drop(self, namespace: str | None = None) -> None:
        """Deletes one namespace, or all, and overwrites the bytes on disk, free pages included."""
        with self._lock:
            with self._readable_errors():
                self._connection.execute("PRAGMA secure_delete = ON")
            with self._transaction() as run:
                if namespace is None:
                    run("DELETE FROM documents")
                    run("DELETE FROM namespaces")
                else:
                    key = (_encoded(namespace),)
                    for row in run("SELECT id FROM namespaces WHERE name = ?", key).fetchall():
                        self._delete_namespace(*row)
            with self._readable_errors():
                self._connection.execute("PRAGMA secure_delete = OFF")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock, self._readable_errors():
            self._connection.close()

    def _prepare(self, vocabulary: str) -> None:
        """Creates the tables of a new file; refuses a file of another program, format or vocabulary."""
        connection = self._connection
        self._retry_while_busy(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone())
        # NORMAL syncs at checkpoints only: a killed process loses nothing, a power cut at most the last batches.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {max(8, self.limit // 32 // _PAGE)}")
        connection.execute(f"PRAGMA journal_size_limit = {self.limit // 16}")
        connection.execute(f"PRAGMA cache_size = {min(256, self.limit // 64 // _PAGE)}")
        with self._transaction() as run:
            tables = run("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            application, version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            if tables == 0 and application == 0:
                for statement in _SCHEMA:
                    run(statement)
                run("INSERT INTO origin VALUES (?)", (vocabulary,))
                run(f"PRAGMA application_id = {_APPLICATION}")
                run(f"PRAGMA user_version = {FORMAT}")
                return
            if application != _APPLICATION:
                raise HierspecError(f"{self.path} is a database of another program: choose another file.")
            if version != FORMAT:
                raise HierspecError(
                    f"{self.path} has format {version} and this hierspec reads {FORMAT}: delete it or choose another."
                )
            file_vocabulary = run("SELECT vocabulary FROM origin").fetchone()[0]
            if file_vocabulary != vocabulary:
                raise HierspecError(
                    f"{self.path} was written with another vocabulary ({file_vocabulary or 'not named'}, the model has "
                    f"{vocabulary or 'none named'}): delete it or choose another file for this model."
                )

    def _check(self) -> None:
        """Reads everything once, so that damage is refused here and not in the middle of a request."""
        namespaces, current, missing = 0, None, (0, 0)  # missing: documents and bytes of the current namespace
        with self._transaction("BEGIN") as run:
            (verdict,) = run("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise self._damaged(verdict.splitlines()[-1])
            for key, documents, size, tokens, checksum in run(_ALL_DOCUMENTS):
                if _checksum(key, tokens) != checksum:
                    raise self._damaged("a document is not what was written")
                if key != current:
                    if missing != (0, 0):
                        break
                    namespaces, current, missing = namespaces + 1, key, (documents, size)
                missing = missing[0] - 1, missing[1] - len(tokens)
            if missing != (0, 0) or namespaces != run("SELECT count(*) FROM namespaces").fetchone()[0]:
                raise self._damaged("documents are missing")

    def _evict(self, goal: int) -> None:
        """Deletes old documents until the file uses at most `goal` bytes. Runs inside a transaction.

        Least recently written namespaces go first, until only `ACTIVE` are left. Then the largest ones lose their
        oldest documents, so that a namespace that writes a lot evicts its own documents and not those of others.
        """
        run = self._connection.execute
        (idle,) = run(
            "SELECT max(0, count(*) - ?) FROM namespaces WHERE name IS NOT ?", (ACTIVE, self._protected)
        ).fetchone()
        while idle > 0 and self._used_bytes() > goal:
            least_recent = "SELECT id FROM namespaces WHERE name IS NOT ? ORDER BY used LIMIT ?"
            victims = run(least_recent, (self._protected, min(idle, 16))).fetchall()
            for (namespace,) in victims:
                self._delete_namespace(namespace)
            idle -= len(victims)
        if idle > 0:
            return
        evictable = "SELECT id, documents, bytes FROM namespaces WHERE name IS NOT ? OR bytes > ?"
        sizes = {row[0]: row[1:] for row in run(evictable, (self._protected, self._max_file // 2))}
        while sizes and (excess := self._used_bytes() - goal) > 0:
            namespace = max(sizes, key=lambda name: sizes[name][1])
            documents, size = sizes.pop(namespace)
            if documents < 2:
                self._delete_namespace(namespace)
                continue
            number = min(documents // 2, 1 + documents * excess // max(1, size))  # then another may be the largest
            sizes[namespace] = documents - number, size - self._delete_oldest(namespace, number)

    def _delete_namespace(self, namespace: int) -> None:
        self._connection.execute("DELETE FROM documents WHERE id > ? AND id < ?", _id_range(namespace))
        self._connection.execute("DELETE FROM namespaces WHERE id = ?", (namespace,))

    def _delete_oldest(self, namespace: int, number: int) -> int:
        """Deletes so many documents and returns how many bytes they had."""
        run, (low, high) = self._connection.execute, _id_range(namespace)
        last, size = run(_OLDEST, (low, high, number)).fetchone()
        run("DELETE FROM documents WHERE id > ? AND id <= ?", (low, last))
        run(_COUNT_DELETED, (number, size, namespace))
        return int(size)

    def _used_bytes(self) -> int:
        pages, free, page_size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * page_size)

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[Callable[..., sqlite3.Cursor]]:
        with self._lock, self._readable_errors():
            run = self._connection.execute
            run(begin)
            try:
                yield run
            except BaseException:
                if self._connection.in_transaction:  # some errors have rolled it back already
                    run("ROLLBACK")
                raise
            run("COMMIT")

    def _retry_while_busy(self, action: Callable[[], object]) -> None:
        """The switch to WAL ignores SQLite's own timeout for locks of other processes."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                action()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # SQLite's message quotes the damaged bytes
            raise self._damaged("its description is no text") from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _DAMAGED:
                raise self._damaged(str(error)) from error
            if code in _BUSY:
                raise HierspecError(
                    f"{self.path} has been locked by another process for {_BUSY_SECONDS:.0f} seconds: try again."
                ) from error
            if code == sqlite3.SQLITE_FULL:
                raise HierspecError(f"The disk is full while writing {self.path}: free some space.") from error
            raise HierspecError(f"{self.path} cannot be used ({error}): choose another file.") from error

    def _damaged(self, reason: str) -> HierspecError:
        return HierspecError(f"{self.path} is damaged ({reason}): delete it or choose another; a new one is learnt.")


def _id_range(namespace: int) -> tuple[int, int]:
    """Exclusive bounds of the ids of a namespace's documents."""
    return (namespace << 32) - 1, (namespace + 1) << 32


def _checksum(key: object, tokens: object) -> int:
    """Covers a document and its namespace's name; -1 where either is missing or of the wrong type."""
    if not isinstance(key, bytes) or not isinstance(tokens, bytes):
        return -1
    return zlib.crc32(tokens, zlib.crc32(key))


def _encoded(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")
