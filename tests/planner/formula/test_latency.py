"""The latency formula: against Monte Carlo, against sums over all outcomes, and in cases worked out by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import ACCEPTED, CORRECTED, UNDRAFTED
from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import (
    AcceptanceRates,
    Figures,
    StoreFigures,
    TierConfig,
    TierFigures,
    in_words,
)
from hierspec.planner.formula.latency import score, verified_block
from hierspec.planner.formula.monte_carlo import monte_carlo

rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3).map(tuple)
acceptances = st.builds(AcceptanceRates, rates, rates, rates, st.just((0.3,)))


def tier(name, first, more=0.0, over=(), overhead=0.0):
    return TierFigures(name, Costs((1, 64), (first, first + 63 * more)), dict(over), overhead)


def three(top, low, skipping=None, **options):
    pairs = {("target", "middle"): top, ("middle", "draft"): low}
    if skipping is not None:
        pairs["target", "draft"] = skipping
    tiers = (tier("target", 1.0, 0.1), tier("middle", 0.3, 0.02), tier("draft", 0.05, 0.01))
    return Figures(tiers, pairs, **options)


def test_plain_decoding_costs_a_pass_a_token():
    figures = Figures((tier("target", 0.02, overhead=0.001),), {})
    plain = score(figures, (TierConfig("target"),))
    assert plain.seconds == pytest.approx(0.021)
    assert plain.tokens_per_pass == 1
    assert plain.tiers[0].share == 1


@given(st.floats(0.0, 0.99), st.integers(1, 12))
def test_a_single_draft_brings_the_known_sum(rate, gather):
    """(1 - a^(n+1)) / (1 - a) tokens for n drafted tokens and one pass: the textbook formula."""
    figures = Figures((tier("target", 1.0, 0.1), tier("draft", 0.1)), {("target", "draft"): AcceptanceRates((rate,))})
    result = score(figures, (TierConfig("target"), TierConfig("draft", gather)))
    tokens = (1 - rate ** (gather + 1)) / (1 - rate)
    assert result.tokens_per_pass == pytest.approx(tokens)
    assert result.seconds == pytest.approx((1.0 + 0.1 * gather + 0.1 * gather) / tokens)
    assert result.tiers[1].block_tokens == gather
    assert result.tiers[1].accepted == pytest.approx((tokens - 1) / gather)
    assert sum(tier.share for tier in result.tiers) == pytest.approx(1)


def enumerated(distribution, config, rates, budget):
    """Sizes and outcomes of a block by enumerating every sequence of rounds and every verdict."""
    sizes, above, rounds = {}, {}, 0.0
    waiting = [((), 1.0)]
    while waiting:
        block, probability = waiting.pop()
        rounds += probability
        for (accepted, how), p in distribution.items():
            longer = (*block, *[ACCEPTED] * accepted, how)
            if len(longer) < config.gather and not (config.until == "correction" and how == CORRECTED):
                waiting.append((longer, probability * p))
                continue
            cut = longer[:budget]
            sizes[len(cut)] = sizes.get(len(cut), 0.0) + probability * p
            alive = probability * p
            for position, token_how in enumerate(cut):
                rate = rates.rates(token_how, position + 1)[position]
                runner_up = rates.runner_up_rate(config.candidates)
                for key, share in (((position, CORRECTED), 1 - runner_up), ((position + 1, UNDRAFTED), runner_up)):
                    above[key] = above.get(key, 0.0) + alive * (1 - rate) * share
                alive *= rate
            above[len(cut), UNDRAFTED] = above.get((len(cut), UNDRAFTED), 0.0) + alive
    return rounds, sizes, above


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3),
    st.builds(
        TierConfig,
        st.just("middle"),
        st.integers(1, 4),
        until=st.sampled_from(("count", "correction")),
        candidates=st.integers(1, 2),
    ),
    acceptances,
    st.none() | st.integers(1, 4),
)
def test_blocks_are_what_all_sequences_of_rounds_add_up_to(undrafted, corrected, config, rates, budget):
    total = sum(undrafted) + sum(corrected)
    distribution = {(accepted, UNDRAFTED): weight / total for accepted, weight in enumerate(undrafted)}
    distribution |= {(accepted, CORRECTED): weight / total for accepted, weight in enumerate(corrected)}
    block = verified_block(distribution, config, rates, budget)
    rounds, sizes, above = enumerated(distribution, config, rates, budget)
    assert block.rounds == pytest.approx(rounds)
    for actual, expected in ((block.sizes, sizes), (block.distribution, above)):
        assert {key: p for key, p in actual.items() if p > 1e-12} == pytest.approx(
            {key: p for key, p in expected.items() if p > 1e-12}
        )
        assert sum(actual.values()) == pytest.approx(1)


TOP = AcceptanceRates((0.8, 0.75), (0.9, 0.85), (0.5, 0.4, 0.3), (0.25, 0.4))
LOW = AcceptanceRates((0.7, 0.6), runner_ups=(0.3,))
CONTEXT = StoreFigures("context", (0.1, 0.1, 0.05, 0.15), 3, 0.004)
HIERARCHIES = [
    (TierConfig("target"), TierConfig("middle", 4), TierConfig("draft", 2)),
    (TierConfig("target"), TierConfig("middle", 6, until="correction"), TierConfig("draft", 3)),
    (TierConfig("target", store="context"), TierConfig("draft", 5)),
    (
        TierConfig("target"),
        TierConfig("middle", 3, store="context", candidates=2),
        TierConfig("draft", 2, candidates=3),
    ),
    (TierConfig("target", budget=3), TierConfig("middle", 4), TierConfig("draft", 3)),
]


@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=in_words)
def test_monte_carlo_agrees_with_the_formula(hierarchy):
    over = {"draft": Costs((1, 8), (0.02, 0.1))}
    figures = three(
        TOP, LOW, skipping=AcceptanceRates((0.5, 0.45, 0.4)), stores={"target": (CONTEXT,), "middle": (CONTEXT,)}
    )
    figures = replace(figures, tiers=(figures.tiers[0], replace(figures.tiers[1], over=over), figures.tiers[2]))
    exact, random = score(figures, hierarchy), monte_carlo(figures, hierarchy, passes=6000, seed=1)
    assert random.error < 0.02 * random.seconds
    assert exact.seconds == pytest.approx(random.seconds, abs=4 * random.error)


def test_who_corrected_matters_and_is_not_averaged_away():
    """The same share of all tokens is accepted, but rejections come at other positions."""
    mixed, apart = AcceptanceRates((0.8,)), AcceptanceRates((0.8,), (0.95,), (0.35,))  # 0.75 x 0.95 + 0.25 x 0.35 = 0.8
    hierarchy = (TierConfig("target"), TierConfig("middle", 4), TierConfig("draft", 2))
    same, other = (score(three(top, AcceptanceRates((0.75,))), hierarchy) for top in (mixed, apart))
    assert abs(same.seconds / other.seconds - 1) > 0.02
    sooner = (TierConfig("target"), TierConfig("middle", 4, until="correction"), TierConfig("draft", 2))
    hopeless = three(AcceptanceRates((0.8,), (0.95,), (0.0,)), AcceptanceRates((0.75,)))
    assert score(hopeless, sooner).seconds < score(hopeless, hierarchy).seconds


def test_a_tier_is_cheaper_over_states_that_it_reuses():
    over = {"draft": Costs((1, 64), (0.2, 0.2 + 63 * 0.02))}
    figures = three(TOP, LOW)
    cheaper = replace(figures, tiers=(figures.tiers[0], replace(figures.tiers[1], over=over), figures.tiers[2]))
    hierarchy = (TierConfig("target"), TierConfig("middle", 3), TierConfig("draft", 2))
    before, after = score(figures, hierarchy), score(cheaper, hierarchy)
    assert after.tiers[1].seconds == pytest.approx(before.tiers[1].seconds - 0.1 * before.tiers[1].passes)
    alone = (TierConfig("target"), TierConfig("middle", 3))
    assert score(cheaper, alone).seconds == score(figures, alone).seconds


def test_acceptance_by_the_tier_below_goes_before_acceptance_by_the_pair():
    figures = three(TOP, LOW, acceptance_by_lower={("target", "middle", "draft"): AcceptanceRates((1.0,))})
    hierarchy = (TierConfig("target"), TierConfig("middle", 4), TierConfig("draft", 2))
    assert score(figures, hierarchy).tiers[1].accepted == pytest.approx(1)
    assert score(figures, hierarchy[:2]).tiers[1].accepted < 0.9


@given(acceptances, rates, st.integers(1, 6), st.integers(1, 4), st.floats(0.0, 0.3))
def test_more_accepted_at_the_target_is_never_slower(top, low, gather, lower, better):
    def raised(listed):
        return tuple(min(1.0, rate + better) for rate in listed)

    hierarchy = (TierConfig("target"), TierConfig("middle", gather), TierConfig("draft", lower))
    improved = AcceptanceRates(raised(top.undrafted), raised(top.accepted), raised(top.corrected), top.runner_ups)
    before, after = (score(three(rates, AcceptanceRates(low)), hierarchy).seconds for rates in (top, improved))
    assert after <= before * (1 + 1e-9)


@given(acceptances, rates, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2), st.floats(0.1, 1.0))
def test_a_cheaper_tier_is_never_slower(top, low, gather, lower, which, factor):
    figures = three(top, AcceptanceRates(low))
    costs = figures.tiers[which].costs
    cheaper = replace(figures.tiers[which], costs=Costs(costs.rows, [factor * seconds for seconds in costs.measured]))
    changed = replace(figures, tiers=(*figures.tiers[:which], cheaper, *figures.tiers[which + 1 :]))
    hierarchy = (TierConfig("target"), TierConfig("middle", gather), TierConfig("draft", lower))
    assert score(changed, hierarchy).seconds <= score(figures, hierarchy).seconds * (1 + 1e-9)


def test_a_store_that_is_always_right_leaves_the_tiers_below_idle():
    sure = StoreFigures("copy", (0.0, 0.0, 1.0), 2)
    figures = three(TOP, LOW, stores={"target": (sure,)})
    result = score(figures, (TierConfig("target", store="copy"), TierConfig("middle", 3), TierConfig("draft", 2)))
    assert result.seconds == pytest.approx(1.2 / 3)
    assert [tier.share for tier in result.tiers] == [1, 0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AcceptanceRates((1.2,)), "from 0 to 1"),
        (lambda: AcceptanceRates(()), "at least one"),
        (lambda: StoreFigures("copy", (0.6, 0.6), 4), "at most 1"),
        (lambda: StoreFigures("copy", (0.1, 0.1, 0.1), 1), "2 cannot be accepted"),
        (lambda: TierConfig("draft", 0), "at least 1"),
        (lambda: TierConfig("draft", until="worth"), "until"),
        (lambda: Figures((tier("a", 1), tier("a", 2)), {}), "no two tiers"),
        (lambda: Figures((tier("a", 1), tier("b", 2)), {("b", "a"): LOW}), "from the target down"),
        (lambda: Figures((tier("a", 1),), {}, {"b": (CONTEXT,)}), "no tier 'b'"),
        (lambda: score(three(TOP, LOW), (TierConfig("target"), TierConfig("draft", 2))), "not known"),
        (lambda: score(three(TOP, LOW), (TierConfig("target", store="copy"),)), "no store 'copy'"),
    ],
)
def test_impossible_figures_are_refused(make, message):
    with pytest.raises(HierspecError, match=message):
        make()


def test_hierarchies_in_words():
    hierarchy = (
        TierConfig("target", store="context"),
        TierConfig("exit 8", 4, until="correction"),
        TierConfig("exit 4", 2, candidates=2),
    )
    assert in_words(hierarchy) == "target + context <- 4 exit 8 until a correction <- 2 exit 4 x 2"
    assert len({in_words(order) for order in itertools.permutations(hierarchy)}) == 6
