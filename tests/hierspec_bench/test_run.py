"""The bench: reads prompts, runs plans interleaved, compares before it counts, ends with the document."""

import json

import pytest

import hierspec
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.prompts import BenchPrompt, read_prompts, spread
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec_bench.document import document
from hierspec_bench.run import run_plans

PROMPTS = [BenchPrompt("one", ("abc abc",)), BenchPrompt("two", ("hello", "again")), BenchPrompt("one", ("xyz",))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", "llama"))


def test_the_document_has_what_the_design_promises(model):
    plans = {"lookup": model.plan("lookup"), "layerskip": model.plan("layerskip")}
    found = run_plans(model, PROMPTS, plans, Sampling(max_tokens=12), batches=(2,))
    result = json.loads(json.dumps(document(found, [], {"command": "x", "model": "tiny", "dtype": "float32"})))
    assert set(result) >= {"machine", "command", "model", "dtype", "threads", "plans", "peers"}
    assert list(result["plans"]) == [
        *("plain", "plain, batch of 2", "lookup", "lookup, batch of 2", "layerskip", "layerskip, batch of 2")
    ]
    for plan in result["plans"].values():
        assert plan["prompts"] == 3 == plan["identical"] + plan["ties"]
        assert set(plan["tasks"]) == {"one", "two"}
        assert plan["tasks"]["one"]["prompts"] == 2
        assert plan["speedup_interval"][0] <= plan["speedup"] <= plan["speedup_interval"][1] or plan["speedup"] == 1
    assert result["plans"]["plain"]["tokens_per_pass"] == 1
    assert result["plans"]["plain"]["speedup"] == 1


def test_a_plan_that_writes_something_else_is_seen(model):
    """A residual plan samples other tokens than plain decoding: the bench must not call that identical."""
    other = Plan(rule="residual", tiers=(TierPlan(exit_layer=2),))
    found = run_plans(model, PROMPTS, {"other": other}, Sampling(max_tokens=12, temperature=1.0))
    differences = [result.difference for result in found["other"]]
    assert any(difference is not None and not difference.is_tie for difference in differences)


def test_prompts_are_spread_over_the_tasks():
    many = [BenchPrompt(task, (str(i),)) for task in "abc" for i in range(10)]
    chosen = spread(many, 7)
    assert [prompt.task for prompt in chosen] == list("aaabbcc")
    assert spread(many, 100) == many
    assert spread(many, 2) == [many[0], many[10]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("not json", "line 1"),
        ('{"task": "x"}', "line 1"),
        ('{"turns": ["a"]}\n{"turns": []}', "line 2"),
        ('{"turns": "abc"}', "line 1"),
        ("[1]", "line 1"),
    ],
)
def test_bad_prompt_files_are_told(tmp_path, text, told):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(hierspec.HierspecError, match=told):
        read_prompts(path)


def test_spec_bench_lines_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "qa", "turns": ["a", "b"], "question_id": 3}\n\n{"turns": ["c"]}\n')
    assert read_prompts(path) == [BenchPrompt("qa", ("a", "b")), BenchPrompt("all", ("c",))]
