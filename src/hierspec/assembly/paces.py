"""The paces of a plan's tiers: made from measured costs, and from what was learnt under earlier plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import numpy as np

from hierspec.assembly.measured_costs import CostBook
from hierspec.core.hierarchy import FIXED
from hierspec.core.interfaces import Pace
from hierspec.core.plan import Plan, TierPlan
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.asking import StoreChoice
from hierspec.pacing.blocks import BlockPolicy, WhileWorthwhile, open_policy
from hierspec.pacing.costs import FREE, NO_PREFILL, Costs, Prefill
from hierspec.pacing.fused_rounds import FusedRounds
from hierspec.pacing.lengths import Lengths
from hierspec.pacing.pace import AdaptivePace
from hierspec.pacing.routing import Route, Router
from hierspec.pacing.stages import Switches
from hierspec.scorers.base import ModelScorer, StateScorer

ROUTES = "routes"  # prefix of the names of what routers learn
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError)  # kept counts that are not as this version writes them
SYNTHETIC = ", synthetic"  # suffix of the names of what is learnt from simulated agreement, which is not kept


class Learning(Protocol):
    """A part of a pace whose counts serve the next run."""

    def learnt(self) -> dict[str, Any]: ...

    def begin_with(self, learnt: Mapping[str, Any]) -> None: ...


_Part = TypeVar("_Part", bound=Learning)


class PaceBook:
    """Makes the paces of a model's plans. Plans that have the same tier below the same one share what it learns.

    Level 0 is the target. `scorers` are those of the plan's tiers, the target's first.
    """

    def __init__(self, costs: CostBook, learnt: Mapping[str, Any] | None = None) -> None:
        self._costs, self._learnt = costs, learnt or {}  # by earlier runs
        self._learning: dict[str, Learning] = {}  # all that learns here, by name
        self._lengths = self._learning_part("lengths", Lengths)
        self._after_drafting: dict[int, Costs] = {}  # by the identity of the costs without drafting
        self._appraisers: dict[tuple[str, str, bool], Appraiser] = {}  # by the scorer's name and kind; synthetic or not
        self._policies: dict[tuple[TierPlan, TierPlan | None], BlockPolicy] = {}  # by the tier and the one above it
        self._switches: dict[Plan, Switches] = {}
        self._fused_rounds: dict[Plan, FusedRounds] = {}
        self._store_choices: dict[tuple[Plan, int], StoreChoice] = {}  # by the plan and the level in it
        self._routers: dict[tuple[TierPlan | None, tuple[TierPlan, ...]], Router] = {}  # by the tier and those below

    def pace(self, plan: Plan, level: int, scorers: Sequence[StateScorer], fused_rounds: bool = False) -> Pace:
        """The pace of the plan's tier at this level. `fused_rounds`: it can be drafted for and verify in one call."""
        adapt, until = (plan.tiers[level - 1].adapt, plan.tiers[level - 1].until) if level else (plan.adapt, "count")
        if not (adapt or plan.weighs or until != "count"):
            return FIXED
        appraiser = self._appraiser(plan, level, scorers) if adapt else None
        costs = FREE if appraiser is None else appraiser.costs
        if plan.weighs:
            costs = self.costs(plan, level, scorers)
        return AdaptivePace(
            costs,
            appraiser,
            self._router(plan, level, scorers),
            {level - 1 - above: self._policy(plan, level, above, scorers) for above in _drafts_for(plan, level)},
            self._lengths,
            self._switch(plan, fused_rounds) if adapt and costs.heals and not level else None,
            self._store_choices.setdefault((plan, level), StoreChoice()),
            self._fused_rounds.setdefault(plan, FusedRounds()) if fused_rounds else None,
        )

    def _switch(self, plan: Plan, fused_rounds: bool) -> Switches:
        # Fused rounds are compared with the drafts of stores in every single round.
        return self._switches.setdefault(plan, Switches(bool(plan.stores and plan.tiers) and not fused_rounds))

    def learnt(self) -> dict[str, Any]:
        """What was learnt so far, for the next run: counts by the names of scorers and stores, never text."""
        return {name: part.learnt() for name, part in self._learning.items() if not name.endswith(SYNTHETIC)}

    def adopt(self, name: str, part: Learning) -> None:
        """Keep what a part learns that was made elsewhere; it begins with what earlier runs have learnt."""
        if name in self._learnt:
            with suppress(*_UNREADABLE):
                part.begin_with(self._learnt[name])
        self._learning.setdefault(name, part)

    def _learning_part(self, name: str, make: Callable[[], _Part]) -> _Part:
        """A part that begins with what earlier runs have learnt. Of two with one name, the first is kept for later."""
        part = make()
        if name in self._learnt:
            try:
                part.begin_with(self._learnt[name])
            except _UNREADABLE:
                part = make()
        self._learning.setdefault(name, part)
        return part

    def costs(self, plan: Plan, level: int, scorers: Sequence[StateScorer], below: int | None = None) -> Costs:
        """Costs of a tier's passes over drafts of the tier at the level `below`, by default the next one down.

        If that is an exit of the same model, it has already run the first layers.
        """
        below = level + 1 if below is None else below
        layer = plan.tiers[below - 1].exit_layer if below <= len(plan.tiers) else None
        shared = layer is not None and scorers[level].pool is scorers[below].pool and layer < scorers[level].layers
        return self._costs.costs(scorers[level], layer if layer is not None and shared else 0)

    def _appraiser(self, plan: Plan, level: int, scorers: Sequence[StateScorer]) -> Appraiser:
        """The appraiser of drafts for this scorer."""
        synthetic = level > 0 and plan.tiers[level - 1].agrees is not None
        key = scorers[level].name, scorers[level].kind, synthetic
        if key not in self._appraisers:
            name = f"drafts for {scorers[level].name}{SYNTHETIC if synthetic else ''}"
            costs = self._costs.costs(scorers[level])
            self._appraisers[key] = self._learning_part(name, lambda: Appraiser(costs))
        return self._appraisers[key]

    def _policy(self, plan: Plan, level: int, above: int, scorers: Sequence[StateScorer]) -> BlockPolicy:
        """When the tier at this level hands up to the tier at the level `above`."""
        tier = plan.tiers[level - 1]
        key = tier, _tier(plan, above)
        if key not in self._policies:
            self._policies[key] = self._new_policy(plan, level, above, scorers)
        return self._policies[key]

    def _new_policy(self, plan: Plan, level: int, above: int, scorers: Sequence[StateScorer]) -> BlockPolicy:
        tier = plan.tiers[level - 1]
        if tier.until != "worth":
            return open_policy(tier.until)
        name = f"{scorers[level].name} for {scorers[above].name}{'' if tier.agrees is None else SYNTHETIC}"
        costs, own = self.costs(plan, above, scorers, level), self._costs.costs(scorers[level])
        after, prefill = self._after(costs), self._prefill(level, scorers)
        return self._learning_part(name, lambda: WhileWorthwhile(after, prefill, own, costs, scorers[level].at_once))

    def _after(self, costs: Costs) -> Costs:
        """Costs of passes right after drafting, which may be slower: they are learnt separately."""
        if id(costs) not in self._after_drafting:
            self._after_drafting[id(costs)] = costs.again()
        return self._after_drafting[id(costs)]

    def _router(self, plan: Plan, level: int, scorers: Sequence[StateScorer]) -> Router | None:
        """The tiers that may draft for the one at this level; None: the next one always does, or there is none."""
        lower = _drafters(plan, level)
        if not lower:
            return None
        key = _tier(plan, level), lower
        if key in self._routers:
            return self._routers[key]
        routes = []
        for below in range(level + 1, level + 1 + len(lower)):
            policy = self._policy(plan, below, level, scorers)
            assert isinstance(policy, WhileWorthwhile)
            costs = self._after(self.costs(plan, level, scorers, below))
            routes.append(Route(policy, costs, partial(_known, scorers[below])))
        if len(routes) == 1:  # there is nothing to choose, so nothing to learn
            return Router(routes)
        names = [scorer.name for scorer in scorers[level : level + 1 + len(lower)]]
        name = (
            f"{ROUTES} {' < '.join(reversed(names))}{'' if all(tier.agrees is None for tier in lower) else SYNTHETIC}"
        )
        self._routers[key] = self._learning_part(name, lambda: Router(routes))
        return self._routers[key]

    def _prefill(self, level: int, scorers: Sequence[StateScorer]) -> Prefill:
        """The prefill that a tier needs before it can draft; none for exits, since the target's layers run anyway."""
        scorer = scorers[level]
        if type(scorer) is ModelScorer and scorer.pool is scorers[0].pool:
            return NO_PREFILL
        return self._costs.prefill(scorer)


def _known(scorer: StateScorer, context: np.ndarray) -> int:
    return scorer.known(context)


def _drafters(plan: Plan, level: int) -> tuple[TierPlan, ...]:
    """The tiers among which a router at this level chooses: the next one and, if this tier adapts, those below it.

    The first tier that does not end its blocks by worth, and all below it, are left out.
    """
    lower = tuple(takewhile(lambda tier: tier.until == "worth", plan.tiers[level:]))
    return lower if (plan.tiers[level - 1] if level else plan).adapt else lower[:1]


def _drafts_for(plan: Plan, level: int) -> list[int]:
    """Levels of the tiers that the one at this level may draft for, the nearest first."""
    if not level:
        return []
    return [level - 1, *(above for above in reversed(range(level - 1)) if len(_drafters(plan, above)) >= level - above)]


def _tier(plan: Plan, level: int) -> TierPlan | None:
    return plan.tiers[level - 1] if level else None
