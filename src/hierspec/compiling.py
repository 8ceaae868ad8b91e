"""Compiling what is not yet in the cache: in several processes at once, and each thing in one of them only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on every system: then two processes may compile the same
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: str | None, name: str) -> Iterator[None]:
    """One process at a time. The system opens the lock of a process that ends, however it ends."""
    if fcntl is None or folder is None:
        yield
        return
    try:
        file = (Path(folder) / f".{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock").open("a")
    except OSError:  # a folder that can only be read
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield
