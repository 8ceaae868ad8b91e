"""One prompt under one plan or engine: its conversation, its answers, and how long they took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hierspec.core.stats import Stats, TierStats
from hierspec.equality import Difference
from hierspec.generation import Generation

_BY_SOURCE = ("proposed", "accepted")
_BY_DEPTH = ("proposed_at", "accepted_at")
_NUMBERS = ("calls", "written", "seconds", "store_seconds", "pick_seconds", "expected_seconds")


@dataclass
class Result:
    """One prompt under one plan: all turns together."""

    task: str
    prompt: int = 0  # its index in the run
    repeat: int = 0
    asked: list[list[int]] = field(default_factory=list)  # ids of the conversation before each answer
    tokens: list[list[int]] = field(default_factory=list)  # of each answer
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    alone: bool = True  # not batched, and the engine reports it: `first_seconds` is of this prompt only
    difference: Difference | None = None  # the first difference from plain decoding
    synthetic: bool = False  # some tier only simulates its acceptance
    pieces: list[list[str]] = field(default_factory=list)  # of the first answer: text, and the source that drafted it

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def text(self) -> list[int]:
        """All answers concatenated."""
        return [token for answer in self.tokens for token in answer]

    @property
    def turns(self) -> int:
        return len(self.tokens)

    def add(self, answer: Generation) -> None:
        if not self.tokens:
            self.pieces = [[piece.text, piece.source] for piece in answer.pieces]
        self.tokens.append(list(answer.tokens))
        self.seconds += answer.seconds
        self.first_seconds += answer.first_seconds
        self.first_tokens += answer.first_tokens
        self.stats.add(answer.stats)
        self.synthetic |= answer.synthetic

    def to_json(self) -> dict[str, Any]:
        """Everything but the difference, which is computed later."""
        values = {name: value for name, value in vars(self).items() if name not in ("stats", "difference")}
        return values | {"stats": [_tier_to_json(tier) for tier in self.stats.tiers]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Result:
        values = {name: value for name, value in document.items() if name != "stats"}
        return cls(**values, stats=Stats([_tier_from_json(tier) for tier in document["stats"]]))


def difference_to_json(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else dict(vars(difference))


def difference_from_json(document: Mapping[str, Any] | None) -> Difference | None:
    if document is None:
        return None
    expected, written = document["tokens"]
    return Difference(document["position"], (expected, written), document["gap"], document["is_tie"])


def _tier_to_json(tier: TierStats) -> dict[str, Any]:
    """Unlike `TierStats.to_json`, which is for people: not rounded, and can be read back."""
    numbers: dict[str, Any] = {"name": tier.name} | {name: getattr(tier, name) for name in _NUMBERS}
    return numbers | {name: sorted(getattr(tier, name).items()) for name in _BY_SOURCE + _BY_DEPTH}


def _tier_from_json(document: Mapping[str, Any]) -> TierStats:
    tier = TierStats(document["name"], **{name: document[name] for name in _NUMBERS})
    for name in _BY_SOURCE + _BY_DEPTH:
        setattr(tier, name, Counter(dict(document[name])))
    return tier
