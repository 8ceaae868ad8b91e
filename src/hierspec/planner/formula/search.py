"""Which tiers to stack and how long their blocks should be: a shortest path, then the exact score of the best few.

For given tiers below it, the cost of a tier's token is an affine, increasing function of the cost of the next tier's
token. So the cheapest hierarchy from each tier down is computed once, from the bottom up (Bellman). The same holds
for the second cheapest and so on, so every tier keeps as many different hierarchies as are asked for. The estimate
assumes that blocks hold exactly `gather` tokens and that all tokens of a tier are equally likely to be accepted. The
score of `latency.py` does not, so it ranks the results and tunes the best in small steps. The more tiers, the more
optimistic the estimate is, so the best of every depth are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hierspec.core.interfaces import UNDRAFTED
from hierspec.planner.formula.figures import AcceptanceRates, Figures, HierarchyConfig, StoreFigures, TierConfig, shape
from hierspec.planner.formula.latency import RoundMemo, Score, score

_TUNED = 3  # best hierarchies, besides the best of each depth, that are tuned by the exact score
_STEPS = 12  # of tuning, at most


@dataclass(frozen=True)
class Limits:
    """What the search may try."""

    longest: int = 16  # tokens of a block
    candidates: tuple[int, ...] = (1,)  # tokens per position
    deepest: int = 5  # tiers, the target among them
    per_depth: int = 8  # different hierarchies of each depth to keep


USUAL = Limits()


@dataclass(frozen=True)
class ScoredHierarchy:
    """A hierarchy with the search's estimate and the exact score."""

    hierarchy: HierarchyConfig
    estimate: float
    score: Score


@dataclass(frozen=True)
class PartialHierarchy:
    """The best of its shape, from some tier down."""

    seconds: float  # per token, by the estimate
    hierarchy: HierarchyConfig


def search(figures: Figures, limits: Limits = USUAL, required: str | None = None) -> list[ScoredHierarchy]:
    """The best hierarchies, fastest first by the exact score; plain decoding is always among them.

    With `required`, only those that contain this tier; plain decoding then only if that tier is the target.
    """
    tuning = _Tuning(figures, limits, required)
    best = [tuning.scored(partial.hierarchy, partial.seconds) for partial in shortest(figures, limits, required)]
    plain: HierarchyConfig = (TierConfig(figures.target.name),)
    if required in (None, figures.target.name) and all(scored.hierarchy != plain for scored in best):
        best.append(tuning.scored(plain, estimate(figures, plain)))
    best.sort(key=_exact_seconds)
    best_of_depth = {len(scored.hierarchy): scored for scored in reversed(best)}.values()
    tuned = [tuning.tuned(scored) for scored in dict.fromkeys((*best[:_TUNED], *best_of_depth))]
    by_shape: dict[object, ScoredHierarchy] = {}  # tuning may turn several into one shape
    for scored in sorted((*tuned, *best), key=_exact_seconds):
        by_shape.setdefault(shape(scored.hierarchy), scored)
    return list(by_shape.values())


def estimate(figures: Figures, hierarchy: HierarchyConfig) -> float:
    """Seconds per token if blocks held exactly `gather` tokens, all equally likely to be accepted."""
    config, tier = hierarchy[0], figures.tier(hierarchy[0].tier)
    store = None if config.store is None else figures.store(config.tier, config.store)
    choice = _store_choice(figures, config.tier, store)
    if len(hierarchy) == 1:
        return (choice.seconds + choice.rest * tier.seconds(1)) / (choice.tokens + choice.rest)
    lower = hierarchy[1]
    drafting = lower.gather * estimate(figures, hierarchy[1:])
    verifying = tier.seconds(1 + lower.gather * lower.candidates, lower.tier)
    rates = figures.acceptance_rates(config.tier, lower.tier)
    written = _tokens_per_pass(rates, lower.gather, lower.candidates)[-1]
    return (choice.seconds + choice.rest * (drafting + verifying)) / (choice.tokens + choice.rest * float(written))


def shortest(figures: Figures, limits: Limits, required: str | None = None) -> list[PartialHierarchy]:
    """The best hierarchies by `estimate`: of every depth the best `per_depth` shapes, the best first."""
    best_from: dict[str, list[PartialHierarchy]] = {}
    names = [tier.name for tier in figures.tiers]
    gate = -1 if required is None else names.index(figures.tier(required).name)
    for level in reversed(range(len(names))):
        # Above the required tier a hierarchy may neither end nor skip that tier.
        lowest = len(names) if level >= gate else gate + 1
        below = {name: best_from[name] for name in names[level + 1 : lowest]}
        best_from[names[level]] = _best_from(figures, limits, names[level], below, may_end=level >= gate)
    return best_from[names[0]]


def _best_from(
    figures: Figures, limits: Limits, name: str, below: Mapping[str, Sequence[PartialHierarchy]], may_end: bool
) -> list[PartialHierarchy]:
    """The best partial hierarchies that start with this tier."""
    tier = figures.tier(name)
    choices = [_store_choice(figures, name, store) for store in (None, *figures.stores.get(name, ()))]
    best: list[PartialHierarchy] = []
    if may_end:
        for choice in choices:
            seconds = (choice.seconds + choice.rest * tier.seconds(1)) / (choice.tokens + choice.rest)
            best.append(PartialHierarchy(seconds, (TierConfig(name, store=choice.name),)))
    lowers: list[PartialHierarchy] = []
    counts, pass_seconds, pass_tokens = [], [], []  # of each tier below: how many of `lowers` start with it, …
    gathers = range(1, limits.longest + 1)
    for lower, partials in below.items():
        extendable = [partial for partial in partials if len(partial.hierarchy) < limits.deepest]
        if (name, lower) not in figures.acceptance or not extendable:
            continue
        rates = figures.acceptance[name, lower]
        lowers += extendable
        counts.append(len(extendable))
        pass_seconds.append(
            [[tier.seconds(1 + gather * many, lower) for gather in gathers] for many in limits.candidates]
        )
        pass_tokens.append([_tokens_per_pass(rates, limits.longest, many) for many in limits.candidates])
    if lowers:
        prices = np.array([partial.seconds for partial in lowers])
        # [lowers, candidates, gathers]
        round_seconds = prices[:, None, None] * np.array(gathers) + np.repeat(np.array(pass_seconds), counts, axis=0)
        round_tokens = np.repeat(np.array(pass_tokens), counts, axis=0)
        # Affine in the cost of a token of the tier below, and increasing.
        values = np.stack(
            [
                (choice.seconds + choice.rest * round_seconds) / (choice.tokens + choice.rest * round_tokens)
                for choice in choices
            ]
        ).reshape(len(choices), len(lowers), -1)
        least, least_at = values.min(axis=2).ravel(), values.argmin(axis=2).ravel()
        depths = np.tile([len(partial.hierarchy) for partial in lowers], len(choices))
        for depth in range(1, limits.deepest):
            of_depth = np.flatnonzero(depths == depth)
            for index in of_depth[np.argsort(least[of_depth], kind="stable")[: limits.per_depth]].tolist():
                choice_index, lower_index = divmod(index, len(lowers))
                candidates_index, shorter = divmod(int(least_at[index]), limits.longest)
                first, *rest = lowers[lower_index].hierarchy
                first = replace(first, gather=1 + shorter, candidates=limits.candidates[candidates_index])
                top = TierConfig(name, store=choices[choice_index].name)
                best.append(PartialHierarchy(float(least[index]), (top, first, *rest)))
    return sorted(best, key=lambda partial: partial.seconds)


class _StoreChoice(NamedTuple):
    """A store that a tier may ask (or none), and what that adds to a pass on average."""

    name: str | None
    rest: float  # share of passes for which it proposes nothing
    seconds: float
    tokens: float


def _store_choice(figures: Figures, tier: str, store: StoreFigures | None) -> _StoreChoice:
    if store is None:
        return _StoreChoice(None, 1.0, 0.0, 0.0)
    seconds = store.seconds + store.hit_rate * figures.tier(tier).seconds(1 + store.rows)
    return _StoreChoice(store.name, 1.0 - store.hit_rate, seconds, store.hit_rate + store.accepted_tokens)


def _tokens_per_pass(rates: AcceptanceRates, longest: int, candidates: int) -> np.ndarray:
    """Tokens that a pass over 1, 2, … drafted tokens writes."""
    accepted = np.cumprod(rates.rates(UNDRAFTED, longest))
    return 1.0 + np.cumsum(accepted) + (1.0 - accepted) * rates.runner_up_rate(candidates)


@dataclass(frozen=True)
class _Tuning:
    """Scores hierarchies, and tunes them by their exact score."""

    figures: Figures
    limits: Limits
    required: str | None
    memo: RoundMemo = field(default_factory=dict)

    def scored(self, hierarchy: HierarchyConfig, estimated: float) -> ScoredHierarchy:
        return ScoredHierarchy(hierarchy, estimated, score(self.figures, hierarchy, self.memo))

    def tuned(self, start: ScoredHierarchy) -> ScoredHierarchy:
        """Tune from the estimate's block lengths and from short blocks, and keep the faster.

        Costs that jump at some width leave more than one local minimum.
        """
        target, *lower = start.hierarchy
        starts = [start.score]
        if len(lower) > 1:
            short = (target, *(replace(config, gather=min(2, self.limits.longest)) for config in lower))
            starts.append(score(self.figures, short, self.memo))
        best = min(map(self._descended, starts), key=_seconds)
        return ScoredHierarchy(best.hierarchy, estimate(self.figures, best.hierarchy), best)

    def _descended(self, best: Score) -> Score:
        """Steepest descent: take the best neighbour as long as it is faster."""
        for _ in range(_STEPS):
            neighbours = (
                score(self.figures, hierarchy, self.memo)
                for hierarchy in self._neighbours(best.hierarchy)
                if self.required is None or any(config.tier == self.required for config in hierarchy)
            )
            fastest = min(neighbours, key=_seconds, default=best)
            if fastest.seconds >= best.seconds:
                break
            best = fastest
        return best

    def _neighbours(self, hierarchy: HierarchyConfig) -> Iterator[HierarchyConfig]:
        """The hierarchy with one small change each.

        Blocks of one tier or of two neighbours get longer or shorter by a token or two, or end by another rule; a tier
        is left out; a store is added, changed or left out.
        """
        last = len(hierarchy) - 1
        steps = [{level: by} for level in range(1, last + 1) for by in (-2, -1, 1, 2)]
        steps += [{level: by, level + 1: other} for level in range(1, last) for by in (-1, 1) for other in (-1, 1)]
        for step in steps:
            if all(1 <= hierarchy[level].gather + by <= self.limits.longest for level, by in step.items()):
                yield tuple(
                    replace(config, gather=config.gather + step[level]) if level in step else config
                    for level, config in enumerate(hierarchy)
                )
        for level, config in enumerate(hierarchy):
            above, below = hierarchy[:level], hierarchy[level + 1 :]
            if level and (below or config.store is not None):  # a tier that only drafts corrects nothing
                until = "count" if config.until == "correction" else "correction"
                yield (*above, replace(config, until=until), *below)
            for store in (None, *(store.name for store in self.figures.stores.get(config.tier, ()))):
                if store != config.store:
                    yield (*above, replace(config, store=store), *below)
            if level and (not below or (above[-1].tier, below[0].tier) in self.figures.acceptance):
                yield (*above, *below)


def _seconds(scored: Score) -> float:
    return scored.seconds


def _exact_seconds(scored: ScoredHierarchy) -> float:
    return scored.score.seconds
