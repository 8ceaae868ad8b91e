"""Log-probabilities are the target's own for every token written, whoever drafted it."""

import math

import numpy as np
import pytest

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer
from hierspec.core.logprobs import token_logprobs
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees

PROMPT = [1, 2, 3]


def test_they_are_those_of_a_sum_in_exact_order():
    generator = np.random.default_rng(0)
    for size in (1, 2, 17, 500):
        row = generator.normal(size=size).astype(np.float32) * 5
        normaliser = math.log(math.fsum(math.exp(float(logit)) for logit in row))
        ranked = sorted(range(size), key=lambda token: (-row[token], token))
        for count in (0, 1, 5, size + 3):
            token = int(generator.integers(size))
            found = token_logprobs(row, token, count)
            assert found.token == token
            assert math.isclose(found.logprob, float(row[token]) - normaliser, abs_tol=1e-12)
            assert [number for number, _ in found.top] == ranked[:count]
            assert all(math.isclose(value, float(row[n]) - normaliser, abs_tol=1e-12) for n, value in found.top)


def test_of_equal_ones_the_lowest_token_comes_first_and_large_logits_do_not_overflow():
    row = np.array([3e4, 1.0, 3e4, 3e4, -np.inf], np.float32)
    found = token_logprobs(row, 4, 2)
    assert [token for token, _ in found.top] == [0, 2]
    assert found.logprob == -math.inf
    assert math.isclose(found.top[0][1], -math.log(3))


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_any_hierarchy_gives_the_targets_own_for_every_token(rule, temperature, seed):
    target, draft = FakeScorer("target", seed=seed), FakeScorer("draft", seed=seed, noise=0.4)
    stores = (FakeStore("trees", random_trees(16, seed)),)
    tiers = (Tier(target, stores=stores, merge=True), Tier(draft, gather=3, candidates=2))
    # Penalties and filters change what is written, and must not change what the model thinks of it.
    sampling = Sampling(
        max_tokens=30, temperature=temperature, seed=seed, top_p=0.8, repetition_penalty=1.3, logprobs=4
    )
    request = Request(PROMPT, sampling, Hierarchy(tiers, rule))
    steps = [step for _, step in Engine().run([request])]
    logprobs = [entry for step in steps for entry in step.logprobs]
    text = np.array([*PROMPT, *request.output], np.int32)
    expected = [
        token_logprobs(target.logits(text[: len(PROMPT) + index]), token, 4)
        for index, token in enumerate(request.output)
    ]
    assert logprobs == expected  # to the bit
    assert any(source != "target" for source in request.sources)  # some were drafted and accepted


def test_nobody_is_asked_for_logits_where_nobody_wants_them():
    asked = []

    class Watched(FakeScorer):
        def score(self, asks):
            asked.extend((self.name, ask.logits) for ask in asks)
            return super().score(asks)

    tiers = (Tier(Watched("target")), Tier(Watched("draft", noise=0.4), gather=2))
    for logprobs in (None, 0):
        asked.clear()
        request = Request(PROMPT, Sampling(max_tokens=8, seed=0, logprobs=logprobs), Hierarchy(tiers))
        steps = [step for _, step in Engine().run([request])]
        assert {logits for name, logits in asked if name == "target"} == {logprobs is not None}
        assert not any(logits for name, logits in asked if name == "draft")
        assert all(len(step.logprobs) == (0 if logprobs is None else len(step.tokens)) for step in steps)


def test_a_scorer_without_logits_is_named():
    class Mute(FakeScorer):
        def score(self, asks):
            return [Answer(picks=answer.picks) for answer in super().score(asks)]

    request = Request(PROMPT, Sampling(max_tokens=8, logprobs=1), Hierarchy((Tier(Mute("mute")),)))
    assert list(Engine().run([request])) == []
    assert request.ended == "error"
    assert "mute gives no logits" in str(request.error)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2"])
def test_wrong_counts_are_told(wrong):
    with pytest.raises(HierspecError, match="logprobs must be None or a whole number"):
        Sampling(logprobs=wrong)
