"""Where hierspec keeps its files, and how it writes them: a reader sees a whole file or folder, or none at all."""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hierspec.core.errors import HierspecError

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_ABANDONED_AFTER_SECONDS = 24 * 3600


def cache_folder() -> Path:
    """The folder for files that can be made again: HIERSPEC_CACHE, else in the user's cache folder."""
    if chosen := os.environ.get("HIERSPEC_CACHE"):
        folder = Path(chosen).expanduser()
    elif user_cache := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(user_cache).expanduser() / "hierspec"
    else:
        try:
            folder = Path.home() / ".cache" / "hierspec"
        except RuntimeError as error:  # a user without a home folder
            raise HierspecError("There is no home folder to cache in: set HIERSPEC_CACHE to a folder.") from error
    make_folder(folder)
    return folder


def make_folder(folder: Path) -> None:
    """Creates `folder` and its parents, and makes sure that files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _cannot_write(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` to write to; it takes the place of `path` when the block succeeds.

    On any error the temporary file is removed and `path` stays as it was.
    """
    with _temporary_beside(path) as temporary:
        yield temporary
        temporary.replace(path)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields an empty temporary folder beside `path`; it takes the place of `path` when the block succeeds."""
    with _temporary_beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        _replace_folder(temporary, path)


def _replace_folder(temporary: Path, path: Path) -> None:
    # rename() does not replace a folder that holds files, so the old one is moved away first. Another process may
    # write the same folder in between, hence the second try.
    for attempt in (1, 2):
        aside = temporary_name(path)
        with suppress(FileNotFoundError):
            path.rename(aside)
        try:
            temporary.rename(path)
            return
        except OSError as error:
            if attempt == 2 or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            remove(aside)


@contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    make_folder(path.parent)
    _remove_abandoned(path)
    temporary = temporary_name(path)
    try:
        yield temporary
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        remove(temporary)


def temporary_name(path: Path) -> Path:
    """A new name beside `path` for what is not whole: being written, or being deleted."""
    return path.with_name(f"{_temporary_prefix(path)}{os.getpid()}-{secrets.token_hex(4)}.part")


def _temporary_prefix(path: Path) -> str:
    return f".{path.name[:48]}."  # shortened: a name that just fits must not become one that does not


def is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".part")


def _remove_abandoned(path: Path) -> None:
    """Removes what a killed process left behind; young ones may belong to a process that is still writing."""
    for temporary in path.parent.glob(".*.part"):
        if not temporary.name.startswith(_temporary_prefix(path)):
            continue
        try:
            if time.time() - temporary.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                remove(temporary)
        except OSError:  # removed meanwhile
            continue


def remove(path: Path) -> None:
    """Deletes a file, a folder with all that is in it, or a link and not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _cannot_write(path: Path, error: OSError) -> HierspecError:
    if error.errno in _FULL_DISK:
        return HierspecError(f"The disk is full while writing {path}: free some space and try again.")
    reason = error.strerror or type(error).__name__
    return HierspecError(
        f"{path} cannot be written ({reason}): choose another folder (set HIERSPEC_CACHE to move the cache)."
    )
