"""With a device of its own, what a round teaches is learnt while the next pass is computed: once, and of that round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
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


class AheadDevice(Device):
    """Also goes on from its own picks, as far as it is allowed to."""

    def score(self, asks):
        return [self._further(ask, answer) for ask, answer in zip(asks, super().score(asks), strict=True)]

    def _further(self, ask, answer):
        answers, context = [answer], ask.context
        for _ in () if ask.ahead is None else ask.ahead:
            context = np.append(context, answers[-1].picks[0, 0]).astype(np.int32)
            answers.append(self._answer(replace(ask, context=context)))
        return replace(answers[0], ahead=tuple(answers[1:]))


class Unsteady(Noting):
    """Begins and ends breaks by what its rounds wrote, whenever it learns of them."""

    def __init__(self, seed: int, tells_the_truth: bool) -> None:
        super().__init__()
        self._dice, self._truth, self._break = np.random.default_rng(seed), tells_the_truth, 0

    def drafts(self, round):
        self._break = max(self._break - 1, 0)
        return not self._break or self._dice.random() < 0.1

    def rests(self, round):
        return self._break if self._truth else 8

    def learn(self, round):
        super().learn(round)
        if round.may_draft:
            self._break = 0 if len(round.tokens) > 2 else int(self._dice.integers(12))


@pytest.mark.parametrize("tells_the_truth", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_answers_written_ahead_are_never_taken_for_those_of_a_draft(seed, tells_the_truth):
    """A round may end a break after the next one has been told how long that lasts; and requests come and go."""
    clock, pace, model = Clock(), Unsteady(seed, tells_the_truth), {"asynchronous": True}
    target = AheadDevice("target", clock, 4.0, **model)
    drafter = Device("drafter", clock, 1.0, noise=0.5, **model)
    tiers = (Tier(target, pace=pace), Tier(drafter, 3))
    plain = Hierarchy((Tier(Device("target", clock, 4.0, False)),))
    engine = Engine(clock)
    requests, expected = [], []
    for number in range(6):
        sampling = Sampling(max_tokens=30, temperature=0.8, seed=number)
        requests.append(Request([1, 2, number], sampling, Hierarchy(tiers)))
        expected.append(Request([1, 2, number], sampling, plain))
    for _ in Engine(clock).run(expected):
        pass
    for request in requests:  # each joins while the one before may still run
        engine.submit(request)
        for _ in range(9):
            engine.step()
    while engine.busy:
        engine.step()
    assert [request.error for request in requests] == [None] * len(requests)
    assert [request.output for request in requests] == [request.output for request in expected]


class Resting(Noting):
    """Drafts nothing for a while, and has a word for every round."""

    def __init__(self, drafts: bool) -> None:
        super().__init__()
        self._drafts, self.attempts = drafts, []

    def drafts(self, round):
        round.attempt = "drafts" if self._drafts and round.request.output else "rests"
        return round.attempt == "drafts"

    def rests(self, round):
        return 8

    def learn(self, round):
        super().learn(round)
        self.attempts.append((round.may_draft, round.attempt))


def test_rounds_of_a_break_count_for_it_though_they_were_computed_ahead():
    """If they did not, breaks would last many times as long, and nothing would be saved for the next trial."""

    def attempts(drafts: bool):
        clock, pace = Clock(), Resting(drafts)
        target = AheadDevice("target", clock, 4.0, asynchronous=True)
        tiers = (Tier(target, pace=pace), Tier(Device("drafter", clock, 1.0, True), 3))
        request = Request([1, 2, 3], Sampling(max_tokens=20), Hierarchy(tiers))
        if drafts:  # the pace changes its mind although answers are ready
            request.ready += [target._answer(ask) for ask in _asks(target, request, 3)]
        for _ in Engine(clock).run([request]):
            pass
        assert request.error is None
        return pace.attempts

    assert attempts(False) == [(False, "rests")] * 20
    begun = attempts(True)
    assert begun[:3] == [(False, "rests"), (False, None), (False, None)]
    assert set(begun[3:]) == {(True, "drafts")}


def _asks(target, request, count):
    """Asks for the first tokens of a request, the last first, as answers that are ready are kept."""
    asks, context = [], request.prompt
    for _ in range(count):
        ask = Ask(target, context, NOTHING, request, 1, False, TierStats("target"), False, False)
        asks.append(ask)
        context = np.append(context, target._answer(ask).picks[0, 0]).astype(np.int32)
    return asks[::-1]
