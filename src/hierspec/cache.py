"""What the cache folder holds, by kind and model, and how it is kept small.

listing = entries()
freed = prune(kinds=["converted", "packed"], max_bytes=5 << 30).bytes
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.in_use import deletable
from hierspec.paths import cache_folder, is_temporary, remove, temporary_name
from hierspec.sizes import parse_size

DERIVED = ("converted", "packed")  # large, and can be made again from a model's files: `keep_within_limit` limits these
ONLY_BY_NAME = ("histories", "corpora", "other")  # the user's own, or nobody knows whose
# What each kind is, for people. A kind has the name of its folder, except for the last six.
KINDS = {
    "models": "models that were downloaded",
    "converted": "GGUF files, converted",
    "packed": "weights, packed for this CPU",
    "costs": "measured costs of passes",
    "plans": "plans chosen by hierspec plan",
    "learnt": "acceptance rates, learnt",
    "traces": "traces recorded by hierspec plan",
    "prompts": "prompt sets that were downloaded",
    "peers": "other engines, installed for hierspec bench",
    "peer-files": "models in the form that other engines read",
    "peer-settings": "best settings of other engines",
    "hashes": "hashes of files, for records",
    "kernels": "code compiled for this CPU",
    "unfinished": "files of processes that were stopped while writing",
    "histories": "histories of answers",
    "corpora": "corpora that were built",
    "other": "files that hierspec does not know",
}
DEFAULT_LIMIT = "20G"
CHOSEN_FOR = "chosen for the model in "  # and its folder: the first comment of a plan file in the cache

_STILL_WRITING_SECONDS = 600  # an unfinished file that changed more recently may still be written to
_KEY = re.compile(r"-(?:[0-9a-f]{20}|[0-9a-f]{12})$")  # what we put after a model's name
_LARGEST_NOTE = 1 << 20  # bytes of a measurement's file; a larger one is none of ours


@dataclass(frozen=True)
class CacheEntry:
    """What is kept or deleted as one: a file or folder of the cache, with the files that belong to it."""

    kind: str
    model: str  # "" if it belongs to none, or nobody knows
    paths: tuple[Path, ...]
    bytes: int
    last_used: float  # seconds since 1970
    in_use: bool

    @property
    def path(self) -> Path:
        return self.paths[0]


@dataclass(frozen=True)
class Pruned:
    """What `prune` did, or would do."""

    deleted: tuple[CacheEntry, ...]
    in_use: tuple[CacheEntry, ...]  # would have gone, but a running process uses it
    failed: tuple[CacheEntry, ...]  # could not be deleted, by its permissions for example

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.deleted)


def entries() -> list[CacheEntry]:
    """All that the cache holds, by kind in the order of `KINDS`, then by model and path."""
    order = {kind: number for number, kind in enumerate(KINDS)}
    found = [*_in_cache_folder(cache_folder()), *_kernels()]
    return sorted(found, key=lambda entry: (order[entry.kind], entry.model, entry.path))


def prune(
    kinds: Collection[str] | None = None,
    model: str | None = None,
    older_than: float | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Deletes entries of these kinds and this model that were last used more than `older_than` seconds ago.

    Without kinds: all but those in `ONLY_BY_NAME`. A model may be a pattern, as in SmolLM2*. With `max_bytes`, deletes
    the least recently used first, until the rest of these kinds and this model takes at most that many bytes. What a
    running process uses stays.
    """
    for kind in kinds or ():
        if kind not in KINDS:
            raise HierspecError(f"The cache holds no kind {kind[:40]!r}; kinds are {', '.join(KINDS)}.")
    chosen = [
        entry
        for entry in entries()
        if (entry.kind not in ONLY_BY_NAME if kinds is None else entry.kind in kinds)
        and (model is None or fnmatchcase(entry.model, model))
    ]
    left, now = sum(entry.bytes for entry in chosen), time.time()
    outcomes: dict[str, list[CacheEntry]] = {"deleted": [], "in use": [], "failed": []}
    for entry in sorted(chosen, key=lambda entry: entry.last_used):
        if max_bytes is not None and left <= max_bytes:
            break
        if older_than is not None and now - entry.last_used <= older_than:
            break
        outcome = _delete(entry) if not (dry_run or entry.in_use) else "in use" if entry.in_use else "deleted"
        outcomes[outcome].append(entry)
        left -= entry.bytes if outcome == "deleted" else 0
    return Pruned(*(tuple(outcomes[outcome]) for outcome in ("deleted", "in use", "failed")))


def limit() -> int | None:
    """Bytes that `DERIVED` files may take together: HIERSPEC_CACHE_LIMIT, by default 20G; 0 means no limit."""
    try:
        return parse_size(os.environ.get("HIERSPEC_CACHE_LIMIT") or DEFAULT_LIMIT) or None
    except HierspecError as error:
        raise HierspecError("HIERSPEC_CACHE_LIMIT must be a size like 500M or 20G, or 0 for no limit.") from error


def keep_within_limit() -> None:
    """Call it once a derived file is written and claimed: the least recently used ones make room for it."""
    most = limit()
    if most is not None:
        prune(DERIVED, max_bytes=most)


def _delete(entry: CacheEntry) -> str:
    """Rename, then delete, so that nobody sees half of it. Returns "deleted", "in use" or "failed".

    What is left if this process is killed in between is listed as unfinished.
    """
    aside: list[Path] = []
    try:
        with deletable(_lock_of(entry)) as free:
            if not free:
                return "in use"
            for path in entry.paths:
                with suppress(FileNotFoundError):
                    aside.append(path.rename(temporary_name(path)))
    except OSError:
        return "failed"
    finally:
        for path in aside:
            with suppress(OSError):
                remove(path)
    if entry.kind in ("histories", "corpora"):
        with suppress(OSError):  # the model's folder, when nothing else is in it
            entry.path.parent.rmdir()
    return "deleted"


def _lock_of(entry: CacheEntry) -> Path:
    """The path that a process claims while it uses the entry.

    For a history it is the folder: opening and closing the file itself would drop SQLite's own locks on it.
    """
    return entry.path.parent if entry.kind == "histories" else entry.path


def folder_name(folder: Path) -> str:
    """A model's folder as part of a file name. Folders of the hub are named by a hash, in one that names the model."""
    hub = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.parents[1].name.removeprefix("models--") if hub else folder.name


def _in_cache_folder(root: Path) -> Iterator[CacheEntry]:
    for top in _listed(root):
        if is_temporary(top):
            yield _entry("unfinished", "", [top])
        elif top.name in KINDS and _is_folder(top):
            yield from _of_kind(top.name, _listed(top))
        elif top.name == "stores" and _is_folder(top):
            for home in _listed(top):
                yield from _stores(home)
        else:
            yield _entry("hashes" if top.name == "file-hashes.json" else "other", "", [top])


def _of_kind(kind: str, paths: list[Path]) -> Iterator[CacheEntry]:
    notes = {path for path in paths if path.name.endswith(".sha256") and path.with_suffix("") in paths}
    for path in paths:
        if is_temporary(path):
            yield _entry("unfinished", "", [path])
        elif path not in notes:
            note = path.with_name(f"{path.name}.sha256")
            yield _entry(
                kind, _MODELS[kind](path) if kind in _MODELS else "", [path, *([note] if note in notes else [])]
            )


def _stores(home: Path) -> Iterator[CacheEntry]:
    """A model's folder of stores: its history with what was made from it and SQLite's files, and its corpus."""
    model = _KEY.sub("", home.name).replace("--", "/")
    if not _is_folder(home):
        yield _entry("other", "", [home])
        return
    paths = _listed(home)
    history = [path for path in paths if path.name.startswith(("history.", "frequent."))]
    if history:  # the database first: without it the others mean nothing
        yield _entry("histories", model, sorted(history, key=lambda path: path.name != "history.sqlite"))
    for path in paths:
        if path not in history:
            kind = "unfinished" if is_temporary(path) else "corpora" if path.name == "corpus" else "other"
            yield _entry(kind, "" if kind == "unfinished" else model, [path])


def _kernels() -> Iterator[CacheEntry]:
    """Code that numba compiled; it keeps it beside the source where it can."""
    for folder in sorted(Path(__file__).parent.rglob("__pycache__")):
        compiled = [path for path in _listed(folder) if path.suffix in (".nbi", ".nbc")]
        if compiled:  # an index without its code is taken for damage, so the indices go first
            yield _entry("kernels", "", sorted(compiled, key=lambda path: path.suffix != ".nbi"))


def _entry(kind: str, model: str, paths: list[Path]) -> CacheEntry:
    size, last_used = 0, 0.0
    for state in _states(paths):
        size += state.st_size
        last_used = max(last_used, state.st_atime, state.st_mtime)
    entry = CacheEntry(kind, model, tuple(paths), size, last_used, False)
    if kind == "unfinished":
        in_use = time.time() - last_used < _STILL_WRITING_SECONDS
    else:
        with deletable(_lock_of(entry)) as free:
            in_use = not free
    return CacheEntry(kind, model, tuple(paths), size, last_used, in_use)


def _states(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """The states of all files, also those in folders. Links count as themselves: what they point to is not ours."""
    for path in paths:
        with suppress(OSError):  # deleted meanwhile
            state = path.lstat()
            if stat.S_ISDIR(state.st_mode):
                yield from _states(_listed(path))
            else:
                yield state


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # deleted meanwhile, or not ours to read
        return []


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _named_model(path: Path) -> str:
    """From a file or folder that is named after its model."""
    name, before = folder_name(path).removesuffix(".weights").removesuffix(".gguf"), ""
    while name != before:  # what is packed from a converted folder has two keys
        name, before = _KEY.sub("", name), name
    return name.replace("--", "/")


def _measured_model(path: Path) -> str:
    """From what a measurement's file says that it is about: the folder of a model."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        if path.stat().st_size <= _LARGEST_NOTE:
            about = json.loads(path.read_text(encoding="utf-8")).get("about")
            return next((_named_model(Path(text)) for text in _strings(about) if text.startswith("/")), "")
    return ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _planned_model(path: Path) -> str:
    """From the first comment of a plan that was chosen."""
    with suppress(OSError, ValueError), path.open(encoding="utf-8") as lines:
        folder = lines.readline(4096).partition(CHOSEN_FOR)[2].strip()
        return _named_model(Path(folder)) if folder else ""
    return ""


_MODELS: dict[str, Callable[[Path], str]] = {
    "models": _named_model,
    "converted": _named_model,
    "packed": _named_model,
    "peer-files": _named_model,
    "costs": _measured_model,
    "learnt": _measured_model,
    "plans": _planned_model,
}
