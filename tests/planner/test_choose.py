"""`hierspec plan`: the chosen plan was run, it is stored for auto, and it writes the same text as plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import hierspec
from hierspec import Plan, Sampling
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.core.plan import TierPlan
from hierspec.planner.candidates import candidate_tiers
from hierspec.planner.choose import PlanResult, _best_first, choose
from hierspec.planner.explain import charts, explained, simulated_score
from hierspec.planner.simulation.acceptance import TARGET
from hierspec.prompts import own_prompts
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

PROMPTS = [("a", "hello there"), ("b", "some words, some words, some words"), ("a", "and more")]


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> hierspec.LanguageModel:
    folder = tiny_checkpoint(tmp_path / "model")
    return hierspec.load(folder, pack=tiny_pack(tmp_path / "pack", folder, exits=(2, 3)))


def test_the_best_plan_was_run(model: hierspec.LanguageModel) -> None:
    choice = choose(model, PROMPTS, Sampling(), max_tokens=16, runs=2, seconds=0.2)
    run = [result for result in choice.results if result.measured is not None]
    assert choice.best is run[0]
    assert choice.best.seconds <= 1.03 * choice.fastest.seconds
    assert choice.fastest.seconds == min(result.seconds for result in run)
    assert 2 <= len(run) <= 3  # the best two, and plain if it is not one of them
    assert choice.plain in run
    names = [result.name for result in choice.results]
    assert {"plain", "lookup", "draft", "hsd", "stores and feature"} <= set(names)
    assert len(set(names)) == len(names) == len({result.plan.to_toml() for result in choice.results})
    # Plain decoding is predicted to write one token per pass, and shares of the time add up to 1.
    assert choice.plain.predicted.tokens_per_pass == pytest.approx(1.0)
    for result in choice.results:
        assert sum(result.predicted.shares().values()) == pytest.approx(1.0)
    json.dumps(choice.to_json())
    assert "<svg" in charts(choice)["predicted"]
    drawn = charts(choice)["hierarchy"]
    assert all(tier.name in drawn for tier in choice.best.predicted.stats.tiers)
    draft = next(result for result in choice.results if result.name == "draft")
    target, drafter = simulated_score(draft).tiers
    assert target.block_tokens == pytest.approx(draft.predicted.tokens_per_pass)
    assert 0 <= drafter.accepted <= 1
    assert target.share + drafter.share <= 1
    sentences = explained(choice)
    assert choice.best.name in sentences[0]
    assert any(sentence.startswith("draft feature is ") for sentence in sentences)


def test_the_search_knows_what_exits_share(model: hierspec.LanguageModel) -> None:
    """The target pays less for tokens of its own exits than for those of other drafters."""
    figures = choose(model, PROMPTS[:2], Sampling(), max_tokens=12, runs=1, seconds=0.1).figures
    assert figures.tiers[0].name == TARGET
    exits = [tier.name for tier in figures.tiers if tier.name.startswith("exit")]
    assert set(figures.target.over) == set(exits)
    for name in exits:
        assert figures.target.seconds(8, name) <= figures.target.seconds(8)
    costs = [tier.costs.seconds(1) for tier in figures.tiers[1:]]
    assert costs == sorted(costs, reverse=True)


def test_tiers_that_take_too_much_memory_are_left_out(model: hierspec.LanguageModel) -> None:
    assert len(candidate_tiers(model)) == 4
    assert candidate_tiers(model, max_memory=0) == []
    assert candidate_tiers(model, max_memory=1 << 30) == candidate_tiers(model)


def test_the_command_writes_a_plan_and_auto_is_it(
    model: hierspec.LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"task": task, "turns": [text]}) + "\n" for task, text in PROMPTS))
    pack = str(model.pack.folder) if model.pack is not None else ""
    command = [
        "plan",
        str(model.folder),
        "--pack",
        pack,
        "--prompts",
        str(prompts),
        "--limit",
        "3",
        "--max-tokens",
        "16",
    ]
    command += [
        "--runs",
        "1",
        "--seconds",
        "0.2",
        "--temperature",
        "0.8",
        "--output",
        str(tmp_path / "out" / "my.toml"),
    ]
    assert main([*command, "--explain", "--save", "--results", str(tmp_path / "out" / "plan.json")]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "out" / "plan.json").read_text())
    written = Plan.read(tmp_path / "out" / "my.toml")
    assert "measured" in (tmp_path / "out" / "my.toml").read_text().splitlines()[1]
    assert (tmp_path / "out" / "my-predicted.svg").exists()
    assert (tmp_path / "out" / "my-hierarchy.svg").exists()
    assert model.plan("auto") == written
    assert document["best"] == document["plans"][0]["name"]
    options = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
    assert model.generate("hello", **options).tokens == model.generate("hello", plan="plain", **options).tokens


def test_answers_that_are_too_short_are_refused(model: hierspec.LanguageModel) -> None:
    with pytest.raises(HierspecError, match="No answer to these prompts has 4 tokens"):
        choose(model, PROMPTS, Sampling(), max_tokens=3, runs=1, seconds=0.1)


def test_wrong_numbers_are_refused(model: hierspec.LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(model.folder), "--runs", "0"]) != 0
    assert "--runs, --limit and --seconds must be more than 0" in capsys.readouterr().err


def test_our_own_prompts_are_six_of_each_family() -> None:
    prompts = own_prompts()
    counts = {task: sum(prompt.task == task for prompt in prompts) for task in {prompt.task for prompt in prompts}}
    assert len(counts) == 6
    assert set(counts.values()) == {6}
    assert len({prompt.turns for prompt in prompts}) == 36
    assert any(len(prompt.turns) > 1 for prompt in prompts)


def test_a_rule_that_samples_needs_recorded_distributions(model: hierspec.LanguageModel) -> None:
    from hierspec.planner.simulation.prediction import predict
    from hierspec.planner.simulation.traces import Trace

    plan = Plan(rule="residual", tiers=(TierPlan(draft="small"),))
    with pytest.raises(HierspecError, match="record distributions to predict residual"):
        predict(model, plan, [Trace("a", (1,), (2, 3))], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_rules_that_sample_are_planned(tmp_path: Path, rule: str) -> None:
    """With draft models that are given by folder."""
    model = hierspec.load(tiny_checkpoint(tmp_path / "model"))
    same = tiny_checkpoint(tmp_path / "same")  # the target itself: its drafts are all accepted
    other = tiny_checkpoint(tmp_path / "other", layers=1, seed=3)
    sampling = Sampling(temperature=0.9, seed=1)
    options = {"max_tokens": 12, "runs": 1, "seconds": 0.1, "drafts": [str(same), str(other)], "rule": rule}
    choice = choose(model, PROMPTS[:2], sampling, **options)  # type: ignore[arg-type]
    assert all(result.plan.rule == rule for result in choice.results if result.plan != Plan())
    by_name = {name: key for key, name in choice.names.items()}
    assert choice.acceptance.count(by_name["draft same"]).rate == pytest.approx(1.0, abs=0.02)  # of 256 of 320 tokens
    assert 0 < choice.acceptance.count(by_name["draft other"]).rate < 0.9
    assert any(result.name.startswith("ladder ") and str(other) in result.name for result in choice.results)
    memory = {result.name: result.memory for result in choice.results}
    assert memory["plain"] == 0
    assert all(size for name, size in memory.items() if str(other) in name)


def test_drafts_that_do_not_fit_are_refused_by_name_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hierspec.cli import options

    folder = tiny_checkpoint(tmp_path / "model")
    wrong = tiny_checkpoint(tmp_path / "wrong", vocabulary=336)
    monkeypatch.setattr(options, "load_model", lambda *_: pytest.fail("the model was loaded"))
    for drafts, sentence in (
        (str(wrong), f"The draft {wrong} has another vocabulary than {folder}"),
        ("nowhere", "There is no model at nowhere"),
        (f"{folder},{folder}", f"The draft {folder} is named twice"),
    ):
        assert main(["plan", str(folder), "--drafts", drafts]) != 0
        assert sentence in capsys.readouterr().err


def test_a_draft_of_a_pack_needs_the_pack(tmp_path: Path) -> None:
    bare = hierspec.load(tiny_checkpoint(tmp_path / "bare"))
    with pytest.raises(HierspecError, match="The draft feature is of a pack"):
        candidate_tiers(bare, drafts=["feature"])
    # Nothing was trained for it: its exits are tried as they are.
    assert [tier.exit_layer for tier in candidate_tiers(bare)] == [1, 2]


def result(name: str, measured: float | None, memory: int | None, tiers: int = 0) -> PlanResult:
    made = SimpleNamespace(seconds_per_token=9.0)
    plan = Plan(tiers=tuple(TierPlan(exit_layer=1 + number) for number in reversed(range(tiers))))
    return PlanResult(name, plan, made, measured, memory=memory)


def test_of_plans_that_are_as_fast_the_simplest_is_best() -> None:
    """Tiers that never draft make a plan no slower, and it may come first by chance."""
    found = [result("many", 1.0, 900, 3), result("simple", 1.02, 0), result("slow", 1.05, 0), result("guess", None, 0)]
    assert [each.name for each in _best_first(found)] == ["simple", "many", "slow", "guess"]
    apart = [result("many", 1.0, 900, 3), result("slow", 1.05, 0)]
    assert [each.name for each in _best_first(apart)] == ["many", "slow"]
    alike = [result("unknown", 1.0, None), result("two", 1.01, 5, 2), result("one", 1.02, 5, 1)]
    assert _best_first(alike)[0].name == "one"
