"""The latency formula: against coins, against sums over all outcomes, and in cases that can be told by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import ACCEPTED as STOOD
from hierspec.core.interfaces import CORRECTED
from hierspec.core.interfaces import UNDRAFTED as OWN
from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import Figures, Rung, StoreFigures, Survival, TierFigures, in_words
from hierspec.planner.formula.latency import gathered, score
from hierspec.planner.formula.simulate import play

rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3).map(tuple)
survivals = st.builds(Survival, rates, rates, rates, st.just((0.3,)))


def tier(name, first, more=0.0, over=(), overhead=0.0):
    return TierFigures(name, Costs((1, 64), (first, first + 63 * more)), dict(over), overhead)


def three(top, low, skip=None, **options):
    pairs = {("target", "middle"): top, ("middle", "draft"): low}
    if skip is not None:
        pairs["target", "draft"] = skip
    tiers = (tier("target", 1.0, 0.1), tier("middle", 0.3, 0.02), tier("draft", 0.05, 0.01))
    return Figures(tiers, pairs, **options)


def test_plain_decoding_costs_a_pass_a_token():
    figures = Figures((tier("target", 0.02, overhead=0.001),), {})
    found = score(figures, (Rung("target"),))
    assert found.seconds == pytest.approx(0.021)
    assert found.tokens_per_pass == 1
    assert found.rungs[0].share == 1


@given(st.floats(0.0, 0.99), st.integers(1, 12))
def test_a_single_draft_brings_the_known_sum(chance, gather):
    """(1 - a^(n+1)) / (1 - a) tokens for n drafts and one pass: the formula that everybody knows."""
    figures = Figures((tier("target", 1.0, 0.1), tier("draft", 0.1)), {("target", "draft"): Survival((chance,))})
    found = score(figures, (Rung("target"), Rung("draft", gather)))
    tokens = (1 - chance ** (gather + 1)) / (1 - chance)
    assert found.tokens_per_pass == pytest.approx(tokens)
    assert found.seconds == pytest.approx((1.0 + 0.1 * gather + 0.1 * gather) / tokens)
    assert found.rungs[1].gathered == gather
    assert found.rungs[1].stands == pytest.approx((tokens - 1) / gather)
    assert sum(rung.share for rung in found.rungs) == pytest.approx(1)


def enumerated(distribution, rung, survival, budget):
    """Sizes and outcomes of a block by walking through every sequence of rounds and every verdict."""
    sizes, above, rounds = {}, {}, 0.0
    waiting = [((), 1.0)]
    while waiting:
        block, chance = waiting.pop()
        rounds += chance
        for (stood, how), p in distribution.items():
            longer = (*block, *[STOOD] * stood, how)
            if len(longer) < rung.gather and not (rung.until == "correction" and how == CORRECTED):
                waiting.append((longer, chance * p))
                continue
            cut = longer[:budget]
            sizes[len(cut)] = sizes.get(len(cut), 0.0) + chance * p
            standing = chance * p
            for place, one in enumerate(cut):
                stands = survival.chances(one, place + 1)[place]
                beside = survival.runner_up(rung.candidates)
                for key, share in (((place, CORRECTED), 1 - beside), ((place + 1, OWN), beside)):
                    above[key] = above.get(key, 0.0) + standing * (1 - stands) * share
                standing *= stands
            above[len(cut), OWN] = above.get((len(cut), OWN), 0.0) + standing
    return rounds, sizes, above


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3),
    st.integers(1, 4), st.sampled_from(("count", "correction")), st.integers(1, 2), survivals,
    st.none() | st.integers(1, 4),
)  # fmt: skip
def test_blocks_are_what_all_sequences_of_rounds_add_up_to(own, corrected, gather, until, candidates, survival, budget):
    total = sum(own) + sum(corrected)
    distribution = {(stood, OWN): chance / total for stood, chance in enumerate(own)}
    distribution |= {(stood, CORRECTED): chance / total for stood, chance in enumerate(corrected)}
    rung = Rung("middle", gather, until=until, candidates=candidates)
    found = gathered(distribution, rung, survival, budget)
    rounds, sizes, above = enumerated(distribution, rung, survival, budget)
    assert found.rounds == pytest.approx(rounds)
    for got, wanted in ((found.sizes, sizes), (found.distribution, above)):
        assert {key: p for key, p in got.items() if p > 1e-12} == pytest.approx(
            {key: p for key, p in wanted.items() if p > 1e-12}
        )
        assert sum(got.values()) == pytest.approx(1)


TOP = Survival((0.8, 0.75), (0.9, 0.85), (0.5, 0.4, 0.3), (0.25, 0.4))
LOW = Survival((0.7, 0.6), beside=(0.3,))
CONTEXT = StoreFigures("context", (0.1, 0.1, 0.05, 0.15), 3, 0.004)
LADDERS = [
    (Rung("target"), Rung("middle", 4), Rung("draft", 2)),
    (Rung("target"), Rung("middle", 6, until="correction"), Rung("draft", 3)),
    (Rung("target", store="context"), Rung("draft", 5)),
    (Rung("target"), Rung("middle", 3, store="context", candidates=2), Rung("draft", 2, candidates=3)),
    (Rung("target", budget=3), Rung("middle", 4), Rung("draft", 3)),
]


@pytest.mark.parametrize("ladder", LADDERS, ids=in_words)
def test_coins_agree_with_the_formula(ladder):
    over = {"draft": Costs((1, 8), (0.02, 0.1))}
    figures = three(TOP, LOW, skip=Survival((0.5, 0.45, 0.4)), stores={"target": (CONTEXT,), "middle": (CONTEXT,)})
    figures = replace(figures, tiers=(figures.tiers[0], replace(figures.tiers[1], over=over), figures.tiers[2]))
    found, played = score(figures, ladder), play(figures, ladder, passes=6000, seed=1)
    assert played.error < 0.02 * played.seconds
    assert found.seconds == pytest.approx(played.seconds, abs=4 * played.error)


def test_who_corrected_matters_and_is_not_averaged_away():
    """The same share of all tokens stands, but refused ones come in other places."""
    alike, told_apart = Survival((0.8,)), Survival((0.8,), (0.95,), (0.35,))  # 0.75 x 0.95 + 0.25 x 0.35 = 0.8
    ladder = (Rung("target"), Rung("middle", 4), Rung("draft", 2))
    same, other = (score(three(top, Survival((0.75,))), ladder) for top in (alike, told_apart))
    assert abs(same.seconds / other.seconds - 1) > 0.02
    sooner = (Rung("target"), Rung("middle", 4, until="correction"), Rung("draft", 2))
    hopeless = three(Survival((0.8,), (0.95,), (0.0,)), Survival((0.75,)))
    assert score(hopeless, sooner).seconds < score(hopeless, ladder).seconds


def test_a_tier_is_cheaper_over_states_that_stand():
    over = {"draft": Costs((1, 64), (0.2, 0.2 + 63 * 0.02))}
    figures = three(TOP, LOW)
    cheaper = replace(figures, tiers=(figures.tiers[0], replace(figures.tiers[1], over=over), figures.tiers[2]))
    ladder = (Rung("target"), Rung("middle", 3), Rung("draft", 2))
    before, after = score(figures, ladder), score(cheaper, ladder)
    assert after.rungs[1].seconds == pytest.approx(before.rungs[1].seconds - 0.1 * before.rungs[1].passes)
    alone = (Rung("target"), Rung("middle", 3))
    assert score(cheaper, alone).seconds == score(figures, alone).seconds


def test_survival_by_who_is_below_goes_before_survival_by_the_pair():
    figures = three(TOP, LOW, through={("target", "middle", "draft"): Survival((1.0,))})
    ladder = (Rung("target"), Rung("middle", 4), Rung("draft", 2))
    assert score(figures, ladder).rungs[1].stands == pytest.approx(1)
    assert score(figures, ladder[:2]).rungs[1].stands < 0.9


@given(survivals, rates, st.integers(1, 6), st.integers(1, 4), st.floats(0.0, 0.3))
def test_more_that_stands_at_the_target_is_never_slower(top, low, gather, lower, better):
    def raised(some):
        return tuple(min(1.0, one + better) for one in some)

    ladder = (Rung("target"), Rung("middle", gather), Rung("draft", lower))
    improved = Survival(raised(top.own), raised(top.stood), raised(top.corrected), top.beside)
    before, after = (score(three(one, Survival(low)), ladder).seconds for one in (top, improved))
    assert after <= before * (1 + 1e-9)


@given(survivals, rates, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2), st.floats(0.1, 1.0))
def test_a_cheaper_tier_is_never_slower(top, low, gather, lower, which, factor):
    figures = three(top, Survival(low))
    costs = figures.tiers[which].costs
    cheaper = replace(figures.tiers[which], costs=Costs(costs.rows, [factor * one for one in costs.measured]))
    changed = replace(figures, tiers=(*figures.tiers[:which], cheaper, *figures.tiers[which + 1 :]))
    ladder = (Rung("target"), Rung("middle", gather), Rung("draft", lower))
    assert score(changed, ladder).seconds <= score(figures, ladder).seconds * (1 + 1e-9)


def test_a_store_that_is_always_right_leaves_the_tiers_below_idle():
    sure = StoreFigures("copy", (0.0, 0.0, 1.0), 2)
    figures = three(TOP, LOW, stores={"target": (sure,)})
    found = score(figures, (Rung("target", store="copy"), Rung("middle", 3), Rung("draft", 2)))
    assert found.seconds == pytest.approx(1.2 / 3)
    assert [rung.share for rung in found.rungs] == [1, 0, 0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Survival((1.2,)), "from 0 to 1"),
        (lambda: Survival(()), "at least one"),
        (lambda: StoreFigures("copy", (0.6, 0.6), 4), "at most 1"),
        (lambda: StoreFigures("copy", (0.1, 0.1, 0.1), 1), "no 2 can stand"),
        (lambda: Rung("draft", 0), "at least 1"),
        (lambda: Rung("draft", until="worth"), "until"),
        (lambda: Figures((tier("a", 1), tier("a", 2)), {}), "no two tiers"),
        (lambda: Figures((tier("a", 1), tier("b", 2)), {("b", "a"): LOW}), "from the target down"),
        (lambda: Figures((tier("a", 1),), {}, {"b": (CONTEXT,)}), "no tier 'b'"),
        (lambda: score(three(TOP, LOW), (Rung("target"), Rung("draft", 2))), "not known"),
        (lambda: score(three(TOP, LOW), (Rung("target", store="copy"),)), "no store 'copy'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(make, said):
    with pytest.raises(HierspecError, match=said):
        make()


def test_ladders_in_words():
    ladder = (Rung("target", store="context"), Rung("exit 8", 4, until="correction"), Rung("exit 4", 2, candidates=2))
    assert in_words(ladder) == "target + context <- 4 exit 8 until a correction <- 2 exit 4 x 2"
    assert len({in_words(one) for one in itertools.permutations(ladder)}) == 6
