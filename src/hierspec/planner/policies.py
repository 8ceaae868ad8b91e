"""What the tiers of a plan need to weigh time: costs of their passes, and when each hands up."""

from __future__ import annotations

from collections.abc import Sequence

from hierspec.core.appraisal import Costs
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.policy import Policy, open_policy
from hierspec.models.scorer import StateScorer
from hierspec.planner.costs import CostBook


class PolicyBook:
    """The policies of a model's plans. What one has learnt serves all plans that have the same tier under the same."""

    def __init__(self, costs: CostBook) -> None:
        self._costs = costs
        self._known: dict[tuple[TierPlan, TierPlan | None], Policy | None] = {}

    def policy(self, plan: Plan, level: int, scorers: Sequence[StateScorer]) -> Policy | None:
        """When the plan's tier at this level (1: the one below the target) hands up; None: by count."""
        if level == 0:
            return None
        tier, above = plan.tiers[level - 1], plan.tiers[level - 2] if level > 1 else None
        if (tier, above) not in self._known:
            self._known[tier, above] = open_policy(tier.until, self.costs(plan, level - 1, scorers))
        return self._known[tier, above]

    def costs(self, plan: Plan, level: int, scorers: Sequence[StateScorer]) -> Costs | None:
        """Costs of a tier's passes where the plan weighs time. An exit below it has run the first layers already."""
        if not plan.weighs:
            return None
        below = plan.tiers[level].exit_layer if level < len(plan.tiers) else None
        shared = below is not None and scorers[level].pool is scorers[level + 1].pool and below < scorers[level].layers
        return self._costs.costs(scorers[level], below if below is not None and shared else 0)
