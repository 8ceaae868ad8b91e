"""The expected latency of a hierarchy, exact for tokens that are accepted independently of each other.

A round of a tier is one pass: over a store's proposal, over a block of the tier below, or over nothing. It writes the
accepted tokens and one token of the tier's own. A block is as many rounds as it takes to have `gather` tokens, so it
often holds more. Each block starts afresh (a renewal process), so means over rounds are means over blocks. Counting
tokens, the distribution of one round of a tier follows from that of the tier below, level by level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from hierspec.core.interfaces import ACCEPTED, CORRECTED, UNDRAFTED
from hierspec.planner.formula.figures import AcceptanceRates, Figures, HierarchyConfig, TierConfig

_Key = TypeVar("_Key")

# What a round wrote: how many drafted tokens were accepted, and how the token after them was written -> probability.
RoundDistribution = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class TierScore:
    """What a tier of a hierarchy does for one token of the target."""

    tier: str
    passes: float
    seconds: float  # of its passes
    store_seconds: float  # of lookups in its store
    rows: float  # of a pass, on average
    block_tokens: float  # of a block that it hands up; for the target: tokens per pass
    accepted: float  # share of these that the tier above accepts; for the target: 1
    share: float  # of the whole time, with its store


@dataclass(frozen=True)
class Score:
    hierarchy: HierarchyConfig
    seconds: float  # per token of the target
    tokens_per_pass: float
    tiers: tuple[TierScore, ...]


def score(figures: Figures, hierarchy: HierarchyConfig, memo: RoundMemo | None = None) -> Score:
    """Seconds per token, tokens per pass and which tier spends the time.

    Hierarchies often have their lower tiers in common: pass one `memo` to all calls that score the same figures.
    """
    top = _round(figures, hierarchy, {} if memo is None else memo)
    tokens = sum((accepted + 1) * probability for (accepted, _), probability in top.distribution.items())
    seconds = sum(work.seconds + work.store_seconds for work in top.work)
    tiers = []
    for level, (config, work) in enumerate(zip(hierarchy, top.work, strict=True)):
        handed_up = work.block_tokens / work.blocks if work.blocks else 0.0
        accepted_share = work.accepted / work.block_tokens if work.block_tokens else 0.0
        tiers.append(
            TierScore(
                tier=config.tier,
                passes=work.passes / tokens,
                seconds=work.seconds / tokens,
                store_seconds=work.store_seconds / tokens,
                rows=work.rows / work.passes if work.passes else 0.0,
                block_tokens=handed_up if level else tokens,
                accepted=accepted_share if level else 1.0,
                share=(work.seconds + work.store_seconds) / seconds if seconds else 0.0,
            )
        )
    return Score(hierarchy, seconds / tokens, tokens, tuple(tiers))


@dataclass(frozen=True)
class _TierWork:
    """What one tier does on average in a round of its own or of a tier above it."""

    passes: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    store_seconds: float = 0.0
    blocks: float = 0.0
    block_tokens: float = 0.0
    accepted: float = 0.0  # of those, by the tier above

    def times(self, count: float) -> _TierWork:
        return _TierWork(*(count * value for value in vars(self).values()))


@dataclass(frozen=True)
class _Round:
    distribution: RoundDistribution
    work: tuple[_TierWork, ...]  # of this tier and those below it


RoundMemo = dict[HierarchyConfig, _Round]  # by hierarchy from some tier down, without that tier's block settings


@dataclass(frozen=True)
class Block:
    """What a tier hands up, and what the tier above writes after verifying it."""

    rounds: float  # on average
    sizes: Mapping[int, float]  # positions handed up -> probability
    distribution: RoundDistribution  # of the round above that verifies it


def _round(figures: Figures, hierarchy: HierarchyConfig, memo: RoundMemo) -> _Round:
    top = hierarchy[0]
    key = (TierConfig(top.tier, store=top.store, budget=top.budget), *hierarchy[1:])
    if key not in memo:
        memo[key] = _computed_round(figures, hierarchy, memo)
    return memo[key]


def _computed_round(figures: Figures, hierarchy: HierarchyConfig, memo: RoundMemo) -> _Round:
    config, tier = hierarchy[0], figures.tier(hierarchy[0].tier)
    store = None if config.store is None else figures.store(config.tier, config.store)
    hit_rate, store_seconds, rows, seconds = 0.0, 0.0, 0.0, 0.0
    distribution: dict[tuple[int, int], float] = {}
    if store is not None:
        hit_rate, store_seconds = store.hit_rate, store.seconds
        rows, seconds = hit_rate * (1 + store.rows), hit_rate * tier.seconds(1 + store.rows)
        for accepted, probability in enumerate(store.accepted):
            # A proposal that is accepted to its end leaves nothing to correct.
            _add(distribution, (accepted, UNDRAFTED if accepted == store.rows else CORRECTED), probability)
    rest = 1.0 - hit_rate
    if len(hierarchy) == 1:
        _add(distribution, (0, UNDRAFTED), rest)
        work = _TierWork(1.0, rows + rest, seconds + rest * tier.seconds(1), store_seconds)
        return _Round(distribution, (work,))
    lower, lower_round = hierarchy[1], _round(figures, hierarchy[1:], memo)
    below_lower = hierarchy[2].tier if len(hierarchy) > 2 else None
    rates = figures.acceptance_rates(config.tier, lower.tier, below_lower)
    block = verified_block(lower_round.distribution, lower, rates, config.budget)
    for outcome, probability in block.distribution.items():
        _add(distribution, outcome, rest * probability)
    for size, probability in block.sizes.items():
        nodes = 1 + size * lower.candidates
        rows += rest * probability * nodes
        seconds += rest * probability * tier.seconds(nodes, lower.tier)
    lower_work = [work.times(rest * block.rounds) for work in lower_round.work]
    handed_up = sum(size * probability for size, probability in block.sizes.items())
    accepted_tokens = sum(accepted * probability for (accepted, _), probability in block.distribution.items())
    lower_work[0] = replace(lower_work[0], blocks=rest, block_tokens=rest * handed_up, accepted=rest * accepted_tokens)
    return _Round(distribution, (_TierWork(1.0, rows, seconds, store_seconds), *lower_work))


def verified_block(
    distribution: RoundDistribution, config: TierConfig, rates: AcceptanceRates, budget: int | None = None
) -> Block:
    """Blocks of a tier whose rounds have this distribution, and how much of them the tier above accepts.

    Counts tokens: `started[n]` is the probability that a round starts after n tokens, `alive[n]` that it does and that
    the tier above would accept all n. The tier above does not see what `budget` cuts off.
    """
    longest_round = max(accepted for accepted, _ in distribution) + 1
    size = config.gather - 1 + longest_round
    limit = size if budget is None else min(budget, size)
    cut_off = [1.0] * (size - limit)
    accepted_rates = rates.rates(ACCEPTED, limit) + cut_off
    # A round ends with a token of the tier's own.
    last_rates = {how: rates.rates(how, limit) + cut_off for how in (UNDRAFTED, CORRECTED)}
    longer = [
        sum(probability for (accepted, _), probability in distribution.items() if accepted > count)
        for count in range(longest_round)
    ]
    started, alive = [1.0] + [0.0] * config.gather, [1.0] + [0.0] * config.gather
    sizes: dict[int, float] = {}
    whole: dict[int, float] = {}  # size of a block of which every token is accepted -> probability
    rejected = [0.0] * size  # position of the first rejected token -> probability
    rounds = 0.0
    for start in range(config.gather):
        if started[start] == 0.0:
            continue
        rounds += started[start]
        reached = alive[start]
        for count in range(longest_round):
            position = start + count
            written = position + 1
            for how, last_rate in last_rates.items():
                probability = distribution.get((count, how), 0.0)
                if probability == 0.0:
                    continue
                rejected[position] += reached * probability * (1.0 - last_rate[position])
                survives = reached * probability * last_rate[position]
                if written >= config.gather or (how == CORRECTED and config.until == "correction"):
                    _add(sizes, min(written, limit), started[start] * probability)
                    _add(whole, min(written, limit), survives)
                else:
                    started[written] += started[start] * probability
                    alive[written] += survives
            rejected[position] += reached * longer[count] * (1.0 - accepted_rates[position])
            reached *= accepted_rates[position]
    above: dict[tuple[int, int], float] = {}
    for block_size, probability in whole.items():
        _add(above, (block_size, UNDRAFTED), probability)
    runner_up = rates.runner_up_rate(config.candidates)
    for position, probability in enumerate(rejected[:limit]):
        _add(above, (position, CORRECTED), probability * (1.0 - runner_up))
        # A runner-up is a leaf: nothing is drafted after it.
        _add(above, (position + 1, UNDRAFTED), probability * runner_up)
    return Block(rounds, sizes, above)


def _add(probabilities: dict[_Key, float], key: _Key, probability: float) -> None:
    if probability > 0.0:
        probabilities[key] = probabilities.get(key, 0.0) + probability
