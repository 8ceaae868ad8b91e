"""Requests that draft and verify at different times still share the passes of their target."""

import numpy as np
import pytest

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer

TOKENS = 60


class Clock:
    """Moves by what passes cost."""

    def __init__(self):
        self.now = 0.0

    def scorer(self, name, seconds, **options):
        scorer = FakeScorer(name, **options)
        score = scorer.score

        def timed(asks):
            self.now += seconds
            return score(asks)

        scorer.score = timed
        return scorer


def request_for(tiers, number, tokens=TOKENS):
    prompt = np.array([number % 16, 3, number % 7])
    return Request(prompt, Sampling(max_tokens=tokens, temperature=1.0, seed=number), Hierarchy(tuple(tiers)))


def plain(number, tokens=TOKENS):
    request = request_for([Tier(FakeScorer("target"))], number, tokens)
    list(Engine().run([request]))
    return request.output


@pytest.mark.parametrize("serving", [False, True])
def test_the_target_waits_for_those_who_draft(serving):
    """Blocks of different lengths end at different times, and yet its passes are as wide as there are requests."""
    clock = Clock()
    target, drafter = clock.scorer("target", 1.0), clock.scorer("drafter", 0.1, noise=0.5)
    requests = [request_for([Tier(target), Tier(drafter, gather=1 + n % 4)], n) for n in range(8)]
    list(Engine(lambda: clock.now, serving=serving).run(requests))
    assert [request.output for request in requests] == [plain(n) for n in range(8)]
    while_all_run = target.packed[1 : min(request.stats.passes for request in requests)]
    assert np.mean(while_all_run) > 7.5


def test_nobody_waits_long_for_slow_drafts():
    clock = Clock()
    target, drafter = clock.scorer("target", 1.0), clock.scorer("drafter", 0.5, noise=0.5)
    drafting = request_for([Tier(target), Tier(drafter, gather=12)], 1, 100)
    steady = request_for([Tier(target)], 2)
    moments = [clock.now]
    for request, _ in Engine(lambda: clock.now).run([drafting, steady]):
        if request is steady:
            moments.append(clock.now)
    assert max(np.diff(moments)) <= 1 + 1.5 + 2 * 0.5 + 1e-9  # its pass, the wait, and the drafts around its end
    assert (drafting.output, steady.output) == (plain(1, 100), plain(2))


def test_a_target_of_others_waits_for_nobody():
    clock = Clock()
    mine, other = clock.scorer("target", 1.0), clock.scorer("target", 1.0)
    drafter = clock.scorer("drafter", 0.1, noise=0.5)
    steady = request_for([Tier(mine)], 2)
    drafting = request_for([Tier(other), Tier(drafter, gather=6)], 1)
    engine = Engine(lambda: clock.now)
    engine.submit(drafting)
    engine.submit(steady)
    rounds = 0
    while steady.ended is None:
        engine.step()
        rounds += 1
    assert rounds == TOKENS


def test_requests_whose_tiers_are_in_another_order_do_not_wait_for_each_other():
    target, one, other = FakeScorer("target"), FakeScorer("one", noise=0.5), FakeScorer("other", noise=0.7)
    orders = [(one, other), (other, one), (one, one)]
    requests = [request_for([Tier(target), *(Tier(each, gather=3) for each in order)], 0) for order in orders]
    engine, rounds = Engine(), 0
    for request in requests:
        engine.submit(request)
    while engine.busy and rounds < 10_000:
        engine.step()
        rounds += 1
    assert [request.output for request in requests] == [plain(0)] * 3
