"""The default model enlarged writes what the default model writes, with as many passes, drafts included."""

import pytest

import hierspec
from hierspec import Plan, TierPlan

pytestmark = pytest.mark.model

LARGER = "hidden=640,heads=16,kv_heads=4,head_size=128,intermediate=1600,layers=32"
PLANS = [Plan(), Plan(tiers=(TierPlan(draft="feature", gather=4, weights="auto"),))]


def test_the_default_model_enlarged_is_the_same_model():
    small = hierspec.load(dtype="float32", device="cpu", keep_learnt=False)
    large = hierspec.load(dtype="float32", device="cpu", keep_learnt=False, enlarged=LARGER)
    assert large.name == f"SmolLM2-135M-Instruct enlarged to {LARGER}"
    assert large.config.layers == 32
    prompt = "Name three rivers in Europe."
    for plan in PLANS:
        answers = [model.generate(prompt, plan=plan, max_tokens=24) for model in (small, large)]
        assert answers[0].tokens == answers[1].tokens
        assert answers[0].stats.passes == answers[1].stats.passes
