"""When a draft is made and verified in one call, and what shape it has: scripted times, no real clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paced_tiers import ROWS, costs
from rounds_of_fakes import FakeRounds

from hierspec.core.draft_tree import DraftTree, likely_tree
from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import UNDRAFTED, Answer, Ask, Block, Round, Written
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.blocks import WhileWorthwhile
from hierspec.pacing.costs import ALONE, FREE, Costs, Load, Prefill
from hierspec.pacing.fused_rounds import FusedRounds
from hierspec.pacing.pace import AdaptivePace
from hierspec.pacing.round_trees import _DEEPEST, _SIZES, ACCEPTED_GREEDY, ACCEPTED_SAMPLED, round_tree
from hierspec.pacing.routing import Route, Router
from hierspec.pacing.stages import StagedAttempt, Stages, Switches
from hierspec.pacing.switch import Attempt, Switch
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees, scripted

FEW = settings(max_examples=100, deadline=None, derandomize=True)
SECONDS, TOKENS = st.floats(0.001, 100.0), st.integers(1, 8)
MANY = st.lists(st.tuples(TOKENS, SECONDS), min_size=1, max_size=40)


def timed(whole: Sequence[tuple[float, float]] = (), others: Sequence[tuple[float, float]] = ()) -> FusedRounds:
    """With rounds of these tokens and seconds."""
    rounds = FusedRounds()
    for kind, several in ((True, whole), (False, others)):
        for tokens, seconds in several:
            rounds.learn(kind, tokens, seconds)
    return rounds


# Times


def test_where_nothing_else_is_drafted_they_are_taken_whatever_they_cost():
    for rounds in (timed(), timed([(1, 9.0)], [(1, 1.0)])):
        assert rounds.better(0.0)
        assert rounds.better(-1.0)


@pytest.mark.parametrize("rounds", [timed(), timed(whole=[(9, 0.1)]), timed(others=[(1, 9.0)])])
def test_before_both_kinds_were_timed_only_good_drafts_come_first(rounds):
    assert rounds.better(0.1)
    assert not rounds.better(1.0)


@pytest.mark.parametrize(
    ("whole", "others", "gain", "better"),
    [
        ((3, 1.5), (1, 1.0), 0.7, True),  # 2 tokens a second, against 1.7
        ((3, 1.5), (1, 1.0), 1.5, False),
        ((3, 1.5), (4, 1.0), 0.7, True),  # what other drafts gained before says nothing about these
        ((3, 1.5), (1, 0.5), 0.5, False),
        ((3, 0.9), (1, 1.0), 2.0, True),
    ],
)
def test_the_faster_kind_is_taken(whole, others, gain, better):
    assert timed([whole] * 5, [others] * 5).better(gain) is better


@FEW
@given(MANY, MANY, st.floats(0.01, 8.0), st.sampled_from([0.125, 4.0, 1024.0]))
def test_the_unit_of_time_and_better_drafts(whole, others, gain, unit):
    rounds, slower = timed(whole, others), timed(*([(n, unit * s) for n, s in each] for each in (whole, others)))
    assert rounds.better(gain) == slower.better(gain)
    if rounds.better(gain):
        assert rounds.better(gain / 2)
    else:
        assert not rounds.better(2 * gain)


@FEW
@given(MANY, MANY)
def test_a_usual_round_takes_an_average_in_which_late_ones_count_more(whole, others):
    rounds, seconds = timed(whole, others), [seconds for _, seconds in whole]
    assert min(seconds) * 0.999 <= rounds.seconds <= max(seconds) * 1.001
    assert timed(others=others).seconds == 0
    before = rounds.seconds
    rounds.learn(True, 1, 2 * before)
    assert before < rounds.seconds < 2 * before
    for _ in range(100):
        rounds.learn(True, 1, 0.5)
    assert rounds.seconds == pytest.approx(0.5, rel=1e-2, abs=0.01)


@FEW
@given(MANY, MANY)
def test_a_new_text_soon_counts_for_more_than_those_before_it(whole, others):
    same, fresh = timed(whole, others), timed(whole, others)
    fresh.new_text()
    assert fresh.seconds == pytest.approx(same.seconds)
    for _ in range(3):
        for rounds in (same, fresh):
            rounds.learn(True, 1, 200.0)
    assert fresh.seconds >= same.seconds - 1e-9
    if len(whole) > 20:
        assert fresh.seconds > 1.1 * same.seconds


def test_a_new_text_leaves_a_short_one_and_other_rounds_as_they_are():
    rounds, same = timed([(3, 1.0)] * 2, [(1, 1.0)] * 30), timed([(3, 1.0)] * 2, [(1, 1.0)] * 30)
    for _ in range(3):
        rounds.new_text()
    for each in (rounds, same):
        each.learn(True, 1, 2.0)
        each.learn(False, 1, 3.0)
    assert rounds.seconds == same.seconds
    for gain in np.linspace(0.05, 3, 60):
        assert rounds.better(gain) == same.better(gain)
    timed().new_text()


# Shapes


def nodes(tree: DraftTree) -> int:
    return len(tree.parents)


def test_wide_where_width_is_cheap_and_narrow_where_it_is_dear():
    own, sizes = costs(0.05), []
    for each in (0.0, 0.004, 0.015, 0.1):
        sizes.append(nodes(round_tree(costs(1.0, each), own, 60, 7, 4, ACCEPTED_GREEDY)))
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (max(_SIZES), min(_SIZES))
    assert len(set(sizes)) == len(_SIZES)


def test_shallow_where_drafting_is_dear():
    depths = [round_tree(costs(1.0, 0.01), costs(own), 15, 7, 4, 0.7).depth for own in (0.001, 0.05, 0.2, 0.6, 2.0)]
    assert depths == sorted(depths, reverse=True)
    assert (depths[0], depths[-1]) == (_DEEPEST, 1)
    assert len(set(depths)) >= 4


def test_shallow_where_little_is_accepted():
    depths = [round_tree(costs(1.0, 0.01), costs(0.1), 15, 7, 4, rate).depth for rate in (0.95, 0.7, 0.5, 0.2)]
    assert depths == sorted(depths, reverse=True)
    assert len(set(depths)) >= 3
    assert ACCEPTED_SAMPLED < ACCEPTED_GREEDY


@FEW
@given(
    st.lists(st.floats(0.0, 0.2), min_size=len(ROWS) - 1, max_size=len(ROWS) - 1),
    st.floats(0.0, 1.0),
    st.integers(1, 50),
    st.integers(1, 10),
    st.integers(1, 4),
    st.floats(0.1, 0.95),
)
def test_within_the_budget_and_the_depth_none_is_faster(steps, price, budget, depth, candidates, rate):
    above, own = Costs(ROWS, np.cumsum([1.0, *steps]).tolist()), costs(price)
    tree = round_tree(above, own, budget, depth, candidates, rate)
    assert nodes(tree) <= budget
    assert tree.depth <= min(depth, _DEEPEST)
    assert max(tree.ranks) < candidates

    def speed(each: DraftTree) -> float:
        seconds = above.under(ALONE).seconds(1 + nodes(each)) + each.depth * own.under(ALONE).seconds(1)
        return (1 + each.expected) / seconds

    for size in _SIZES:
        for deep in range(1, min(depth, _DEEPEST) + 1):
            assert speed(tree) >= speed(likely_tree(min(size, budget), deep, candidates, rate)) - 1e-9


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (3, 8), (7, 5), (40, 2), (40, 9)])
def test_where_nothing_was_measured_it_is_of_a_middle_size(budget, depth):
    tree = round_tree(FREE, FREE, budget, depth, 3, 0.7)
    assert nodes(tree) <= min(budget, 15)
    assert nodes(tree) == min(budget, 15, sum(3**level for level in range(1, tree.depth + 1)))
    assert tree.depth == min(budget, depth, 5)
    assert round_tree(FREE, costs(9.0), budget, depth, 3, 0.7) is tree
    assert round_tree(costs(1.0), FREE, budget, depth, 3, 0.7).depth == min(budget, depth, _DEEPEST)  # drafting is free


# Whether they go on


@pytest.mark.parametrize("beside_stores", [False, True])
def test_a_switch_that_is_on_goes_on_until_the_end_of_its_run(beside_stores):
    """It says so when a round begins; while drafts pay the next one then drafts."""
    switch, rounds = Switch(beside_stores=beside_stores), []
    for _ in range(1500):
        attempt = switch.begin()
        rounds.append((attempt.drafts, switch.goes_on()))
        switch.learn(attempt, 2 if attempt.drafts else 1, 1.2 if attempt.drafts else 1.0)
    for (drafts, goes_on), (next_drafts, _) in pairwise(rounds):
        assert not goes_on or (drafts and next_drafts)
    drafted = [goes_on for drafts, goes_on in rounds if drafts]
    assert drafted.count(True) > 0.95 * len(drafted) > 1000
    assert not rounds[0][1]


def test_a_switch_in_a_break_does_not_go_on():
    """Also not after one round that only looks."""
    switch, looked = Switch(), 0
    for number in range(1500):
        attempt = switch.begin()
        if number > 600 and not attempt.drafts:
            assert not switch.goes_on()
        if attempt.looks:
            looked += 1
            assert not switch.goes_on()
        switch.learn(attempt, 1, 1.5 if attempt.drafts else 1.0)
    assert looked


def test_tiers_go_on_only_where_both_switches_do():
    class Fixed:
        def __init__(self, goes_on: bool) -> None:
            self.goes_on = lambda: goes_on

    for drafts in (True, False):
        alone = Stages()
        alone._drafts = Fixed(drafts)  # type: ignore[assignment]
        assert alone.goes_on() is drafts
        for tiers in (True, False):
            both = Stages(tiers_apart=True)
            both._drafts, both._tiers = Fixed(drafts), Fixed(tiers)  # type: ignore[assignment]
            assert both.goes_on() is (drafts and tiers)


# The pace


class Promising(Appraiser):
    """Whatever stores propose should gain so many tokens."""

    promise = 0.0

    def appraise(self, proposals: Any, budget: int, speed: float, load: Load = ALONE) -> tuple[float, Proposal]:
        return self.promise, proposals[0]


class Watched(Stages):
    """Everything may be drafted; remembers what it is told."""

    def __init__(self, goes_on: bool = True) -> None:
        super().__init__()
        self.learnt: list[tuple[float, float, float]] = []  # tokens, seconds, prefill
        self._goes_on = goes_on

    def begin(self, requests: int = 1) -> StagedAttempt:
        return StagedAttempt(self, Attempt(True))

    def goes_on(self) -> bool:
        return self._goes_on

    def learn(self, attempt: Any, tokens: float, seconds: float, requests: int = 1, prefill: float = 0.0) -> None:
        self.learnt.append((tokens, seconds, prefill))


ABOVE, OWN = costs(2.0, 0.1), costs(0.25)


def a_pace(rounds: FusedRounds | None, stages: Stages | None = None, prefill: float = 0.0) -> AdaptivePace:
    policy = WhileWorthwhile(ABOVE, Prefill(prefill), OWN)
    switches = Switches()
    switches.of = lambda requests: stages  # type: ignore[assignment, method-assign, return-value]
    appraiser = Promising(ABOVE)
    return AdaptivePace(
        ABOVE,
        appraiser,
        Router([Route(policy, ABOVE)]),
        switches=None if stages is None else switches,
        fused_rounds=rounds,
    )


def a_round(output: int = 4, proposals: Sequence[Proposal] = (), fused: bool = True, room: int = 20) -> Round:
    hierarchy = Hierarchy((Tier(FakeScorer("target", 8)), Tier(FakeScorer("drafter", 8), 3)))
    request = Request([1] * 30, Sampling(max_tokens=output + room + 1), hierarchy)
    request.output += [2] * output
    request.prefilled = False
    round = Round(0, np.array([*request.prompt, *request.output]), room, 7, request, Block())
    round.proposals, round.fused = list(proposals), fused
    return round


STORED = Proposal.chain([3, 4, 5], "store")


def never(*given: Any, **named: Any) -> Any:
    raise AssertionError("not asked for")


def test_a_round_that_can_be_one_call_is_one():
    pace, round = a_pace(FusedRounds()), a_round()
    pace.router.choose = never
    block = pace.route(round)
    assert block is not None
    assert (block.skipped, round.fused) == (0, True)
    assert pace.router.routes[0].policy._blocks == 1
    assert block.least >= 1


@pytest.mark.parametrize("drafts", [True, False])
def test_stores_that_promise_more_are_left_to_the_router_until_rounds_are_timed(drafts):
    pace, round = a_pace(FusedRounds()), a_round(proposals=[STORED])
    pace.appraiser.promise = 2.0
    pace.router.choose = lambda *given: 0 if drafts else None
    assert (pace.route(round) is not None) is drafts
    assert not round.fused
    assert round.appraised is STORED


def test_stores_that_promise_more_are_verified_alone_once_rounds_are_timed():
    """A tier that drafts first takes longer than a fused round does: it is not asked."""
    pace, round = a_pace(timed([(3, 3.0)], [(1, 2.0)])), a_round(proposals=[STORED])
    pace.router.choose = pace.router.explore = never
    pace.appraiser.promise = 1.5
    assert pace.route(round) is None
    assert not round.fused
    assert pace.choose(round).tokens
    pace.appraiser.promise, round = 0.5, a_round(proposals=[STORED])
    assert pace.route(round) is not None
    assert round.fused


def test_a_drafter_that_would_read_the_prompt_for_too_little_is_left_out():
    pace = a_pace(timed([(3, 3.0)], [(1, 2.0)]), prefill=5.0)
    pace.router.choose = never
    late = a_round(room=2)
    assert pace.route(late) is None
    assert not late.fused
    late.request.stats.tiers[1].calls = 1  # it has read the prompt
    late.fused = True
    assert pace.route(late) is not None
    assert late.fused


def test_a_round_that_is_left_out_counts_as_plain():
    """It drafts nothing, so it says nothing about drafts, and a break begins."""
    stages = Stages()
    stages.begin = lambda requests=1: StagedAttempt(stages, Attempt(True))
    stages._drafts.lends = lambda prefill: True
    stages.learn = never
    pace, late = a_pace(timed([(3, 3.0)], [(1, 2.0)]), stages, prefill=5.0), a_round(room=2)
    late.may_draft = pace.drafts(late)
    assert pace.route(late) is None
    assert late.attempt.declined
    late.tokens, late.ended = [3], 1.0
    pace.learn(late)
    assert stages._drafts.rests() > 1


def test_a_clock_that_stands_still_divides_nothing():
    assert timed([(3, 0.0)], [(1, 1.0)]).better(0.5)


def test_the_prompts_pass_waits_for_no_draft_where_the_next_round_is_one_call():
    first = a_round(output=0, fused=False)
    pace = a_pace(timed([(3, 3.0)]))
    pace.router.choose = never
    assert pace.route(first) is None
    for rounds, running in ((FusedRounds(), 1), (None, 1), (timed([(3, 3.0)]), 2)):
        pace = a_pace(rounds)
        pace.router.choose = lambda *given: 0
        first.request.running_requests = running
        assert pace.route(first) is not None


def test_a_new_text_is_told_to_the_rounds():
    """Only where one request runs alone."""
    for output, running, told in ((0, 1, 1), (3, 1, 0), (0, 2, 0)):
        rounds, calls = FusedRounds(), []
        rounds.new_text = lambda calls=calls: calls.append(1)
        pace, round = a_pace(rounds, Watched()), a_round(output=output)
        round.request.running_requests = running
        assert pace.drafts(round)
        assert len(calls) == told


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("switch", [True, False, None])
def test_the_next_round_is_likely_one_call_where_the_switch_stays_on(fused, switch):
    stages = None if switch is None else Watched(switch)
    pace, round = a_pace(FusedRounds(), stages), a_round(fused=fused)
    assert pace.drafts(round)
    assert pace.goes_on(round) is (fused and switch is not False)


def ended(
    pace: AdaptivePace, seconds: float, drafted: bool = True, fused: bool = True, missed: int = 0, **settings: Any
) -> Round:
    """A round that has ended, and that the pace has learnt from. It wrote three tokens."""
    round = a_round(fused=fused)
    assert pace.drafts(round)
    for name, value in settings.items():
        setattr(round.request, name, value)
    round.began, round.ended, round.missed, round.tokens = 50.0, 50.0 + seconds, missed, [3, 4, 6]
    round.draft = STORED
    round.proposals = [STORED]
    if drafted:
        round.drafted = Block(written=[Written([(token, None)], "drafter", UNDRAFTED) for token in STORED.tokens])
    pace.learn(round)
    return round


def test_what_is_timed():
    rounds = FusedRounds()
    pace = a_pace(rounds, Watched())
    ended(pace, 9.0, fused=False)  # tier by tier: serves no comparison
    ended(pace, 9.0, running_requests=2)
    ended(pace, 9.0, prefilled=True)
    assert (rounds._fused, rounds._others) == ([0.0] * 3, [0.0] * 3)
    ended(pace, 3.0)
    assert (rounds._fused, rounds._others) == ([1, 3, 3.0], [0.0] * 3)
    ended(pace, 2.0, drafted=False, fused=False)
    assert (rounds._fused, rounds._others) == ([1, 3, 3.0], [1, 3, 2.0])
    untimed = a_pace(None, Watched())
    ended(untimed, 3.0)  # no device can
    assert len(untimed.switches.of(1).learnt) == 1


def test_a_round_is_expected_to_take_its_pass_and_the_drafted_tokens():
    pace = a_pace(FusedRounds(), Watched())
    load = Load(1, 34)
    verified = ABOVE.under(load).seconds(4)
    assert ended(pace, 3.0).seconds == pytest.approx(verified + 3 * OWN.under(load).seconds(1))
    assert ended(pace, 3.0, fused=False).seconds == pytest.approx(verified)  # the drafter's own are in its block


def test_what_a_drafter_reads_first_is_no_cost_of_the_round():
    """It serves later rounds too. A few tokens take no time."""
    rounds, stages = FusedRounds(), Watched()
    pace = a_pace(rounds, stages)
    ended(pace, 3.0, missed=500)  # the first one: nobody knows yet how long one takes
    assert stages.learnt.pop() == (3, 1.5, 0.0)
    ended(pace, 3.0)
    ended(pace, 11.0, missed=17)
    assert stages.learnt.pop() == (3, 5.5, 4.0)  # in plain passes, which take two seconds
    assert rounds.seconds == pytest.approx(3.0)
    ended(pace, 2.0, missed=500)  # and never less than nothing
    assert stages.learnt.pop() == (3, 1.0, 0.0)
    before = rounds.seconds
    ended(pace, 11.0, missed=16)
    assert stages.learnt.pop() == (3, 5.5, 0.0)
    assert rounds.seconds > before + 1


# All of it, on a clock that passes move


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(FakeScorer):
    """Takes as long as its costs say."""

    def __init__(self, name: str, clock: Clock, price: Costs, noise: float = 0.0) -> None:
        super().__init__(name, 16, seed=3, sharpness=3.0, noise=noise)
        self.clock, self.price = clock, price

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        self.clock.now += self.price.seconds(sum(1 + len(ask.proposal) for ask in asks))
        return super().score(asks)


class TimedRounds(FakeRounds):
    seconds = 0.0

    def answer(self, ask: Ask) -> Answer:
        began = self.target.clock.now
        answer = super().answer(ask)
        self.target.clock.now = began + self.seconds
        return answer


LONG = 1200


def decode(seconds: float, stores: Any = lambda text: (), whole: bool = True) -> tuple[float, FakeRounds, Request]:
    """Seconds for a text of which plain decoding needs `LONG`, where a fused round takes so long."""
    clock, price, own = Clock(), costs(1.0, 0.01), costs(0.2)
    target, drafter = Timed("target", clock, price), Timed("drafter", clock, own, noise=0.15)
    rounds = TimedRounds(target, drafter, likely_tree(7, 4, 3, 0.7))
    rounds.seconds = seconds
    text = Request([1, 2, 3], Sampling(max_tokens=LONG), Hierarchy((Tier(FakeScorer("", 16, target.logits)),)))
    list(Engine().run([text]))
    policy = WhileWorthwhile(price, own=own)
    pace = AdaptivePace(
        price,
        Appraiser(price),
        Router([Route(policy, price)]),
        switches=Switches(),
        fused_rounds=FusedRounds() if whole else None,
    )
    top = Tier(target, 1, stores(text.text.tolist()), 7, True, pace=pace, rounds=rounds if whole else None)
    hierarchy = Hierarchy((top, Tier(drafter, 4, pace=AdaptivePace(own, ends={0: policy}))))
    request, clock.now = Request([1, 2, 3], Sampling(max_tokens=LONG), hierarchy), 0.0
    list(Engine(clock=clock).run([request]))
    assert request.output == text.output
    return clock.now, rounds, request


def test_rounds_in_one_call_that_are_fast_are_nearly_all_there_are():
    seconds, rounds, request = decode(1.2)
    apart, _, _ = decode(1.2, whole=False)
    assert len(rounds.rounds) > 0.9 * request.stats.passes
    assert sum(each.begun for each in rounds.rounds) > 0.9 * len(rounds.rounds)
    assert seconds < 0.75 * apart < 0.75 * LONG


def test_rounds_in_one_call_that_are_slow_cost_little():
    """Two passes more than all that they can write."""
    seconds, rounds, request = decode(7.0)
    assert 0 < len(rounds.rounds) < 0.05 * request.stats.passes
    assert seconds < 1.1 * LONG


def test_stores_that_are_right_keep_their_drafts_and_those_that_guess_do_not():
    def right(text: list[int]) -> tuple[FakeStore, ...]:
        return (FakeStore("store", scripted(text)),)

    def guessing(text: list[int]) -> tuple[FakeStore, ...]:
        return (FakeStore("store", random_trees(16, 5, silence=0)),)

    seconds, rounds, request = decode(1.2, right)
    assert seconds < 0.25 * LONG  # eight tokens a pass
    assert len(rounds.rounds) < 0.2 * request.stats.passes
    alone, _, _ = decode(1.2)
    seconds, rounds, request = decode(1.2, guessing)
    assert len(rounds.rounds) > 0.7 * request.stats.passes
    assert seconds < 1.15 * alone
