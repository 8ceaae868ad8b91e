"""Replay against the model: recorded answers through stores give the same counters as real runs."""

import json

import pytest

import hierspec
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Tier
from hierspec.core.plan import Plan
from hierspec.fill_history import fill_history
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.costs import Costs
from hierspec.pacing.pace import AdaptivePace
from hierspec.planner.simulation.replay import Record, read_records, replay, write_records
from hierspec.planner.simulation.trace_scorer import TraceScorer
from hierspec.stores.context import ContextStore
from hierspec.stores.history import HistoryStore
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeStore, random_trees, scripted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("replay") / "tiny", "llama"))


def test_counters_are_those_of_the_model_itself(model):
    prompts = [[1, 2, 3, 1, 2], [7, 8, 9, 7, 8, 9], [5] * 9]
    plan = Plan(stores=("context",), budget=9)
    tier = Tier(TraceScorer("target", model.config.vocabulary), 1, (ContextStore(),), 9)
    for prompt in prompts:
        length = len(model.generate(prompt, plan=plan, max_tokens=40).tokens)
        real = model.generate(prompt, plan=plan, max_tokens=length)  # a record has no limit but its length
        [replayed] = replay([Record("t", tuple(prompt), real.tokens)], tier).values()
        for name in ("calls", "written", "proposed", "accepted", "accepted_at"):
            assert getattr(real.stats.tiers[0], name) == getattr(replayed.tiers[0], name)


def test_a_store_that_knows_the_answer_is_always_right():
    text = list(range(100, 140))
    store = FakeStore("knows", scripted([1, 2, *text]))
    [stats] = replay([Record("t", (1, 2), tuple(text))], Tier(TraceScorer("target", 200), 1, (store,), 9)).values()
    assert stats.tiers[0].calls == 4  # ten tokens per pass
    wrong = FakeStore("wrong", random_trees(50, silence=0))
    [stats] = replay([Record("t", (1, 2), tuple(text))], Tier(TraceScorer("target", 200), 1, (wrong,), 9)).values()
    assert stats.tiers[0].calls == len(text)


def test_tasks_are_counted_apart_and_history_helps_the_second_time():
    answer = tuple(range(20, 60))
    records = [Record("one", (1, 2, 3), answer), Record("two", (4, 5, 6), answer)]
    costs = Costs((1, 32), (1.0, 1.1))
    pace = AdaptivePace(costs, Appraiser(costs))
    tier = Tier(TraceScorer("target", 99), 1, (HistoryStore(),), 7, pace=pace)
    by_task = replay(records, tier)
    assert by_task["one"].passes == len(answer)
    assert by_task["two"].passes < len(answer) / 4


def test_records_survive_the_file(tmp_path):
    records = [Record("a", (1, 2), (3,)), Record("b", (4,), ())]
    write_records(tmp_path / "r.jsonl", records)
    assert read_records(tmp_path / "r.jsonl") == records
    (tmp_path / "bad.jsonl").write_text('{"prompt": [], "output": [1]}\n')
    with pytest.raises(HierspecError, match="not a file of records"):
        read_records(tmp_path / "bad.jsonl")


def test_filling_the_history_resumes_where_it_stopped(model, tmp_path):
    prompts = [["hello there"], ["what is it", "and then"], ["more"]]
    with HistoryStore(tmp_path / "history.sqlite", vocabulary_hash="x") as store:
        assert fill_history(model, store, prompts[:2], max_tokens=12, batch=1) == 3
        assert fill_history(model, store, prompts, max_tokens=12, batch=2) == 1
        assert fill_history(model, store, prompts, max_tokens=12) == 0
        assert store.info()["documents"] >= 2


def test_the_store_command(tmp_path, capsys):
    folder = str(tiny_checkpoint(tmp_path / "tiny", "llama"))
    home = str(tmp_path / "stores")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"task": "qa", "turns": ["the cat sat on"]}\n{"task": "qa", "turns": ["why"]}\n')
    at = ["--model", folder, "--stores", home]

    def out(*arguments: str) -> str:
        assert main([*arguments]) == 0
        return capsys.readouterr().out

    assert main(["store", "replay", str(tmp_path / "none.jsonl"), *at]) == 2
    out("store", "build", "corpus", str(text), *at)
    assert main(["store", "build", "frequent", folder, "--stores", home]) == 2  # it is made from a history
    assert "store build history" in capsys.readouterr().err
    out("store", "build", "history", "--prompts", str(prompts), "--max-tokens", "16", *at)
    out("store", "build", "frequent", folder, "--stores", home)
    info = json.loads(out("store", "info", *at))
    assert info["corpus"]["tokens"] > 1000
    assert info["history"]["documents"] == 2
    assert info["frequent"]["size"] == 5
    record = str(tmp_path / "record.jsonl")
    plans = ["--plans", "hd+,hd,rest,lookahead", "--max-tokens", "16", "--batch", "2,3", "--record", record, "--json"]
    document = json.loads(out("bench", folder, "--stores", home, "--prompts", str(prompts), *plans))
    assert len(document["plans"]) == 15
    assert all(plan["identical"] == 2 for plan in document["plans"].values())
    replayed = json.loads(out("store", "replay", record, "--use", "context,history,corpus?", *at))
    assert replayed["tokens_per_pass"] > 1
    assert set(replayed["tasks"]) == {"qa"}
    out("store", "drop", "frequent", folder, "--stores", home)
    out("store", "drop", "history", *at)
    out("store", "drop", "corpus", *at)
    assert main(["store", "drop", "corpus", *at]) == 2
    assert main(["generate", folder, "--stores", home, "-p", "x", "--plan", "rest"]) == 2
    assert "hierspec store build corpus" in capsys.readouterr().err


def test_what_was_built_helps_everyone_and_measuring_leaves_it_alone(model, tmp_path):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    plan = Plan(stores=("history",), budget=9)
    folder, home = model.folder, tmp_path / "stores"
    with hierspec.load(folder, stores=home) as loaded:
        with HistoryStore(loaded.home.history, vocabulary_hash=loaded.home.vocabulary_hash) as store:
            answer = loaded.generate(prompt, plan="plain", max_tokens=40).tokens
            store.add([*prompt, *answer], "shared")
        measured = loaded.apart()
        helped = measured.generate(prompt, plan=plan, max_tokens=40, namespace="ann")
        assert helped.tokens == answer
        assert helped.stats.passes < len(answer) / 2
        measured.generate(prompt[::-1], plan=plan, max_tokens=40)
        with HistoryStore(loaded.home.history, vocabulary_hash=loaded.home.vocabulary_hash) as store:
            assert store.info()["documents"] == 1
        loaded.generate(prompt[::-1], plan=plan, max_tokens=40)
    with HistoryStore(loaded.home.history, vocabulary_hash=loaded.home.vocabulary_hash) as store:
        assert store.info()["documents"] == 2  # written when the model was closed


def test_namespaces_do_not_help_each_other(model):
    apart = model.apart()
    plan = Plan(stores=("history",), budget=9)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    first = apart.generate(prompt, plan=plan, max_tokens=40, namespace="ann")
    stranger = apart.generate(prompt, plan=plan, max_tokens=40, namespace="bob")
    again = apart.generate(prompt, plan=plan, max_tokens=40, namespace="ann")
    assert first.tokens == stranger.tokens == again.tokens
    assert sum(stranger.stats.tiers[0].proposed.values()) == 0
    assert again.stats.passes < first.stats.passes
