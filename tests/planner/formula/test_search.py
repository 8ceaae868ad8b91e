"""The search: the optimum of its estimate against brute force, what it must never do, and how results are shown."""

import itertools
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_growth import chart, growth, synthetic_figures

from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import AcceptanceRates, Figures, StoreFigures, TierConfig, TierFigures, shape
from hierspec.planner.formula.latency import score
from hierspec.planner.formula.picture import picture
from hierspec.planner.formula.report import compared, explained, tier_rows
from hierspec.planner.formula.search import Limits, estimate, search, shortest

probabilities = st.floats(0.0, 1.0)


@st.composite
def figures(draw, most=4):
    """A few tiers, some pairs unknown, some costs by the tier below, some stores."""
    names = [f"tier {level}" for level in range(draw(st.integers(1, most)))]

    def costs():
        first = draw(st.floats(0.001, 1.0))
        return Costs((1, 4, 32), (first, first * draw(st.floats(1.0, 2.0)), first * draw(st.floats(2.0, 9.0))))

    tiers, acceptance, stores = [], {}, {}
    for level, name in enumerate(names):
        over = {below: costs() for below in names[level + 1 :] if draw(st.booleans())}
        tiers.append(TierFigures(name, costs(), over, draw(st.floats(0.0, 0.1))))
        for below in names[level + 1 :]:
            if draw(st.integers(0, 3)):
                rates = tuple(draw(st.lists(probabilities, min_size=1, max_size=3)))
                acceptance[name, below] = AcceptanceRates(rates, runner_ups=(draw(probabilities),))
        if draw(st.booleans()):
            weights = draw(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4))
            share = draw(st.floats(0.1, 1.0)) / max(1.0, sum(weights))
            shares = tuple(share * weight for weight in weights)
            stores[name] = (StoreFigures("copy", shares, 4, draw(st.floats(0.0, 0.01))),)
    return Figures(tuple(tiers), acceptance, stores)


def every_hierarchy(drawn, limits):
    """Brute force: all chains of tiers from the target down, all block lengths, with and without stores."""
    below = [tier.name for tier in drawn.tiers[1:]]
    chains = (chain for count in range(len(below) + 1) for chain in itertools.combinations(below, count))
    for chain in chains:
        names = (drawn.target.name, *chain)
        if any(pair not in drawn.acceptance for pair in itertools.pairwise(names)):
            continue
        store_choices = [(None, *(store.name for store in drawn.stores.get(name, ()))) for name in names]
        blocks = list(itertools.product(range(1, limits.longest + 1), limits.candidates))
        for stores in itertools.product(*store_choices):
            for sizes in itertools.product(blocks, repeat=len(chain)):
                yield tuple(
                    TierConfig(name, gather, store, candidates=candidates)
                    for name, store, (gather, candidates) in zip(names, stores, [(1, 1), *sizes], strict=True)
                )


@settings(max_examples=60, deadline=None)
@given(figures(), st.sampled_from([Limits(3), Limits(2, (1, 2)), Limits(3, deepest=3, per_depth=2)]), st.data())
def test_the_shortest_paths_are_the_best_of_all(drawn, limits, data):
    """By the estimate: the best of every shape, and of each depth the best shapes; the same with a required tier."""
    required = data.draw(st.none() | st.sampled_from([tier.name for tier in drawn.tiers]))
    best = {}
    for hierarchy in every_hierarchy(drawn, limits):
        if required is None or any(config.tier == required for config in hierarchy):
            value = estimate(drawn, hierarchy)
            best[shape(hierarchy)] = min(value, best.get(shape(hierarchy), value))
    paths = shortest(drawn, limits, required)
    for depth in range(1, limits.deepest + 1):
        values = sorted(value for names, value in best.items() if len(names) == depth)
        count = len(values) if depth == 1 else limits.per_depth
        assert [path.seconds for path in paths if len(path.hierarchy) == depth] == pytest.approx(values[:count])
    assert all(len(path.hierarchy) <= limits.deepest for path in paths)
    assert [path.seconds for path in paths] == sorted(path.seconds for path in paths)
    for path in paths:
        assert estimate(drawn, path.hierarchy) == pytest.approx(path.seconds)
        assert best[shape(path.hierarchy)] == pytest.approx(path.seconds)
    assert len({shape(path.hierarchy) for path in paths}) == len(paths)


@settings(max_examples=40, deadline=None)
@given(figures(), st.data())
def test_what_gets_better_never_makes_the_best_slower(drawn, data):
    limits = Limits(4)
    before = shortest(drawn, limits)[0].seconds
    if drawn.acceptance:
        pair = data.draw(st.sampled_from(sorted(drawn.acceptance)))
        rates, by = drawn.acceptance[pair], data.draw(st.floats(0.0, 0.5))
        better = replace(rates, undrafted=tuple(min(1.0, rate + by) for rate in rates.undrafted))
        improved = replace(drawn, acceptance={**drawn.acceptance, pair: better})
        assert shortest(improved, limits)[0].seconds <= before + 1e-12
    added = StoreFigures("more", (0.1, 0.3), 3)
    stores = {drawn.target.name: (*drawn.stores.get(drawn.target.name, ()), added)}
    assert shortest(replace(drawn, stores={**drawn.stores, **stores}), limits)[0].seconds <= before + 1e-12
    if len(drawn.tiers) > 1:
        name = data.draw(st.sampled_from([tier.name for tier in drawn.tiers[1:]]))
        assert shortest(drawn.without(name), limits)[0].seconds >= before - 1e-12


@settings(max_examples=30, deadline=None)
@given(figures())
def test_plain_decoding_is_always_among_them_and_all_are_scored_exactly(drawn):
    results = search(drawn, Limits(4, per_depth=2))
    plain = (TierConfig(drawn.target.name),)
    assert any(result.hierarchy == plain for result in results)
    assert [result.score.seconds for result in results] == sorted(result.score.seconds for result in results)
    assert len({shape(result.hierarchy) for result in results}) == len(results)
    for result in results:
        assert result.score == score(drawn, result.hierarchy)
        assert result.estimate == pytest.approx(estimate(drawn, result.hierarchy))
    assert results[0].score.seconds <= drawn.target.seconds(1) * (1 + 1e-9)


def test_the_exact_score_has_the_last_word():
    """A block that overshoots is expensive here, which only the exact score sees: the search finds the best of its
    shape."""
    tiers = (
        TierFigures("target", Costs((1, 5, 6, 40), (1.0, 1.0, 3.0, 40.0))),
        TierFigures("middle", Costs((1, 64), (0.2, 0.3))),
        TierFigures("draft", Costs((1, 64), (0.01, 0.02))),
    )
    pairs = {("target", "middle"): AcceptanceRates((0.9,)), ("middle", "draft"): AcceptanceRates((0.7,))}
    figures, limits = Figures(tiers, pairs), Limits(6)
    best = search(figures, limits)[0]
    rivals = [rival for rival in every_hierarchy(figures, limits) if shape(rival) == shape(best.hierarchy)]
    assert best.score.seconds <= min(score(figures, rival).seconds for rival in rivals) * (1 + 1e-9)
    assert best.hierarchy != shortest(figures, limits)[0].hierarchy


def test_growth_is_measured_and_drawn():
    measured = growth((2, 4), rounds=1)
    assert [row["tiers"] for row in measured] == [2, 4]
    assert all(row["path_seconds"] > 0 and row["search_seconds"] > 0 for row in measured)
    ElementTree.fromstring(chart(measured).svg())
    assert len(synthetic_figures(7).acceptance) == 21


EXAMPLE = Figures(
    (
        TierFigures("target", Costs((1, 64), (0.020, 0.028))),
        TierFigures("middle", Costs((1, 64), (0.004, 0.006))),
        TierFigures("draft", Costs((1, 64), (0.0006, 0.0009))),
        TierFigures("useless", Costs((1, 64), (0.019, 0.020))),
        TierFigures("stranger", Costs((1, 64), (0.001, 0.001))),
    ),
    {
        ("target", "middle"): AcceptanceRates((0.85,)),
        ("middle", "draft"): AcceptanceRates((0.75,)),
        ("target", "draft"): AcceptanceRates((0.5,)),
        ("target", "useless"): AcceptanceRates((0.3,)),
    },
    {"target": (StoreFigures("copy", (0.04, 0.04, 0, 0, 0, 0.3), 5, 1e-5), StoreFigures("noise", (1.0,), 60, 1e-3))},
)


def test_every_tier_and_store_is_explained():
    results = search(EXAMPLE)
    sentences = explained(EXAMPLE, results)
    assert shape(results[0].hierarchy) == (("target", "copy"), ("middle", None), ("draft", None))
    assert [sentence.partition(":")[0] for sentence in sentences] == [
        "target",
        "middle is in",
        "draft is in",
        "useless is out",
        "stranger is out",
        "copy is in, under target",
        "noise is out",
    ]
    without = search(EXAMPLE.without("middle"))[0].score
    slower = 100 * (without.seconds / results[0].score.seconds - 1)
    assert f"{slower:.1f}% slower" in sentences[1]
    assert slower > 1
    assert "nothing is known" in sentences[4]
    assert "as fast" not in "".join(sentences)
    plain = EXAMPLE.without("middle", "draft", "useless", "stranger").without_store("copy").without_store("noise")
    assert "nothing is faster" in explained(plain, search(plain))[0]


def test_rows_and_pictures_show_the_results():
    best = search(EXAMPLE)[0].score
    rows = tier_rows(EXAMPLE, best)
    assert [row["tier"] for row in rows] == ["target", "middle", "draft"]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    assert rows[0]["token_ms"] == pytest.approx(1e3 * best.seconds, abs=1e-3)
    assert rows[2]["token_ms"] == pytest.approx(0.6)
    drawn = picture(EXAMPLE, best, "a < b")
    texts = [item.text for item in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "target", "middle", "draft"} <= set(texts)
    assert any("asks copy first" in text for text in texts)
    listed = compared(EXAMPLE, search(EXAMPLE), {"mine": (TierConfig("target"), TierConfig("draft", 3))})
    assert [row.score.seconds for row in listed] == sorted(row.score.seconds for row in listed)
    assert [row.name for row in listed if row.name] == ["mine"]
    json.dumps([row.to_json() for row in listed])
