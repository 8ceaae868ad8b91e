"""Documents of tokens in one SQLite file, by namespace, within a limit of bytes. Neither numpy nor torch is needed.

Every batch is one transaction: whoever opens the file after a crash finds whole batches only. Several processes may
have the file open; they take turns in writing.
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
LEAST_LIMIT = 1 << 19  # bytes; with less, what SQLite needs besides the documents would be most of it
ACTIVE = 64  # namespaces, those used last, that do not simply make way when others need room
_APPLICATION = 0x68737068  # "hsph": in the head of the file, so that `file` and we know it
_PAGE = 4096  # bytes, SQLite's own choice
_LEAST_FILE = 512  # bytes, of any SQLite file
_INDEX_OF_LOG = 1 << 15  # bytes, SQLite's file that ends in -shm
_PATIENCE_SECONDS = 10.0  # how long to wait for another process that writes
_DOCUMENT_OVERHEAD = 32  # bytes of a row, on the safe side
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

# A document's id is its namespace's times 2^32 plus its number there: what belongs together lies together, so that
# the oldest documents of a namespace are a few whole pages.
_SCHEMA = (
    "CREATE TABLE origin (vocabulary TEXT NOT NULL)",
    # next: the number of the next document. used: counts the batches, here the last one that wrote to the namespace.
    "CREATE TABLE namespaces (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, documents INTEGER NOT NULL, "
    "bytes INTEGER NOT NULL, next INTEGER NOT NULL, used INTEGER NOT NULL)",
    "CREATE TABLE documents (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL, checksum INTEGER NOT NULL)",
)
_NEW_NAMESPACE = "INSERT OR IGNORE INTO namespaces (name, documents, bytes, next, used) VALUES (?, 0, 0, 0, 0)"
_ONE_MORE = "UPDATE namespaces SET documents = documents + 1, bytes = bytes + ?, next = next + 1, used = ? WHERE id = ?"
_FEWER = "UPDATE namespaces SET documents = documents - ?, bytes = bytes - ? WHERE id = ?"
_ONE_NAMESPACE = "SELECT documents, bytes, 1 FROM namespaces WHERE name = ?"
_ALL_DOCUMENTS = (
    "SELECT name, documents, bytes, tokens, checksum FROM documents LEFT JOIN namespaces "
    "ON namespaces.id = documents.id >> 32 ORDER BY documents.id"
)
_OLDEST = (
    "SELECT max(id), sum(length(tokens)) FROM (SELECT id, tokens FROM documents WHERE id > ? AND id < ? "
    "ORDER BY id LIMIT ?)"
)
_SOME_DOCUMENTS = "SELECT id, tokens, checksum FROM documents WHERE id > ? AND id < ? ORDER BY id LIMIT 64"


@dataclass(frozen=True)
class Held:
    """What the file holds of one namespace, or of all."""

    documents: int = 0
    bytes: int = 0  # of the documents themselves
    namespaces: int = 0


class Archive:
    """The file at `path`; made when it is not there. The limit covers the file and the log beside it.

    The namespace `lasting` gives way to none as long as it takes less than half of the file.
    """

    def __init__(self, path: Path, limit: int, vocabulary_hash: str = "", lasting: str | None = None) -> None:
        if limit < LEAST_LIMIT:
            raise HierspecError(f"{path} cannot be kept within {limit} bytes: allow at least {LEAST_LIMIT}.")
        self.path, self.limit = path, limit
        self._room = limit - limit // 4 - _INDEX_OF_LOG  # of the file; the rest is for the log
        self._lasting = None if lasting is None else _encoded(lasting)
        self._files = tuple(str(path) + end for end in ("", "-wal", "-shm"))
        self._lock = threading.RLock()
        make_folder(path.parent)
        if path.is_file() and 0 < path.stat().st_size < _LEAST_FILE:  # SQLite would take it for an empty one
            raise self._damaged("it is too short")
        with self._explained():
            # Transactions are ours to begin and end; the lock lets threads share the connection.
            self._connection = sqlite3.connect(
                path, timeout=_PATIENCE_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with self._explained():
                self._prepare(vocabulary_hash)
                self._check()
        except BaseException:
            self._connection.close()
            raise

    def write(self, documents: Sequence[tuple[str, bytes]]) -> None:
        """Adds all of these (namespace, tokens) or, on any error, none; the oldest give way where room is missing."""
        if not documents:
            return
        coming = sum(len(tokens) + _DOCUMENT_OVERHEAD for _, tokens in documents)
        if 4 * coming > self._room:
            raise ValueError(f"a batch of {coming} bytes is too much for a file of {self.limit}")
        with self._transaction() as run:
            # A page holds one document of a little over half its size, hence twice the bytes.
            if self._used() + 2 * coming > self._room:
                self._evict(self._room - self._room // 32 - 2 * coming)
            (used,) = run("SELECT coalesce(max(used), 0) + 1 FROM namespaces").fetchone()
            for name, tokens in documents:
                key = _encoded(name)
                run(_NEW_NAMESPACE, (key,))
                namespace, number = run("SELECT id, next FROM namespaces WHERE name = ?", (key,)).fetchone()
                row = ((namespace << 32) + number, tokens, _checksum(key, tokens))
                run("INSERT INTO documents (id, tokens, checksum) VALUES (?, ?, ?)", row)
                run(_ONE_MORE, (len(tokens), used, namespace))

    def read(self, namespace: str, most: int | None = None) -> Iterator[bytes]:
        """The documents of one namespace, oldest first; only the newest `most` bytes where that is given."""
        key = _encoded(namespace)
        with self._transaction("BEGIN") as run:
            row = run("SELECT id FROM namespaces WHERE name = ?", (key,)).fetchone()
            low, high = _range(*row) if row else (0, 0)
            if most is not None:
                size = 0
                newest = "SELECT id, length(tokens) FROM documents WHERE id > ? AND id < ? ORDER BY id DESC"
                for first, length in run(newest, (low, high)):
                    low, size = first - 1, size + length
                    if size >= most:
                        break
        rows = [(low, b"", 0)] if row else []
        while rows:  # a few at a time: no lock is held while the caller works
            with self._transaction("BEGIN") as run:
                rows = run(_SOME_DOCUMENTS, (rows[-1][0], high)).fetchall()
            for _, tokens, checksum in rows:
                if _checksum(key, tokens) != checksum:
                    raise self._damaged("a document is not what was written")
                yield tokens

    def held(self, namespace: str | None = None) -> Held:
        """How much there is of one namespace, or in all."""
        with self._transaction("BEGIN") as run:
            if namespace is None:
                row = run("SELECT sum(documents), sum(bytes), count(*) FROM namespaces").fetchone()
            else:
                row = run(_ONE_NAMESPACE, (_encoded(namespace),)).fetchone()
        return Held(*(value or 0 for value in row)) if row else Held()

    def file_bytes(self) -> int:
        """What the file and the log beside it take on the disk."""
        size = 0
        for file in self._files:
            with suppress(FileNotFoundError):
                size += os.stat(file).st_size
        return size

    def drop(self, namespace: str | None = None) -> None:
        """Forgets one namespace, or all. Nothing of it stays in the file, not even in pages no longer used."""
        with self._lock:
            with self._explained():
                self._connection.execute("PRAGMA secure_delete = ON")
            with self._transaction() as run:
                if namespace is None:
                    run("DELETE FROM documents")
                    run("DELETE FROM namespaces")
                else:
                    key = (_encoded(namespace),)
                    for row in run("SELECT id FROM namespaces WHERE name = ?", key).fetchall():
                        self._forget(*row)
            with self._explained():
                self._connection.execute("PRAGMA secure_delete = OFF")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock, self._explained():
            self._connection.close()

    def _prepare(self, vocabulary: str) -> None:
        """Makes the tables of a new file; refuses a file that is another's."""
        connection = self._connection
        self._patiently(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone())
        # NORMAL syncs at checkpoints only: a killed process loses nothing, a power cut at most the last batches.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {max(8, self.limit // 32 // _PAGE)}")
        connection.execute(f"PRAGMA journal_size_limit = {self.limit // 16}")
        connection.execute(f"PRAGMA cache_size = {min(256, self.limit // 64 // _PAGE)}")
        with self._transaction() as run:
            tables = run("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            mark, version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            if tables == 0 and mark == 0:
                for statement in _SCHEMA:
                    run(statement)
                run("INSERT INTO origin VALUES (?)", (vocabulary,))
                run(f"PRAGMA application_id = {_APPLICATION}")
                run(f"PRAGMA user_version = {FORMAT}")
                return
            if mark != _APPLICATION:
                raise HierspecError(f"{self.path} is a database of another program: choose another file.")
            if version != FORMAT:
                raise HierspecError(
                    f"{self.path} has format {version} and this hierspec reads {FORMAT}: delete it or choose another."
                )
            made_with = run("SELECT vocabulary FROM origin").fetchone()[0]
            if made_with != vocabulary:
                raise HierspecError(
                    f"{self.path} was written with another vocabulary ({made_with or 'not named'}, the model has "
                    f"{vocabulary or 'none named'}): delete it or choose another file for this model."
                )

    def _check(self) -> None:
        """Reads everything once: what is damaged is refused here and not in the middle of a request."""
        seen, last, left = 0, None, (0, 0)  # namespaces; the last one, and what must still come of it
        with self._transaction("BEGIN") as run:
            (verdict,) = run("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise self._damaged(verdict.splitlines()[-1])
            for key, documents, size, tokens, checksum in run(_ALL_DOCUMENTS):
                if _checksum(key, tokens) != checksum:
                    raise self._damaged("a document is not what was written")
                if key != last:
                    if left != (0, 0):
                        break
                    seen, last, left = seen + 1, key, (documents, size)
                left = left[0] - 1, left[1] - len(tokens)
            if left != (0, 0) or seen != run("SELECT count(*) FROM namespaces").fetchone()[0]:
                raise self._damaged("documents are missing")

    def _evict(self, goal: int) -> None:
        """Deletes old documents until the file uses at most `goal` bytes; part of a transaction.

        The namespaces written to longest ago go first, until only `ACTIVE` are left; then the largest ones lose their
        oldest documents, so that one that writes a lot pushes out itself and not the others.
        """
        run = self._connection.execute
        (idle,) = run(
            "SELECT max(0, count(*) - ?) FROM namespaces WHERE name IS NOT ?", (ACTIVE, self._lasting)
        ).fetchone()
        while idle > 0 and self._used() > goal:
            oldest = "SELECT id FROM namespaces WHERE name IS NOT ? ORDER BY used LIMIT ?"
            some = run(oldest, (self._lasting, min(idle, 16))).fetchall()
            for (namespace,) in some:
                self._forget(namespace)
            idle -= len(some)
        if idle > 0:
            return
        others = "SELECT id, documents, bytes FROM namespaces WHERE name IS NOT ? OR bytes > ?"
        left = {row[0]: row[1:] for row in run(others, (self._lasting, self._room // 2))}
        while left and (excess := self._used() - goal) > 0:
            namespace = max(left, key=lambda name: left[name][1])
            documents, size = left.pop(namespace)
            if documents < 2:
                self._forget(namespace)
                continue
            number = min(documents // 2, 1 + documents * excess // max(1, size))  # then another may be the largest
            left[namespace] = documents - number, size - self._delete_oldest(namespace, number)

    def _forget(self, namespace: int) -> None:
        self._connection.execute("DELETE FROM documents WHERE id > ? AND id < ?", _range(namespace))
        self._connection.execute("DELETE FROM namespaces WHERE id = ?", (namespace,))

    def _delete_oldest(self, namespace: int, number: int) -> int:
        """Deletes so many documents, and says how many bytes they had."""
        run, (low, high) = self._connection.execute, _range(namespace)
        last, gone = run(_OLDEST, (low, high, number)).fetchone()
        run("DELETE FROM documents WHERE id > ? AND id <= ?", (low, last))
        run(_FEWER, (number, gone, namespace))
        return int(gone)

    def _used(self) -> int:
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[Callable[..., sqlite3.Cursor]]:
        with self._lock, self._explained():
            run = self._connection.execute
            run(begin)
            try:
                yield run
            except BaseException:
                if self._connection.in_transaction:  # some errors have ended it already
                    run("ROLLBACK")
                raise
            run("COMMIT")

    def _patiently(self, action: Callable[[], object]) -> None:
        """The change to WAL does not wait for other processes by itself."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                action()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # SQLite quotes a damaged file in its own message
            raise self._damaged("its description is no text") from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _DAMAGED:
                raise self._damaged(str(error)) from error
            if code in _BUSY:
                raise HierspecError(
                    f"{self.path} has been locked by another process for {_PATIENCE_SECONDS:.0f} seconds: try again."
                ) from error
            if code == sqlite3.SQLITE_FULL:
                raise HierspecError(f"The disk is full while writing {self.path}: free some space.") from error
            raise HierspecError(f"{self.path} cannot be used ({error}): choose another place.") from error

    def _damaged(self, how: str) -> HierspecError:
        return HierspecError(f"{self.path} is damaged ({how}): delete it or choose another; it is learnt anew.")


def _range(namespace: int) -> tuple[int, int]:
    """The ids of a namespace's documents lie between these two."""
    return (namespace << 32) - 1, (namespace + 1) << 32


def _checksum(key: object, tokens: object) -> int:
    """Of a document and the namespace it belongs to: neither may change. -1 where there is no such thing."""
    if not isinstance(key, bytes) or not isinstance(tokens, bytes):
        return -1
    return zlib.crc32(tokens, zlib.crc32(key))


def _encoded(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")
