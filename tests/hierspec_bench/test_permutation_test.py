"""The test of the distribution: passes fair samplers, finds biased ones, and its p-value means what it says."""

import numpy as np
import pytest

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer
from hierspec_bench.permutation_test import SAME, same_distribution


def written(rule, seed, temperature=1.0, prompts=60, sharpness=2.0, noise=1.0):
    """Texts of a fake model under a rule, with a worse fake as its draft."""
    target = FakeScorer("target", sharpness=sharpness)
    tiers = (Tier(target), Tier(FakeScorer("draft", noise=noise), gather=3)) if rule != "plain" else (Tier(target),)
    hierarchy = Hierarchy(tiers, "coupled" if rule == "plain" else rule)
    texts = []
    for place in range(prompts):
        sampling = Sampling(max_tokens=24, temperature=temperature, seed=seed + place)
        request = Request([place % 16, place // 16], sampling, hierarchy)
        for _ in Engine().run([request]):
            pass
        texts.append(list(request.output))
    return texts


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_rules_that_draw_keep_the_law(rule):
    assert same_distribution(written("plain", 1), written(rule, 1))["p"] > 0.05


def test_the_coupled_rule_leaves_nothing_to_test():
    found = same_distribution(written("plain", 1), written("coupled", 1))
    assert (found["p"], found["method"], found["tokens"]) == (1.0, SAME, 2 * 60 * 24)


@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"sharpness": 2.6}])
def test_a_biased_writer_is_found(changes):
    """One that samples a little too sharply, as a rule does that favours its draft."""
    assert same_distribution(written("plain", 1), written("plain", 1001, **changes))["p"] < 0.01


def test_a_writer_that_takes_guesses_too_easily_is_found():
    """Each token is the draft's own with probability one half: what a broken acceptance does."""
    rng = np.random.default_rng(0)
    plain = written("plain", 1, prompts=150)
    target, draft = FakeScorer("target"), FakeScorer("draft", noise=1.0)
    biased = []
    for place in range(150):
        text = [place % 16, place // 16]
        for _ in range(24):
            logits = (target if rng.random() < 0.5 else draft).logits(np.array(text, np.int32))
            chances = np.exp(logits - logits.max())
            text.append(int(rng.choice(16, p=chances / chances.sum())))
        biased.append(text[2:])
    assert same_distribution(plain, biased)["p"] < 0.01


def test_p_is_small_as_seldom_as_it_says(monkeypatch):
    """Texts of the same distribution whose tokens depend on each other (each repeats one): 10% of p are under 0.1."""
    monkeypatch.setattr("hierspec_bench.permutation_test.SWAPS", 199)
    rng = np.random.default_rng(0)

    def texts():
        return [[int(token)] * 30 for token in rng.integers(0, 6, 25)]

    found = np.array([same_distribution(texts(), texts())["p"] for _ in range(200)])
    assert 0.04 < (found <= 0.1).mean() < 0.17
    assert (found <= 0.5).mean() == pytest.approx(0.5, abs=0.12)


def test_the_order_of_writers_does_not_matter():
    one, two = written("plain", 1, prompts=12), written("plain", 50, prompts=12)
    assert same_distribution(one, two) == same_distribution(two, one)


def test_empty_texts_and_lengths_count():
    short, long = [[1, 2]] * 20, [[1, 2, 1, 2]] * 20
    assert same_distribution(short, long)["p"] < 0.01
    assert same_distribution([[]] * 3, [[]] * 3)["p"] == 1.0
    assert 0 < same_distribution([[], [1]], [[2], []])["p"] <= 1
    assert same_distribution([[1, 2, 3]], [[1, 3, 2]])["p"] == 1.0  # one pair, and nothing that is looked at differs
