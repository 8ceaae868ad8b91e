"""Which files of the cache are in use: running processes say so by locks, and files carry the time of their last use.

A lock (`flock`) ends with its process, however that ends, so nothing stays locked by mistake.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on every system: there nothing is known to be in use
    fcntl = None  # type: ignore[assignment]

_MAX_CLAIMS = 64  # each is an open file; a process that has used more models than that gives up its oldest claims
_WAIT_SECONDS = 1.0  # for a process that looks at a file, or is moving it away, which takes milliseconds
_HELD_BY_OTHERS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)

_claims: OrderedDict[tuple[int, int], int] = OrderedDict()  # (device, inode) -> open file, oldest first
_claims_lock = threading.Lock()


def claim(path: Path) -> None:
    """Keeps other processes from deleting this file or folder of the cache until this process ends.

    Never fails: if there is no such path or locks do not work, only the protection is missing. So callers claim a path
    first, and then look whether it is there.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        with suppress(OSError):
            if _claimed(path):
                return
        if fcntl is None or not os.path.lexists(path) or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def mark_used(*files: Path) -> None:
    """Sets the time of last use. Systems that keep it themselves do so once a day, or never."""
    for file in files:
        with suppress(OSError):
            # The time of change stays: it is part of the keys under which files of the cache are found again.
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


@contextmanager
def deletable(path: Path) -> Iterator[bool]:
    """Whether no process has claimed this path. While the block runs, nobody can claim it."""
    try:
        file = _open(path)
    except OSError:  # it cannot be known: deleting it will tell
        yield True
        return
    try:
        yield fcntl is None or _lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)  # and with it the lock


def _claimed(path: Path) -> bool:
    file = _open(path)
    state, kept = os.fstat(file), False
    identity = (state.st_dev, state.st_ino)
    try:
        with _claims_lock:
            if identity in _claims:
                _claims.move_to_end(identity)
                return True
            if fcntl is None or not _lock(file, fcntl.LOCK_SH):
                return False
            now = os.stat(path)
            if (now.st_dev, now.st_ino) != identity:  # moved away before it was locked
                return False
            _claims[identity], kept = file, True
            if len(_claims) > _MAX_CLAIMS:
                os.close(_claims.popitem(last=False)[1])
            return True
    finally:
        if not kept:
            os.close(file)


def _open(path: Path) -> int:
    # Does not follow a link, nor wait for the writer of a pipe.
    return os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD_BY_OTHERS  # other errors: this file system has no locks
    return True
