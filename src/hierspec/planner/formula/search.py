"""Which tiers to stack, and how much each gathers: a shortest path, then the exact score of the best few.

What a token of a tier costs is, for given tiers below it, an affine function of what a token of the next tier costs,
and it rises with it. So the cheapest way down from each tier is found once, from the bottom up (Bellman), and the same
holds for the second cheapest and so on: as many different hierarchies are kept at every tier as are asked for. The
formula takes blocks to hold exactly `gather` tokens and all tokens of a tier to be alike; the score of `latency.py`
does not, so it has the last word, also over a few steps aside from what the formula prefers. The more tiers, the more
the formula promises: so the best of every depth are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hierspec.planner.formula.figures import Figures, Ladder, Rung, StoreFigures, Survival, shape
from hierspec.planner.formula.latency import Rounds, Score, score

_POLISHED = 3  # best hierarchies, and the best of each depth, are tuned step by step by the exact score
_STEPS = 12  # at most, each


@dataclass(frozen=True)
class Limits:
    """What the search may try."""

    longest: int = 16  # tokens of a block
    candidates: tuple[int, ...] = (1,)  # tokens a position
    deepest: int = 5  # tiers, the target among them
    kept: int = 8  # different hierarchies of each depth


USUAL = Limits()


@dataclass(frozen=True)
class Candidate:
    """A hierarchy: what the search's formula says of it, and the exact score."""

    ladder: Ladder
    estimate: float
    score: Score


@dataclass(frozen=True)
class Route:
    """The best known of one shape, from some tier down."""

    seconds: float  # a token, by the formula
    ladder: Ladder


def search(figures: Figures, limits: Limits = USUAL, through: str | None = None) -> list[Candidate]:
    """The best hierarchies, the fastest by the exact score first; plain decoding is always among them.

    With `through` only those that have this tier, and plain decoding only if it is the target.
    """
    ways = shortest(figures, limits, through)
    known: Rounds = {}
    best = [Candidate(way.ladder, way.seconds, score(figures, way.ladder, known)) for way in ways]
    plain: Ladder = (Rung(figures.target.name),)
    if through in (None, figures.target.name) and all(one.ladder != plain for one in best):
        best.append(Candidate(plain, estimate(figures, plain), score(figures, plain)))
    best.sort(key=lambda one: one.score.seconds)
    of_each_depth = {len(one.ladder): one for one in reversed(best)}.values()
    tuned = dict.fromkeys((*best[:_POLISHED], *of_each_depth))
    polished = [_polished(figures, one, limits, through, known) for one in tuned]
    by_shape: dict[object, Candidate] = {}  # tuning may lead several to one shape
    for one in sorted((*polished, *best), key=lambda one: one.score.seconds):
        by_shape.setdefault(shape(one.ladder), one)
    return list(by_shape.values())


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


def shortest(figures: Figures, limits: Limits, through: str | None = None) -> list[Route]:
    """The best hierarchies by `estimate`: of every depth the best `kept` shapes, the best first."""
    known: dict[str, list[Route]] = {}
    names = [tier.name for tier in figures.tiers]
    gate = -1 if through is None else names.index(figures.tier(through).name)
    for place in reversed(range(len(names))):
        # Whoever must come by a tier may neither end above it nor step over it.
        lowest = len(names) if place >= gate else gate + 1
        known[names[place]] = _ways(figures, names[place], names[place + 1 : lowest], known, limits, place >= gate)
    return known[names[0]]


def _ways(
    figures: Figures, name: str, lower: list[str], known: dict[str, list[Route]], limits: Limits, may_end: bool
) -> list[Route]:
    """The best ways down from this tier."""
    tier = figures.tier(name)
    asked = []  # the store, the share of passes without a guess of it, and what it adds to a pass
    for store in (None, *figures.stores.get(name, ())):
        rest = 1.0 if store is None else 1.0 - store.share
        asked.append((None if store is None else store.name, rest, *_of_store(figures, name, store)))
    found = []
    if may_end:
        for called, rest, seconds, tokens in asked:
            found.append(Route((seconds + rest * tier.seconds(1)) / (tokens + rest), (Rung(name, store=called),)))
    under: list[Route] = []
    counts, own, brought = [], [], []  # of each tier below: its ways; seconds of a pass, and tokens that it brings
    gathers = range(1, limits.longest + 1)
    for below in lower:
        ways = [way for way in known[below] if len(way.ladder) < limits.deepest]
        if (name, below) not in figures.survivals or not ways:
            continue
        survival = figures.survivals[name, below]
        passes = [[tier.seconds(1 + count * many, below) for count in gathers] for many in limits.candidates]
        tokens_of = [_tokens(survival, limits.longest, many) for many in limits.candidates]
        under += ways
        counts.append(len(ways))
        own.append(passes)
        brought.append(tokens_of)
    if under:
        prices = np.array([way.seconds for way in under])
        # [ways, candidates, gathers]
        rounds = prices[:, None, None] * np.array(gathers) + np.repeat(np.array(own), counts, axis=0)
        bring = np.repeat(np.array(brought), counts, axis=0)
        # Affine in what a token below costs, and rising with it.
        values = np.stack(
            [(seconds + rest * rounds) / (tokens + rest * bring) for _, rest, seconds, tokens in asked]
        ).reshape(len(asked), len(under), -1)
        least, places = values.min(axis=2).ravel(), values.argmin(axis=2).ravel()
        depths = np.tile([len(way.ladder) for way in under], len(asked))
        for depth in range(1, limits.deepest):
            of_depth = np.flatnonzero(depths == depth)
            for index in of_depth[np.argsort(least[of_depth], kind="stable")[: limits.kept]].tolist():
                asking, way = divmod(index, len(under))
                which, gather = divmod(int(places[index]), limits.longest)
                first, *rest_of = under[way].ladder
                lowered = replace(first, gather=1 + gather, candidates=limits.candidates[which])
                found.append(Route(float(least[index]), (Rung(name, store=asked[asking][0]), lowered, *rest_of)))
    return sorted(found, key=lambda way: way.seconds)


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


def _polished(figures: Figures, candidate: Candidate, limits: Limits, through: str | None, known: Rounds) -> Candidate:
    """A hierarchy tuned by the exact score: from what the formula says and from short blocks, since costs that
    jump at some width leave more than one valley."""
    ladder = candidate.ladder
    short = (ladder[0], *(replace(rung, gather=min(2, limits.longest)) for rung in ladder[1:]))
    starts = [candidate.score] + ([score(figures, short, known)] if len(ladder) > 2 else [])
    best = min((_descended(figures, start, limits, through, known) for start in starts), key=_seconds)
    return Candidate(best.ladder, estimate(figures, best.ladder), best)


def _descended(figures: Figures, best: Score, limits: Limits, through: str | None, known: Rounds) -> Score:
    """Down the steepest step while there is one."""
    for _ in range(_STEPS):
        tried = (
            score(figures, one, known)
            for one in _beside(figures, best.ladder, limits)
            if through is None or any(rung.tier == through for rung in one)
        )
        nearest = min(tried, key=_seconds, default=best)
        if nearest.seconds >= best.seconds:
            break
        best = nearest
    return best


def _seconds(found: Score) -> float:
    return found.seconds


def _beside(figures: Figures, ladder: Ladder, limits: Limits) -> Iterator[Ladder]:
    """A token or two more or less gathered somewhere, at two neighbours at once too, or another end of blocks; a tier
    left out, a store taken or left."""
    last = len(ladder) - 1
    steps = [{place: by} for place in range(1, last + 1) for by in (-2, -1, 1, 2)]
    steps += [{place: by, place + 1: other} for place in range(1, last) for by in (-1, 1) for other in (-1, 1)]
    for step in steps:
        if all(1 <= ladder[place].gather + by <= limits.longest for place, by in step.items()):
            yield tuple(
                replace(rung, gather=rung.gather + step[place]) if place in step else rung
                for place, rung in enumerate(ladder)
            )
    for place, rung in enumerate(ladder):
        before, after = ladder[:place], ladder[place + 1 :]
        if place and (after or rung.store is not None):  # whoever only drafts corrects nothing
            yield (*before, replace(rung, until="count" if rung.until == "correction" else "correction"), *after)
        for store in (None, *(store.name for store in figures.stores.get(rung.tier, ()))):
            if store != rung.store:
                yield (*before, replace(rung, store=store), *after)
        if place and (not after or (before[-1].tier, after[0].tier) in figures.survivals):
            yield (*before, *after)
