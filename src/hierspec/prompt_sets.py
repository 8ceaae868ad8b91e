"""Prompt sets by name: our own, and public ones that are fetched once and known by their hash."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec.paths import cache_folder, whole_file
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt, own_prompts, read_prompts

OWN = "own"
_SECONDS = 30.0  # without a byte before a download fails
_LARGEST = 64 << 20  # bytes; a larger file is no prompt set


@dataclass(frozen=True)
class PromptSet:
    """A file of prompts at a public address. Only a file with this hash is accepted."""

    address: str
    sha256: str


SETS = {
    "spec-bench": PromptSet(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/"
        "data/spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    ),
}


def find_prompts(source: str | None, progress: Progress = silent) -> tuple[str, list[BenchPrompt]]:
    """Prompts by name or path, and their name for a record, which is never a whole path."""
    if source is None or source == OWN:
        return OWN, own_prompts()
    if source in SETS:
        return source, read_prompts(_fetch(source, SETS[source], progress))
    path = Path(source)
    if not path.exists() and not path.suffix and path.name == source:
        raise HierspecError(f"There are no prompts {source!r}; choose {', '.join([OWN, *SETS])} or a file of prompts.")
    return path.name, read_prompts(path)


def _fetch(name: str, prompt_set: PromptSet, progress: Progress) -> Path:
    """The file in the cache, downloaded if it is missing or damaged."""
    path = cache_folder() / "prompts" / f"{name}.jsonl"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == prompt_set.sha256:
        return path
    progress(f"Fetching the prompts {name}", 0, 1)
    try:
        with urllib.request.urlopen(prompt_set.address, timeout=_SECONDS) as stream:
            content: bytes = stream.read(_LARGEST + 1)
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or error
        raise HierspecError(
            f"The prompts {name} could not be fetched ({reason}): connect to the internet, or fetch "
            f"{prompt_set.address} elsewhere and give it with --prompts FILE."
        ) from error
    if hashlib.sha256(content).hexdigest() != prompt_set.sha256:
        raise HierspecError(
            f"What came from {prompt_set.address} is not the file that hierspec knows (its hash differs): check the "
            "connection, or give a file with --prompts FILE."
        )
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
    progress(f"Fetching the prompts {name}", 1, 1)
    return path
