"""What-if files: figures are read as written, mistakes are named, and the examples give what the documents say."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.planner.formula import whatif
from hierspec.planner.formula.figures import AcceptanceRates, StoreFigures, TierConfig, shape
from hierspec.planner.formula.latency import score
from hierspec.planner.formula.search import Limits, search

EXAMPLES = Path(__file__).parents[3] / "examples"
probabilities = st.floats(0.0, 1.0)

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
    figures = read.figures
    assert (read.title, read.limits) == ("all keys", Limits(5, (1, 2)))
    assert figures.target.seconds(1) == pytest.approx(0.0205)
    assert figures.target.seconds(8) == pytest.approx(0.0245)
    assert figures.target.seconds(1 + 7 * 5) == pytest.approx(0.0205 + 35 * 4e-3 / 7)
    assert figures.target.seconds(3, "exit") == pytest.approx(0.0115)
    assert figures.tier("draft").seconds(200) == pytest.approx(0.001)
    assert figures.acceptance_rates("target", "draft") == AcceptanceRates((0.5,), runner_ups=(0.2, 0.3))
    # Half of exit's tokens are draft's: 0.8 = 0.5 x 1.0 + 0.5 x 0.6 and 0.7 = 0.5 x 0.8 + 0.5 x 0.6.
    through_exit = figures.acceptance_rates("target", "exit", "draft")
    assert through_exit.accepted == pytest.approx((1.0, 0.8))
    assert through_exit.corrected == pytest.approx((0.6, 0.6))
    store = figures.store("target", "context")
    assert store == StoreFigures("context", (0.1, 0.2, 0.1), 6, store.seconds)
    assert store.seconds == pytest.approx(3e-5)
    assert read.hierarchies == {
        "mine": (
            TierConfig("target", store="context"),
            TierConfig("exit", 4, until="correction"),
            TierConfig("draft", 2),
        )
    }


@given(probabilities, probabilities, probabilities)
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
    rates = whatif.from_toml(text).figures.acceptance_rates("a", "b", "c")
    if 0 < share < 1:
        assert share * rates.accepted[0] + (1 - share) * rates.corrected[0] == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
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
)
def test_what_is_wrong_in_a_file_is_named(old, new, message):
    assert old in WHOLE
    with pytest.raises(HierspecError) as error:
        whatif.from_toml(WHOLE.replace(old, new, 1))
    assert message in str(error.value)


def test_a_missing_file_is_named(capsys):
    assert main(["plan", "--simulate", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err


def test_the_command_shows_explains_and_draws(tmp_path, capsys):
    costs, drawn = tmp_path / "costs.toml", tmp_path / "out" / "hierarchy.svg"
    costs.write_text(WHOLE, encoding="utf-8")
    assert main(["plan", "--simulate", str(costs), "--explain", "--output", str(drawn)]) == 0
    out = capsys.readouterr().err  # standard output is no terminal: there the document goes
    assert "all keys" in out
    assert "exit is " in out
    assert "mine" in out
    ElementTree.fromstring(drawn.read_text(encoding="utf-8"))
    assert main(["plan", "--simulate", str(costs), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plain_ms"] == 20.5
    assert document["hierarchies"][0]["hierarchy"] == document["best"]
    checked = [row for row in document["hierarchies"] if "played_ms" in row]
    assert len(checked) >= 2
    for row in checked:
        assert row["predicted_ms"] == pytest.approx(row["played_ms"], abs=5 * row["error_ms"] + 1e-3)


def speedups(name):
    read = whatif.read(EXAMPLES / name)
    plain, results = read.figures.target.seconds(1), search(read.figures, read.limits)
    named = {name: plain / score(read.figures, hierarchy).seconds for name, hierarchy in read.hierarchies.items()}
    by_shape = {shape(result.hierarchy): plain / result.score.seconds for result in results}
    return plain / results[0].score.seconds, named, by_shape


def test_the_example_of_hispec_says_what_the_documents_say():
    best, named, _ = speedups("whatif_hispec.toml")
    assert named == pytest.approx({"single layer": 1.59, "hispec": 1.97}, abs=0.005)
    assert best == pytest.approx(2.20, abs=0.005)


def test_the_example_of_hsd_says_what_the_documents_say():
    best, _, by_shape = speedups("whatif_hsd.toml")
    single = max(speed for names, speed in by_shape.items() if len(names) == 2)
    assert best / single == pytest.approx(1.17, abs=0.005)
    assert best == pytest.approx(2.98, abs=0.005)


def test_the_file_in_the_documents_is_read():
    text = (EXAMPLES.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    read = whatif.from_toml(text.partition("```toml\n")[2].partition("```")[0])
    assert list(read.hierarchies) == ["mine"]
    assert search(read.figures, read.limits)[0].score.seconds < read.figures.target.seconds(1)
