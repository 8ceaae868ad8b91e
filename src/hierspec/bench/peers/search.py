"""A peer's best setting is searched, not taken from its defaults; what was found is kept for this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hierspec.bench.peers.catalogue import Setting
from hierspec.core.errors import HierspecError
from hierspec.machine import machine
from hierspec.paths import cache_folder, whole_file

PROMPTS, TOKENS = 3, 48


class Timed(Protocol):
    @property
    def tokens(self) -> list[int]: ...

    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class Found:
    """The fastest setting, and what every one of them gave."""

    setting: Setting
    searched: list[dict[str, Any]]


def search(
    settings: Sequence[Setting],
    open_with: Callable[[Setting], None],
    generate: Callable[[list[int]], Timed],
    prompts: Sequence[list[int]],
    tried: Callable[[int], None] = lambda count: None,
) -> Found:
    """Every setting on the prompts, after a warm-up. One that cannot run is kept with its reason."""
    searched: list[dict[str, Any]] = []
    for count, setting in enumerate(settings, 1):
        try:
            open_with(setting)
            generate(prompts[0][::-1])  # warm up, with a text that no prefix cache can use afterwards
            answers = [generate(prompt) for prompt in prompts]
            speed = sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)
            searched.append({"setting": dict(setting), "tokens_per_second": round(speed, 2)})
        except HierspecError as error:
            searched.append({"setting": dict(setting), "error": str(error)})
        tried(count)
    good = [item for item in searched if "error" not in item]
    if not good:
        raise HierspecError(searched[0]["error"] if searched else "There are no settings to try.")
    return Found(max(good, key=lambda item: item["tokens_per_second"])["setting"], searched)


def kept(peer: str, version: str, model: Sequence[str]) -> Found | None:
    """What was found here before for this version of the peer and this model."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_path(peer, version, model).read_text(encoding="utf-8"))
        return Found(dict(content["setting"]), list(content["searched"]))
    return None


def keep(peer: str, version: str, model: Sequence[str], found: Found) -> None:
    with whole_file(_path(peer, version, model)) as temporary:
        content = {"setting": dict(found.setting), "searched": found.searched}
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _path(peer: str, version: str, model: Sequence[str]) -> Any:
    key = json.dumps([peer, version, list(model), machine()], sort_keys=True)
    folder = cache_folder() / "peer-settings"
    return folder / f"{peer.replace(':', '-')}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
