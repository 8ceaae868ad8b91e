"""Which tiers to stack, and how much each gathers: a shortest path, then the exact score of the best few.

What a token of a tier costs is, for given tiers below it, an affine function of what a token of the next tier costs,
and it rises with it. So the cheapest way down from each tier is found once, from the bottom up (Bellman), and the same
holds for the second cheapest and so on: as many different hierarchies are kept at every tier as are asked for. The
formula takes blocks to hold exactly `gather` tokens and all tokens of a tier to be alike; the score of `latency.py`
does not, so it has the last word, also over a few steps aside from what the formula prefers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hierspec.planner.figures import Figures, Ladder, Rung, StoreFigures, Survival
from hierspec.planner.latency import Score, score

_POLISHED = 4  # of the best hierarchies are tuned step by step by the exact score
_STEPS = 12  # at most, each


@dataclass(frozen=True)
class Limits:
    """What the search may try."""

    longest: int = 16  # tokens of a block
    candidates: tuple[int, ...] = (1,)  # tokens a position
    kept: int = 16  # different hierarchies


USUAL = Limits()


@dataclass(frozen=True)
class Candidate:
    """A hierarchy: what the search's formula says of it, and the exact score."""

    ladder: Ladder
    estimate: float
    score: Score


@dataclass(frozen=True)
class _Way:
    """The best known of one shape, from some tier down."""

    seconds: float  # a token, by the formula
    ladder: Ladder


def search(figures: Figures, limits: Limits = USUAL, through: str | None = None) -> list[Candidate]:
    """The best hierarchies, the fastest by the exact score first; plain decoding is always among them.

    With `through` only those that have this tier, and plain decoding only if it is the target.
    """
    ways = shortest(figures, limits, through)
    best = [Candidate(way.ladder, way.seconds, score(figures, way.ladder)) for way in ways]
    plain: Ladder = (Rung(figures.target.name),)
    if through in (None, figures.target.name) and all(one.ladder != plain for one in best):
        best.append(Candidate(plain, estimate(figures, plain), score(figures, plain)))
    best.sort(key=lambda one: one.score.seconds)
    best[:_POLISHED] = [_polished(figures, one, limits) for one in best[:_POLISHED]]
    best.sort(key=lambda one: one.score.seconds)
    return best


def estimate(figures: Figures, ladder: Ladder) -> float:
    """Seconds a token by the search's own formula: blocks of exactly `gather`, and all tokens of a tier alike."""
    rung, tier = ladder[0], figures.tier(ladder[0].tier)
    store = None if rung.store is None else figures.store(rung.tier, rung.store)
    share = 0.0 if store is None else store.share
    seconds, tokens = _of_store(figures, rung.tier, store)
    if len(ladder) == 1:
        return (seconds + (1 - share) * tier.seconds(1)) / (tokens + (1 - share))
    lower = ladder[1]
    drafted = lower.gather * estimate(figures, ladder[1:])
    own = tier.seconds(1 + lower.gather * lower.candidates, lower.tier)
    brought = _tokens(figures.survival(rung.tier, lower.tier), lower.gather, lower.candidates)[-1]
    return (seconds + (1 - share) * (drafted + own)) / (tokens + (1 - share) * float(brought))


def shortest(figures: Figures, limits: Limits, through: str | None = None) -> list[_Way]:
    """The best hierarchies by `estimate`, one of each shape, the best first."""
    known: dict[str, list[_Way]] = {}
    names = [tier.name for tier in figures.tiers]
    gate = -1 if through is None else names.index(figures.tier(through).name)
    for place in reversed(range(len(names))):
        # Whoever must come by a tier may neither end above it nor step over it.
        lowest = len(names) if place >= gate else gate + 1
        known[names[place]] = _ways(figures, names[place], names[place + 1 : lowest], known, limits, place >= gate)
    return known[names[0]]


def _ways(
    figures: Figures, name: str, lower: list[str], known: dict[str, list[_Way]], limits: Limits, may_end: bool
) -> list[_Way]:
    """The best ways down from this tier."""
    tier = figures.tier(name)
    lower = [one for one in lower if (name, one) in figures.survivals and known[one]]
    found: list[tuple[float, str | None, _Way | None, int, int]] = []  # seconds, store, way below, gather, candidates
    gathers = np.arange(1, limits.longest + 1)
    for store in (None, *figures.stores.get(name, ())):
        share, called = (0.0, None) if store is None else (store.share, store.name)
        seconds, tokens = _of_store(figures, name, store)
        if may_end:
            alone = (seconds + (1 - share) * tier.seconds(1)) / (tokens + (1 - share))
            found.append((alone, called, None, 1, 1))
        for below in lower:
            survival = figures.survivals[name, below]
            prices = np.array([way.seconds for way in known[below]])
            options = []
            for candidates in limits.candidates:
                own = np.array([tier.seconds(1 + int(gather) * candidates, below) for gather in gathers])
                brought = tokens + (1 - share) * _tokens(survival, limits.longest, candidates)
                # [ways below, gathers]: affine and rising in what a token below costs
                options.append((seconds + (1 - share) * (np.outer(prices, gathers) + own)) / brought)
            values = np.stack(options, axis=1).reshape(len(prices), -1)
            for way, row, at in zip(known[below], values, values.argmin(axis=1), strict=True):
                which, gather = divmod(int(at), limits.longest)
                found.append((float(row[at]), called, way, 1 + gather, limits.candidates[which]))
    found.sort(key=lambda one: one[0])
    ways = []
    for value, called, under, gather, candidates in found[: limits.kept]:
        rest: Ladder = ()
        if under is not None:
            rest = (replace(under.ladder[0], gather=gather, candidates=candidates), *under.ladder[1:])
        ways.append(_Way(value, (Rung(name, store=called), *rest)))
    return ways


def _of_store(figures: Figures, tier: str, store: StoreFigures | None) -> tuple[float, float]:
    """Seconds and tokens that a store adds to a pass of the tier, over passes with a guess of it and without."""
    if store is None:
        return 0.0, 0.0
    seconds = store.seconds + store.share * figures.tier(tier).seconds(1 + store.rows)
    return seconds, store.share + store.tokens


def _tokens(survival: Survival, longest: int, candidates: int) -> np.ndarray:
    """Tokens that a pass over 1, 2, … tokens of a tier brings."""
    standing = np.cumprod([survival.own[min(place, len(survival.own) - 1)] for place in range(longest)])
    return 1.0 + np.cumsum(standing) + (1.0 - standing) * survival.runner_up(candidates)


def _polished(figures: Figures, candidate: Candidate, limits: Limits) -> Candidate:
    """The same hierarchy tuned by the exact score: down the steepest step while there is one."""
    best = candidate.score
    for _ in range(_STEPS):
        nearest = min((score(figures, one) for one in _beside(best.ladder, limits)), key=_seconds, default=best)
        if nearest.seconds >= best.seconds:
            break
        best = nearest
    return Candidate(best.ladder, estimate(figures, best.ladder), best)


def _seconds(found: Score) -> float:
    return found.seconds


def _beside(ladder: Ladder, limits: Limits) -> Iterator[Ladder]:
    """One token more or less gathered somewhere, or another end of blocks."""
    for place in range(1, len(ladder)):
        rung = ladder[place]
        gathers = (gather for gather in (rung.gather - 1, rung.gather + 1) if 1 <= gather <= limits.longest)
        changed = [replace(rung, gather=gather) for gather in gathers]
        if place + 1 < len(ladder) or rung.store is not None:  # whoever only drafts corrects nothing
            changed.append(replace(rung, until="count" if rung.until == "correction" else "correction"))
        for one in changed:
            yield (*ladder[:place], one, *ladder[place + 1 :])
