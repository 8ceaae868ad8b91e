"""Stores in every order, and what asking them in turn saves: on a tiny model and on recorded answers."""

import json

import store_access
import store_orders

from hierspec.core.plan import Plan
from hierspec.planner.simulation.replay import Record, write_records
from hierspec.testing.checkpoints import tiny_checkpoint


def test_every_subset_in_every_order():
    plan = Plan(stores=("a", "b?", "c"), budget=9, merge=True)
    plans = store_orders.ordered_plans(plan, plan.stores)
    assert len(plans) == 3 + 6 + 6
    assert plans["c > b"] == Plan(stores=("c", "b?"), budget=9, merge=True)
    assert list(store_orders.ordered_plans(plan, plan.stores, True)) == [
        *("a", "b", "c", "a > b", "a > c", "b > c", "a > b > c")
    ]


def test_orders_run_with_the_model(tmp_path, capsys):
    folder, prompts = tiny_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"task": "qa", "turns": ["the cat sat on the cat"]}\n')
    options = ["--stores", str(tmp_path / "stores"), "--prompts", str(prompts), "--max-tokens", "12"]
    assert store_orders.main([str(folder), "--like", "hd+", *options]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(document["plans"]) == {"plain", "context", "history", "context > history", "history > context"}
    assert all(figures["identical"] == 1 for figures in document["plans"].values())


def test_access_in_turn_changes_no_draft_of_a_fixed_plan(tmp_path, capsys):
    folder, record = tiny_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "answers.jsonl"
    write_records(record, [Record("qa", (1, 2, 3, n, 2, 3), (4, 5, 1, 2, 3, 4, 5, 1, 2)) for n in range(4)])
    options = ["--stores", str(tmp_path / "stores"), "--repeats", "1"]
    assert store_access.main([str(folder), str(record), *options]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["setting"] for row in document["settings"]] == [name for name, _, _ in store_access.settings()]
    for row in document["settings"]:
        if row["setting"].startswith("fixed"):
            assert row["all"]["tokens_per_pass"] == row["in turn"]["tokens_per_pass"]
            assert row["all"]["nodes_per_pass"] == row["in turn"]["nodes_per_pass"]
