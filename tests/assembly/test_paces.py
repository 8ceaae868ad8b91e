"""Paces of plans: who shares what was learnt, and that both ends of a route have the same policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest

from hierspec.assembly.paces import PaceBook
from hierspec.core.hierarchy import FIXED
from hierspec.core.plan import Plan, TierPlan
from hierspec.pacing.blocks import UntilCorrection, WhileWorthwhile
from hierspec.pacing.costs import FREE, Costs, Prefill
from hierspec.pacing.pace import AdaptivePace


@dataclass(frozen=True)
class Named:
    """All that a book of paces asks of a scorer."""

    name: str
    layers: int
    pool: str = "pool"
    kind: str = ""
    at_once: int = 1


class MadeUpCosts:
    def __init__(self):
        self.asked = {}

    def costs(self, scorer, computed_layers=0):
        key = scorer.name, computed_layers
        return self.asked.setdefault(key, Costs((1, 32), (float(scorer.layers), scorer.layers + 32.0)))

    def prefill(self, scorer):
        return Prefill(1.0)


LAYERS = (30, 12, 8, 4)
SCORERS = [Named(f"exit {layers}", layers) for layers in LAYERS]


def ladder(adapts=(True,) * 4, untils=("worth",) * 3) -> Plan:
    tiers = tuple(
        TierPlan(exit_layer=layers, until=until, adapt=adapt)
        for layers, until, adapt in zip(LAYERS[1:], untils, adapts[1:], strict=False)
    )
    return Plan(adapt=adapts[0], tiers=tiers)


def paces(book: PaceBook, plan: Plan) -> list[AdaptivePace]:
    return [book.pace(plan, level, SCORERS) for level in range(1 + len(plan.tiers))]


@pytest.mark.parametrize("adapts", list(product([False, True], repeat=3)))
@pytest.mark.parametrize("untils", [("worth",) * 3, ("worth", "worth", "count"), ("worth", "correction", "worth")])
def test_both_ends_of_a_route_have_one_policy(adapts, untils):
    book = MadeUpCosts()
    built = paces(PaceBook(book), ladder((*adapts, False), untils))
    for level, pace in enumerate(built):
        lower = untils[level:]
        reached = next((k for k, until in enumerate(lower) if until != "worth"), len(lower))
        routes = () if pace.router is None else pace.router.routes
        assert len(routes) == (reached if level < 3 and adapts[level] else min(reached, 1))
        for skipped, route in enumerate(routes):
            below = level + 1 + skipped
            assert built[below].ends[skipped] is route.policy
            assert isinstance(route.policy, WhileWorthwhile)
            # Passes of this tier over drafts of an exit below, which has run the first layers.
            assert route.costs is book.asked[SCORERS[level].name, LAYERS[below]]
            assert route.policy.above is route.costs
        assert pace.costs is book.asked[SCORERS[level].name, LAYERS[level + 1] if level < 3 else 0]
        assert (pace.appraiser is not None) == (level < 3 and adapts[level])


def test_a_fixed_plan_weighs_nothing_and_measures_nothing():
    book = MadeUpCosts()
    plan = ladder((False,) * 4, ("count", "correction", "count"))
    built = paces(PaceBook(book), plan)
    assert [pace is FIXED for pace in built] == [True, True, False, True]
    assert isinstance(built[2].ends[0], UntilCorrection)
    assert built[2].costs is FREE
    assert built[2].router is None
    assert not book.asked


def test_what_was_learnt_serves_all_plans_with_the_same_tier_under_the_same():
    book, plan = PaceBook(MadeUpCosts()), ladder()
    first, again = paces(book, plan), paces(book, replace(plan, budget=30, stores=("context",)))
    shorter = paces(book, replace(plan, tiers=plan.tiers[:1]))
    changed = paces(book, replace(plan, tiers=(replace(plan.tiers[0], gather=9), *plan.tiers[1:])))
    apart = paces(PaceBook(MadeUpCosts()), plan)
    for level in range(4):
        assert first[level].appraiser is again[level].appraiser is changed[level].appraiser
        assert first[level].appraiser is not apart[level].appraiser
    for level in range(2):  # those that have several routes
        assert first[level].router is again[level].router
    assert first[1].ends[0] is shorter[1].ends[0]
    assert first[1].ends[0] is not changed[1].ends[0]
    assert first[1].ends[0] is not apart[1].ends[0]
    assert first[3].ends[0] is changed[3].ends[0]  # the tier above it is the same
    assert first[0].router is not changed[0].router


def test_synthetic_tiers_are_learnt_apart():
    book, plan = PaceBook(MadeUpCosts()), ladder()
    synthetic = replace(plan, tiers=tuple(replace(tier, agrees=0.5) for tier in plan.tiers))
    real, played = paces(book, plan), paces(book, synthetic)
    assert real[0].appraiser is played[0].appraiser
    assert real[1].appraiser is not played[1].appraiser
