"""Where a result came from: versions, file hashes, threads and processors."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hierspec.core.plan import Plan
from hierspec.language_model import LanguageModel
from hierspec.paths import cache_folder, whole_file
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec_bench.bandwidth import METHOD, memory_bandwidth

_PROGRAMS = ("hierspec", "torch", "numpy", "numba", "safetensors", "tokenizers")
_SUFFIXES = (".safetensors", ".json", ".model", ".jinja", ".gguf")


def provenance(model: LanguageModel, plans: Iterable[Plan] = (), progress: Progress = silent) -> dict[str, Any]:
    """Keys of the document that say where and with what it was measured."""
    return {
        "versions": versions(),
        "files": model_files(model, plans, progress),
        "affinity": affinity(),
        "stores": model.home.beginning(),
    }


def versions() -> dict[str, str]:
    programs = {"python": platform.python_version()}
    for name in _PROGRAMS:
        with suppress(importlib.metadata.PackageNotFoundError):
            programs[name] = importlib.metadata.version(name)
    return programs


def affinity() -> list[int]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def bandwidth(model: LanguageModel) -> dict[str, Any]:
    """Memory bandwidth, and the bytes that a pass over one token reads. A GPU's bandwidth is not measured."""
    facts: dict[str, Any] = {"weights_bytes": model.decoder.weight_bytes}
    if model.decoder.backend.device.type == "cpu":
        facts |= {"gigabytes_per_second": round(memory_bandwidth() / 1e9, 2), "method": METHOD}
    return facts


def prompt_set(name: str, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """The prompts of a run: their name, their number, and a hash of their content."""
    content = json.dumps([[prompt.task, *prompt.turns] for prompt in prompts], ensure_ascii=False)
    hashed = hashlib.sha256(content.encode()).hexdigest()
    return {"name": name, "count": len(prompts), "turns": sum(len(p.turns) for p in prompts), "sha256": hashed}


def model_files(model: LanguageModel, plans: Iterable[Plan] = (), progress: Progress = silent) -> dict[str, str]:
    """sha256 of the files of the model, its pack, and draft models in folders, by file name without path."""
    named = {path.name: path for path in _of_folder(model.folder)}
    if model.file is not None:
        named[model.file.name] = model.file
    for source in dict.fromkeys(tier.draft for plan in plans for tier in plan.tiers if tier.draft):
        folder = Path(source)
        if folder.is_dir():
            named |= {f"{folder.name}/{path.name}": path for path in _of_folder(folder)}
    hashed = file_hashes(list(named.values()), progress)
    by_name = {name: hashed[path] for name, path in named.items()}
    if model.pack is not None:
        by_name |= {f"pack/{name}": value for name, value in model.pack.hashes.items()}
    return by_name


def file_hashes(paths: Sequence[Path], progress: Progress = silent) -> dict[Path, str]:
    """sha256 of each file. A file whose size and modification time are unchanged is not read again."""
    cache = cache_folder() / "file-hashes.json"
    by_path: dict[str, list[Any]] = {}  # size, time of change, hash
    with suppress(OSError, ValueError):  # missing or damaged: hash the files again
        read = json.loads(cache.read_text(encoding="utf-8"))
        by_path = read if isinstance(read, dict) else {}
    hashes: dict[Path, str] = {}
    changed = False
    for number, path in enumerate(paths):
        progress("Hashing files", number, len(paths))
        state = path.stat()
        key = [state.st_size, state.st_mtime_ns]
        row = by_path.get(str(path.resolve()))
        if not (isinstance(row, list) and row[:2] == key and len(row) == 3):
            with path.open("rb") as file:
                row = [*key, hashlib.file_digest(file, "sha256").hexdigest()]
            by_path[str(path.resolve())], changed = row, True
        hashes[path] = str(row[2])
    if changed:
        with whole_file(cache) as temporary:
            temporary.write_text(json.dumps(by_path) + "\n", encoding="utf-8")
    return hashes


def _of_folder(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
