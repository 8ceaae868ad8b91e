"""Rounds that draft and verify in one call: whatever is drafted, and whenever, the text is plain decoding's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_of_fakes import FakeRounds, FusedRound

from hierspec.core.draft_tree import likely_tree
from hierspec.core.engine import Engine
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask, Block, Constraint, PassTime, RequestView, Round
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.request import Request, Step
from hierspec.core.sampling import Sampling, adjust, picks
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees

SEEDS = st.integers(0, 10**9)


def plain(scorer: FakeScorer, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """Plain decoding with nothing of requests, hierarchies or engines in it."""
    text, output = np.array(prompt, np.int32), list[int]()
    while len(output) < sampling.max_tokens and (not output or output[-1] not in sampling.stop_ids):
        z = adjust(scorer.logits(text), text, len(prompt), sampling)
        output.append(picks(z, sampling, sampling.seed or 0, len(text))[0])
        text = np.append(text, np.int32(output[-1]))
    return output


class Always(FixedPace):
    """Every round that can be one call is one, and so is the next; in others no tier drafts."""

    def __init__(self) -> None:
        self.learnt: list[Round] = []
        self.passes: list[PassTime | None] = []

    def route(self, round: Round) -> Block | None:
        return Block() if round.fused else None

    def goes_on(self, round: Round) -> bool:
        return round.fused

    def learn(self, round: Round) -> None:
        self.learnt.append(round)
        self.passes.append(round.request.last_pass)


class Undecided(Always):
    """Decides by dice: one call, tier by tier, stores alone or nothing; and whether that will go on."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = random.Random(seed)

    def drafts(self, round: Round) -> bool:
        return self._dice.random() < 0.85

    def rests(self, round: Round) -> int:
        return self._dice.randrange(4)  # the target may write ahead meanwhile

    def route(self, round: Round) -> Block | None:
        kind = self._dice.random()
        if kind < 0.25:
            round.fused = False
        return None if kind > 0.85 else Block()

    def goes_on(self, round: Round) -> bool:
        return round.fused and self._dice.random() < 0.8


class FarSighted(FakeScorer):
    """Goes on from its own picks wherever it may."""

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        return [
            replace(answer, ahead=self._ahead(ask, answer))
            for ask, answer in zip(asks, super().score(asks), strict=True)
        ]

    def _ahead(self, ask: Ask, answer: Answer) -> tuple[Answer, ...]:
        answers, context = [answer], ask.context
        while len(answers) <= (0 if ask.ahead is None else len(ask.ahead)):
            context = np.append(context, np.int32(answers[-1].picks[0, 0]))
            answers.append(self._answer(replace(ask, context=context)))
        return tuple(answers[1:])


def pair(seed: int, vocabulary: int, noise: float) -> tuple[FakeScorer, FakeScorer]:
    return FakeScorer("target", vocabulary, seed=seed), FakeScorer("drafter", vocabulary, seed=seed, noise=noise)


def tiers_of(rounds: FakeRounds, pace: FixedPace, gather: int = 3, **settings: Any) -> tuple[Tier, ...]:
    budget = len(rounds.tree.parents)
    return Tier(rounds.target, budget=budget, pace=pace, rounds=rounds, **settings), Tier(rounds.drafter, gather)


def run(*requests: Request) -> list[Step]:
    return [step for _, step in Engine().run(requests)]


def whole(rounds: FakeRounds) -> list[FusedRound]:
    """Those in which something was drafted."""
    return [each for each in rounds.rounds if each.draft.tokens]


def random_case(seed: int, temperature: float) -> tuple[list[int], Sampling, FakeRounds]:
    generator = np.random.default_rng([seed, 1])
    vocabulary = int(generator.integers(4, 13))

    def sometimes(value: Any, off: Any) -> Any:
        return value if generator.random() < 0.25 else off

    sampling = Sampling(
        max_tokens=int(generator.integers(1, 30)),
        temperature=temperature,
        top_k=sometimes(int(generator.integers(2, vocabulary + 1)), 0),
        top_p=sometimes(float(generator.uniform(0.3, 1)), 1.0),
        repetition_penalty=sometimes(float(generator.uniform(0.7, 2)), 1.0),
        frequency_penalty=sometimes(float(generator.uniform(-1, 1)), 0.0),
        stop_ids=tuple(generator.integers(0, vocabulary, int(generator.integers(0, 2))).tolist()),
        seed=int(generator.integers(2**63)),
    )
    prompt = generator.integers(0, vocabulary, int(generator.integers(1, 6))).tolist()
    nodes, depth, candidates = (int(generator.integers(1, most)) for most in (12, 6, 5))
    tree = likely_tree(nodes, depth, candidates, float(generator.choice([0.3, 0.6, 0.9])))
    target, drafter = pair(seed % 1000, vocabulary, float(generator.choice([0.0, 0.2, 0.7])))
    target = FarSighted("target", vocabulary, target.logits) if generator.random() < 0.5 else target
    return prompt, sampling, FakeRounds(target, drafter, tree, float(generator.choice([0.0, 0.2])), seed)


def check_room(request: Request, steps: list[Step], rounds: FakeRounds) -> Counter[str]:
    """No draft goes beyond the end of the text, and nothing else is left out of it. Returns what was seen."""
    seen, written = Counter[str](), 0
    asked = {each.output: each.draft for each in rounds.rounds if each.request is request}
    for step in steps:
        room = request.limit - written - 1
        assert max(step.draft.depths(), default=-1) < room
        if (draft := asked.get(written)) is not None:
            assert room > 0
            assert step.draft == draft.cut(room)
            seen["whole"] += bool(draft.tokens)
            seen["plain pass"] += not draft.tokens
            seen["cut"] += len(step.draft) < len(draft)
            seen["accepted"] += len(step.accepted)
            seen["beside the chain"] += step.draft == draft and any(node >= rounds.depth for node in step.accepted)
        written += len(step.tokens)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding(temperature: float) -> None:
    """Any tree, room, pace, store and stop id; rounds in flight, rounds without a draft, and what is learnt later."""
    seen = Counter[str]()

    @settings(max_examples=250, deadline=None, derandomize=True)
    @given(SEEDS)
    def check(seed: int) -> None:
        generator = np.random.default_rng(seed)
        prompt, sampling, rounds = random_case(seed, temperature)
        rounds.target.asynchronous = bool(generator.integers(2))  # type: ignore[attr-defined]
        trees = random_trees(rounds.vocabulary, seed, silence=0.5)
        stores = (FakeStore("store", trees),) if generator.random() < 0.4 else ()
        gather, merge, pace = int(generator.integers(1, 5)), bool(generator.integers(2)), Undecided(seed)
        request = Request(prompt, sampling, Hierarchy(tiers_of(rounds, pace, gather, stores=stores, merge=merge)))
        steps = run(request)
        expected = plain(rounds.target, prompt, sampling)
        assert request.error is None
        assert request.output == expected
        assert len(request.output) <= sampling.max_tokens
        assert request.ended == ("stop" if expected[-1] in sampling.stop_ids else "length")
        assert [token for step in steps for token in step.tokens] == expected
        assert len(pace.learnt) == len(steps)
        seen.update(check_room(request, steps, rounds))
        seen["in flight"] += sum(each.begun for each in rounds.rounds)
        seen["stopped"] += request.ended == "stop" and pace.learnt[-1].fused and len(steps[-1].tokens) > 1
        seen["ahead"] += rounds.target.asks < len(steps)
        target, drafter = request.stats.tiers
        assert target.written == len(expected)
        assert target.calls == len(steps)
        assert sum(target.proposed.values()) == sum(len(step.draft) for step in steps)
        assert sum(target.accepted.values()) == sum(len(step.accepted) for step in steps)
        assert sum(drafter.proposed.values()) == 0
        assert target.proposed[drafter.name] >= target.accepted[drafter.name]

    check()
    wanted = ("whole", "plain pass", "cut", "accepted", "beside the chain", "in flight", "stopped", "ahead")
    assert min(seen[each] for each in wanted) > 5, seen  # else nothing was shown


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_length_ends_where_it_should(temperature: float) -> None:
    """A drafter that is always right: the last drafts are cut to what there is room for."""
    for tokens in range(1, 24):
        rounds = FakeRounds(*pair(1, 16, 0.0), likely_tree(9, 4, 3, 0.6))
        sampling = Sampling(max_tokens=tokens, temperature=temperature, seed=3)
        request = Request([1, 2, 3], sampling, Hierarchy(tiers_of(rounds, Always())))
        steps = run(request)
        assert request.output == plain(rounds.target, [1, 2, 3], sampling)
        # One token of its own from the prompt's pass, and then five a round.
        rounds_of_five, rest = divmod(tokens - 1, 5)
        assert [len(step.tokens) for step in steps] == [1, *[5] * rounds_of_five, *([rest] if rest else [])]
        check_room(request, steps, rounds)


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_stop_id_in_the_middle_of_an_accepted_draft_ends_the_text(stop_at: int) -> None:
    text = [1, *range(2, 15)]  # no token comes twice

    def counting(context: np.ndarray) -> np.ndarray:
        return np.eye(16)[min(int(context[-1]) + 1, 15)]

    scorers = FakeScorer("target", 16, counting), FakeScorer("drafter", 16, counting)
    rounds, stop = FakeRounds(*scorers, likely_tree(4, 4, 1, 0.9)), text[stop_at]
    request = Request([1], Sampling(max_tokens=13, stop_ids=(stop,)), Hierarchy(tiers_of(rounds, Always())))
    steps = run(request)
    assert request.output == text[1 : stop_at + 1]
    assert request.ended == "stop"
    # The first token is the target's own, then in turn four of the drafter and one of the target's own.
    assert request.sources == ["target" if place % 5 == 0 else "drafter" for place in range(stop_at)]
    assert sum(request.stats.tiers[0].accepted.values()) == request.sources.count("drafter")
    assert all(len(step.accepted) <= len(step.tokens) for step in steps)


# Counters


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_both_tiers_count_what_was_done(temperature: float) -> None:
    rounds = FakeRounds(*pair(5, 12, 0.3), likely_tree(10, 4, 3, 0.6))
    sampling = Sampling(max_tokens=60, temperature=temperature, seed=2)
    request = Request([1, 2, 3], sampling, Hierarchy(tiers_of(rounds, pace := Always())))
    steps = run(request)
    target, drafter = request.stats.tiers
    drafted = [round.draft for round in pace.learnt]
    assert target.calls == len(steps) == len(pace.learnt)
    assert target.drafts == drafter.calls == len(whole(rounds)) == sum(bool(draft.tokens) for draft in drafted) > 9
    assert target.proposed == {"drafter": sum(map(len, drafted))}
    assert target.accepted == {"drafter": sum(len(step.accepted) for step in steps)}
    assert 0 < target.accepted["drafter"] < target.proposed["drafter"]
    assert target.proposed_at == Counter(depth for draft in drafted for depth in draft.depths())
    assert target.accepted_at == Counter(depth for step in steps for depth in range(len(step.accepted)))
    assert target.written == 60
    assert drafter.written == rounds.tree.depth * drafter.calls
    assert not drafter.proposed
    assert target.seconds > 0
    last = rounds.rounds[-1]
    assert drafter.reach == last.context + rounds.tree.depth
    assert target.reach == last.context + len(last.draft)


def test_the_drafters_block_is_the_chain() -> None:
    """What the pace learns from is as if the drafter had handed it up."""
    rounds = FakeRounds(*pair(5, 12, 0.3), likely_tree(10, 4, 3, 0.6))
    request = Request([1, 2], Sampling(max_tokens=40), Hierarchy(tiers_of(rounds, pace := Always())))
    run(request)
    first, *others = pace.learnt
    assert (first.drafted, first.draft, first.fused) == (None, NOTHING, False)
    for round in others:
        if not round.room:
            assert round.drafted is None
            continue
        assert round.fused
        assert round.drafted is not None
        depth = min(round.room, rounds.tree.depth)
        assert [position.token for position in round.drafted.written] == list(round.draft.tokens[:depth])
        assert round.proposals[0] is round.draft
        assert round.drafted.skipped == 0


def test_what_the_drafter_missed_is_noted() -> None:
    """It has to read first what others wrote since its last round: the whole text before its first one."""
    turns = [True, True, False, False, False, True, True]

    class InTurn(Always):
        def drafts(self, round: Round) -> bool:
            return not round.request.output or turns.pop(0)

    rounds = FakeRounds(*pair(3, 12, 5.0), likely_tree(2, 2, 1, 0.5))  # a bad drafter
    request = Request([1] * 20, Sampling(max_tokens=40), Hierarchy(tiers_of(rounds, pace := InTurn())))
    engine = Engine()
    engine.submit(request)
    while turns:
        engine.step()
    request.cancel()
    reach, missed = 0, []
    for round in pace.learnt[1:]:
        if round.fused:
            missed.append(max(len(round.context) - reach, 0))
            assert round.missed == missed[-1]
            reach = len(round.context) + 2
        else:
            assert round.missed == 0
    assert missed[0] == 21
    assert any(0 < each < 21 for each in missed[1:])
    assert 0 in missed


def test_a_fused_round_is_no_pass_of_one_scorer() -> None:
    """Costs are by rows of one scorer: a round that drafts and verifies says nothing about them."""
    ticks = count()
    rounds = FakeRounds(*pair(5, 12, 0.3), likely_tree(10, 4, 3, 0.6), silence=0.4)
    request = Request([1, 2, 3], Sampling(max_tokens=80), Hierarchy(tiers_of(rounds, pace := Always())))
    for _ in Engine(clock=lambda: float(next(ticks))).run([request]):
        pass
    seen = Counter[bool]()
    for round, last_pass in list(zip(pace.learnt, pace.passes, strict=True))[1:]:  # the first one also prefills
        assert (last_pass is None) == bool(round.draft.tokens)
        assert last_pass is None or last_pass.rows == 1
        assert round.ended > round.began
        seen[last_pass is None] += 1
    assert min(seen[True], seen[False]) > 3


# Rounds without a draft


def test_an_answer_without_a_draft_is_a_plain_pass() -> None:
    rounds = FakeRounds(*pair(5, 12, 0.3), likely_tree(10, 4, 3, 0.6), silence=1.0)
    sampling = Sampling(max_tokens=12)
    request = Request([1, 2, 3], sampling, Hierarchy(tiers_of(rounds, pace := Always())))
    steps = run(request)
    assert request.output == plain(rounds.target, [1, 2, 3], sampling)
    assert len(rounds.rounds) == 10  # not for the first token, nor for the last
    assert [len(step.tokens) for step in steps] == [1] * 12
    assert all(source == "target" for source in request.sources)
    for round in pace.learnt:
        assert not round.fused
        assert round.drafted is None
        assert (round.draft, round.proposals, round.missed) == (NOTHING, [], 0)
    target, drafter = request.stats.tiers
    assert (target.calls, target.drafts, target.written) == (12, 0, 12)
    assert (drafter.calls, drafter.written, drafter.reach) == (0, 0, 0)


# When they are asked for


class Anything(Constraint):
    """A grammar that allows everything."""

    def wrote(self, tokens: Sequence[int]) -> None:
        return

    def allowed(self, written: np.ndarray, proposal: Proposal) -> list[np.ndarray | None]:
        return [np.full(2, 255, np.uint8)] * (1 + len(proposal))

    def pruned(self, written: np.ndarray, proposal: Proposal) -> Proposal:
        return proposal

    def forced(self, written: np.ndarray, most: int) -> Proposal:
        return NOTHING


@pytest.mark.parametrize(
    ("rule", "constraint", "logprobs"),
    [("residual", None, None), ("block", None, None), ("coupled", Anything(), None), ("coupled", None, 2)],
    ids=["residual", "block", "grammar", "logprobs"],
)
def test_only_picks_come_from_fused_rounds(rule: str, constraint: Constraint | None, logprobs: int | None) -> None:
    """They have no distributions, no logits and no masks."""
    rounds, sampling = FakeRounds(*pair(5, 12, 0.3), likely_tree(6, 3, 2, 0.6)), Sampling(max_tokens=20, seed=1)
    expected = plain(rounds.target, [1, 2], sampling)
    for asked, kind in ((False, (rule, constraint, logprobs)), (True, ("coupled", None, None))):
        which, grammar, count = kind
        pace = Undecided(1)  # it also drafts tier by tier
        request = Request(
            [1, 2],
            Sampling(max_tokens=20, seed=1, logprobs=count),
            Hierarchy(tiers_of(rounds, pace), which),
            constraint=grammar,
        )
        run(request)
        assert request.output == expected
        assert bool(rounds.rounds) is asked
        assert sum(request.stats.tiers[0].accepted.values()) > 0


def test_not_where_the_scorer_of_rounds_cannot_nor_without_one() -> None:
    asked = list[int]()

    class Choosy(FakeRounds):
        def takes(self, request: RequestView, position: int) -> bool:
            assert position == len(request.prompt) + len(request.output) - 1
            asked.append(position)
            return position % 3 == 0

        def begun(self, request: RequestView, position: int) -> bool:
            return False

    rounds, sampling = Choosy(*pair(5, 12, 0.3), likely_tree(6, 3, 2, 0.6)), Sampling(max_tokens=40)
    expected = plain(rounds.target, [1, 2], sampling)
    request = Request([1, 2], sampling, Hierarchy(tiers_of(rounds, Always())))
    run(request)
    assert request.output == expected
    assert {(each.context - 1) % 3 for each in rounds.rounds} == {0}
    assert len(asked) > len(rounds.rounds) > 3
    top, drafter = tiers_of(rounds, Always())
    before = len(rounds.rounds)
    request = Request([1, 2], sampling, Hierarchy((Tier(top.scorer, budget=6), drafter)))  # a fixed pace
    run(request)
    assert request.output == expected
    assert len(rounds.rounds) == before
    assert request.stats.tiers[1].calls > 3


def test_never_for_the_first_token_nor_without_room() -> None:
    rounds, sampling = FakeRounds(*pair(5, 12, 0.0), likely_tree(3, 3, 1, 0.6)), Sampling(max_tokens=6)
    request = Request([1, 2], sampling, Hierarchy(tiers_of(rounds, Always())))
    steps = run(request)
    assert [len(step.tokens) for step in steps] == [1, 4, 1]
    assert [each.output for each in rounds.rounds] == [1]


def test_the_next_round_may_begin_only_where_its_whole_draft_has_room() -> None:
    """Behind all that this one can write at most."""
    depth = 3
    for tokens in range(2, 40):
        rounds = FakeRounds(*pair(5, 12, 0.0), likely_tree(5, depth, 2, 0.6))
        request = Request([1, 2], Sampling(max_tokens=tokens), Hierarchy(tiers_of(rounds, Always())))
        run(request)
        for each in rounds.rounds:
            room = tokens - each.output - 1
            assert each.goes_on == (room - (depth + 1) > depth)
        for now, then in pairwise(rounds.rounds):
            assert then.begun == now.goes_on
            assert not now.goes_on or tokens - then.output - 1 > depth


def test_a_round_in_flight_is_taken_whoever_should_draft() -> None:
    """Its draft is as good as free. But the one after it is not begun."""

    class Once(Always):
        def route(self, round: Round) -> Block | None:
            return None if rounds.rounds else super().route(round)

    rounds, sampling = FakeRounds(*pair(5, 12, 0.3), likely_tree(5, 3, 2, 0.6)), Sampling(max_tokens=60)
    request = Request([1, 2], sampling, Hierarchy(tiers_of(rounds, pace := Once())))
    run(request)
    assert request.output == plain(rounds.target, [1, 2], sampling)
    assert [(each.begun, each.goes_on) for each in rounds.rounds] == [(False, True), (True, False)]
    assert [round.fused for round in pace.learnt[:4]] == [False, True, True, False]
    assert [round.drafted is not None for round in pace.learnt[:4]] == [False, True, True, False]
    assert request.stats.tiers[1].calls == 2


def test_a_round_in_flight_is_left_where_nothing_may_be_drafted() -> None:
    class Breaks(Always):
        def drafts(self, round: Round) -> bool:
            return len(rounds.rounds) != 1

    rounds, sampling = FakeRounds(*pair(5, 12, 0.3), likely_tree(5, 3, 2, 0.6)), Sampling(max_tokens=30)
    request = Request([1, 2], sampling, Hierarchy(tiers_of(rounds, Breaks())))
    run(request)
    assert request.output == plain(rounds.target, [1, 2], sampling)
    assert len(rounds.rounds) == 1
    assert rounds.flight is not None


# Several requests


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS, st.integers(2, 4))
def test_several_requests_draft_tier_by_tier(seed: int, together: int) -> None:
    """And in fused rounds once one is left alone. Rounds in flight are none here."""

    class Unsure(Always):
        def goes_on(self, round: Round) -> bool:
            return False

    generator = np.random.default_rng(seed)
    rounds = FakeRounds(*pair(seed % 1000, 9, 0.3), likely_tree(6, 3, 2, 0.6))
    tiers, requests = tiers_of(rounds, Unsure()), []
    for number in range(together):
        sampling = Sampling(max_tokens=int(generator.integers(1, 30)), temperature=number % 2 * 0.8, seed=seed + number)
        requests.append(Request([1, number], sampling, Hierarchy(tiers)))
    run(*requests)
    for request in requests:
        assert request.output == plain(rounds.target, request.prompt.tolist(), request.sampling)
    assert all(each.running == 1 for each in rounds.rounds)
    longest = sorted(request.limit for request in requests)
    assert rounds.rounds or longest[-1] - longest[-2] < 12


def test_a_second_request_ends_them_after_the_one_in_flight() -> None:
    rounds, engine = FakeRounds(*pair(5, 12, 0.3), likely_tree(5, 3, 2, 0.6)), Engine()
    tiers = tiers_of(rounds, Always())
    first, second = (Request([1, number], Sampling(max_tokens=40), Hierarchy(tiers)) for number in range(2))
    engine.submit(first)
    while len(rounds.rounds) < 2:
        engine.step()
    assert rounds.flight is not None
    engine.submit(second)
    while engine.busy:
        engine.step()
    # One was asked for before the second came, and one more is in flight.
    shared = [(each.request, each.begun, each.goes_on) for each in rounds.rounds if each.running > 1]
    assert shared == [(first, True, True), (first, True, False)]
    for request in (first, second):
        assert request.output == plain(rounds.target, request.prompt.tolist(), request.sampling)
