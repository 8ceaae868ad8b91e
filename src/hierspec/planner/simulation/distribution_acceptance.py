"""How often drafts are accepted under the rules residual and block: expected counts, from recorded distributions.

Nothing is sampled: at every position the rate is 1 - TV between the two tiers, and a position counts as a trial with
the probability that all drafts before it are accepted, by the verifier and by the target, whose text it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.planner.simulation.acceptance import (
    DEPTHS,
    TARGET,
    Acceptance,
    AcceptanceCount,
    MiddleTierCount,
    PairKey,
)
from hierspec.planner.simulation.distributions import jointly_accepted, overlap, ratios, row
from hierspec.planner.simulation.traces import Trace


def expected_acceptance(traces: Sequence[Trace], rule: str, depths: int = DEPTHS) -> Acceptance:
    """Expected counts of every ordered pair of tiers, and of every two of them below the target."""
    keys = [key for key in (traces[0].distributions if traces else {}) if key != TARGET]
    by_depth: dict[PairKey, tuple[AcceptanceCount, ...]] = {}
    by_middle_tier: dict[tuple[str, str, str], MiddleTierCount] = {}
    for trace in traces:
        overlaps = _Overlaps(trace)
        for drafter in keys:
            for verifier in (TARGET, *keys):
                if drafter == verifier:
                    continue
                pair = PairKey(drafter, verifier, trace.task, trace.temperature)
                before = by_depth.get(pair, (AcceptanceCount(),) * depths)
                added = _count_by_depth(trace, overlaps, drafter, verifier, rule, depths)
                by_depth[pair] = tuple(old + new for old, new in zip(before, added, strict=True))
                if verifier != TARGET:
                    three = drafter, verifier, TARGET
                    count = _count_middle(trace, overlaps, drafter, verifier)
                    by_middle_tier[three] = by_middle_tier.get(three, MiddleTierCount()) + count
    return Acceptance(by_depth, by_middle_tier)


class _Overlaps:
    """1 - TV between two tiers at every position of a text, each pair computed once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[tuple[str, str, int], np.ndarray] = {}

    def at(self, one: str, other: str, depth: int) -> np.ndarray:
        """[positions]; 0 at the first `depth`, where nothing was recorded."""
        recorded = self._trace.distributions
        first, second = sorted((one, other))
        deepest = max(len(recorded[first].tokens), len(recorded[second].tokens)) - 1
        depth = min(depth, deepest)
        key = first, second, depth
        if key not in self._known:
            values = np.zeros(len(self._trace.output))
            for position in range(depth, len(values)):
                here = (row(recorded[name], depth, position) for name in (first, second))
                values[position] = overlap(*here)
            self._known[key] = values
        return self._known[key]


def _count_by_depth(
    trace: Trace, overlaps: _Overlaps, drafter: str, verifier: str, rule: str, depths: int
) -> list[AcceptanceCount]:
    size = len(trace.output)
    joint = None
    if rule == "block" and verifier == TARGET:
        joint = jointly_accepted([ratios(trace, drafter, TARGET, depth) for depth in range(depths)])
    alive, counts = np.ones(size), []  # by the position where drafting began
    for depth in range(depths):
        alive = alive[: max(size - depth, 0)]  # beyond the end nothing was recorded
        if joint is not None and depth:
            accepted = joint[depth + 1][: len(alive)]
            alive = joint[depth][: len(alive)]
        else:
            accepted = alive * overlaps.at(drafter, verifier, depth)[depth:]
        counts.append(AcceptanceCount(float(accepted.sum()), float(alive.sum())))
        equal = np.minimum(1.0, ratios(trace, drafter, verifier, depth)[depth:])
        if verifier != TARGET:
            equal = equal * np.minimum(1.0, ratios(trace, verifier, TARGET, depth)[depth:])
        alive = alive * equal
    return counts


def _count_middle(trace: Trace, overlaps: _Overlaps, drafter: str, middle: str) -> MiddleTierCount:
    size = len(trace.output)
    agreed = float(overlaps.at(drafter, middle, 0).sum())
    stands = np.minimum(1.0, ratios(trace, middle, TARGET, 0))  # the middle tier wrote the text's token
    both = float((stands * np.minimum(1.0, ratios(trace, drafter, middle, 0))).sum())
    # Rounding, and what was not recorded, must not give more accepted tokens than there were.
    corrected = size - agreed
    return MiddleTierCount(
        AcceptanceCount(min(both, agreed), agreed),
        AcceptanceCount(min(max(float(stands.sum()) - both, 0.0), corrected), corrected),
    )
