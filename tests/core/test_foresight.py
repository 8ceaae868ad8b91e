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
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier, _proposal
from hierspec.core.interfaces import RUNNER_UP, UNDRAFTED, Answer, Ask, Block, Written, evidence
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


def test_the_least_tokens_of_a_block_come_from_one_call():
    """From the first block on, before anything was learnt: a drafter's costs are taken from such calls."""

    class FourAtLeast(FixedPace):
        def route(self, round):
            return Block(0, least=4)

    target, drafter = FakeScorer("target", 8, seed=3), AheadScorer("drafter", 8, seed=3)
    hierarchy = Hierarchy((Tier(target, pace=FourAtLeast()), Tier(drafter, 6)))
    request = Request([1, 2], Sampling(max_tokens=6, seed=1), hierarchy)
    outcome = request.ask(None)
    while not request.stats.tiers[1].calls:
        outcome = request.ask(outcome.scorer.score([outcome])[0])
    assert (drafter.calls, request.stats.tiers[1].calls) == (1, 4)


class BranchingScorer(AheadScorer):
    """Says of each token what it would write after the runners-up, as far as it writes ahead."""

    def _further(self, ask: Ask, answer: Answer) -> Answer:
        first = super()._further(ask, answer)
        answers, context, branching = [first, *first.ahead], ask.context, []
        for step, each in enumerate(answers):
            branches = []
            for token in each.picks[0, 1:].tolist():
                text, branch = np.append(context, token).astype(np.int32), []
                for _ in answers[step + 1 :]:
                    follower = self._led(text, self._answer(replace(ask, context=text)))
                    branch.append((int(follower.picks[0, 0]), float(follower.leads[0])))
                    text = np.append(text, branch[-1][0]).astype(np.int32)
                branches.append(tuple(branch))
            branching.append(replace(each, ahead=(), branches=tuple(branches)))
            context = np.append(context, each.picks[0, 0]).astype(np.int32)
        return replace(branching[0], ahead=tuple(branching[1:]))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_follows_runners_up_is_drafted_too(temperature):
    sampling = Sampling(max_tokens=150, temperature=temperature, seed=1)
    model: dict[str, int] = {"vocabulary": 64, "seed": 4, "order": 4}  # its texts do not repeat themselves
    passes, outputs = [], []
    for kind in (AheadScorer, BranchingScorer):
        target, drafter = FakeScorer("target", **model), kind("drafter", **model, noise=1.0)
        hierarchy = Hierarchy((Tier(target, budget=24), Tier(drafter, 4, candidates=3)))
        request = Request([1, 2], sampling, hierarchy)
        for _ in Engine().run([request]):
            pass
        passes.append(request.stats.passes)
        outputs.append(request.output)
    plain = Request([1, 2], sampling, Hierarchy((Tier(FakeScorer("target", **model)),)))
    for _ in Engine().run([plain]):
        pass
    assert outputs == [plain.output, plain.output]
    assert passes[1] < passes[0]


def test_branches_stand_behind_the_runners_up_that_they_continue():
    spine = [
        Written([(5, None), (6, None), (7, None)], "d", UNDRAFTED, 3, None, (((60, 1), (61, 2)), ())),
        Written([(8, None)], "d", UNDRAFTED),
    ]
    draft = _proposal(spine, "d")
    assert draft.tokens == (5, 6, 7, 8, 60, 61)
    assert draft.parents == (-1, -1, -1, 0, 1, 4)
    assert draft.evidence == (evidence(UNDRAFTED, 3), evidence(RUNNER_UP, 3), evidence(RUNNER_UP, 3), UNDRAFTED, 1, 2)


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
