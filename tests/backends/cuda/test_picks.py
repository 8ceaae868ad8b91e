"""Picks in Triton are those of the numpy reference, ties and filters included."""

import numpy as np
import pytest
import torch

from hierspec.backends.cuda.pick import Picker
from hierspec.core import sampling as reference
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import NO_TOKEN, Sampling
from hierspec.core.stats import TierStats

VOCABULARY = 1500  # two blocks of the kernel, the second not full
PROMPT, CONTEXT = [1, 2, 3, 9, 9], np.array([1, 2, 3, 9, 9, 17, 17], np.int32)
TREE = Proposal((1, 2, 3), (-1, 0, 0))
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, seed=4, top_k=20, top_p=0.9),
    Sampling(temperature=0.7, seed=4, top_p=0.3),
    Sampling(temperature=1.3, seed=5, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1),
    Sampling(temperature=0.8, seed=6, logit_bias={3: 4.0, 9: -8.0}),
    Sampling(repetition_penalty=1.2, logit_bias={5: 3.0, 7: -np.inf}),
]


class Nobody:
    name, vocabulary = "nobody", VOCABULARY


def asked(sampling: Sampling, candidates: int = 3, distributions: bool = False) -> Ask:
    request = Request(PROMPT, sampling, Hierarchy((Tier(Nobody()),)))
    request.output = [17, 17]
    leads = not distributions
    return Ask(Nobody(), CONTEXT, TREE, request, candidates, distributions, TierStats(""), leads=leads)


def adjusted(ask: Ask, row: int, logits: torch.Tensor) -> tuple[np.ndarray, int]:
    """By the reference, and the position of the token."""
    text = np.concatenate((CONTEXT, np.array(TREE.path(row - 1) if row else [], np.int32)))
    return reference.adjust(logits.numpy(), text, len(PROMPT), ask.request.sampling), len(text)


@pytest.mark.parametrize("ties", [False, True])
def test_all_asks_at_once(device, ties):
    asks = [asked(sampling) for sampling in SAMPLINGS]
    logits = 3 * torch.randn(4 * len(asks), VOCABULARY, generator=torch.Generator().manual_seed(7))
    if ties:
        logits = (2 * logits).round() / 2
    answers = Picker(device).answers(asks, logits.to(device))
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        for row in range(4):
            z, position = adjusted(ask, row, logits[4 * number + row])
            right = reference.picks(z, ask.request.sampling, ask.request.seed, position, 3)
            possible = min(int(np.isfinite(z).sum()), 3)  # the others are anything
            assert answer.picks[row, :possible].tolist() == right[:possible]


def test_many_candidates(device):
    ask = asked(Sampling(), candidates=11)
    logits = torch.randn(4, VOCABULARY)
    [answer] = Picker(device).answers([ask], logits.to(device))
    assert np.array_equal(answer.picks[:, :11], np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :11])


def test_rows_that_are_not_numbers_have_no_token(device):
    logits = torch.randn(4, VOCABULARY)
    logits[0, 5], logits[1], logits[2, 7] = torch.nan, -torch.inf, torch.inf
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        [answer] = Picker(device).answers([asked(sampling)], logits.to(device))
        assert (answer.picks[:3] == NO_TOKEN).all()
        assert (answer.picks[3] >= 0).all()


def test_distributions_are_the_reference_ones(device):
    asks = [asked(sampling, distributions=True) for sampling in SAMPLINGS]
    logits = (6 * torch.randn(4 * len(asks), VOCABULARY)).round() / 2
    answers = Picker(device).answers(asks, logits.to(device))
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        for row in range(4):
            z, _ = adjusted(ask, row, logits[4 * number + row])
            assert np.allclose(answer.distributions[row], reference.distribution(z, ask.request.sampling), atol=1e-12)
