"""Picks for a batch in one call: those that each request gets alone, to the bit."""

import numpy as np
import pytest
import torch

from hierspec.backends.cpu import answers as module
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import NO_TOKEN, Sampling
from hierspec.core.stats import TierStats

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.6, seed=2, top_k=7),
    Sampling(temperature=1.4, seed=3, top_p=0.8),
    Sampling(temperature=0.9, seed=4, min_p=0.1),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=1.0, seed=5, logit_bias={3: 2.0}),
]


class Nobody:
    name, vocabulary = "nobody", 320


def an_ask(number: int, candidates: int = 1, leads: bool = False) -> Ask:
    request = Request([1, 2, 3], SAMPLINGS[number % len(SAMPLINGS)], Hierarchy((Tier(Nobody()),)))
    proposal = NOTHING if number % 3 else Proposal((4, 5, 6), (-1, 0, 0))
    context = np.arange(1, 4 + number % 5, dtype=np.int32)
    return Ask(Nobody(), context, proposal, request, candidates, False, TierStats(""), leads)


@pytest.fixture(scope="module")
def backend():
    return CpuBackend(2)


@pytest.mark.parametrize("vocabulary", [320, 321])
@pytest.mark.parametrize("candidates", [(1,), (3,), (1, 3, 2)])
def test_a_batch_gets_the_picks_of_each_request_alone(backend, candidates, vocabulary):
    asks = [an_ask(number, candidates[number % len(candidates)], number % 4 == 0) for number in range(23)]
    ends = np.cumsum([1 + len(ask.proposal) for ask in asks])
    logits = 3 * torch.randn(int(ends[-1]), vocabulary, generator=torch.Generator().manual_seed(4))
    logits[5, 9], logits[12] = float("nan"), float("inf")
    before, together = logits.clone(), backend.pick(asks, logits)
    assert torch.equal(before.nan_to_num(), logits.nan_to_num())
    assert any((found.picks == NO_TOKEN).any() for found in together)
    for ask, found, end in zip(asks, together, ends, strict=True):
        [alone] = backend.pick([ask], logits[end - 1 - len(ask.proposal) : end])
        assert np.array_equal(found.picks, alone.picks)
        numbers = alone.picks[:, 0] != NO_TOKEN  # other leads mean nothing
        assert (found.leads is None) == (alone.leads is None)
        assert alone.leads is None or np.array_equal(found.leads[numbers], alone.leads[numbers])


def test_requests_without_penalties_and_biases_take_one_call(backend, monkeypatch):
    asks = [an_ask(number) for number in range(12)]
    one_by_one = []
    monkeypatch.setattr(module, "answer", lambda ask, *_: one_by_one.append(ask))
    backend.pick(asks, torch.randn(sum(1 + len(ask.proposal) for ask in asks), 320))
    assert [ask.request.sampling for ask in one_by_one] == [SAMPLINGS[5], SAMPLINGS[6]]
