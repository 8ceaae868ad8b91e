"""The pace of a tier: with nothing given it is that of a fixed plan, and what it adds up is what its parts say."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from paced_tiers import costs, ladder_costs, ladder_policies, paced, random_tiers

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Block, Round
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.costs import ALONE
from hierspec.pacing.pace import AdaptivePace
from hierspec.pacing.stages import StagedAttempt, Stages, Switches
from hierspec.pacing.switch import Attempt
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees


def run(tiers: tuple[Tier, ...], rule: str = "coupled", count: int = 2) -> list[Request]:
    sampling = Sampling(max_tokens=40, temperature=0.8, seed=3)
    requests = [Request([1, k], sampling, Hierarchy(tiers, rule)) for k in range(count)]
    for _ in Engine().run(requests):
        pass
    return requests


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
@pytest.mark.parametrize("seed", range(5))
def test_without_parts_it_is_the_fixed_pace(rule, seed):
    rng = np.random.default_rng(seed)
    tiers = random_tiers(rng, 1 + seed % 4, seed, 5)
    adaptive = tuple(Tier(t.scorer, t.gather, t.stores, t.budget, t.merge, t.candidates, AdaptivePace()) for t in tiers)
    for fixed, same in zip(run(tiers, rule), run(adaptive, rule), strict=True):
        assert fixed.output == same.output
        assert fixed.sources == same.sources
        for left, right in zip(fixed.stats.tiers, same.stats.tiers, strict=True):
            assert (left.calls, left.proposed, left.accepted_at) == (right.calls, right.proposed, right.accepted_at)
            assert left.expected_seconds == right.expected_seconds == 0.0


class Adding(AdaptivePace):
    """Adds up the seconds of its rounds."""

    total = 0.0

    def learn(self, round: Round) -> None:
        super().learn(round)
        Adding.total += round.seconds


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_round_takes_its_pass_and_those_below(depth):
    tiers = random_tiers(np.random.default_rng(depth), depth, depth, 4)
    policies = ladder_policies(tiers, ["worth"] * (depth - 1))
    top, *others = paced(tiers, ladder_costs(tiers), policies)
    Adding.total = 0.0
    pace = Adding(top.pace.costs, Appraiser(costs(1.0, 0.05)), top.pace.router)
    watched = (Tier(top.scorer, 1, top.stores, top.budget, top.merge, pace=pace), *others)
    requests = run(watched)
    expected = sum(tier.expected_seconds for request in requests for tier in request.stats.tiers)
    assert Adding.total == pytest.approx(expected)


def test_what_the_stores_proposed_is_appraised_once_where_nobody_drafts():
    """The tree that routing weighs is the one that is verified, and a draft from below has it weighed again."""
    price, calls = costs(1.0), []

    class Watching(Appraiser):
        def appraise(self, proposals, budget, speed, load=ALONE):
            calls.append([proposal.sources[0] for proposal in proposals])
            return super().appraise(proposals, budget, speed, load)

    store = FakeStore("store", random_trees(8, 1, silence=0))
    scorers = FakeScorer("target", 8, seed=1), FakeScorer("draft", 8, seed=1, noise=0.2)
    tiers = Tier(scorers[0], 1, (store,), 7, merge=True), Tier(scorers[1], 3)
    [policy] = ladder_policies(tiers, ["worth"])
    built = paced(tiers, [price, costs(0.1)], [policy], appraisers={0: Watching(price)})
    drafting = [True, False]
    policy.pays = lambda *given: drafting.pop(0)
    request = Request([1, 2], Sampling(max_tokens=9), Hierarchy(built))
    outcome = request.ask(None)
    while request.stats.passes < 2:
        outcome = request.ask(outcome.scorer.score([outcome])[0] if hasattr(outcome, "scorer") else None)
    assert calls == [["store"], ["draft", "store"], ["store"]]


def test_blocks_end_by_count_above_the_least():
    request = Request([1], Sampling(), Hierarchy((Tier(FakeScorer()),)))

    class Stop:
        def go_on(self, block, load=ALONE):
            return False

        def learn_round(self, tokens, seconds, load=ALONE):
            return

    pace = AdaptivePace(ends={2: Stop()})
    block = Block(skipped=2, gather=4, least=3)
    round = Round(1, np.array([1]), 9, 7, request, block)
    ended = []
    for _ in range(4):
        block.written.append(None)
        ended.append(pace.hands_up(round))
    assert ended == [False, False, True, True]


class WatchedStages(Stages):
    """Remembers what it is told. Everything may be drafted."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt: list[float] = []
        self.charged: list[float] = []

    def begin(self, requests: int = 1) -> StagedAttempt:
        return StagedAttempt(self, Attempt(True))

    def learn(
        self, attempt: StagedAttempt, tokens: float, seconds: float, requests: int = 1, prefill: float = 0.0
    ) -> None:
        self.learnt.append(tokens)

    def charge(self, tokens: float, seconds: float, requests: int = 1, prefill: float = 0.0) -> None:
        assert 0 <= prefill <= seconds
        self.charged.append(seconds)


def test_a_drafters_prefill_is_charged_and_the_targets_is_not():
    """Each request's first round prefills both: of it only what the drafter took counts, less what it brought."""
    tiers = Tier(FakeScorer("target", 8, seed=1)), Tier(FakeScorer("draft", 8, seed=1), 3)
    top, drafter = paced(tiers, [costs(1.0), costs(0.1)], ladder_policies(tiers, ["worth"]))
    stages, switches = WatchedStages(), Switches()
    switches.of = lambda requests: stages
    pace = AdaptivePace(top.pace.costs, None, top.pace.router, switches=switches)
    ticks = count(0)
    sampling = Sampling(max_tokens=40, temperature=0)
    requests = [Request([1] * 9, sampling, Hierarchy((replace(top, pace=pace), drafter))) for _ in range(2)]
    for request in requests:
        steps = [step for _, step in Engine(clock=lambda: float(next(ticks))).run([request])]
        assert sum(len(step.tokens) for step in steps) == 40
    assert len(stages.charged) == 2
    assert all(charge < 20 for charge in stages.charged)
    assert sum(stages.learnt) < 80


@pytest.mark.parametrize(("at_once", "begun"), [(1, 3), (2, 0)])
def test_the_switches_are_told_of_each_new_text_that_runs_alone(at_once, begun):
    """Where several run, the next round is mostly another text's, and what all of them learn is of all."""
    tier = random_tiers(np.random.default_rng(1), 1, 1, 5)[0]
    switches, texts = Switches(), []
    for requests in (1, 2):
        stages = switches.of(requests)
        stages.new_text = lambda stages=stages: texts.append(stages)
    adaptive = replace(tier, pace=AdaptivePace(switches=switches))
    if at_once == 2:
        run((adaptive,), count=2)
    else:
        for _ in range(3):
            run((adaptive,), count=1)
    assert texts == begun * [switches.of(1)]
