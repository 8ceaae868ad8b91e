"""The search: the optimum of its formula against brute force, what it must never do, and figures read from files."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_growth import chart, growth, synthetic_figures

from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.pacing.appraisal import Costs
from hierspec.planner.formula import whatif
from hierspec.planner.formula.figures import Figures, Rung, StoreFigures, Survival, TierFigures, shape
from hierspec.planner.formula.latency import score
from hierspec.planner.formula.picture import picture
from hierspec.planner.formula.report import compared, explained, tier_rows
from hierspec.planner.formula.search import Limits, estimate, search, shortest

EXAMPLES = Path(__file__).parents[3] / "examples"
chances = st.floats(0.0, 1.0)


@st.composite
def figures(draw, most=4):
    """A few tiers, some pairs unknown, some costs by who is below, some stores."""
    names = [f"tier {place}" for place in range(draw(st.integers(1, most)))]

    def costs():
        first = draw(st.floats(0.001, 1.0))
        return Costs((1, 4, 32), (first, first * draw(st.floats(1.0, 2.0)), first * draw(st.floats(2.0, 9.0))))

    tiers, survivals, stores = [], {}, {}
    for place, name in enumerate(names):
        over = {below: costs() for below in names[place + 1 :] if draw(st.booleans())}
        tiers.append(TierFigures(name, costs(), over, draw(st.floats(0.0, 0.1))))
        for below in names[place + 1 :]:
            if draw(st.integers(0, 3)):
                own = tuple(draw(st.lists(chances, min_size=1, max_size=3)))
                survivals[name, below] = Survival(own, beside=(draw(chances),))
        if draw(st.booleans()):
            weights = draw(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4))
            share = draw(st.floats(0.1, 1.0)) / max(1.0, sum(weights))
            stores[name] = (StoreFigures("copy", tuple(share * one for one in weights), 4, draw(st.floats(0.0, 0.01))),)
    return Figures(tuple(tiers), survivals, stores)


def every_ladder(known, limits):
    """Brute force: all chains of tiers from the target down, all that they may gather, with and without stores."""
    below = [tier.name for tier in known.tiers[1:]]
    chains = (chain for count in range(len(below) + 1) for chain in itertools.combinations(below, count))
    for chain in chains:
        names = (known.target.name, *chain)
        if any(pair not in known.survivals for pair in itertools.pairwise(names)):
            continue
        asked = [(None, *(store.name for store in known.stores.get(name, ()))) for name in names]
        blocks = list(itertools.product(range(1, limits.longest + 1), limits.candidates))
        for stores in itertools.product(*asked):
            for sizes in itertools.product(blocks, repeat=len(chain)):
                yield tuple(
                    Rung(name, gather, store, candidates=candidates)
                    for name, store, (gather, candidates) in zip(names, stores, [(1, 1), *sizes], strict=True)
                )


@settings(max_examples=60, deadline=None)
@given(figures(), st.sampled_from([Limits(3), Limits(2, (1, 2)), Limits(3, deepest=3, kept=2)]), st.data())
def test_the_shortest_paths_are_the_best_of_all(known, limits, data):
    """By the formula: the best of every shape, and of each depth the best shapes; the same through each tier."""
    through = data.draw(st.none() | st.sampled_from([tier.name for tier in known.tiers]))
    best = {}
    for ladder in every_ladder(known, limits):
        if through is None or any(rung.tier == through for rung in ladder):
            value = estimate(known, ladder)
            best[shape(ladder)] = min(value, best.get(shape(ladder), value))
    found = shortest(known, limits, through)
    for depth in range(1, limits.deepest + 1):
        values = sorted(value for names, value in best.items() if len(names) == depth)
        kept = len(values) if depth == 1 else limits.kept
        assert [way.seconds for way in found if len(way.ladder) == depth] == pytest.approx(values[:kept])
    assert all(len(way.ladder) <= limits.deepest for way in found)
    assert [way.seconds for way in found] == sorted(way.seconds for way in found)
    for way in found:
        assert estimate(known, way.ladder) == pytest.approx(way.seconds)
        assert best[shape(way.ladder)] == pytest.approx(way.seconds)
    assert len({shape(way.ladder) for way in found}) == len(found)


@settings(max_examples=40, deadline=None)
@given(figures(), st.data())
def test_what_gets_better_never_makes_the_best_slower(known, data):
    limits = Limits(4)
    before = shortest(known, limits)[0].seconds
    if known.survivals:
        pair = data.draw(st.sampled_from(sorted(known.survivals)))
        one, by = known.survivals[pair], data.draw(st.floats(0.0, 0.5))
        better = replace(one, own=tuple(min(1.0, chance + by) for chance in one.own))
        assert (
            shortest(replace(known, survivals={**known.survivals, pair: better}), limits)[0].seconds <= before + 1e-12
        )
    added = StoreFigures("more", (0.1, 0.3), 3)
    stores = {known.target.name: (*known.stores.get(known.target.name, ()), added)}
    assert shortest(replace(known, stores={**known.stores, **stores}), limits)[0].seconds <= before + 1e-12
    if len(known.tiers) > 1:
        name = data.draw(st.sampled_from([tier.name for tier in known.tiers[1:]]))
        assert shortest(known.without(name), limits)[0].seconds >= before - 1e-12


@settings(max_examples=30, deadline=None)
@given(figures())
def test_plain_decoding_is_always_among_them_and_all_are_scored_exactly(known):
    found = search(known, Limits(4, kept=2))
    plain = (Rung(known.target.name),)
    assert any(one.ladder == plain for one in found)
    assert [one.score.seconds for one in found] == sorted(one.score.seconds for one in found)
    assert len({shape(one.ladder) for one in found}) == len(found)
    for one in found:
        assert one.score == score(known, one.ladder)
        assert one.estimate == pytest.approx(estimate(known, one.ladder))
    assert found[0].score.seconds <= known.target.seconds(1) * (1 + 1e-9)


def test_the_exact_score_has_the_last_word():
    """A block that overshoots is dear here, which only the exact law sees: the search ends at the best of its shape."""
    tiers = (
        TierFigures("target", Costs((1, 5, 6, 40), (1.0, 1.0, 3.0, 40.0))),
        TierFigures("middle", Costs((1, 64), (0.2, 0.3))),
        TierFigures("draft", Costs((1, 64), (0.01, 0.02))),
    )
    pairs = {("target", "middle"): Survival((0.9,)), ("middle", "draft"): Survival((0.7,))}
    known, limits = Figures(tiers, pairs), Limits(6)
    best = search(known, limits)[0]
    rivals = [ladder for ladder in every_ladder(known, limits) if shape(ladder) == shape(best.ladder)]
    assert best.score.seconds <= min(score(known, ladder).seconds for ladder in rivals) * (1 + 1e-9)
    assert best.ladder != shortest(known, limits)[0].ladder


def test_growth_is_measured_and_drawn():
    measured = growth((2, 4), rounds=1)
    assert [row["tiers"] for row in measured] == [2, 4]
    assert all(row["path_seconds"] > 0 and row["search_seconds"] > 0 for row in measured)
    ElementTree.fromstring(chart(measured).svg())
    assert len(synthetic_figures(7).survivals) == 21


KNOWN = Figures(
    (
        TierFigures("target", Costs((1, 64), (0.020, 0.028))),
        TierFigures("middle", Costs((1, 64), (0.004, 0.006))),
        TierFigures("draft", Costs((1, 64), (0.0006, 0.0009))),
        TierFigures("useless", Costs((1, 64), (0.019, 0.020))),
        TierFigures("stranger", Costs((1, 64), (0.001, 0.001))),
    ),
    {
        ("target", "middle"): Survival((0.85,)), ("middle", "draft"): Survival((0.75,)),
        ("target", "draft"): Survival((0.5,)), ("target", "useless"): Survival((0.3,)),
    },
    {"target": (StoreFigures("copy", (0.04, 0.04, 0, 0, 0, 0.3), 5, 1e-5), StoreFigures("noise", (1.0,), 60, 1e-3))},
)  # fmt: skip


def test_every_tier_and_store_is_explained():
    found = search(KNOWN)
    said = explained(KNOWN, found)
    assert shape(found[0].ladder) == (("target", "copy"), ("middle", None), ("draft", None))
    assert [line.partition(":")[0] for line in said] == [
        "target", "middle is in", "draft is in", "useless is out", "stranger is out", "copy is in, under target",
        "noise is out",
    ]  # fmt: skip
    without = search(KNOWN.without("middle"))[0].score
    slower = 100 * (without.seconds / found[0].score.seconds - 1)
    assert f"{slower:.1f}% slower" in said[1]
    assert slower > 1
    assert "nothing is known" in said[4]
    assert "as fast" not in "".join(said)
    plain = KNOWN.without("middle", "draft", "useless", "stranger").without_store("copy").without_store("noise")
    assert "nothing is faster" in explained(plain, search(plain))[0]


def test_rows_and_pictures_show_what_was_found():
    best = search(KNOWN)[0].score
    rows = tier_rows(KNOWN, best)
    assert [row["tier"] for row in rows] == ["target", "middle", "draft"]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    assert rows[0]["token_ms"] == pytest.approx(1e3 * best.seconds, abs=1e-3)
    assert rows[2]["token_ms"] == pytest.approx(0.6)
    drawn = picture(KNOWN, best, "a < b")
    texts = [item.text for item in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "target", "middle", "draft"} <= set(texts)
    assert any("asks copy first" in text for text in texts)
    listed = compared(KNOWN, search(KNOWN), {"mine": (Rung("target"), Rung("draft", 3))})
    assert [one.score.seconds for one in listed] == sorted(one.score.seconds for one in listed)
    assert [one.name for one in listed if one.name] == ["mine"]
    json.dumps([one.to_json() for one in listed])


WHOLE = """
title = "all keys"
longest = 5
candidates = [1, 2]

[[tier]]
name = "target"
milliseconds = {1 = 20, 8 = 24.0}
milliseconds_over = {exit = [10, 0.5]}
overhead = 0.5
accepts = {exit = [0.8, 0.7], draft = 0.5}
corrected = {exit = 0.6}
beside = {draft = [0.2, 0.3]}

[[tier.store]]
name = "context"
stands = [0.1, 0.2, 0.1]
rows = 6
milliseconds = 0.03

[[tier]]
name = "exit"
milliseconds = [5, 0.25]
accepts = {draft = 0.5}

[[tier]]
name = "draft"
milliseconds = [1, 0.0]

[[ladder]]
name = "mine"
tiers = ["target", "exit", "draft"]
gather = [4, 2]
stores = {target = "context"}
until = {exit = "correction"}
"""


def test_a_file_of_figures_is_read():
    read = whatif.from_toml(WHOLE)
    known = read.figures
    assert (read.title, read.limits) == ("all keys", Limits(5, (1, 2)))
    assert known.target.seconds(1) == pytest.approx(0.0205)
    assert known.target.seconds(8) == pytest.approx(0.0245)
    assert known.target.seconds(1 + 7 * 5) == pytest.approx(0.0205 + 35 * 4e-3 / 7)
    assert known.target.seconds(3, "exit") == pytest.approx(0.0115)
    assert known.tier("draft").seconds(200) == pytest.approx(0.001)
    assert known.survival("target", "draft") == Survival((0.5,), beside=(0.2, 0.3))
    # Half of exit's tokens are draft's: 0.8 = 0.5 x 1.0 + 0.5 x 0.6 and 0.7 = 0.5 x 0.8 + 0.5 x 0.6.
    through = known.survival("target", "exit", "draft")
    assert through.stood == pytest.approx((1.0, 0.8))
    assert through.corrected == pytest.approx((0.6, 0.6))
    store = known.store("target", "context")
    assert store == StoreFigures("context", (0.1, 0.2, 0.1), 6, store.seconds)
    assert store.seconds == pytest.approx(3e-5)
    assert read.ladders == {
        "mine": (Rung("target", store="context"), Rung("exit", 4, until="correction"), Rung("draft", 2))
    }


@given(chances, chances, chances)
def test_kinds_of_tokens_always_make_up_the_whole(whole, share, given_rate):
    text = f"""
[[tier]]
name = "a"
milliseconds = [1, 0]
accepts = {{b = {whole}}}
corrected = {{b = {given_rate}}}
[[tier]]
name = "b"
milliseconds = [1, 0]
accepts = {{c = {share}}}
[[tier]]
name = "c"
milliseconds = [1, 0]
"""
    one = whatif.from_toml(text).figures.survival("a", "b", "c")
    if 0 < share < 1:
        assert share * one.stood[0] + (1 - share) * one.corrected[0] == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("longest = 5", "longst = 5", "'longst' in the file (did you mean 'longest'?)"),
        ("overhead = 0.5", "overheat = 0.5", "'overheat' in the tier 'target' (did you mean 'overhead'?)"),
        ("accepts = {draft = 0.5}", "accepts = {draught = 0.5}", "(did you mean 'draft'?); tiers are target, exit"),
        ("rows = 6", "row = 6", "'row' in the store 'context' of the tier 'target' (did you mean 'rows'?)"),
        ("gather = [4, 2]", "gathers = [4, 2]", "(did you mean 'gather'?)"),
        ("gather = [4, 2]", "gather = [4]", "gather of the ladder 'mine'"),
        ("longest = 5", "longest = 0", "longest of the file must be a whole number from 1 up"),
        ("candidates = [1, 2]", "candidates = 2", "candidates must be a list"),
        ("draft = 0.5}\ncorrected", "draft = 1.5}\ncorrected", "from 0 to 1"),
        ("draft = 0.5}\ncorrected", "draft = nan}\ncorrected", "from 0 to 1"),
        ("corrected = {exit = 0.6}", "corrected = {target = 0.6}", "'target', which its accepts has not"),
        ("corrected = {exit = 0.6}", "corrected = 0.6", "must be a table"),
        ("accepts = {draft = 0.5}", "accepts = {target = 0.5}", "from the target down"),
        ("milliseconds = [1, 0.0]", "milliseconds = 1", "two numbers or a table"),
        ("milliseconds = [1, 0.0]", "milliseconds = [1, -1]", "none may be below 0"),
        ("milliseconds = [1, 0.0]", "milliseconds = {2 = 1.0}", "1 row"),
        ("milliseconds = [1, 0.0]", "", "needs milliseconds"),
        ("[[tier.store]]", "[tier.store]", "[[store]]"),
        ("stands = [0.1, 0.2, 0.1]", "stands = [0.9, 0.2]", "at most 1"),
        ("stands = [0.1, 0.2, 0.1]", "stands = 0.1", "must be a list"),
        ('{target = "context"}', '{target = "contxt"}', "no store 'contxt'"),
        ('"correction"', '"worth"', "count, correction"),
        ('["target", "exit", "draft"]', '["exit", "draft"]', "begins with 'target'"),
        ('name = "exit"', 'name = "target"', "'exit'"),
        ('name = "exit"', "name = 3", "must be a string"),
        ("[[tier]]", "[[tier", "not valid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(old, new, said):
    assert old in WHOLE
    with pytest.raises(HierspecError) as error:
        whatif.from_toml(WHOLE.replace(old, new, 1))
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_named(capsys):
    assert main(["plan", "--simulate", "nowhere.toml"]) == 1
    assert "nowhere.toml" in capsys.readouterr().err


def test_the_command_shows_explains_and_draws(tmp_path, capsys):
    costs, drawn = tmp_path / "costs.toml", tmp_path / "out" / "hierarchy.svg"
    costs.write_text(WHOLE, encoding="utf-8")
    assert main(["plan", "--simulate", str(costs), "--explain", "--output", str(drawn)]) == 0
    out = capsys.readouterr().out
    assert "all keys" in out
    assert "exit is " in out
    assert "mine" in out
    ElementTree.fromstring(drawn.read_text(encoding="utf-8"))
    assert main(["plan", "--simulate", str(costs), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plain_ms"] == 20.5
    assert document["hierarchies"][0]["hierarchy"] == document["best"]
    played = [one for one in document["hierarchies"] if "played_ms" in one]
    assert len(played) >= 2
    for one in played:
        assert one["predicted_ms"] == pytest.approx(one["played_ms"], abs=5 * one["error_ms"] + 1e-3)


def speedups(name):
    read = whatif.read(EXAMPLES / name)
    plain, found = read.figures.target.seconds(1), search(read.figures, read.limits)
    given_ladders = {called: plain / score(read.figures, ladder).seconds for called, ladder in read.ladders.items()}
    return (
        plain / found[0].score.seconds,
        given_ladders,
        {shape(one.ladder): plain / one.score.seconds for one in found},
    )


def test_the_example_of_hispec_says_what_the_documents_say():
    best, given_ladders, _ = speedups("whatif_hispec.toml")
    assert given_ladders == pytest.approx({"single layer": 1.59, "hispec": 1.97}, abs=0.005)
    assert best == pytest.approx(2.20, abs=0.005)


def test_the_example_of_hsd_says_what_the_documents_say():
    best, _, by_shape = speedups("whatif_hsd.toml")
    single = max(speed for names, speed in by_shape.items() if len(names) == 2)
    assert best / single == pytest.approx(1.17, abs=0.005)
    assert best == pytest.approx(2.98, abs=0.005)


def test_the_file_in_the_documents_is_read():
    text = (EXAMPLES.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    read = whatif.from_toml(text.partition("```toml\n")[2].partition("```")[0])
    assert list(read.ladders) == ["mine"]
    assert search(read.figures, read.limits)[0].score.seconds < read.figures.target.seconds(1)
