"""The shipped feature drafter: what it writes in one call is what it writes token by token."""

import pytest

from hierspec import Plan, Sampling, TierPlan

pytestmark = pytest.mark.model

PROMPTS = ["Name three rivers in Europe and the countries they run through.", "What is 17 plus 25? Explain each step."]
PLANS = [Plan(tiers=(TierPlan(draft="feature", gather=5, candidates=2),), budget=12), "draft", "auto"]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_drafts_of_one_call_are_those_of_many(default_model, temperature):
    sampling = Sampling(max_tokens=32, temperature=temperature, seed=5)
    plain = [default_model.generate(prompt, plan="plain", sampling=sampling).tokens for prompt in PROMPTS]
    scorer = default_model.assembler.catalogue.feature("feature")
    writer, calls = scorer.writer, {}
    assert writer is not None
    for plan in PLANS:
        found = []
        for each in (writer, None):
            own = default_model.apart()
            default_model.forget()
            object.__setattr__(scorer, "writer", each)
            try:
                answers = [own.generate(prompt, plan=plan, sampling=sampling) for prompt in PROMPTS]
            finally:
                object.__setattr__(scorer, "writer", writer)
            assert [answer.tokens for answer in answers] == plain
            tiers = [tier.to_json() for answer in answers for tier in answer.stats.tiers]
            found.append([{**tier, "seconds": 0, "store_seconds": 0} for tier in tiers])
        assert found[0] == found[1], plan
        calls[str(plan)] = sum(tier["calls"] for tier in found[0] if tier["tier"] == "feature drafter")
    assert calls[str(PLANS[0])] > 40
