"""Scorers that write ahead: the pace still decides after every token, so nothing changes but the number of calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.engine import Engine
from hierspec.core.foresight import LEADS, SUREST, Foresight, lead_class
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.scorers.synthetic import Rates, References, SyntheticScorer
from hierspec.testing.fakes import FakeScorer, FakeStore, scripted


class AheadScorer(FakeScorer):
    """Goes on from its own picks where it is allowed to. Leads are made up from the text."""

    def score(self, asks):
        answers = super().score(asks)
        return [self._further(ask, answer) for ask, answer in zip(asks, answers, strict=True)]

    def _further(self, ask: Ask, answer: Answer) -> Answer:
        answers, context, least = [self._led(ask.context, answer)], ask.context, SUREST
        for row in () if ask.ahead is None else ask.ahead:
            least = min(least, lead_class(answers[-1].leads[0]))
            if not row[least] or answers[-1].picks[0, 0] in ask.request.stop_ids:
                break
            context = np.append(context, answers[-1].picks[0, 0]).astype(np.int32)
            answers.append(self._led(context, self._answer(replace(ask, context=context))))
        return replace(answers[0], ahead=tuple(answers[1:]))

    def _led(self, context: np.ndarray, answer: Answer) -> Answer:
        lead = np.random.default_rng([7, *context.tolist()]).exponential(3.0)
        return replace(answer, leads=np.full(len(answer.picks), lead))


class SteppingScorer(AheadScorer):
    """The same, one token a call."""

    def score(self, asks):
        return super().score([replace(ask, ahead=None) for ask in asks])


class FussyPace(FixedPace):
    """Ends blocks by their length and leads, and notes what it was told."""

    def __init__(self, seed: int) -> None:
        self.told: list[tuple[int, ...]] = []
        self._ends = np.random.default_rng(seed).random((20, SUREST + 1)) < 0.3

    def learn(self, round):
        if (last := round.request.last_pass) is not None:
            assert last.rows <= round.request.running_requests  # one a step, however many steps there were
        self.told.append((*round.context.tolist(), *round.tokens))

    def hands_up(self, round):
        written = round.block.written
        return super().hands_up(round) or bool(self._ends[len(written), written[-1].lead])


def written(kind, seed: int, sampling: Sampling, gather: int, requests: int = 1):
    target, pace = FakeScorer("target", 8, seed=seed), FussyPace(seed)
    drafter = kind("drafter", 8, seed=seed, noise=0.4)
    foresight = Foresight()
    outputs = []
    for first in range(4):  # one after the other, so that the later ones know what the pace does
        hierarchy = Hierarchy((Tier(target), Tier(drafter, gather, candidates=2, pace=pace, foresight=foresight)))
        running = [Request([1, 2, first, number], sampling, hierarchy) for number in range(requests)]
        # By a clock that ticks at every look: which requests share a call must not depend on this machine.
        for _ in Engine(clock=count().__next__).run(running):
            pass
        assert all(request.error is None for request in running)
        outputs += [(request.output, request.sources, request.stats.to_json()) for request in running]
    for _, _, tiers in outputs:
        for tier in tiers:
            del tier["seconds"]
    return outputs, pace.told, drafter.calls


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([0.0, 0.9]), st.integers(1, 9), st.sampled_from([(), (3,)]), st.integers(1, 3)
)
def test_the_same_blocks_and_decisions_as_token_by_token(seed, temperature, gather, stop_ids, requests):
    sampling = Sampling(max_tokens=12, temperature=temperature, seed=seed, stop_ids=stop_ids)
    ahead, told, calls = written(AheadScorer, seed, sampling, gather, requests)
    stepping, told_stepping, most_calls = written(SteppingScorer, seed, sampling, gather, requests)
    assert ahead == stepping
    assert sorted(told) == sorted(told_stepping)
    if requests == 1:  # else who goes on alone, and when, differs too
        assert calls <= most_calls


def test_a_pace_that_goes_on_is_soon_foreseen():
    sampling = Sampling(max_tokens=200, seed=1)

    class Steady(FussyPace):
        def hands_up(self, round):
            return FixedPace.hands_up(self, round)

    target, drafter = FakeScorer("target", 8, seed=3), AheadScorer("drafter", 8, seed=3)
    hierarchy = Hierarchy((Tier(target), Tier(drafter, 4, pace=Steady(0))))
    request = Request([1, 2], sampling, hierarchy)
    for _ in Engine().run([request]):
        pass
    assert len(request.output) == 200
    blocks = request.stats.tiers[0].calls
    assert request.stats.tiers[1].calls >= 4 * (blocks - 1)
    assert drafter.calls < 2.5 * blocks  # leads differ, so not all is foreseen at once


def test_foresight_learns_by_length_and_least_lead_and_forgets():
    foresight = Foresight()
    assert not foresight.ahead(0, SUREST, 5).any()
    assert foresight.ahead(0, SUREST, 1).shape == (0, SUREST + 1)
    for _ in range(12):
        foresight.learn(1, 5, True)
        foresight.learn(2, 5, True)
        foresight.learn(2, 3, False)
    ahead = foresight.ahead(0, SUREST, 4)
    assert ahead.shape == (3, SUREST + 1)
    surer = list(range(5, SUREST + 1))  # what goes on after a lead of 5 goes on after greater ones
    assert np.argwhere(ahead).tolist() == [[length, lead] for length in (0, 1) for lead in surer]
    # A block whose least lead was 5 already: whatever comes, it is at most 5.
    assert foresight.ahead(1, 5, 3)[0].tolist() == [False] * 5 + [True] * 3
    for _ in range(12):
        foresight.learn(1, SUREST, False)  # and what ends after the surest ends after all
    assert not foresight.ahead(0, SUREST, 4)[0].any()
    foresight.learn(1000, 0, True)  # deeper than it counts
    assert foresight.ahead(1000, SUREST, 3).shape == (2, SUREST + 1)


def test_classes_of_leads():
    assert [lead_class(lead) for lead in (0.0, 0.25, 0.6, 100.0)] == [0, 1, 2, len(LEADS)]


def test_tiers_that_verify_are_never_asked_to_write_ahead():
    """Neither the target, nor one that others draft for, nor one that has stores, nor by whole distributions."""
    asked: list[tuple[str, bool]] = []

    class Noting(FakeScorer):
        def score(self, asks):
            asked.extend((self.name, ask.ahead is not None) for ask in asks)
            return super().score(asks)

    def tiers(stores=()):
        scorers = [Noting(name, 8, seed=1) for name in ("target", "middle", "bottom")]
        return tuple(Tier(scorer, 4, stores=stores if scorer.name == "bottom" else ()) for scorer in scorers)

    store = FakeStore("script", scripted([1, 2, 3] * 30))
    for hierarchy in (Hierarchy(tiers()), Hierarchy(tiers((store,))), Hierarchy(tiers(), "residual")):
        asked.clear()
        for _ in Engine().run([Request([1, 2], Sampling(max_tokens=8, seed=1), hierarchy)]):
            pass
        may = {name for name, ahead in asked if ahead}
        assert may == ({"bottom"} if hierarchy.tiers[2].stores == () and hierarchy.rule == "coupled" else set())
        assert {name for name, _ in asked} == {"target", "middle", "bottom"}


@pytest.mark.parametrize("agrees", [0.0, 0.6])
def test_a_synthetic_tier_does_not_go_on_from_picks_that_are_replaced(agrees):
    references = References()
    target, inner = FakeScorer("target", 8, seed=2), AheadScorer("inner", 8, seed=9)
    synthetic = SyntheticScorer(inner, (Rates(agrees, agrees),), 0, references)
    hierarchy = Hierarchy((Tier(target), Tier(synthetic, 4)))
    outputs = []
    for _ in range(6):
        request = Request([1, 2], Sampling(max_tokens=30, seed=1), hierarchy)
        references[request] = outputs[0] if outputs else ()
        for _ in Engine().run([request]):
            pass
        outputs.append(request.output)
        assert request.output == outputs[0]
    assert inner.calls == sum(inner.packed)
    assert hierarchy.tiers[1].foresight.ahead(0, SUREST, 3).any()  # it would have been allowed to


class Timing(FixedPace):
    """Notes what each round took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def learn(self, round):
        self.seconds.append(round.request.spent - round.began)


def test_a_call_that_writes_ahead_takes_its_time_token_by_token():
    """Else the first of its tokens would seem slow and the others free."""
    now = [0.0]

    class Slow(AheadScorer):
        def score(self, asks):
            answers = super().score(asks)
            now[0] += sum(2.0 + len(answer.ahead) for answer in answers)
            return answers

    pace = Timing()
    target = Slow("target", 8, seed=3)
    request = Request([1, 2, 3], Sampling(max_tokens=16), Hierarchy((Tier(target, pace=pace),)))
    for _ in Engine(clock=lambda: now[0]).run([request]):
        pass
    assert target.calls < len(request.output) == len(pace.seconds)
    first, *others = pace.seconds
    assert first == pytest.approx(2.0)  # a call of its own: nobody waits for more than the first token
    assert max(others) < 1.5 * min(others)
    assert request.spent == pytest.approx(sum(pace.seconds)) == now[0]
