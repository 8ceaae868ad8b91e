"""Picks and laws on the device equal the one-row reference in core."""

import random

import numpy as np
import pytest
import torch

from hierspec.core import sampling as reference
from hierspec.core.engine import Request
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Ask, Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.models import pick

VOCABULARY = 96


class Nobody:
    name, vocabulary = "nobody", VOCABULARY

    def score(self, asks):
        return []

    def release(self, request):
        pass


def make_ask(rng: random.Random, sampling: Sampling, laws: bool = False, candidates: int = 1) -> Ask:
    prompt = rng.choices(range(VOCABULARY), k=rng.randrange(1, 30))
    request = Request(prompt, sampling, Hierarchy((Tier(Nobody()),)))
    context = np.array(prompt + rng.choices(range(VOCABULARY), k=rng.randrange(20)), np.int32)
    nodes = rng.randrange(7)
    tree = Proposal(
        tuple(rng.choices(range(VOCABULARY), k=nodes)), tuple(rng.randrange(-1, node) for node in range(nodes))
    )
    return Ask(Nobody(), context, tree, request, candidates, laws, TierStats("x"))


def random_sampling(rng: random.Random) -> Sampling:
    if rng.random() < 0.4:  # what the compiled walk takes
        return Sampling(temperature=rng.choice([0, 0.3, 1.0, 1.7]), seed=rng.randrange(1 << 40))
    return Sampling(
        temperature=rng.choice([0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 200]),
        top_p=rng.choice([1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, -0.2]),
        logit_bias=rng.choice([None, {3: 2.5, 11: -100.0}]),
        seed=rng.randrange(1 << 40),
    )


@pytest.mark.parametrize("seed", range(200))
def test_picks_and_laws_equal_the_reference(seed):
    rng = random.Random(seed)
    sampling = random_sampling(rng)
    ask = make_ask(rng, sampling, laws=bool(seed % 2), candidates=rng.choice([1, 3]))
    logits = torch.randn(1 + len(ask.proposal), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    answer = pick.answer(ask, logits)
    for row in range(len(logits)):
        text = np.append(ask.context, ask.proposal.path(row - 1)).astype(np.int64)
        z = reference.adjust(logits[row].numpy(), text, len(ask.request.prompt), sampling)
        if ask.laws:
            assert np.abs(answer.laws[row] - reference.law(z, sampling)).max() < 1e-6
        else:
            expected = reference.picks(z, sampling, ask.request.seed, len(text), ask.candidates)
            possible = int(np.isfinite(z).sum())  # past these, runners-up have no probability and any order is right
            assert answer.picks[row].tolist()[:possible] == expected[:possible]


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 3.0])
def test_compiled_picks_equal_the_reference_on_a_large_vocabulary(temperature):
    """Also where one token leads by far, where all are alike, and where the best stands first or last."""
    size, seed = 49_152, 12
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, size, generator=generator) * torch.linspace(0.01, 12, 40)[:, None]
    logits[3, 0], logits[4, -1], logits[5] = 90.0, 90.0, 1.0
    keys = np.array([reference.noise_keys(seed, row) for row in range(40)], np.int64)
    found = np.empty(40, np.int64)
    pick.best_tokens(logits.numpy(), np.float32(temperature), keys, found)
    sampling = Sampling(temperature=temperature)
    for row in range(40):
        z = reference.adjust(logits[row].numpy(), np.array([0]), 1, sampling)
        noisy = z + reference.gumbel(seed, row, size) if temperature else z
        assert noisy.max() - noisy[found[row]] < 1e-4  # the best, or one that float32 cannot tell from it


def test_equal_logits_give_the_lowest_token():
    logits = torch.zeros(1, 64)
    logits[0, [37, 21, 53]] = 2.0
    found = np.empty(1, np.int64)
    pick.best_tokens(logits.numpy(), np.float32(0), np.zeros((1, 2), np.int64), found)
    assert found[0] == 21


def test_noise_equals_the_reference():
    for seed, position in [(0, 0), (7, 1), (2**63, 12345), (-3, 9)]:
        ours = pick.gumbel(seed, position, 50_000, torch.device("cpu")).double().numpy()
        theirs = reference.gumbel(seed, position, 50_000)
        assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_told(bad):
    ask = make_ask(random.Random(0), Sampling())
    logits = torch.zeros(1 + len(ask.proposal), VOCABULARY)
    logits[-1, 5] = bad
    with pytest.raises(HierspecError, match="not numbers"):
        pick.answer(ask, logits)
