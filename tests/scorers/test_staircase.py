"""The pool of staircases: a memo within a budget. Whatever it forgets, nothing changes but time."""

import numpy as np
import pytest

from hierspec.backends.torch.decoder import TorchDecoder
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.scorers.staircase import Staircase, StaircasePool
from hierspec.testing.checkpoints import random_weights, tiny_config


class Nobody:
    name, vocabulary = "nobody", 320

    def score(self, asks):
        return []

    def release(self, request):
        pass


def a_request() -> Request:
    return Request([1, 2, 3], Sampling(), Hierarchy((Tier(Nobody()),)))


def a_pool(slots: int) -> StaircasePool:
    config = tiny_config("llama")
    decoder = TorchDecoder(config, random_weights(config))
    each = Staircase(decoder.new_memory(), (4,), config.hidden, decoder.dtype, decoder.device).bytes_for(1)
    return StaircasePool(decoder, budget=slots * each)


def prepare(pool: StaircasePool, *asked: tuple[Request, int]) -> list[Staircase]:
    return pool.prepare([(request, np.arange(length, dtype=np.int32), Proposal()) for request, length in asked])


def test_memory_grows_with_use_and_stays_within_the_budget():
    pool, requests = a_pool(2000), [a_request() for _ in range(12)]
    for round_ in range(20):
        for place, request in enumerate(requests):
            prepare(pool, (request, 10 + 20 * round_ + place))
            assert pool.bytes_held() <= pool.budget
    assert pool.bytes_held() > 0


def test_the_least_recently_used_goes_first():
    pool, first, second, third = a_pool(1000), a_request(), a_request(), a_request()
    [old] = prepare(pool, (first, 100))
    [kept] = prepare(pool, (second, 100))
    kept.heights[:100] = 4
    prepare(pool, (third, 500))
    [again] = prepare(pool, (second, 100))
    assert again is kept
    assert (again.heights[:100] == 4).all()
    [new] = prepare(pool, (first, 100))
    assert new is not old


def test_a_pass_that_cannot_fit_is_told():
    with pytest.raises(HierspecError, match="--kv-memory"):
        prepare(a_pool(1000), (a_request(), 1001))
    with pytest.raises(HierspecError, match="--kv-memory"):
        prepare(a_pool(1000), (a_request(), 600), (a_request(), 600))


def test_what_an_ended_request_leaves_serves_a_prompt_that_begins_alike():
    pool, first = a_pool(5000), a_request()
    [old] = prepare(pool, (first, 100))
    old.heights[:100] = 4
    pool.release(first)
    [taken] = prepare(pool, (a_request(), 150))
    assert taken is old
    assert taken.heights[:150].tolist() == [4] * 100 + [0] * 50


def test_clearing_forgets_everything():
    pool, request = a_pool(5000), a_request()
    prepare(pool, (request, 100))
    pool.clear()
    assert pool.bytes_held() == 0
    pool.release(request)  # of a staircase that is gone
    [new] = prepare(pool, (request, 100))
    assert (new.heights[:100] == 0).all()
