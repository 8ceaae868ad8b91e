"""Given several drafts with known rates and costs, the plan that is chosen is near the best of all ladders."""

from __future__ import annotations

import itertools

import pytest

from hierspec.core.plan import Plan, TierPlan
from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import AcceptanceRates, Figures, HierarchyConfig, TierConfig, TierFigures
from hierspec.planner.formula.monte_carlo import monte_carlo
from hierspec.planner.formula.search import Limits, search
from hierspec.planner.plans_to_try import LONGEST, fixed_ladder

# Milliseconds of a pass of one row, and of each row more: a target and six drafts, from the best to the cheapest.
TIERS = {
    "target": (20.0, 0.3),
    "8 layers": (4.0, 0.15),
    "feature": (1.2, 0.25),
    "4 layers": (1.5, 0.06),
    "exit": (2.4, 0.1),
    "2 layers": (0.5, 0.03),
    "bigrams": (0.05, 0.01),
}
# How good a draft is, from 0 to 1: two tiers agree the more often the nearer they are.
SKILL = {"8 layers": 0.86, "feature": 0.6, "4 layers": 0.7, "exit": 0.45, "2 layers": 0.5, "bigrams": 0.2}
GATHERS = (1, 2, 4, 8)


def scripted(cheapness: float, memory_bound: bool) -> Figures:
    """`cheapness` scales what drafts cost; where memory is the limit, width is nearly free for the target."""
    order = ["target", *sorted(SKILL, key=lambda name: -TIERS[name][0])]
    tiers = []
    for name in order:
        first, more = TIERS[name]
        scale = 1.0 if name == "target" else cheapness
        each = more if memory_bound or name != "target" else 4.0
        tiers.append(TierFigures(name, Costs((1, 64), (1e-3 * scale * first, 1e-3 * scale * (first + 63 * each)))))
    rates = {}
    for above, below in itertools.combinations(order, 2):
        top = SKILL.get(above, 1.0)
        rate = SKILL[below] if above == "target" else min(0.97, 1 - abs(top - SKILL[below]) * 0.9)
        rates[above, below] = AcceptanceRates((rate,))
    return Figures(tuple(tiers), rates)


def every_ladder(figures: Figures) -> list[HierarchyConfig]:
    """All of up to two tiers below the target, with these block lengths."""
    names = [tier.name for tier in figures.tiers[1:]]
    target = TierConfig("target")
    ladders: list[HierarchyConfig] = [(target,)]
    for count in (1, 2):
        for chain in itertools.combinations(names, count):
            for gathers in itertools.product(GATHERS, repeat=count):
                below = (TierConfig(name, gather) for name, gather in zip(chain, gathers, strict=True))
                ladders.append((target, *below))
    return ladders


@pytest.mark.parametrize("memory_bound", [True, False])
@pytest.mark.parametrize("cheapness", [0.25, 2.0])
def test_the_choice_is_within_five_percent_of_the_best_of_all_ladders(cheapness: float, memory_bound: bool) -> None:
    """The best of all by exhaustive simulation, which knows nothing of the formula."""
    figures = scripted(cheapness, memory_bound)
    ladders = every_ladder(figures)
    assert len(ladders) > 250
    rough = sorted(ladders, key=lambda ladder: monte_carlo(figures, ladder, passes=40, seed=1).seconds)
    best = min(monte_carlo(figures, ladder, passes=1000, seed=2).seconds for ladder in rough[:8])
    [chosen, *_] = search(figures, Limits(LONGEST, deepest=len(figures.tiers)))
    assert monte_carlo(figures, chosen.hierarchy, passes=2000, seed=3).seconds <= 1.05 * best


def test_a_ladder_of_the_search_verifies_all_that_is_handed_up() -> None:
    hierarchy = (TierConfig("target"), TierConfig("a", 6), TierConfig("b", 3))
    plan = fixed_ladder([TierPlan(draft="a"), TierPlan(draft="b")], hierarchy)
    assert plan == Plan(
        budget=9, tiers=(TierPlan(draft="a", gather=6, budget=3), TierPlan(draft="b", gather=3, budget=1))
    )
