"""An SQLite file of ours: transactions, a bounded write-ahead log, and errors in one sentence."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.in_use import claim, mark_used
from hierspec.paths import make_folder

PAGE = 4096  # bytes, SQLite's default
LOG_INDEX = 1 << 15  # bytes of the -shm file
_MIN_FILE = 512  # bytes of any SQLite file
_BUSY_SECONDS = 10.0  # how long to wait for another process that writes
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_NOT_WRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

Run = Callable[..., sqlite3.Cursor]


class SqliteFile:
    """A connection to the file at `path`, created if missing. Threads may share it, processes may share the file."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._files = tuple(str(path) + suffix for suffix in ("", "-wal", "-shm"))
        self._lock = threading.RLock()
        self._check_path()
        with self.readable_errors():
            # No implicit transactions: `transaction` does them. The lock lets threads share the connection.
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        with self._closed_on_error(), self.readable_errors():
            self._retry_while_busy(lambda: self.run("PRAGMA journal_mode = WAL").fetchone())
            # NORMAL syncs at checkpoints only: a killed process loses nothing, a power cut at most the last batches.
            self.run("PRAGMA synchronous = NORMAL")
            self.run(f"PRAGMA wal_autocheckpoint = {max(8, limit // 32 // PAGE)}")
            self.run(f"PRAGMA journal_size_limit = {limit // 16}")
            self.run(f"PRAGMA cache_size = {min(256, limit // 64 // PAGE)}")

    def prepare(self, application: int, version: int, written: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Runs these statements in a new file; refuses one of another program or format."""
        with self._closed_on_error(), self.transaction() as run:
            tables = run("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            found, found_version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            if tables == 0 and found == 0:
                for statement, values in written:
                    run(statement, values)
                run(f"PRAGMA application_id = {application}")
                run(f"PRAGMA user_version = {version}")
                return
            if found != application:
                raise HierspecError(f"{self.path} is a database of another program: choose another file.")
            if found_version != version:
                raise HierspecError(
                    f"{self.path} has format {found_version} and this hierspec reads {version}: delete it or choose "
                    "another."
                )

    def run(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    @contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[Run]:
        with self._lock, self.readable_errors():
            try:
                if self._connection.in_transaction:  # Ctrl-C came during the last rollback
                    self.run("ROLLBACK")
                self.run(begin)
                yield self.run
                self.run("COMMIT")
            except BaseException:  # Ctrl-C may come between any two of these lines
                if self._connection.in_transaction:  # some errors have rolled it back already
                    self.run("ROLLBACK")
                raise

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """What is deleted in this block is overwritten, free pages included."""
        with self._lock, self.readable_errors():
            self.run("PRAGMA secure_delete = ON")
            try:
                yield
            finally:
                self.run("PRAGMA secure_delete = OFF")

    def truncate_log(self, wait: bool = True) -> bool:
        """Moves all of the log into the file; False while another process reads it."""
        with self._lock, self.readable_errors():
            try:
                if not wait:
                    self.run("PRAGMA busy_timeout = 0").fetchone()
                (busy, _, _) = self.run("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                self.run(f"PRAGMA busy_timeout = {1000 * _BUSY_SECONDS:.0f}").fetchone()
        return not busy

    def give_back_free_pages(self) -> None:
        with self._lock, self.readable_errors():
            self.run("VACUUM")
            self.truncate_log()

    def used_bytes(self) -> int:
        """Bytes of the pages in use; the file may have free ones."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, page_size = (self.run(f"PRAGMA {name}").fetchone()[0] for name in names)
        return int((pages - free) * page_size)

    def bytes(self) -> int:
        """Size on disk, of the file and its log."""
        size = 0
        for file in self._files:
            with suppress(OSError):
                size += os.stat(file).st_size
        return size

    def close(self) -> None:
        with self._lock, self.readable_errors():
            self._connection.close()

    def damaged(self, reason: str) -> HierspecError:
        return HierspecError(f"{self.path} is damaged ({reason}): delete it or choose another; a new one is learnt.")

    @contextmanager
    def readable_errors(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # SQLite's message quotes the damaged bytes
            raise self.damaged("its description is no text") from error
        except sqlite3.Error as error:
            raise self._readable(getattr(error, "sqlite_errorcode", 0) & 0xFF) from error

    def _readable(self, code: int) -> HierspecError:
        if code in _DAMAGED:
            return self.damaged("SQLite cannot read it")
        if code in _BUSY:
            return HierspecError(
                f"{self.path} has been locked by another process for {_BUSY_SECONDS:.0f} seconds: try again."
            )
        if code == sqlite3.SQLITE_FULL:
            return HierspecError(f"The disk is full while writing {self.path}: free some space.")
        if code in _NOT_WRITABLE:
            return HierspecError(
                f"{self.path} cannot be written: change the permissions of the file and its folder, or choose another "
                "file."
            )
        return HierspecError(f"{self.path} cannot be used: check the disk or choose another file.")

    def _check_path(self) -> None:
        """Check it before SQLite does, which takes a short file for an empty one and waits for a pipe."""
        make_folder(self.path.parent)
        try:
            state = os.stat(self.path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # a name that is too long, or holds a zero byte
            raise HierspecError(f"{str(self.path)[-200:]!r} cannot be a file here: choose another name.") from error
        else:
            if not stat.S_ISREG(state.st_mode):
                raise HierspecError(f"{self.path} is a folder or a device: choose another file.")
            if 0 < state.st_size < _MIN_FILE:
                raise self.damaged("it is too short")
        # The folder, not the file: SQLite's locks on a file are lost when it is opened and closed beside SQLite.
        claim(self.path.parent)
        mark_used(self.path)

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
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._connection.close()
            raise
