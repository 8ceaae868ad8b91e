"""What the planner knows about the tiers it may stack: what their passes cost, and how often tokens are accepted.

A `HierarchyConfig` is one way to stack them, the target first. Nothing here measures anything or runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import ACCEPTED, CORRECTED, UNDRAFTED
from hierspec.pacing.costs import Costs

BLOCK_ENDS = ("count", "correction")  # what `until` may be here; "worth" is decided while drafting: no closed form


@dataclass(frozen=True)
class TierFigures:
    """A tier and the seconds of its passes by rows (the last token before the draft is a row too)."""

    name: str
    costs: Costs
    # By the name of a tier below: costs of verifying its tokens, if this tier reuses that tier's hidden states.
    over: Mapping[str, Costs] = field(default_factory=dict)
    overhead: float = 0.0  # seconds that every pass takes on top

    def seconds(self, rows: int, below: str | None = None) -> float:
        """Seconds of a pass over `rows` rows, drafted by `below` (None: by a store, or nothing was drafted)."""
        costs = self.costs if below is None else self.over.get(below, self.costs)
        return costs.seconds(rows) + self.overhead


@dataclass(frozen=True)
class AcceptanceRates:
    """How often the tier above accepts a token if it accepted all before it, by the token's position in the block.

    The last value holds for all later positions. A token that a tier accepted from below (`accepted`) is accepted
    above more often than one it wrote in place of a rejected draft (`corrected`); one it wrote without a draft
    (`undrafted`) lies in between. `runner_ups[n]` is the probability that one of the first n + 1 runners-up is accepted
    if the token itself is rejected.
    """

    undrafted: tuple[float, ...]
    accepted: tuple[float, ...] = ()  # empty: as undrafted
    corrected: tuple[float, ...] = ()  # empty: as undrafted
    runner_ups: tuple[float, ...] = ()  # empty: never

    def __post_init__(self) -> None:
        if not self.undrafted:
            raise HierspecError("An acceptance needs at least one number.")
        for rate in (*self.undrafted, *self.accepted, *self.corrected, *self.runner_ups):
            if not 0 <= rate <= 1:
                raise HierspecError(f"An acceptance must be from 0 to 1, not {rate}.")

    def rates(self, how: int, positions: int) -> list[float]:
        """The rates of tokens written in this way (`core.interfaces`), at the first `positions` positions."""
        by_kind = {
            UNDRAFTED: self.undrafted,
            ACCEPTED: self.accepted or self.undrafted,
            CORRECTED: self.corrected or self.undrafted,
        }
        listed = by_kind[how]
        return [listed[min(position, len(listed) - 1)] for position in range(positions)]

    def runner_up_rate(self, candidates: int) -> float:
        """The probability that another of this many candidates is accepted if the first is rejected."""
        if candidates < 2 or not self.runner_ups:
            return 0.0
        return self.runner_ups[min(candidates - 2, len(self.runner_ups) - 1)]


@dataclass(frozen=True)
class StoreFigures:
    """A store's proposals to one tier.

    `accepted[n]` is the share of the tier's passes with a proposal of which n tokens are accepted. The shares may add
    up to less than 1: in the other passes the store proposes nothing, and the tier below drafts instead.
    """

    name: str
    accepted: tuple[float, ...]
    rows: int  # nodes of a proposal
    seconds: float = 0.0  # of a lookup, with or without a result

    def __post_init__(self) -> None:
        if any(share < 0 for share in self.accepted) or sum(self.accepted) > 1 + 1e-9:
            raise HierspecError(f"The shares of the store {self.name!r} must be at least 0 and together at most 1.")
        if self.rows < 1 or len(self.accepted) > self.rows + 1:
            raise HierspecError(
                f"The store {self.name!r} proposes {self.rows} rows, so {len(self.accepted) - 1} cannot be accepted."
            )

    @property
    def hit_rate(self) -> float:
        """The share of passes for which it has a proposal."""
        return min(1.0, sum(self.accepted))

    @property
    def accepted_tokens(self) -> float:
        """The mean over all passes, those without a proposal included."""
        return sum(count * share for count, share in enumerate(self.accepted))


Pair = tuple[str, str]  # the tier above, the tier whose tokens it verifies


@dataclass(frozen=True)
class Figures:
    """Tiers from the target down (a tier may only verify later ones), which may verify which, and their stores."""

    tiers: tuple[TierFigures, ...]
    acceptance: Mapping[Pair, AcceptanceRates]  # a pair that is missing cannot be stacked
    stores: Mapping[str, tuple[StoreFigures, ...]] = field(default_factory=dict)
    # (above, tier, below): rates of a middle tier's tokens by the tier below it, if that was measured.
    acceptance_by_lower: Mapping[tuple[str, str, str], AcceptanceRates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        levels = {tier.name: level for level, tier in enumerate(self.tiers)}
        if not levels or len(levels) < len(self.tiers):
            raise HierspecError("There must be a target, and no two tiers of one name.")
        for names in (*self.acceptance, *self.acceptance_by_lower):
            for above, below in pairwise(names):
                if levels.get(above, len(levels)) >= levels.get(below, -1):
                    raise HierspecError(f"{above!r} cannot verify {below!r}: list tiers from the target down.")
        for name in self.stores:
            if name not in levels:
                raise HierspecError(f"There is no tier {name!r} for stores to propose to.")

    @property
    def target(self) -> TierFigures:
        return self.tiers[0]

    @cached_property
    def _by_name(self) -> dict[str, TierFigures]:
        return {tier.name: tier for tier in self.tiers}

    def tier(self, name: str) -> TierFigures:
        if name in self._by_name:
            return self._by_name[name]
        raise HierspecError(f"There is no tier {name!r}; tiers are {', '.join(tier.name for tier in self.tiers)}.")

    def store(self, tier: str, name: str) -> StoreFigures:
        for store in self.stores.get(tier, ()):
            if store.name == name:
                return store
        raise HierspecError(f"The tier {tier!r} has no store {name!r}.")

    def acceptance_rates(self, above: str, tier: str, below: str | None = None) -> AcceptanceRates:
        """How often `above` accepts this tier's tokens, with `below` drafting for it."""
        if below is not None and (above, tier, below) in self.acceptance_by_lower:
            return self.acceptance_by_lower[above, tier, below]
        if (above, tier) not in self.acceptance:
            raise HierspecError(f"It is not known how often {above!r} accepts tokens of {tier!r}.")
        return self.acceptance[above, tier]

    def without(self, *tiers: str) -> Figures:
        """As if there were no such tiers below the target."""
        removed = set(tiers)
        return replace(
            self,
            tiers=tuple(tier for tier in self.tiers if tier.name not in removed),
            acceptance={names: rates for names, rates in self.acceptance.items() if not removed & set(names)},
            acceptance_by_lower={
                names: rates for names, rates in self.acceptance_by_lower.items() if not removed & set(names)
            },
            stores={tier: stores for tier, stores in self.stores.items() if tier not in removed},
        )

    def without_store(self, name: str) -> Figures:
        """As if no tier had this store."""
        remaining = {
            tier: tuple(store for store in stores if store.name != name) for tier, stores in self.stores.items()
        }
        return replace(self, stores=remaining)


@dataclass(frozen=True)
class TierConfig:
    """A tier in a hierarchy. It hands up blocks of `gather` tokens or more; the target's own is 1."""

    tier: str
    gather: int = 1
    store: str | None = None  # asked first, before the tier below
    until: str = "count"  # or "correction": a block also ends with a correction
    candidates: int = 1  # tokens handed up per position: the one written, then runners-up
    budget: int | None = None  # most positions of the block below that this tier verifies; None: all

    def __post_init__(self) -> None:
        if self.until not in BLOCK_ENDS:
            raise HierspecError(f"until must be one of {', '.join(BLOCK_ENDS)}, not {self.until!r}.")
        if self.gather < 1 or self.candidates < 1 or (self.budget is not None and self.budget < 1):
            raise HierspecError("gather, candidates and budget must be at least 1.")


HierarchyConfig = tuple[TierConfig, ...]  # the target first


def shape(hierarchy: HierarchyConfig) -> tuple[tuple[str, str | None], ...]:
    """Which tiers and stores, without block sizes: configurations of one shape are one hierarchy, tuned differently."""
    return tuple((config.tier, config.store) for config in hierarchy)


def in_words(hierarchy: Sequence[TierConfig]) -> str:
    """One line, the target first: target + context <- 4 exit 8 <- 2 exit 4."""
    parts = []
    for level, config in enumerate(hierarchy):
        part = f"{config.gather} " if level else ""
        part += config.tier + (f" + {config.store}" if config.store else "")
        part += " until a correction" if config.until == "correction" else ""
        part += f" x {config.candidates}" if config.candidates > 1 else ""
        parts.append(part)
    return " <- ".join(parts)
