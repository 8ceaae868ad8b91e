"""The expected latency of a ladder of tiers, exact for tokens that stand or fall independently of each other.

A round of a tier is one pass: over a store's guess, or over a block of the tier below, or over nothing. It writes the
guesses that stand and one token of the tier's own. A block is as many rounds as it takes to have `gather` tokens, so
it often holds more. Blocks begin anew each time (a renewal), so means of rounds are means of blocks: the law of one
round of a tier follows from that of the tier below, level by level, by counting tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from hierspec.core.interfaces import ACCEPTED as STOOD
from hierspec.core.interfaces import CORRECTED
from hierspec.core.interfaces import UNDRAFTED as OWN
from hierspec.planner.formula.figures import Figures, Ladder, Rung, Survival

_Key = TypeVar("_Key")

# What a round wrote: how many guesses stood, and how the tier's own token after them came about -> its chance.
RoundLaw = Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class RungScore:
    """What a tier of a ladder does for one token of the target."""

    tier: str
    passes: float
    seconds: float  # of its own passes
    store_seconds: float  # of asking its store
    rows: float  # of a pass, on the average
    gathered: float  # tokens of a block that it hands up; of the target: of a pass
    stands: float  # share of those that stand above; of the target: 1
    share: float  # of the whole time, its store's included


@dataclass(frozen=True)
class Score:
    ladder: Ladder
    seconds: float  # a token of the target
    tokens_per_pass: float
    rungs: tuple[RungScore, ...]


def score(figures: Figures, ladder: Ladder, known: Rounds | None = None) -> Score:
    """Seconds a token, tokens a pass and who spends the time.

    Ladders often have their lower tiers in common: whoever scores many of the same figures keeps `known` in between.
    """
    found = _round(figures, ladder, {} if known is None else known)
    tokens = sum((stood + 1) * chance for (stood, _), chance in found.distribution.items())
    seconds = sum(spent.seconds + spent.store_seconds for spent in found.spent)
    rungs = tuple(
        RungScore(
            rung.tier, spent.passes / tokens, spent.seconds / tokens, spent.store_seconds / tokens,
            spent.rows / spent.passes if spent.passes else 0.0,
            tokens if level == 0 else spent.handed / spent.blocks if spent.blocks else 0.0,
            1.0 if level == 0 else spent.stood / spent.handed if spent.handed else 0.0,
            (spent.seconds + spent.store_seconds) / seconds if seconds else 0.0,
        )
        for level, (rung, spent) in enumerate(zip(ladder, found.spent, strict=True))
    )  # fmt: skip
    return Score(ladder, seconds / tokens, tokens, rungs)


@dataclass(frozen=True)
class _Spent:
    """Means of what one tier does in a round of some tier above it, or of its own."""

    passes: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    store_seconds: float = 0.0
    blocks: float = 0.0
    handed: float = 0.0  # tokens in them
    stood: float = 0.0  # of those, above

    def times(self, count: float) -> _Spent:
        return _Spent(*(count * value for value in vars(self).values()))


@dataclass(frozen=True)
class _Round:
    distribution: RoundLaw
    spent: tuple[_Spent, ...]  # of this tier and those below it


Rounds = dict[Ladder, _Round]  # of ladders from some tier down, that tier's own block left open


@dataclass(frozen=True)
class Block:
    """What a tier hands up and what becomes of it."""

    rounds: float  # on the average
    sizes: Mapping[int, float]  # positions handed up -> chance
    distribution: RoundLaw  # of the round above that verifies it


def _round(figures: Figures, ladder: Ladder, known: Rounds) -> _Round:
    key = (Rung(ladder[0].tier, store=ladder[0].store, budget=ladder[0].budget), *ladder[1:])
    if key not in known:
        known[key] = _worked_out(figures, ladder, known)
    return known[key]


def _worked_out(figures: Figures, ladder: Ladder, known: Rounds) -> _Round:
    rung, tier = ladder[0], figures.tier(ladder[0].tier)
    store = None if rung.store is None else figures.store(rung.tier, rung.store)
    share, store_seconds, rows, seconds = 0.0, 0.0, 0.0, 0.0
    distribution: dict[tuple[int, int], float] = {}
    if store is not None:
        share, store_seconds = store.share, store.seconds
        rows, seconds = share * (1 + store.rows), share * tier.seconds(1 + store.rows)
        for stood, chance in enumerate(store.stands):
            # A guess that stood to its end leaves nothing to correct.
            _add(distribution, (stood, OWN if stood == store.rows else CORRECTED), chance)
    rest = 1.0 - share
    if len(ladder) == 1:
        _add(distribution, (0, OWN), rest)
        own = _Spent(1.0, rows + rest, seconds + rest * tier.seconds(1), store_seconds)
        return _Round(distribution, (own,))
    lower, below = ladder[1], _round(figures, ladder[1:], known)
    beneath = ladder[2].tier if len(ladder) > 2 else None
    block = gathered(below.distribution, lower, figures.survival(rung.tier, lower.tier, beneath), rung.budget)
    for outcome, chance in block.distribution.items():
        _add(distribution, outcome, rest * chance)
    for size, chance in block.sizes.items():
        nodes = 1 + size * lower.candidates
        rows += rest * chance * nodes
        seconds += rest * chance * tier.seconds(nodes, lower.tier)
    spent = [one.times(rest * block.rounds) for one in below.spent]
    handed = sum(size * chance for size, chance in block.sizes.items())
    standing = sum(stood * chance for (stood, _), chance in block.distribution.items())
    spent[0] = replace(spent[0], blocks=rest, handed=rest * handed, stood=rest * standing)
    return _Round(distribution, (_Spent(1.0, rows, seconds, store_seconds), *spent))


def gathered(distribution: RoundLaw, rung: Rung, survival: Survival, budget: int | None = None) -> Block:
    """Blocks of a tier whose rounds have this law, as this rung hands them up, and how they fare above.

    Counts tokens: `begun` is the chance that a round begins after so many, `alive` that it does and that all of those
    would stand above. Of what is cut off by `budget` the tier above sees nothing.
    """
    most = max(stood for stood, _ in distribution) + 1  # tokens of a round
    size = rung.gather - 1 + most
    limit = size if budget is None else min(budget, size)
    beyond = [1.0] * (size - limit)
    accepted = survival.chances(STOOD, limit) + beyond
    own = {how: survival.chances(how, limit) + beyond for how in (OWN, CORRECTED)}
    longer = [sum(chance for (stood, _), chance in distribution.items() if stood > count) for count in range(most)]
    begun, alive = [1.0] + [0.0] * rung.gather, [1.0] + [0.0] * rung.gather
    sizes: dict[int, float] = {}
    through: dict[int, float] = {}  # tokens of a block that all stand
    fallen = [0.0] * size  # place of the first that does not
    rounds = 0.0
    for start in range(rung.gather):
        if begun[start] == 0.0:
            continue
        rounds += begun[start]
        standing = alive[start]
        for count in range(most):
            place = start + count
            written = place + 1
            for how, stands in own.items():
                chance = distribution.get((count, how), 0.0)
                if chance == 0.0:
                    continue
                fallen[place] += standing * chance * (1.0 - stands[place])
                still = standing * chance * stands[place]
                if written >= rung.gather or (how == CORRECTED and rung.until == "correction"):
                    _add(sizes, min(written, limit), begun[start] * chance)
                    _add(through, min(written, limit), still)
                else:
                    begun[written] += begun[start] * chance
                    alive[written] += still
            fallen[place] += standing * longer[count] * (1.0 - accepted[place])
            standing *= accepted[place]
    above: dict[tuple[int, int], float] = {}
    for stood, chance in through.items():
        _add(above, (stood, OWN), chance)
    beside = survival.runner_up(rung.candidates)
    for place, chance in enumerate(fallen[:limit]):
        _add(above, (place, CORRECTED), chance * (1.0 - beside))
        _add(above, (place + 1, OWN), chance * beside)  # a runner-up is a leaf: after it the tier goes on by itself
    return Block(rounds, sizes, above)


def _add(counts: dict[_Key, float], key: _Key, chance: float) -> None:
    if chance > 0.0:
        counts[key] = counts.get(key, 0.0) + chance
