"""Phases and the long comparison: the same texts for all plans, and what is not the same is seen."""

import json
from dataclasses import asdict

import equality
import phases
import pytest
from equality import BATCHES, PLAIN_BATCH, TEMPERATURES, Equality, compare_many
from phases import Phase, PhaseRun, shifting_load, shifting_text

import hierspec
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.prompts import BenchPrompt
from hierspec.testing.checkpoints import tiny_checkpoint

PROMPTS = [BenchPrompt("one", ("abc abc",)), BenchPrompt("two", ("hello", "again")), BenchPrompt("one", ("xyz",))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("phases") / "tiny", "llama", context=4096)


@pytest.fixture(scope="module")
def model(folder):
    return hierspec.load(folder)


def test_the_best_fixed_plan_is_named_and_auto_measured_by_it():
    phase = Phase("code", 10, {"plain": 4.0, "auto": 2.1, "lookup": 2.0}, {"plain": 3.0, "auto": 1.5, "lookup": 1.2})
    found = phase.to_json()
    assert found["best_fixed"] == "lookup"
    assert found["auto_over_best"] == 1.05
    assert found["decode_auto_over_best"] == 1.25
    assert found["auto_over_plain"] == 0.525


def test_all_plans_go_through_the_same_phases(model):
    run = PhaseRun(model, {"lookup": model.plan("lookup")}, Sampling(max_tokens=8, seed=0))
    found = shifting_text(run, [("a b a b", "c", "a b"), ("d", "e", "f")])
    found += shifting_load(run, PROMPTS, loads=(1, 2, 1))
    assert [phase.name for phase in found] == [
        *("code", "prose", "code again", "1 at once", "2 at once", "1 at once, again")
    ]
    for phase in found:
        assert set(phase.seconds) == {"plain", "auto", "lookup"}
        assert phase.tokens > 0
        assert not any(phase.differences.values())
        json.dumps(phase.to_json())


def test_a_text_that_differs_is_seen(model, monkeypatch):
    run = PhaseRun(model, {}, Sampling(max_tokens=8, seed=0))
    honest = hierspec.LanguageModel.generate_many

    def other(self, prompts, *, plan, sampling):
        return honest(self, prompts, plan=plan, sampling=Sampling(max_tokens=8, temperature=5.0 * bool(plan.stores)))

    monkeypatch.setattr(phases.LanguageModel, "generate_many", other)
    [phase] = shifting_load(run, PROMPTS, loads=(2,))
    assert phase.differences["auto"]
    assert not phase.differences["plain"]


def test_tokens_are_compared_in_all_ways(model):
    kept = []
    found = compare_many(
        model, model.plan("lookup"), PROMPTS, 600, 8, keep=lambda compared: kept.append(asdict(compared))
    )
    assert found.tokens >= 600 > kept[-2]["tokens"]
    assert set(found.by_temperature) == {str(temperature) for temperature in TEMPERATURES}
    assert set(found.by_batch) == {str(batch) for batch in BATCHES}
    assert sum(found.by_batch.values()) == found.tokens == sum(found.by_temperature.values())
    assert found.differences == []
    assert found.answers == PLAIN_BATCH * found.groups
    # A run that goes on from the first group ends where the whole one did.
    again = compare_many(model, model.plan("lookup"), PROMPTS, 600, 8, Equality.from_json(kept[0]))
    assert (again.tokens, again.answers, again.by_batch) == (found.tokens, found.answers, found.by_batch)


def test_what_is_not_the_same_is_counted(model, monkeypatch):
    honest = equality._written

    def wrong(model, plan, cases):
        found = honest(model, plan, cases)
        if plan.stores:
            found[0][3] += 1
        return found

    monkeypatch.setattr(equality, "_written", wrong)
    found = compare_many(model, model.plan("lookup"), PROMPTS, 1, 8)
    assert len(found.differences) == PLAIN_BATCH // BATCHES[0]
    assert {one["position"] for one in found.differences} == {3}
    with pytest.raises(HierspecError, match="same distribution"):
        compare_many(model, Plan(rule="residual", tiers=(TierPlan(exit_layer=2),)), PROMPTS, 1)


def test_the_scripts(folder, tmp_path, capsys):
    output = tmp_path / "equality.json"
    command = [str(folder), "--plans", "lookup", "--max-tokens", "6", "--json", "--output", str(output)]
    assert equality.main([*command, "--tokens", "40"]) == 0
    first = json.loads(output.read_text())
    assert first["tokens"] >= 40
    assert equality.main([*command, "--tokens", str(first["tokens"] + 1)]) == 0
    assert json.loads(output.read_text())["groups"] == first["groups"] + 1
    assert equality.main([*command, "--max-tokens", "7", "--tokens", "1"]) != 0
    assert equality.main([*command, "--tokens", "0"]) != 0
    assert "another model, plan or setting" in capsys.readouterr().err
    assert phases.main([str(folder), "--plans", "lookup", "--limit", "1", "--max-tokens", "4"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [phase["phase"] for phase in result["text"]] == ["code", "prose", "code again"]
    assert len(result["load"]) == 4
