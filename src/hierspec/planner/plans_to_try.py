"""From what the search found to plans: with fixed lengths, with lengths that adapt while drafting, and with stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hierspec.assembly.auto import beside_stores
from hierspec.core.plan import NAMED, Plan, TierPlan
from hierspec.core.verify import BY_DISTRIBUTION
from hierspec.planner.formula.figures import HierarchyConfig

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel

PLAIN = "plain"
LONGEST = 16  # tokens of a block: beyond that, even drafts that are nearly always accepted gain nothing measurable
_HIERARCHIES = 3  # of the search's results, besides the best of each depth, made into plans
_LONGEST_ADAPTIVE = 8  # tokens, where a policy ends a tier's blocks
_WIDEST = 48  # nodes that a pass of a fixed hierarchy may verify


def plans_to_try(
    model: LanguageModel,
    tiers: Sequence[TierPlan],
    hierarchies: Sequence[HierarchyConfig],
    by_key: Mapping[str, TierPlan],
    rule: str = "coupled",
) -> dict[str, Plan]:
    """Plans by name, each once: named plans that can run, and the search's hierarchies with fixed and adaptive lengths.

    All have this rule, except plain decoding.
    """
    plans: dict[str, Plan] = {PLAIN: Plan(), **_named(model, tiers, rule)}
    for hierarchy in _chosen(hierarchies):
        configs = hierarchy[1:]
        below = [by_key[config.tier] for config in configs]
        lengths = " < ".join(f"{tier_name(tier)} {config.gather}" for tier, config in zip(below, configs, strict=True))
        adaptive = tuple(replace(tier, gather=_LONGEST_ADAPTIVE, until="worth") for tier in below)
        names = " < ".join(map(tier_name, below))
        plans[f"ladder {lengths}"] = fixed_ladder(below, hierarchy)
        plans[f"ladder {names}, while it is worth it"] = Plan(budget=12, adapt=True, tiers=adaptive)
        plans[f"stores and {names}"] = beside_stores(adaptive, model.config.layers)
    for tier in tiers:
        # Under rules that sample, runners-up are drafts of their own, which no trace has.
        for candidates in (1,) if rule in BY_DISTRIBUTION else (1, 2):
            drafter = replace(tier, gather=_LONGEST_ADAPTIVE, until="worth", candidates=candidates)
            suffix = f", {candidates} candidates" if candidates > 1 else ""
            plans[f"stores and {tier_name(tier)}{suffix}"] = beside_stores((drafter,), model.config.layers)
    distinct: dict[str, Plan] = {}
    for name, plan in plans.items():
        plan = plan if plan == Plan() else replace(plan, rule=rule)
        if plan not in distinct.values():
            distinct[name] = plan
    return distinct


def fixed_ladder(below: Sequence[TierPlan], hierarchy: HierarchyConfig) -> Plan:
    """The search's hierarchy as a plan: every tier verifies all that the tier below it may hand up."""
    budgets, longest = list[int](), 0
    for config in reversed(hierarchy):
        budgets.insert(0, max(1, min(longest, _WIDEST)))
        longest = (config.gather + longest) * config.candidates  # a block's last round may add that many more
    tiers = tuple(
        replace(tier, gather=config.gather, until=config.until, candidates=config.candidates, budget=budget)
        for tier, config, budget in zip(below, hierarchy[1:], budgets[1:], strict=True)
    )
    return Plan(budget=budgets[0], tiers=tiers)


def tier_name(tier: TierPlan) -> str:
    return f"exit {tier.exit_layer}" if tier.exit_layer is not None else str(tier.draft)


def _named(model: LanguageModel, tiers: Sequence[TierPlan], rule: str) -> dict[str, Plan]:
    """Named plans whose tiers are all available."""
    sources = {(tier.exit_layer, tier.draft) for tier in tiers}
    plans = {}
    named = {name: model.plan(name) for name in NAMED}
    for name in sorted(NAMED, key=lambda name: named[name].rule != rule):  # plans that have the rule come first
        plan = named[name]
        if set(plan.stores) & {"lookahead", "corpus"}:
            continue  # lookahead learns from the target's picks after rejected tokens, which no trace has
        if rule in BY_DISTRIBUTION and any(tier.candidates > 1 for tier in plan.tiers):
            continue
        if all((tier.exit_layer, tier.draft) in sources for tier in plan.tiers):
            plans[name] = plan
    return plans


def _chosen(hierarchies: Sequence[HierarchyConfig]) -> Iterable[HierarchyConfig]:
    """The best few, and the best of every depth: the more tiers there are, the more optimistic the formula is."""
    below = [hierarchy for hierarchy in hierarchies if len(hierarchy) > 1]
    of_depth: dict[int, HierarchyConfig] = {}
    for hierarchy in below:
        of_depth.setdefault(len(hierarchy), hierarchy)
    return dict.fromkeys((*below[:_HIERARCHIES], *of_depth.values()))
