"""`hierspec plan` writes only where it is told; what it saved is shown and forgotten. `hierspec cache`."""

import json
import os
import time
from types import SimpleNamespace

import pytest

from hierspec.assembly.auto import AutoPlan
from hierspec.cli.main import main
from hierspec.core.plan import Plan, TierPlan


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HIERSPEC_CACHE", str(folder))
    monkeypatch.setattr("hierspec.cache._kernels", lambda: iter(()))  # not in the cache: those of this checkout
    return folder


@pytest.fixture
def chosen(loaded, tiny_model, cache, monkeypatch, tmp_path):
    """A search that takes no time, in an empty folder."""
    # A model finds its plan in the cache folder of the time when it was loaded.
    monkeypatch.setattr(tiny_model, "_auto", AutoPlan(tiny_model.about, tiny_model.plan("auto")))
    best, plain = (
        SimpleNamespace(
            name=name,
            plan=plan,
            measured=seconds,
            predicted=SimpleNamespace(seconds_per_token=seconds, tokens_per_pass=1.0),
            memory=2_000_000,
        )
        for name, plan, seconds in (
            ("the best", Plan(tiers=(TierPlan(exit_layer=2),)), 0.001),
            ("plain", Plan(), 0.002),
        )
    )
    choice = SimpleNamespace(best=best, plain=plain, results=[best, plain], to_json=lambda: {"best": "the best"})
    tier = SimpleNamespace(tier="exit 2", seconds=1.0, passes=1.0, block_tokens=1.0, accepted=0.5, share=0.5)
    monkeypatch.setattr("hierspec.planner.choose.choose", lambda *a: choice)
    monkeypatch.setattr("hierspec.planner.explain.simulated_score", lambda best: SimpleNamespace(tiers=[tier]))
    monkeypatch.setattr("hierspec.planner.explain.explained", lambda choice: ["exit 2 is in: it is cheap."])
    monkeypatch.setattr("hierspec.planner.explain.charts", lambda choice: {"predicted": "<svg/>"})
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_search_writes_nothing_unless_told(chosen, cache, tiny_model, capsys):
    before = tiny_model.plan("auto")
    assert main(["plan"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["saved"] is False
    assert "Nothing was saved: --save makes this plan auto, --output FILE writes it" in err
    assert list(chosen.iterdir()) == []
    assert not (cache / "plans").exists()
    assert tiny_model.plan("auto") == before
    assert main(["plan", "--output", "mine.toml"]) == 0
    assert sorted(path.name for path in chosen.iterdir()) == ["mine-predicted.svg", "mine.toml"]
    assert Plan.read(chosen / "mine.toml") == Plan(tiers=(TierPlan(exit_layer=2),))
    assert tiny_model.plan("auto") == before


def test_a_plan_is_saved_shown_and_forgotten(chosen, tiny_model, capsys):
    before = tiny_model.plan("auto")
    assert main(["plan", "--save"]) == 0
    assert "the plan auto is now this one" in capsys.readouterr().err
    assert list(chosen.iterdir()) == []
    assert tiny_model.plan("auto") == Plan(tiers=(TierPlan(exit_layer=2),))
    assert main(["plan", "--show"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["auto"] == "saved"
    assert Plan.from_toml(document["plan"]) == tiny_model.plan("auto") == Plan.read(document["file"])
    assert "plan auto, as hierspec plan --save chose it:\n  " in err
    assert main(["generate", "-p", "abc", "--max-tokens", "3", "--verbose"]) == 0
    assert "plan auto, as hierspec plan --save chose it:" in capsys.readouterr().err
    assert main(["plan", "--forget"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["forgotten"] is True
    assert tiny_model.plan("auto") == before
    assert main(["plan", "--forget"]) == 0
    assert "There was no saved plan" in capsys.readouterr().err
    assert main(["generate", "-p", "abc", "--max-tokens", "3", "--verbose"]) == 0
    assert "plan auto, as it is without hierspec plan --save:" in capsys.readouterr().err


def test_the_cache_is_listed_and_pruned_only_with_yes(cache, terminal):
    for name, size, days in (("converted/old-model", 3000, 40), ("packed/new-model.weights", 5000, 1)):
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
        then = time.time() - days * 86400
        os.utime(path, (then, then))
    assert main(["cache"]) == 0
    out = terminal.readouterr().out
    assert "7.8 KB" in out
    assert [line.split()[:2] for line in out.splitlines()[3:]] == [["old-model", "converted"], ["new-model", "packed"]]
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert main(["cache", "prune", "--older-than", "30d"]) == 0
    assert "2.9 KB would be deleted; --yes deletes it" in terminal.readouterr().out
    assert (cache / "converted" / "old-model").exists()
    assert main(["cache", "prune", "--older-than", "30d", "--yes"]) == 0
    assert "2.9 KB deleted" in terminal.readouterr().out
    assert not (cache / "converted" / "old-model").exists()
    assert main(["cache", "prune", "--kind", "packed", "--keep-size", "10K", "--yes", "--json"]) == 0
    assert json.loads(terminal.readouterr().out)["bytes"] == 0
    assert main(["cache", "prune", "--model", "new*", "--yes", "--json"]) == 0
    assert json.loads(terminal.readouterr().out)["bytes"] == 5000
    assert not (cache / "packed" / "new-model.weights").exists()
