"""What the tiers of a plan need to weigh time: costs of their passes, when each hands up, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from hierspec.assembly.measured_costs import CostBook
from hierspec.core.plan import Plan, TierPlan
from hierspec.pacing.appraisal import Costs
from hierspec.pacing.blocks import Policy, WhileWorthwhile, open_policy
from hierspec.pacing.routing import Route, Router
from hierspec.scorers.base import ModelScorer, StateScorer
from hierspec.scorers.drafters import AdapterScorer

_WIDE = 32  # rows of a pass from which on each costs what it costs among many


class PolicyBook:
    """The policies of a model's plans. What one has learnt serves all plans that have the same tier under the same."""

    def __init__(self, costs: CostBook) -> None:
        self._costs = costs
        self._known: dict[tuple[TierPlan, TierPlan | None], Policy | None] = {}
        self._ways: dict[tuple[TierPlan | None, tuple[TierPlan, ...]], Router] = {}

    def policy(self, plan: Plan, level: int, scorers: Sequence[StateScorer], above: int | None = None) -> Policy | None:
        """When the plan's tier at this level (1: the one below the target) hands up to the one above it, or to that at
        the level `above`; None: by count."""
        if level == 0:
            return None
        above = level - 1 if above is None else above
        tier, upper = plan.tiers[level - 1], _tier(plan, above)
        if (tier, upper) not in self._known:
            self._known[tier, upper] = open_policy(
                tier.until, self.costs(plan, above, scorers, level), self._reading(plan, level, scorers)
            )
        return self._known[tier, upper]

    def ways(self, plan: Plan, level: int, scorers: Sequence[StateScorer]) -> Router | None:
        """The tiers that the one at this level may have drafted by, where it adapts: all that decide whether they are
        worth it, down to the first that does not."""
        lower = tuple(takewhile(lambda tier: tier.until == "worth", plan.tiers[level:]))
        if len(lower) < 2 or not (plan.tiers[level - 1] if level else plan).adapt:
            return None
        key = _tier(plan, level), lower
        if key not in self._ways:
            ways = []
            for place in range(level + 1, level + 1 + len(lower)):
                policy, costs = self.policy(plan, place, scorers, level), self.costs(plan, level, scorers, place)
                assert isinstance(policy, WhileWorthwhile)
                assert costs is not None
                ways.append(Route(policy, costs))
            self._ways[key] = Router(ways)
        return self._ways[key]

    def costs(self, plan: Plan, level: int, scorers: Sequence[StateScorer], below: int | None = None) -> Costs | None:
        """Costs of a tier's passes where the plan weighs time, over guesses of the tier below it, or of that at the
        level `below`. An exit there has run the first layers already."""
        if not plan.weighs:
            return None
        below = level + 1 if below is None else below
        layer = plan.tiers[below - 1].exit_layer if below <= len(plan.tiers) else None
        shared = layer is not None and scorers[level].pool is scorers[below].pool and layer < scorers[level].layers
        return self._costs.costs(scorers[level], layer if layer is not None and shared else 0)

    def _reading(self, plan: Plan, level: int, scorers: Sequence[StateScorer]) -> float:
        """Seconds for each token of a text before a tier can draft. The target's own layers have read it anyway."""
        scorer = scorers[level]
        if plan.tiers[level - 1].until != "worth" or (type(scorer) is ModelScorer and scorer.pool is scorers[0].pool):
            return 0.0
        costs = self._costs.costs(scorer)
        each = (costs.seconds(_WIDE) - costs.seconds(_WIDE // 2)) / (_WIDE // 2)
        return each / (1 + scorer.layers) if isinstance(scorer, AdapterScorer) else each  # an adapter is one layer more


def _tier(plan: Plan, level: int) -> TierPlan | None:
    return plan.tiers[level - 1] if level else None
