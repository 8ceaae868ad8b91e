"""What the planner knows of the tiers that it may stack: what their passes cost, and whose tokens stand where.

A ladder is one way to stack them, the target first. Nothing here measures anything and nothing runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import ACCEPTED as STOOD
from hierspec.core.interfaces import CORRECTED
from hierspec.core.interfaces import UNDRAFTED as OWN
from hierspec.pacing.costs import Costs

HANDS_UP = ("count", "correction")  # what `until` may be here; "worth" is decided on the way and has no closed form


@dataclass(frozen=True)
class TierFigures:
    """A tier and the seconds of its passes by rows (the last token before the guesses is a row too)."""

    name: str
    costs: Costs
    # The same for tokens of a tier below whose states it goes on from, by that tier's name.
    over: Mapping[str, Costs] = field(default_factory=dict)
    overhead: float = 0.0  # seconds that every pass takes beside

    def seconds(self, rows: int, below: str | None = None) -> float:
        """Of a pass over so many rows whose guesses come from `below` (None: from a store, or there are none)."""
        costs = self.costs if below is None else self.over.get(below, self.costs)
        return costs.seconds(rows) + self.overhead


@dataclass(frozen=True)
class Survival:
    """How often a tier's token stands above where all before it in the block did, by its place in the block.

    The last value continues. What a tier accepted from below (`stood`) survives more often than what it wrote in the
    place of a guess (`corrected`); what it wrote where nothing was guessed (`own`) lies in between. `beside` is the
    chance that one of the first, first two, … runners-up stands where the token itself did not.
    """

    own: tuple[float, ...]
    stood: tuple[float, ...] = ()  # empty: as own
    corrected: tuple[float, ...] = ()  # empty: as own
    beside: tuple[float, ...] = ()  # empty: never

    def __post_init__(self) -> None:
        if not self.own:
            raise HierspecError("An acceptance needs at least one number.")
        for chance in (*self.own, *self.stood, *self.corrected, *self.beside):
            if not 0 <= chance <= 1:
                raise HierspecError(f"An acceptance must be from 0 to 1, not {chance}.")

    def chances(self, how: int, places: int) -> list[float]:
        """Of tokens that came about like this, at the first so many places."""
        rates = {OWN: self.own, STOOD: self.stood or self.own, CORRECTED: self.corrected or self.own}[how]
        return [rates[min(place, len(rates) - 1)] for place in range(places)]

    def runner_up(self, candidates: int) -> float:
        """That another of so many candidates stands where the first did not."""
        if candidates < 2 or not self.beside:
            return 0.0
        return self.beside[min(candidates - 2, len(self.beside) - 1)]


@dataclass(frozen=True)
class StoreFigures:
    """A store's guesses to one tier.

    `stands[n]` is the share of the tier's passes for which it has a guess of which n tokens stand; what is missing to
    1 is the share for which it has none, and the tier below is asked instead.
    """

    name: str
    stands: tuple[float, ...]
    rows: int  # nodes of a guess
    seconds: float = 0.0  # of asking, whether there is a guess or not

    def __post_init__(self) -> None:
        if any(chance < 0 for chance in self.stands) or sum(self.stands) > 1 + 1e-9:
            raise HierspecError(f"The shares of the store {self.name!r} must be at least 0 and together at most 1.")
        if self.rows < 1 or len(self.stands) > self.rows + 1:
            raise HierspecError(
                f"Of the {self.rows} rows of the store {self.name!r} no {len(self.stands) - 1} can stand."
            )

    @property
    def share(self) -> float:
        """Of passes for which it has a guess."""
        return min(1.0, sum(self.stands))

    @property
    def tokens(self) -> float:
        """That stand on the average of passes, those without a guess included."""
        return sum(count * chance for count, chance in enumerate(self.stands))


Pair = tuple[str, str]  # the tier above, the tier whose tokens it verifies


@dataclass(frozen=True)
class Figures:
    """Tiers, the target first and a tier only above later ones; who may stand under whom, and which stores."""

    tiers: tuple[TierFigures, ...]
    survivals: Mapping[Pair, Survival]  # a pair that is missing cannot be stacked
    stores: Mapping[str, tuple[StoreFigures, ...]] = field(default_factory=dict)
    # Survival of a middle tier's tokens by who is below it, where that is known better than by the pair alone.
    through: Mapping[tuple[str, str, str], Survival] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = {tier.name: place for place, tier in enumerate(self.tiers)}
        if not places or len(places) < len(self.tiers):
            raise HierspecError("There must be a target, and no two tiers of one name.")
        for names in (*self.survivals, *self.through):
            for above, below in pairwise(names):
                if places.get(above, len(places)) >= places.get(below, -1):
                    raise HierspecError(f"{above!r} cannot verify {below!r}: list tiers from the target down.")
        for name in self.stores:
            if name not in places:
                raise HierspecError(f"There is no tier {name!r} for stores to guess to.")

    @property
    def target(self) -> TierFigures:
        return self.tiers[0]

    @cached_property
    def _named(self) -> dict[str, TierFigures]:
        return {tier.name: tier for tier in self.tiers}

    def tier(self, name: str) -> TierFigures:
        if name in self._named:
            return self._named[name]
        raise HierspecError(f"There is no tier {name!r}; tiers are {', '.join(tier.name for tier in self.tiers)}.")

    def store(self, tier: str, name: str) -> StoreFigures:
        for store in self.stores.get(tier, ()):
            if store.name == name:
                return store
        raise HierspecError(f"The tier {tier!r} has no store {name!r}.")

    def survival(self, above: str, tier: str, below: str | None = None) -> Survival:
        """Of this tier's tokens at the one above, with `below` under it."""
        if below is not None and (above, tier, below) in self.through:
            return self.through[above, tier, below]
        if (above, tier) not in self.survivals:
            raise HierspecError(f"It is not known how often tokens of {tier!r} stand at {above!r}.")
        return self.survivals[above, tier]

    def without(self, *tiers: str) -> Figures:
        """As if there were no such tiers below the target."""
        return replace(
            self,
            tiers=tuple(tier for tier in self.tiers if tier.name not in tiers),
            survivals={pair: one for pair, one in self.survivals.items() if not set(pair) & set(tiers)},
            through={triple: one for triple, one in self.through.items() if not set(triple) & set(tiers)},
            stores={tier: stores for tier, stores in self.stores.items() if tier not in tiers},
        )

    def without_store(self, name: str) -> Figures:
        """As if no tier had this store."""
        kept = {tier: tuple(one for one in stores if one.name != name) for tier, stores in self.stores.items()}
        return replace(self, stores=kept)


@dataclass(frozen=True)
class Rung:
    """A tier as it stands in a ladder. What it hands up: `gather` tokens or more; the target's own is 1."""

    tier: str
    gather: int = 1
    store: str | None = None  # asked first, before the tier below
    until: str = "count"  # or "correction": hand up at once what ends in a correction
    candidates: int = 1  # tokens handed up a position: the one written, then runners-up
    budget: int | None = None  # most positions handed *to* this tier that it verifies; None: all

    def __post_init__(self) -> None:
        if self.until not in HANDS_UP:
            raise HierspecError(f"until must be one of {', '.join(HANDS_UP)}, not {self.until!r}.")
        if self.gather < 1 or self.candidates < 1 or (self.budget is not None and self.budget < 1):
            raise HierspecError("gather, candidates and budget must be at least 1.")


Ladder = tuple[Rung, ...]  # the target first


def shape(ladder: Ladder) -> tuple[tuple[str, str | None], ...]:
    """Which tiers and stores, whatever they gather: ladders of one shape are the same hierarchy, tuned differently."""
    return tuple((rung.tier, rung.store) for rung in ladder)


def in_words(ladder: Sequence[Rung]) -> str:
    """One line, the target first: target + context <- 4 exit 8 <- 2 exit 4."""
    parts = []
    for place, rung in enumerate(ladder):
        said = f"{rung.gather} " if place else ""
        said += rung.tier + (f" + {rung.store}" if rung.store else "")
        said += " until a correction" if rung.until == "correction" else ""
        said += f" x {rung.candidates}" if rung.candidates > 1 else ""
        parts.append(said)
    return " <- ".join(parts)
