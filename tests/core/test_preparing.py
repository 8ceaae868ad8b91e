"""What a scorer prepares for later passes is no cost of the pass that needed it first."""

from __future__ import annotations

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Preparing(FakeScorer):
    """A pass takes a second, and the third one records something for a hundred."""

    preparing, clock = 0.0, Clock()

    def score(self, asks):
        self.clock.now += 1
        if self.calls == 2:
            self.clock.now += 100
            self.preparing += 100
        return super().score(asks)


class Noting(FixedPace):
    def __init__(self) -> None:
        self.passes = []

    def learn(self, round):
        self.passes.append((round.request.last_pass and round.request.last_pass.seconds, round.request.prefilled))


def test_nothing_is_learnt_of_a_pass_that_prepared_something():
    scorer, pace = Preparing("target", 8), Noting()
    scorer.clock = Clock()
    request = Request([1, 2, 3, 4, 5], Sampling(max_tokens=5), Hierarchy((Tier(scorer, pace=pace),)))
    for _ in Engine(scorer.clock).run([request]):
        pass
    assert pace.passes == [(None, True), (1.0, False), (None, True), (1.0, False), (1.0, False)]
    assert request.spent == 5
    assert request.stats.tiers[0].seconds == 5
