"""Tiers in the middle that are skipped while they are in the way: distributions and texts stay, and what is decided
pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from enumerate_distributions import Branches, TooManyBranches
from hypothesis import given, settings
from hypothesis import strategies as st
from paced_tiers import TEXT, TOKENS, Reciting, costs, ladder_costs, ladder_policies, paced, random_tiers
from random_hierarchies import EXACT, errors, random_hierarchy, random_sampling

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import UNDRAFTED, Written
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.verify import RULES
from hierspec.pacing.blocks import WhileWorthwhile
from hierspec.pacing.costs import Costs, Load
from hierspec.pacing.routing import Route, Router
from hierspec.scorers.synthetic import Rates, References, SyntheticScorer


def with_routes(tiers: tuple[Tier, ...], eager: bool = False) -> tuple[Tier, ...]:
    """The same tiers, each of which may ask any below it; eager ones decide from the first round on."""
    prices = ladder_costs(tiers)
    policies = ladder_policies(tiers, ["worth"] * (len(tiers) - 1), eager)
    routers = {}
    for level, price in enumerate(prices[:-2]):
        nearest = policies[level]
        assert isinstance(nearest, WhileWorthwhile)
        further = [WhileWorthwhile(price) for _ in policies[level + 1 :]]
        routers[level] = router = Router([Route(policy, price) for policy in (nearest, *further)])
        if eager:  # each has been tried; which is faster, and whether one is tried again, the text decides
            for index, route in enumerate(router.routes):
                route.policy._blocks, route.policy._gains[-1] = 100, [8.0, 6.0]
                router._rounds[index], router._brought[index] = 100, [1.5, 1.4]
    return paced(tiers, prices, policies, routers)


class Watched(Router):
    """Notes the routes that were taken."""

    taken: list[int | None]

    def choose(self, *given) -> int | None:
        self.taken.append(super().choose(*given))
        return self.taken[-1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [3, 4])
def test_the_distribution_is_plain_decodings(rule, depth, monkeypatch):
    """Every outcome of ladders that skip tiers by what was written before."""
    taken: list[int | None] = []
    honest = Router.choose

    def watched(self, *given):
        taken.append(honest(self, *given))
        return taken[-1]

    monkeypatch.setattr(Router, "choose", watched)
    cases, both = 0, 0
    for attempt in range(120):
        generator = np.random.default_rng([31, depth, attempt])
        sampling = random_sampling(generator, 2, depth + 1)
        plain = tuple(
            replace(tier, gather=min(tier.gather, 2), candidates=1)
            for tier in random_hierarchy(generator, depth, 2, attempt, with_stores=attempt % 3 == 0)
        )

        def tiers(branches: Branches, plain=plain) -> tuple[Tier, ...]:
            return with_routes(plain, eager=True)  # each run begins with nothing learnt

        taken.clear()
        try:
            error, leaves = errors(tiers, rule, sampling, attempt % 2 == 0, 400)
        except TooManyBranches:
            continue
        if leaves < 8:
            continue
        assert error < EXACT, (attempt, sampling)
        cases += 1
        both += {0, 1} <= set(taken)
        if cases == 6 and both >= 2:
            break
    assert cases >= 6
    assert both >= 2  # outcomes of one request really take several routes


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.0, 0.8]), depth=st.integers(3, 4))
def test_the_text_is_plain_decodings(seed, temperature, depth):
    rng = np.random.default_rng(seed)
    tiers = random_tiers(rng, depth, seed, 4)
    shared = Hierarchy(with_routes(tiers, eager=bool(rng.integers(2))))
    sampling = Sampling(max_tokens=60, temperature=temperature, seed=seed)
    plain = [Request([1, k], sampling, Hierarchy((Tier(tiers[0].scorer),))) for k in range(3)]
    fast = [Request([1, k], sampling, shared) for k in range(3)]
    for requests in (plain, fast):
        for _ in Engine().run(requests):
            pass
    assert [request.output for request in fast] == [request.output for request in plain]


# A simulation: tiers that agree at given rates, costs as a formula says, nothing timed.


class Phases(SyntheticScorer):
    """Agrees at the first rates up to a position of the text, and at the second ones from there on."""

    def __init__(self, inner, rates, later, at, level, references):
        super().__init__(inner, rates, level, references)
        self.later, self.at = SyntheticScorer(inner, later, level, references), at

    def score(self, asks):
        return [
            (self.later.score([ask]) if len(ask.context) >= self.at else super(Phases, self).score([ask]))[0]
            for ask in asks
        ]


def run(rates, prices, gathers, later=None, over=True) -> tuple[float, list[int | None], list[int]]:
    """Expected seconds a token of one long text; the routes that were taken, and how much was written after each."""
    references = References()
    tiers = [Tier(Reciting("target", TEXT), budget=40)]
    for level, gather in enumerate(gathers):
        inner = Reciting(f"exit {level}", TEXT)
        scorer = Phases(inner, rates, later or rates, TOKENS // 2, level, references)
        tiers.append(Tier(scorer, gather, (), 40))
    router = Watched([Route(WhileWorthwhile(prices[0]), prices[0]) for _ in gathers])
    router.taken = []
    policies = [WhileWorthwhile(price) for price in prices[: len(gathers)]]
    hierarchy = Hierarchy(paced(tiers, prices, policies, {0: router} if over else {}))
    request = Request(TEXT[:1], Sampling(max_tokens=TOKENS), hierarchy)
    references[request] = TEXT[1:]
    written = [len(request.output) for _ in Engine().run([request])]
    assert request.output == TEXT[1 : TOKENS + 1]
    return sum(tier.expected_seconds for tier in request.stats.tiers) / TOKENS, router.taken, written


PRICES = [costs(1.0, 0.05), costs(0.4, 0.02), costs(0.1)]


def test_a_worthless_tier_in_the_middle_is_skipped():
    """It accepts nearly all that the target will not: the plan without it is met but for what trials cost."""
    with_it = run((Rates(0.7, 0.7), Rates(0.98, 0.98)), PRICES, [12, 6], over=False)[0]
    without, _, _ = run((Rates(0.686, 0.686),), [PRICES[0], PRICES[2]], [6], over=False)
    routed, taken, _ = run((Rates(0.7, 0.7), Rates(0.98, 0.98)), PRICES, [12, 6])
    assert with_it > 1.25 * without
    assert routed < 1.05 * without, (routed, without)
    assert taken[len(taken) // 2 :].count(1) > 0.9 * len(taken[len(taken) // 2 :])


def test_a_tier_in_the_middle_that_pays_is_kept():
    rates, prices = (Rates(0.95, 0.6), Rates(0.8, 0.8)), [costs(1.0, 0.1), costs(0.1, 0.01), costs(0.03)]
    ladder = run(rates, prices, [12, 6], over=False)[0]
    without = run((Rates(0.76, 0.76),), [prices[0], prices[2]], [6], over=False)[0]
    routed, taken, _ = run(rates, prices, [12, 6])
    assert without > 1.08 * ladder
    assert routed < 1.05 * ladder, (routed, ladder)
    assert taken[len(taken) // 2 :].count(0) > 0.8 * len(taken[len(taken) // 2 :])


def test_where_nothing_pays_nothing_is_drafted():
    routed, taken, _ = run((Rates(0.03, 0.03), Rates(0.5, 0.5)), PRICES, [12, 6])
    assert routed < 1.07
    assert taken.count(None) > 0.8 * len(taken)


GOOD, IN_THE_WAY = (Rates(0.98, 0.98), Rates(0.3, 0.3)), (Rates(0.7, 0.7), Rates(0.98, 0.98))


@pytest.mark.parametrize(("first", "later", "better"), [(GOOD, IN_THE_WAY, 1), (IN_THE_WAY, GOOD, 0)])
def test_the_decision_follows_the_text(first, later, better):
    """From 300 tokens after the change on at least two rounds in three take the better route."""
    prices = [costs(1.0, 0.1), costs(0.2, 0.01), costs(0.05)]
    _, taken, written = run(first, prices, [12, 6], later)
    assert len(taken) == len(written) or len(taken) == len(written) - 1  # the last token may leave no room
    before = [route for route, at in zip(taken, written, strict=False) if TOKENS // 4 < at < TOKENS // 2]
    after = [route for route, at in zip(taken, written, strict=False) if at > TOKENS // 2 + 300]
    assert before.count(1 - better) > 2 / 3 * len(before), (before.count(0), before.count(1))
    assert after.count(better) > 2 / 3 * len(after), (after.count(0), after.count(1))


def test_rounds_without_drafts_count_for_the_next_trial():
    """Where nothing pays the plan takes breaks, and nobody asks in those."""
    dear = Costs((1, 8), (1.0, 1.0))
    router = Router([Route(policy := WhileWorthwhile(dear, own=Costs((1, 8), (0.6, 0.6))), dear)])
    for _ in range(100):
        policy.begin()
        policy.learn_round(1, 0.6)
        policy.learn_block([Written([(1, None)], "d", UNDRAFTED)], [9], 1.6)
    while router.choose() is not None:
        pass
    assert router.choose() is None
    router.idle(100)
    assert router.choose() is not None
    assert router.choose() is None


def test_a_hopeless_load_asks_nobody():
    full = Costs((1, 8, 9, 128), (1.0, 1.0, 1.1, 13.0))
    router = Router([Route(WhileWorthwhile(full), full), Route(WhileWorthwhile(full), full)])
    assert router.choose() is not None
    assert router.choose(load=Load(16)) is None
