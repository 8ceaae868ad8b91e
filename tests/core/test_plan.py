"""Plans: to TOML and back, and every way to get one wrong told in one sentence."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core import plan as plans
from hierspec.core.errors import HierspecError
from hierspec.core.plan import NAMED, UNTIL, Plan, TierPlan
from hierspec.core.verify import RULES

# Any text but lone surrogates, which no UTF-8 file can hold; controls, DEL and emoji are where TOML and JSON differ.
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\x7f", "😀", '"\\\n', "é"])
NUMBERS = st.integers(1, 10**6)
STORES = st.lists(WORDS, max_size=3).map(tuple)
COMMON = {"gather": NUMBERS, "stores": STORES, "budget": NUMBERS, "merge": st.booleans(), "candidates": NUMBERS}
COMMON |= {"until": st.sampled_from(UNTIL)}
LAYERS = st.lists(st.integers(0, 80), min_size=1, max_size=5, unique=True).map(tuple)
DEPTHS = st.floats(0, 1, exclude_min=True)
TIERS = (
    st.builds(TierPlan, exit_layer=NUMBERS, **COMMON)
    | st.builds(TierPlan, exit_depth=DEPTHS, early_exit=st.booleans(), **COMMON)
    | st.builds(TierPlan, draft=WORDS, **COMMON)
    | st.builds(TierPlan, skip_layers=LAYERS, **COMMON)
)
SHARES = st.floats(0, 1)
PLAYED = st.builds(Plan, tiers=st.lists(st.builds(TierPlan, exit_layer=NUMBERS, agrees=SHARES), max_size=3).map(tuple))
PLANS = st.builds(
    Plan,
    model=st.none() | WORDS,
    rule=st.sampled_from(list(RULES)),
    stores=STORES,
    budget=NUMBERS,
    merge=st.booleans(),
    tiers=st.lists(TIERS, max_size=4).map(tuple),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PLANS | PLAYED)
def test_round_trip(plan: Plan) -> None:
    text = plan.to_toml()
    assert Plan.from_toml(text) == plan
    assert Plan.from_toml(text).to_toml() == text


def test_only_what_matters_is_written() -> None:
    plan = Plan(stores=("context",), tiers=(TierPlan(exit_layer=8, gather=4, stores=("context",)),))
    expected = 'rule = "coupled"\nstores = ["context"]\n\n[[tier]]\nexit_layer = 8\ngather = 4\nstores = ["context"]\n'
    assert plan.to_toml() == expected


def test_the_plan_of_the_design(tmp_path: Path) -> None:
    """Comments are for people: they are read past, and a plan written again has none."""
    text = """
# made by: hierspec plan            predicted 2.1x, measured 2.0x
model = "default"
rule = "coupled"
stores = ["context", "history"]     # what the target may ask first
[[tier]]
exit_layer = 8
gather = 4
stores = ["context"]
[[tier]]
exit_layer = 4
gather = 2
"""
    file = tmp_path / "plan.toml"
    file.write_text(text, encoding="utf-8")
    plan = Plan.read(file)
    assert plan == Plan(
        model="default",
        stores=("context", "history"),
        tiers=(TierPlan(exit_layer=8, gather=4, stores=("context",)), TierPlan(exit_layer=4, gather=2)),
    )
    assert "#" not in plan.to_toml()
    assert Plan.read(str(file)) == plan


def test_an_empty_plan_is_plain() -> None:
    assert Plan.from_toml("") == Plan() == Plan.named("plain", 30)


@pytest.mark.parametrize("layers", [1, 2, 30, 80])
@pytest.mark.parametrize("name", NAMED)
def test_named_plans(name: str, layers: int) -> None:
    plan = Plan.named(name, layers)
    assert Plan.from_toml(plan.to_toml()) == plan
    assert all(1 <= (tier.exit_layer or 1) <= layers for tier in plan.tiers)


def test_named_plans_exit_where_the_papers_do() -> None:
    assert [tier.exit_layer for tier in Plan.named("hispec", 32).tiers] == [8, 4]
    assert [tier.exit_layer for tier in Plan.named("layerskip", 32).tiers] == [4]


# For targets of 1 to 80 layers: the layer near 1/8 of them, and near 1/4.
EIGHTH = """
    1 1 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 2 3 3 3 3 3 3 3 4 4 4 4 4 4 4 4 4 5 5 5 5
    5 5 5 6 6 6 6 6 6 6 6 6 7 7 7 7 7 7 7 8 8 8 8 8 8 8 8 8 9 9 9 9 9 9 9 10 10 10 10 10
"""
QUARTER = """
    1 2 2 2 2 2 2 2 2 2 3 3 3 4 4 4 4 4 5 5 5 6 6 6 6 6 7 7 7 8 8 8 8 8 9 9 9 10 10 10 10 10
    11 11 11 12 12 12 12 12 13 13 13 14 14 14 14 14 15 15 15 16 16 16 16 16 17 17 17 18 18 18 18 18 19 19 19 20 20 20
"""
STORES_TOGETHER = ("context", "history", "corpus?")


def expected_plans(eighth: int, quarter: int) -> dict[str, Plan]:
    drafter = TierPlan(draft="feature", gather=8, until="worth")
    adaptive = Plan(budget=12, adapt=True)
    upper, lower = TierPlan(exit_layer=quarter, gather=4), TierPlan(exit_layer=eighth, gather=2)
    return {
        "plain": Plan(),
        "lookup": Plan(stores=("copy",), budget=12, adapt=True),
        "lookup-fixed": Plan(stores=("pld",), budget=10),
        "lookahead": Plan(stores=("lookahead",), budget=60),
        "rest": Plan(stores=("corpus",), budget=64),
        "hd": Plan(stores=("lookahead", "frequent?", "pairs?"), budget=55, merge=True),
        "hd+": Plan(stores=STORES_TOGETHER, budget=24, merge=True, adapt=True),
        "layerskip": Plan(tiers=(TierPlan(exit_layer=eighth, gather=4),)),
        "layerskip+": replace(adaptive, tiers=(TierPlan(exit_layer=eighth, gather=8, until="worth"),)),
        "adadecode": Plan(
            budget=12,
            tiers=(replace(upper, gather=8, until="unsure"), replace(lower, gather=6, until="unsure")),
        ),
        "hispec": Plan(tiers=(upper, lower)),
        "hispec+": replace(
            adaptive,
            tiers=(replace(upper, gather=8, until="worth"), replace(lower, gather=4, until="worth")),
        ),
        "draft": replace(adaptive, tiers=(drafter,)),
        "eagle": replace(adaptive, budget=24, tiers=(replace(drafter, gather=6, candidates=3),)),
        "eagle+": Plan(
            stores=STORES_TOGETHER, budget=24, merge=True, adapt=True, tiers=(replace(drafter, candidates=2),)
        ),
        "hsd": Plan(tiers=(TierPlan(draft="feature", gather=4), TierPlan(draft="small", gather=2))),
        "hsd-residual": Plan(
            rule="residual", tiers=(TierPlan(draft="feature", gather=4), TierPlan(draft="small", gather=2))
        ),
    }


def test_the_shipped_files_say_what_the_named_plans_are() -> None:
    depths = list(zip(map(int, EIGHTH.split()), map(int, QUARTER.split()), strict=True))
    assert len(depths) == 80
    for layers, (eighth, quarter) in enumerate(depths, 1):
        assert {name: Plan.named(name, layers) for name in NAMED} == expected_plans(eighth, quarter)
        # A checkpoint that names its early exit changes layerskip and nothing else.
        changed = {name: Plan.named(name, layers, 3) for name in NAMED}
        assert changed == expected_plans(eighth, quarter) | {
            name: expected_plans(3, 3)[name] for name in ("layerskip", "layerskip+")
        }


def test_every_shipped_file_is_a_named_plan_with_a_comment() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in plans._SHIPPED.iterdir()}
    assert files.keys() == set(NAMED)
    for name, text in files.items():
        comment, _, rest = text.partition("\nrule = ")
        assert comment.startswith("# "), name
        assert all(line.startswith("# ") for line in comment.splitlines())
        assert "#" not in rest
        assert Plan.from_toml(text).to_toml() == f"rule = {rest}"  # written as hierspec would write it


def test_depths_become_layers_of_the_target() -> None:
    deep, shallow = TierPlan(exit_depth=0.5, gather=3), TierPlan(exit_depth=0.5, early_exit=True)
    plan = Plan(tiers=(deep, TierPlan(draft="small"), shallow))
    for layers, early_exit, expected in ((12, None, (7, 6)), (2, None, (2, 1)), (1, None, (1, 1)), (12, 2, (6, 2))):
        fitted = plan.fitted(layers, early_exit)
        upper, lower = expected
        assert fitted == Plan(tiers=(TierPlan(exit_layer=upper, gather=3), plan.tiers[1], TierPlan(exit_layer=lower)))
        assert fitted.fitted(80) is fitted
    assert Plan(tiers=(TierPlan(exit_depth=1.0),)).fitted(30).tiers[0].exit_layer == 30


def test_a_fixed_plan_weighs_nothing() -> None:
    tiers = (TierPlan(draft="small", until="worth", adapt=True), TierPlan(exit_layer=2, until="correction"))
    fixed = Plan(stores=("copy",), adapt=True, tiers=tiers).fixed()
    assert fixed == Plan(stores=("copy",), tiers=(TierPlan(draft="small"), tiers[1]))
    assert not fixed.weighs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("store = []", r"Unknown key 'store' in the plan \(did you mean 'stores'\?\); keys are model, rule, .*tier\."),
        ("tiers = []", r"Unknown key 'tiers' in the plan \(did you mean 'tier'\?\)"),
        ("xyzzy = 1", r"Unknown key 'xyzzy' in the plan; keys are"),
        ("[[tier]]\nexit_layer = 2\n[[tier]]\nexit_layr = 2", r"'exit_layr' in the tier 2 \(did you mean 'exit_layer'"),
        ("[[tier]]\nexit_layer = 2\ntier = 3", "Unknown key 'tier' in the tier 1"),
        ("budget = '8'", "budget in the plan must be a whole number, not '8'"),
        ("budget = 8.0", "budget in the plan must be a whole number, not 8.0"),
        ("budget = true", "budget in the plan must be a whole number, not True"),
        ("merge = 1", "merge in the plan must be true or false, not 1"),
        ("model = 1", "model in the plan must be a string, not 1"),
        ("stores = 'context'", "stores in the plan must be a list of strings, not 'context'"),
        ("stores = ['context', 1]", "stores in the plan must be a list of strings"),
        ("[[tier]]\nexit_layer = '4'", "exit_layer in the tier 1 must be a whole number"),
        ("[[tier]]\ndraft = 4", "draft in the tier 1 must be a string"),
        ("rule = 'coupling'", r"Unknown rule 'coupling' \(did you mean 'coupled'\?\); rules are coupled, residual"),
        ("[tier]\nexit_layer = 4", r"Tiers are written as \[\[tier\]\]"),
        ("tier = 4", r"Tiers are written as \[\[tier\]\]"),
        ("tier = [4]", r"Tiers are written as \[\[tier\]\]"),
        ("[[tier]]", "either exit_layer .* or draft"),
        ("[[tier]]\nexit_layer = 4\ndraft = 'small'", "either exit_layer .* or draft"),
        ("[[tier]]\nexit_layer = 0", "exit_layer must be at least 1, not 0"),
        ("[[tier]]\nexit_depth = 0", "exit_depth must be above 0 and at most 1, not 0.0"),
        ("[[tier]]\nexit_depth = 8", "exit_depth must be above 0 and at most 1, not 8.0"),
        ("[[tier]]\nexit_depth = nan", "exit_depth must be above 0 and at most 1"),
        ("[[tier]]\nexit_depth = '1/8'", "exit_depth in the tier 1 must be a number"),
        ("[[tier]]\nexit_layer = 4\nexit_depth = 0.5", "either exit_layer .* or draft"),
        ("[[tier]]\nexit_layer = 4\nearly_exit = true", "early_exit needs exit_depth beside it"),
        ("[[tier]]\nexit_layer = 4\ngather = 0", "gather must be at least 1, not 0"),
        ("[[tier]]\nexit_layer = 4\nbudget = -1", "budget must be at least 1, not -1"),
        ("[[tier]]\nexit_layer = 4\ncandidates = 0", "candidates must be at least 1, not 0"),
        ("budget = 0", "budget must be at least 1, not 0"),
        ("model = ", "not valid TOML"),
        ("model = 'a'\nmodel = 'b'", "not valid TOML"),
    ],
)
def test_errors(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(HierspecError, match=says) as caught:
        Plan.from_toml(text)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    file = tmp_path / "plan.toml"  # from a file, the file is named too
    file.write_text(text, encoding="utf-8")
    with pytest.raises(HierspecError, match=says) as caught:
        Plan.read(file)
    assert str(file) in str(caught.value)


def test_unknown_plan_names() -> None:
    with pytest.raises(HierspecError, match=r"'hispek' \(did you mean 'hispec'\?\); plans are auto, plain, lookup"):
        Plan.named("hispek", 30)
    with pytest.raises(HierspecError, match=r"'qqq'; plans are .* or give a TOML file"):
        Plan.named("qqq", 30)


def test_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(HierspecError, match="cannot be read"):
            Plan.read(path)
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HierspecError, match=r"binary\.toml cannot be read"):
        Plan.read(file)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=30) | st.sampled_from(["[[tier", "tier.x = 1", "a.b = 2", "[[tier.x]]", "[plan]"]))
def test_strange_text_is_never_a_crash(text: str) -> None:
    try:
        Plan.from_toml(text)
    except HierspecError:
        return
    assert not set(tomllib.loads(text)) - {"model", "rule", "stores", "budget", "merge", "tier"}
