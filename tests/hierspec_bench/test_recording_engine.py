"""What scorers answered is played back as it was, with what they wrote ahead."""

import json
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer, FakeStore
from hierspec_bench.recording_engine import Playback, RecordingEngine


class Ahead(FakeScorer):
    """Writes ahead wherever it may."""

    def score(self, asks):
        answers = []
        for ask, answer in zip(asks, super().score(asks), strict=True):
            further, context, last = [], ask.context, answer
            for _ in () if ask.ahead is None else ask.ahead:
                context = np.append(context, last.picks[0, 0]).astype(np.int32)
                last = self._answer(replace(ask, context=context))
                further.append(last)
            branches = (((3, 0.5), (4, 0.25)), ()) if further else ()
            answers.append(replace(answer, ahead=tuple(further), branches=branches))
        return answers


def run(engine, *scorers):
    request = Request([1, 2], Sampling(max_tokens=20, seed=1), Hierarchy((Tier(scorers[0]), Tier(scorers[1], 4))))
    times = [request.last_pass for _ in engine.run([request])]
    return request, times


def test_a_run_is_played_back_without_its_scorers():
    recorded, drafter = RecordingEngine(), Ahead("drafter", 8, seed=1, noise=0.3)
    first, times = run(recorded, FakeScorer("target", 8, seed=1), drafter)
    transcript = recorded.transcript()
    written = [answer for _, _, _, _, _, *answers in transcript[1:] for answer in answers]
    assert any(len(answer) > 3 for answer in written), "nothing written ahead"
    assert any(branches for _, _, branches, *_ in written)
    transcript = json.loads(json.dumps(transcript))
    target, other = FakeScorer("target", 8, seed=5), Ahead("drafter", 8, seed=5)  # would answer otherwise
    again, played_times = run(Playback(transcript), target, other)
    assert again.output == first.output
    assert any(times)
    assert played_times == times  # a pace learns from them: to the last bit, with the time between passes
    assert again.stats.to_json() == first.stats.to_json()
    assert target.calls == other.calls == 0


class Listening(FixedPace):
    """Notes how long stores took, as a pace that chooses between them learns it."""

    def __init__(self):
        self.noted = []

    def learn(self, round):
        self.noted.append([(store, seconds) for store, _, seconds in round.asked])


def test_what_stores_cost_is_played_back_too():
    """Which stores are asked depends on it, so a run that learnt other times would draft otherwise."""

    def times(engine, pace, seed):
        stores = tuple(FakeStore(name, lambda context, budget: Proposal.chain([1])) for name in ("one", "two"))
        tier = Tier(FakeScorer("target", 8, seed=1), stores=stores, merge=True, pace=pace)
        requests = [Request([1, 2], Sampling(max_tokens=10), Hierarchy((tier,))) for _ in range(2)]
        readings = accumulate(np.random.default_rng(seed).random(1000).tolist())
        for request in requests:
            request.clock = lambda: next(readings)
        list(engine.run(requests))
        return [request.stats.tiers[0].store_seconds for request in requests]

    recorded, pace, played = RecordingEngine(), Listening(), Listening()
    told = times(recorded, pace, 1)
    assert times(Playback(json.loads(json.dumps(recorded.transcript()))), played, 2) == told
    assert played.noted == pace.noted
    assert len({seconds for asked in pace.noted for _, seconds in asked}) > 10


def test_what_tiers_had_in_the_cache_is_played_back_too():
    """How long a drafter's prefill takes depends on it, and so whether it drafts."""

    def known(engine, tokens):
        tiers = Tier(FakeScorer("target", 8, seed=1)), Tier(FakeScorer("drafter", 8, seed=1), 2)
        requests = [Request([1, 2, 3], Sampling(max_tokens=6), Hierarchy(tiers)) for _ in range(2)]
        for number, request in enumerate(requests):
            engine.submit(request)
            if tokens:
                request.stats.tiers[1].known = tokens - number
        while engine.busy:
            engine.step()
        return [[stats.known for stats in request.stats.tiers] for request in requests]

    recorded = RecordingEngine()
    assert known(recorded, 3) == [[None, 3], [None, 2]]
    assert known(Playback(json.loads(json.dumps(recorded.transcript()))), 0) == [[None, 3], [None, 2]]


def test_what_a_drafter_computed_for_the_target_is_charged_again():
    class Reading(FakeScorer):
        """Its first pass also computes for the target, which it is not charged with."""

        def score(self, asks):
            if not self.calls:
                asks[0].stats.seconds -= 2.0
                asks[0].stats.prefill_seconds -= 2.5
                asks[0].request.stats.tiers[0].seconds += 2.0
            return super().score(asks)

    def charged(engine, drafter):
        request, _ = run(engine, FakeScorer("target", 8, seed=1), drafter)
        return [(stats.seconds, stats.prefill_seconds) for stats in request.stats.tiers]

    recorded = RecordingEngine()
    told = charged(recorded, Reading("drafter", 8, seed=1))
    assert told[1][1] < -2
    assert charged(Playback(json.loads(json.dumps(recorded.transcript()))), FakeScorer("drafter", 8)) == told


def test_what_does_not_fit_is_told():
    with pytest.raises(HierspecError, match="--restart"):
        run(
            Playback([[], [0.0, 0.0, False, [], [], [[[1], [2]], None, []]]]),
            FakeScorer("target", 8),
            FakeScorer("drafter", 8),
        )
