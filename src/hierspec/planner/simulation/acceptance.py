"""How often drafts are accepted, counted on traces: for every pair of tiers, by depth, task and temperature.

Tokens that a middle tier accepted and tokens that it corrected are also counted separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hierspec.planner.simulation.traces import Trace, tiers_of

TARGET = "target"
DEPTHS = 8


@dataclass(frozen=True)
class AcceptanceCount:
    """How many of a number of drafted tokens were accepted: counted, or expected."""

    accepted: float = 0
    trials: float = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.trials if self.trials else 0.0

    def __add__(self, other: AcceptanceCount) -> AcceptanceCount:
        return AcceptanceCount(self.accepted + other.accepted, self.trials + other.trials)


@dataclass(frozen=True)
class PairKey:
    """What is counted separately: drafting tier, verifying tier, task and temperature."""

    drafter: str
    verifier: str
    task: str
    temperature: float


@dataclass(frozen=True)
class MiddleTierCount:
    """Tokens that a middle tier hands up, by whether it accepted or corrected them: how many are accepted above."""

    accepted: AcceptanceCount = AcceptanceCount()
    corrected: AcceptanceCount = AcceptanceCount()

    def __add__(self, other: MiddleTierCount) -> MiddleTierCount:
        return MiddleTierCount(self.accepted + other.accepted, self.corrected + other.corrected)


@dataclass(frozen=True)
class Acceptance:
    """Counts over the target's text.

    At depth d a token is a trial if the verifier and the target accept all d tokens before it, so that the text before
    it is still the target's.
    """

    by_depth: dict[PairKey, tuple[AcceptanceCount, ...]] = field(default_factory=dict)
    # By drafter, middle tier and verifier.
    by_middle_tier: dict[tuple[str, str, str], MiddleTierCount] = field(default_factory=dict)

    def count(
        self,
        drafter: str,
        verifier: str = TARGET,
        depth: int | None = None,
        task: str | None = None,
        temperature: float | None = None,
    ) -> AcceptanceCount:
        """Over all depths, tasks and temperatures that are not given. Depths beyond the deepest count as that."""
        total = AcceptanceCount()
        for key, counts in self.by_depth.items():
            if (key.drafter, key.verifier) != (drafter, verifier) or task not in (None, key.task):
                continue
            if temperature in (None, key.temperature):
                chosen = counts if depth is None else counts[min(depth, len(counts) - 1) :][:1]
                total = sum(chosen, total)
        return total

    def tiers(self) -> list[str]:
        return list(dict.fromkeys(key.drafter for key in self.by_depth))

    def to_json(self) -> dict[str, Any]:
        return {
            "pairs": [
                {
                    "guesser": key.drafter,
                    "judge": key.verifier,
                    "task": key.task,
                    "temperature": key.temperature,
                    "stood_by_depth": [count.accepted for count in counts],
                    "trials_by_depth": [count.trials for count in counts],
                }
                for key, counts in self.by_depth.items()
            ],
            "dependence": [
                {
                    "guesser": drafter,
                    "middle": middle,
                    "judge": verifier,
                    "let_stand": [count.accepted.accepted, count.accepted.trials],
                    "corrected": [count.corrected.accepted, count.corrected.trials],
                }
                for (drafter, middle, verifier), count in self.by_middle_tier.items()
            ],
        }

    def rows(self, verifier: str = TARGET) -> list[list[str]]:
        """A table for people, its heading first: how often the verifier accepts drafts of each tier."""
        tasks = list(dict.fromkeys(key.task for key in self.by_depth))
        lines = [["tier", "all", *(f"depth {depth + 1}" for depth in range(4)), *tasks]]
        for drafter in self.tiers():
            if drafter == verifier or not self.count(drafter, verifier).trials:
                continue
            counts = [self.count(drafter, verifier), *(self.count(drafter, verifier, depth) for depth in range(4))]
            counts += [self.count(drafter, verifier, task=task) for task in tasks]
            lines.append([drafter, *(f"{count.rate:.2f}" for count in counts)])
        return lines

    def middle_tier_rows(self, verifier: str = TARGET) -> list[list[str]]:
        """A table for people, its heading first: what middle tiers hand up, by whether they corrected it."""
        lines = [["drafted by", "verified by", "accepted, also above", "corrected, accepted above"]]
        for (drafter, middle, above), count in self.by_middle_tier.items():
            if above == verifier:
                rates = (f"{part.rate:.2f} of {part.trials:.0f}" for part in (count.accepted, count.corrected))
                lines.append([drafter, middle, *rates])
        return lines


def acceptance(traces: Sequence[Trace], depths: int = DEPTHS) -> Acceptance:
    """Counts of every ordered pair of tiers that all these traces have, and of every three of them."""
    keys = tiers_of(traces)
    by_depth: dict[PairKey, tuple[AcceptanceCount, ...]] = {}
    by_middle_tier: dict[tuple[str, str, str], MiddleTierCount] = {}
    for trace in traces:
        for drafter, verifier in _pairs(keys):
            pair = PairKey(drafter, verifier, trace.task, trace.temperature)
            before = by_depth.get(pair, (AcceptanceCount(),) * depths)
            added = _count_by_depth(trace, drafter, verifier, depths)
            by_depth[pair] = tuple(old + new for old, new in zip(before, added, strict=True))
        for drafter, middle in _pairs(keys):
            for verifier in (TARGET, *keys):
                if middle == TARGET or verifier in (drafter, middle):
                    continue
                three = drafter, middle, verifier
                by_middle_tier[three] = by_middle_tier.get(three, MiddleTierCount()) + _count_middle(trace, *three)
    return Acceptance(by_depth, by_middle_tier)


def agreement(traces: Iterable[Trace], tier: str, other: str | None) -> float:
    """The share of positions at which two tiers pick the same, each right after the written text. None: the target."""
    same = [picks(trace, tier, 0) == picks(trace, other or TARGET, 0) for trace in traces]
    return float(np.mean(np.concatenate(same))) if same else 0.0


def picks(trace: Trace, tier: str, depth: int) -> np.ndarray:
    """[positions]: what a tier picks at every position if the last `depth` tokens before it are not written yet."""
    return np.array(trace.output, np.int32) if tier == TARGET else trace.tiers[tier].first(depth)


def _pairs(keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Drafter and verifier; the target drafts for no tier."""
    for drafter in keys:
        for verifier in (TARGET, *keys):
            if verifier != drafter:
                yield drafter, verifier


def _count_by_depth(trace: Trace, drafter: str, verifier: str, depths: int) -> list[AcceptanceCount]:
    size = len(trace.output)
    output = np.array(trace.output, np.int32)
    alive = np.ones(size, bool)  # by the position where drafting began
    counts = []
    for depth in range(depths):
        alive = alive[: max(size - depth, 0)]  # beyond the end nothing was recorded
        drafted, verified = picks(trace, drafter, depth)[depth:], picks(trace, verifier, depth)[depth:]
        accepted = alive & (drafted == verified)
        counts.append(AcceptanceCount(int(accepted.sum()), int(alive.sum())))
        alive = accepted & (verified == output[depth:])
    return counts


def _count_middle(trace: Trace, drafter: str, middle: str, verifier: str) -> MiddleTierCount:
    drafted, handed_up, above = (picks(trace, tier, 0) for tier in (drafter, middle, verifier))
    agreed, accepted = drafted == handed_up, handed_up == above
    return MiddleTierCount(
        AcceptanceCount(int((agreed & accepted).sum()), int(agreed.sum())),
        AcceptanceCount(int((~agreed & accepted).sum()), int((~agreed).sum())),
    )
