"""With a device of its own, what a round teaches is learnt while the next pass is computed: once, and of that round."""

from __future__ import annotations

import pytest

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Device(FakeScorer):
    """Takes some seconds for a pass, and lets its requests learn meanwhile, if it has a device of its own."""

    def __init__(self, name: str, clock: Clock, seconds: float, asynchronous: bool, calls_back: bool = True, **model):
        super().__init__(name, 8, seed=3, **model)
        self._clock, self._seconds, self._calls_back = clock, seconds, calls_back
        self.asynchronous, self.computing = asynchronous, False

    def score(self, asks):
        self.computing = True
        for ask in asks if self.asynchronous and self._calls_back else ():
            ask.request.catch_up()
        self.computing = False
        self._clock.now += self._seconds
        return super().score(asks)


class Noting(FixedPace):
    """Notes what it learnt from each of its rounds, and whether a device computed meanwhile."""

    def __init__(self) -> None:
        self.scorers: list[Device] = []
        self.learnt, self.while_computing = [], []

    def learn(self, round):
        last = round.request.last_pass
        seconds = None if last is None else (last.rows, round.request.prefilled or last.seconds)
        self.learnt.append((len(round.context), tuple(round.tokens), round.ended - round.began, seconds))
        self.while_computing.append(any(scorer.computing for scorer in self.scorers))


def run(asynchronous: bool, calls_back: bool = True, requests: int = 1, draft: bool = True):
    clock, pace = Clock(), Noting()
    target = Device("target", clock, 4.0, asynchronous, calls_back)
    drafter = Device("drafter", clock, 1.0, asynchronous, calls_back, noise=0.5)
    pace.scorers = [target, drafter]
    tiers = (Tier(target, pace=pace), Tier(drafter, 2)) if draft else (Tier(target, pace=pace),)
    running = [Request([1, 2, 3 + each], Sampling(max_tokens=20), Hierarchy(tiers)) for each in range(requests)]
    for _ in Engine(clock).run(running):
        pass
    assert all(request.error is None for request in running)
    return [request.output for request in running], pace


@pytest.mark.parametrize("calls_back", [True, False])
@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("requests", [1, 3])
def test_the_same_is_learnt_of_every_round(calls_back, draft, requests):
    outputs, pace = run(False, requests=requests, draft=draft)
    same_outputs, later = run(True, calls_back, requests, draft)
    assert outputs == same_outputs
    if requests == 1:
        assert later.learnt == pace.learnt
    else:  # which request of a pass learns first may differ
        assert sorted(each[:2] for each in later.learnt) == sorted(each[:2] for each in pace.learnt)
    assert not any(pace.while_computing)
    if calls_back:  # all but the last rounds
        assert later.while_computing.count(False) == requests


def test_a_pace_that_fails_later_fails_its_own_request():
    class Failing(Noting):
        def learn(self, round):
            super().learn(round)
            if len(self.learnt) == 3:
                raise ValueError("no")

    clock = Clock()
    paces = Failing(), Noting()
    requests = []
    for pace in paces:
        target = Device("target", clock, 4.0, True, calls_back=False)
        requests.append(Request([1, 2, 3], Sampling(max_tokens=12), Hierarchy((Tier(target, pace=pace),))))
    for _ in Engine(clock).run(requests):
        pass
    assert requests[0].ended == "error"
    assert "ValueError" in str(requests[0].error) or "no" in str(requests[0].error)
    assert (requests[1].ended, len(requests[1].output)) == ("length", 12)
