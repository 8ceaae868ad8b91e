"""Searches the best setting of another engine, instead of using its defaults, and keeps it for this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hierspec.core.errors import HierspecError
from hierspec.kept import KeptFile
from hierspec.machine import machine
from hierspec_bench.peers.catalogue import Setting

PROMPTS, TOKENS, WARM_TOKENS = 3, 48, 8
SECONDS = 1800.0  # for the searches of all engines together
_HOPELESS = 3.0  # a setting this many times slower than the best on the first prompt is not tried on the others
_PATIENCE = 60.0  # extra seconds that opening and each answer may take, because some engines compile
_NO_TIME = "Not tried: the time for searching was over."


@dataclass
class Allowance:
    """Time for the searches of several engines: each may use an equal share of what is left."""

    peers: int
    seconds: float = SECONDS
    clock: Callable[[], float] = time.monotonic

    @contextmanager
    def part(self) -> Iterator[Callable[[], bool]]:
        """One engine's share; yields a function that says whether it is used up."""
        began, part = self.clock(), self.seconds / max(1, self.peers)
        try:
            yield lambda: self.clock() - began > part
        finally:
            self.seconds = max(0.0, self.seconds - (self.clock() - began))
            self.peers -= 1


class Timed(Protocol):
    @property
    def tokens(self) -> list[int]: ...

    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class Searched:
    """The fastest setting, and the result of every setting."""

    setting: Setting
    searched: list[dict[str, Any]]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Searched:
        return cls(dict(document["setting"]), list(document["searched"]))

    def to_json(self) -> dict[str, Any]:
        return {"setting": dict(self.setting), "searched": self.searched}

    @property
    def tried(self) -> list[dict[str, Any]]:
        return [item for item in self.searched if item.get("error") != _NO_TIME]

    @property
    def complete(self) -> bool:
        return len(self.tried) == len(self.searched)


def search(
    settings: Sequence[Setting],
    open_with: Callable[[Setting, float | None], None],
    generate: Callable[[list[int], int, float | None], Timed],
    prompts: Sequence[list[int]],
    report: Callable[[int], None] = lambda count: None,
    over: Callable[[], bool] = lambda: False,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> Searched:
    """Tries every setting on the prompts, after a warm-up, until time is over.

    Settings that cannot run, are far slower than the best or were not tried are listed with that reason. Both functions
    get a limit in seconds, once it is known: a setting that the processor lacks instructions for may be a hundred times
    slower. Settings of an `earlier` search are not tried again.
    """
    searched: list[dict[str, Any]] = []
    best: tuple[float, float] | None = None  # tokens/s of the fastest so far on all prompts, and on the first
    if speeds := [item["tokens_per_second"] for item in earlier if "tokens_per_second" in item]:
        best = max(speeds), max(speeds)
    limit: float | None = None  # for an answer
    opening_limit: float | None = None
    for count, setting in enumerate(settings, 1):
        item: dict[str, Any] = {"setting": dict(setting)}
        before = next((dict(tried) for tried in earlier if tried["setting"] == item["setting"]), None)
        searched.append(before or item)
        if before is None and best is not None and over():
            item["error"] = _NO_TIME
        if before is not None or "error" in item:
            report(count)
            continue
        try:
            began = time.monotonic()
            open_with(setting, opening_limit)
            opened = time.monotonic() - began
            generate(prompts[0][::-1], WARM_TOKENS, limit)  # a text that no prefix cache can use afterwards
            answers = [generate(prompts[0], TOKENS, limit)]
            first = _speed(answers)
            if best is not None and first * _HOPELESS < best[1]:
                item["error"] = f"Dropped after one prompt: {first:.2f} tokens/s, and the best {best[1]:.2f}."
            else:
                answers += [generate(prompt, TOKENS, limit) for prompt in prompts[1:]]
                speed = _speed(answers)
                item["tokens_per_second"] = round(speed, 2)
                if best is None or (speed, first) > best:
                    best = speed, first
                    limit = _HOPELESS * max(answer.seconds for answer in answers) + _PATIENCE
                    opening_limit = _HOPELESS * opened + _PATIENCE
        except HierspecError as error:
            item["error"] = str(error)
        report(count)
    good = [item for item in searched if "error" not in item]
    if not good:
        raise HierspecError(searched[0]["error"] if searched else "There are no settings to try.")
    return Searched(max(good, key=lambda item: item["tokens_per_second"])["setting"], searched)


def _speed(answers: Sequence[Timed]) -> float:
    return sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)


def kept_search(engine: str, version: str, model: Sequence[str]) -> KeptFile:
    """The cached search for this version of an engine and this model. `model` includes the number of threads."""
    name = engine.replace(":", "-") + "-{key}.json"
    return KeptFile.of("peer-settings", [engine, version, list(model), machine()], name, digits=16)
