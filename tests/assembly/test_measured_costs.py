"""What passes cost here: the formula behind scripted passes comes out, and measuring leaves nothing behind."""

from __future__ import annotations

from typing import ClassVar

import pytest

import hierspec
from hierspec.assembly import measured_costs
from hierspec.assembly.measured_costs import measure, measure_prefill
from hierspec.core.plan import TierPlan
from hierspec.pacing.costs import Load
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

FIXED, ROW, ATTENTION = 1.0, 0.1, 0.001  # seconds of a pass, of a row, and of a row for each token of its context


class Scripted:
    """Passes that take what a formula says."""

    contexts: ClassVar[list[int]] = []

    def __init__(self, scorer, context, computed_layers=0, compute=True):
        self.context = len(context)
        Scripted.contexts.append(self.context)

    def run(self, tokens):
        return [FIXED, ROW * len(tokens), ATTENTION * len(tokens) * self.context]

    def prefill(self, tokens):
        return tokens * (ROW + ATTENTION * (self.context - tokens / 2))

    def close(self):
        pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "target", "llama", layers=4)
    tiny_pack(root / "pack", root / "target", exits=(2,))
    return root


@pytest.fixture
def model(folders):
    return hierspec.load(folders / "target", pack=folders / "pack", backend="torch")


def test_costs_are_measured_after_two_contexts(model, monkeypatch):
    monkeypatch.setattr(measured_costs, "PassTimer", Scripted)
    Scripted.contexts = []
    target = model.assembler.target
    costs = measure(target)
    assert costs.context == Scripted.contexts[0] < Scripted.contexts[1] < model.config.context
    for context in (costs.context, 300, 5000):
        for rows in (1, 5, 32):
            taken = FIXED + rows * (ROW + ATTENTION * context)
            assert costs.under(Load(1, context)).seconds(rows) == pytest.approx(taken)
    prefill = measure_prefill(target)
    assert prefill.each == pytest.approx(ROW)
    assert prefill.growth == pytest.approx(ATTENTION)


def test_where_there_is_no_room_for_a_long_context_one_is_enough(folders, monkeypatch):
    monkeypatch.setattr(measured_costs, "PassTimer", Scripted)
    small = hierspec.load(folders / "target", pack="none", backend="torch", kv_memory=1 << 19)
    Scripted.contexts = []
    costs = measure(small.assembler.target)
    assert len(Scripted.contexts) == 1
    assert costs.under(Load(1, 10_000)).seconds(3) == costs.seconds(3) == pytest.approx(1.3 + 3 * 0.128)


@pytest.mark.parametrize("tier", [None, TierPlan(exit_layer=2), TierPlan(draft="feature"), TierPlan(draft="small")])
def test_measuring_leaves_nothing_behind(model, tier):
    """It never computes the long context, and nobody may read what it left out."""
    plain = model.generate("ab ab", plan="plain", max_tokens=12).tokens
    scorer = model.assembler.target if tier is None else model.assembler.tier_scorer(tier)
    before = model.decoder.layer_rows
    costs, prefill = measure(scorer), measure_prefill(scorer)
    assert model.decoder.layer_rows - before < 20_000
    assert costs.growth[-1] > 0
    assert prefill.each >= 0
    assert all(pool.staircases() == [] for pool in scorer.pools)
    assert model.generate("ab ab", plan="plain", max_tokens=12).tokens == plain
