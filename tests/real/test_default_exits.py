"""The shipped early-exit model: exits of every kind, in chains and trees, alone and batched, keep its text."""

import pytest

import hierspec
from hierspec import Plan, Sampling, TierPlan
from hierspec.checkpoints.packs import SHIPPED

pytestmark = pytest.mark.model

PROMPTS = [
    "Translate German to English: Die alte Brücke wurde im Frühling gesperrt.",
    "What is 17 plus 25? Explain each step.",
    "Name three rivers in Europe and the countries they run through.",
    "Summarize: The town built a new school. The old school was too small. Parents were glad about the new school.",
]
TREE = Plan(
    budget=16,
    tiers=(TierPlan(exit_layer=8, gather=4, candidates=2), TierPlan(exit_layer=4, gather=2, candidates=3)),
)
# Exits with an adapter, with a separate norm and with neither; one of them asks a store.
MIXED = Plan(
    tiers=(
        TierPlan(exit_layer=12, gather=4),
        TierPlan(exit_layer=8, gather=3, stores=("context",)),
        TierPlan(exit_layer=3, gather=2),
    )
)


@pytest.fixture(scope="module")
def variant():
    return hierspec.load("default-ee")


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_exits_write_what_the_variant_writes(variant, default_model, temperature):
    sampling = Sampling(max_tokens=8, temperature=temperature, seed=5)
    answers = [variant.generate(prompt, plan="plain", sampling=sampling).tokens for prompt in PROMPTS]
    for plan in ("layerskip+", "hispec", TREE, MIXED):
        alone = [variant.generate(prompt, plan=plan, sampling=sampling).tokens for prompt in PROMPTS]
        assert alone == answers, plan
        if plan in (TREE, MIXED):  # the other two are what they consist of
            batch = variant.generate_many(PROMPTS, plan=plan, sampling=sampling)
            assert [answer.tokens for answer in batch] == answers, plan
    # It is another model than the default one.
    assert [default_model.generate(prompt, plan="plain", sampling=sampling).tokens for prompt in PROMPTS] != answers


def test_its_exits_are_those_of_the_pack(variant):
    sampling = Sampling(max_tokens=40)
    answer = variant.generate(PROMPTS[1], plan="hispec", sampling=sampling)
    assert answer.stats.passes < len(answer.tokens)  # untrained exits would give one token per pass
    assert variant.pack.exits() == (4, 8)
    assert variant.pack.exits_with_norm() == (2, 6, 12)


def test_the_shipped_packs_are_small():
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= 40e6
