"""How often guesses stand, from traces: for every pair of tiers, by depth, task and temperature, and what a correction
says about the token that it brings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hierspec.planner.simulation.traces import Trace, tiers_of

TARGET = "target"
DEPTHS = 8


@dataclass(frozen=True)
class Share:
    """So many of so many stood."""

    stood: int = 0
    trials: int = 0

    @property
    def rate(self) -> float:
        return self.stood / self.trials if self.trials else 0.0

    def __add__(self, other: Share) -> Share:
        return Share(self.stood + other.stood, self.trials + other.trials)


@dataclass(frozen=True)
class Where:
    """What a share is about: who guessed, who judged, in which task, at which temperature."""

    guesser: str
    judge: str
    task: str
    temperature: float


@dataclass(frozen=True)
class Dependence:
    """Of tokens that a middle tier handed up: those it let stand, and those it corrected, that stood above."""

    stood: Share = Share()
    corrected: Share = Share()

    def __add__(self, other: Dependence) -> Dependence:
        return Dependence(self.stood + other.stood, self.corrected + other.corrected)


@dataclass(frozen=True)
class Acceptance:
    """Counts over the target's text. At depth d a guess is a trial where all d before it stood with both, so that the
    text before it is still the target's."""

    by_depth: dict[Where, tuple[Share, ...]] = field(default_factory=dict)
    dependence: dict[tuple[str, str, str], Dependence] = field(default_factory=dict)  # (guesser, middle, judge)

    def share(
        self, guesser: str, judge: str = TARGET, depth: int | None = None, task: str | None = None,
        temperature: float | None = None,
    ) -> Share:  # fmt: skip
        """Over all depths, tasks and temperatures that are not named. The deepest stands for all beyond it."""
        total = Share()
        for where, shares in self.by_depth.items():
            if (where.guesser, where.judge) != (guesser, judge) or task not in (None, where.task):
                continue
            if temperature in (None, where.temperature):
                chosen = shares if depth is None else shares[min(depth, len(shares) - 1) :][:1]
                total = sum(chosen, total)
        return total

    def tiers(self) -> list[str]:
        return list(dict.fromkeys(where.guesser for where in self.by_depth))

    def to_json(self) -> dict[str, Any]:
        return {
            "pairs": [
                {
                    "guesser": where.guesser, "judge": where.judge, "task": where.task,
                    "temperature": where.temperature, "stood_by_depth": [share.stood for share in shares],
                    "trials_by_depth": [share.trials for share in shares],
                }
                for where, shares in self.by_depth.items()
            ],
            "dependence": [
                {
                    "guesser": guesser, "middle": middle, "judge": judge,
                    "let_stand": [found.stood.stood, found.stood.trials],
                    "corrected": [found.corrected.stood, found.corrected.trials],
                }
                for (guesser, middle, judge), found in self.dependence.items()
            ],
        }  # fmt: skip

    def rows(self, judge: str = TARGET) -> list[list[str]]:
        """A table for people, its heading first: how often guesses of each tier stand with the judge."""
        tasks = list(dict.fromkeys(where.task for where in self.by_depth))
        lines = [["tier", "all", *(f"depth {depth + 1}" for depth in range(4)), *tasks]]
        for guesser in self.tiers():
            if guesser == judge or not self.share(guesser, judge).trials:
                continue
            shares = [self.share(guesser, judge), *(self.share(guesser, judge, depth) for depth in range(4))]
            shares += [self.share(guesser, judge, task=task) for task in tasks]
            lines.append([guesser, *(f"{share.rate:.2f}" for share in shares)])
        return lines

    def dependence_rows(self, judge: str = TARGET) -> list[list[str]]:
        """A table for people, its heading first: what middle tiers hand up, by whether they corrected it."""
        lines = [["drafted by", "judged by", "let stand, stood above", "corrected, stood above"]]
        for (guesser, middle, above), found in self.dependence.items():
            if above == judge:
                rates = (f"{share.rate:.2f} of {share.trials}" for share in (found.stood, found.corrected))
                lines.append([guesser, middle, *rates])
        return lines


def acceptance(traces: Sequence[Trace], depths: int = DEPTHS) -> Acceptance:
    """Of every ordered pair of tiers that all these traces know, and of every three of them."""
    keys = tiers_of(traces)
    by_depth: dict[Where, tuple[Share, ...]] = {}
    dependence: dict[tuple[str, str, str], Dependence] = {}
    for trace in traces:
        for guesser, judge in _pairs(keys):
            where = Where(guesser, judge, trace.task, trace.temperature)
            found = _by_depth(trace, guesser, judge, depths)
            before = by_depth.get(where, (Share(),) * depths)
            by_depth[where] = tuple(one + two for one, two in zip(before, found, strict=True))
        for guesser, middle in _pairs(keys):
            for judge in (TARGET, *keys):
                if middle == TARGET or judge in (guesser, middle):
                    continue
                three = guesser, middle, judge
                dependence[three] = dependence.get(three, Dependence()) + _dependence(trace, *three)
    return Acceptance(by_depth, dependence)


def agreement(traces: Iterable[Trace], one: str, other: str | None) -> float:
    """The share of positions at which two tiers pick the same, each right after what is written. None: the target."""
    same = [said(trace, one, 0) == said(trace, other or TARGET, 0) for trace in traces]
    return float(np.mean(np.concatenate(same))) if same else 0.0


def said(trace: Trace, tier: str, depth: int) -> np.ndarray:
    """What a tier picks at every position when so many tokens before it are not written yet. [positions]"""
    return np.array(trace.output, np.int32) if tier == TARGET else trace.tiers[tier].first(depth)


def _pairs(keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Guesser and judge; the target guesses for nobody."""
    for guesser in keys:
        for judge in (TARGET, *keys):
            if judge != guesser:
                yield guesser, judge


def _by_depth(trace: Trace, guesser: str, judge: str, depths: int) -> list[Share]:
    size = len(trace.output)
    output = np.array(trace.output, np.int32)
    alive = np.ones(size, bool)  # by the position where drafting began
    found = []
    for depth in range(depths):
        alive = alive[: max(size - depth, 0)]  # beyond the end nothing is known
        guess, judged = said(trace, guesser, depth)[depth:], said(trace, judge, depth)[depth:]
        stood = alive & (guess == judged)
        found.append(Share(int(stood.sum()), int(alive.sum())))
        alive = stood & (judged == output[depth:])
    return found


def _dependence(trace: Trace, guesser: str, middle: str, judge: str) -> Dependence:
    guess, own, above = (said(trace, tier, 0) for tier in (guesser, middle, judge))
    same, stands = guess == own, own == above
    return Dependence(
        Share(int((same & stands).sum()), int(same.sum())),
        Share(int((~same & stands).sum()), int((~same).sum())),
    )
