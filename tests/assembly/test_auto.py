"""The plan `auto`: what was found by measuring, else what there is for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

import hierspec
from hierspec import Plan, TierPlan
from hierspec.assembly.auto import AUTO, save_plan, saved_plan
from hierspec.cache import entries
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))


def test_without_a_pack_stores_guess(tmp_path: Path) -> None:
    model = hierspec.load(tiny_checkpoint(tmp_path / "model"))
    plan = model.plan(AUTO)
    assert (plan.stores, plan.tiers) == (("context", "history", "corpus?"), ())
    assert plan.adapt
    assert model.generate("hello", max_tokens=12).tokens == model.generate("hello", plan="plain", max_tokens=12).tokens


def test_a_packs_drafter_stands_beside_the_stores(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    model = hierspec.load(folder, pack=tiny_pack(tmp_path / "pack", folder))
    [tier] = model.plan(AUTO).tiers
    assert (tier.draft, tier.until) == ("feature", "worth")
    for temperature in (0.0, 0.8):
        options = {"max_tokens": 24, "temperature": temperature, "seed": 3}
        assert (
            model.generate("hello there", **options).tokens
            == model.generate("hello there", plan="plain", **options).tokens
        )


def test_what_was_found_for_this_machine_comes_first(tmp_path: Path) -> None:
    model = hierspec.load(tiny_checkpoint(tmp_path / "model"))
    other = hierspec.load(tiny_checkpoint(tmp_path / "other"))
    found = Plan(tiers=(TierPlan(exit_layer=2, gather=3),))
    path = save_plan(found, model.about, "made by a test")
    assert "# made by a test\n" in path.read_text()
    assert [(entry.path, entry.model) for entry in entries() if entry.kind == "plans"] == [(path, "model")]
    assert model.plan(AUTO) == found
    assert other.plan(AUTO) != found
    path.write_text("gather = [", encoding="utf-8")  # damaged: as if there were none
    assert saved_plan(model.about) is None
    assert model.plan(AUTO) == other.plan(AUTO)
