"""Stores are asked in turn: under a fixed plan while the draft has room, else while the next is worth its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paced_tiers import costs

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import FIXED, Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.pacing.acceptance import AcceptanceRates
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.asking import StoreChoice, promise
from hierspec.pacing.pace import AdaptivePace
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees

VOCABULARY = 8


def counting(name: str, draft, asked: list[str]) -> FakeStore:
    def propose(context, budget):
        asked.append(name)
        return draft(context, budget)

    return FakeStore(name, propose)


def written(tier: Tier, rule: str = "coupled", count: int = 3) -> list[list[int]]:
    sampling = Sampling(max_tokens=60, temperature=0.8, seed=5)
    requests = [Request([1, k], sampling, Hierarchy((tier,), rule)) for k in range(count)]
    for _ in Engine().run(requests):
        pass
    return [request.output for request in requests]


@pytest.mark.parametrize(
    ("first", "merge", "expected"),
    [
        ([1, 2, 3], True, ["a"]),  # full
        ([1, 2], True, ["a", "b", "c"]),  # there is room, also after b, which drafts the same
        ([], True, ["a", "b", "c"]),
        ([1, 2], False, ["a"]),
        ([], False, ["a", "b"]),
    ],
)
def test_a_fixed_plan_asks_the_next_store_while_the_draft_has_room(first, merge, expected):
    asked: list[str] = []
    stores = (
        counting("a", lambda context, budget: Proposal.chain(first, "a"), asked),
        counting("b", lambda context, budget: Proposal.chain([1, 2], "b"), asked),
        counting("c", lambda context, budget: Proposal.chain([4, 5, 6], "c"), asked),
    )
    tier = Tier(FakeScorer("target", VOCABULARY, seed=1), 1, stores, budget=3, merge=merge)
    request = Request([1, 2], Sampling(max_tokens=8), Hierarchy((tier,)))
    next(iter(Engine().run([request])))
    assert asked[: len(expected) + 1] == [*expected, "a"][: len(asked)]  # then the next round begins


def test_what_is_verified_is_the_same_as_if_all_had_been_asked():
    """The stores that are not asked could not have added a node."""

    class AsksAll(type(FIXED)):
        def asks(self, round, store):
            return True

    target = FakeScorer("target", VOCABULARY, seed=2)
    stores = tuple(FakeStore(f"store{k}", random_trees(VOCABULARY, k)) for k in range(3))
    for budget in (2, 5, 12):
        tier = Tier(target, 1, stores, budget, merge=True)
        counters = []
        for each in (tier, replace(tier, pace=AsksAll())):
            request = Request([1, 2], Sampling(max_tokens=50, temperature=0.8, seed=1), Hierarchy((each,)))
            for _ in Engine().run([request]):
                pass
            counters.append((request.output, request.stats.tiers[0].proposed, request.stats.tiers[0].accepted_at))
        assert counters[0] == counters[1]


def share_asked(choice: StoreChoice, rounds: int, gained: float, speed: float) -> float:
    asked = 0
    for _ in range(rounds):
        if choice.asks("corpus", 1, speed):
            asked += 1
            choice.learn("corpus", 1, gained, 50e-6)
    return asked / rounds


def test_a_store_that_adds_less_than_its_time_rests_and_comes_back():
    choice = StoreChoice()
    assert share_asked(choice, 500, 0.1, speed=100.0) == 1.0  # 50 us of 100 tokens a second: 0.005 tokens
    assert share_asked(choice, 3000, 0.0, speed=2000.0) < 0.2
    assert share_asked(choice, 4000, 0.0, speed=2000.0) < 0.04  # tried ever less often
    share_asked(choice, 2000, 0.5, speed=2000.0)  # its drafts have become better
    assert share_asked(choice, 500, 0.5, speed=2000.0) == 1.0


def test_worth_is_learnt_by_how_good_the_draft_before_it_is():
    rates, choice = AcceptanceRates(), StoreChoice()
    good, poor = Proposal((1,), (-1,), ("s",), evidence=(2,)), Proposal((1,), (-1,), ("s",), evidence=(1,))
    for _ in range(200):
        rates.learn(good, [1])
        rates.learn(poor, [2])
    classes = [promise(rates, drafts) for drafts in ((), (Proposal(),), (poor,), (poor, good))]
    assert classes[0] == classes[1] <= classes[2] < classes[3]
    for _ in range(400):
        choice.learn("corpus", classes[3], 0.0, 50e-6)
        choice.learn("corpus", classes[0], 0.4, 50e-6)
    assert choice.asks("corpus", classes[0], 2000.0)
    assert not choice.asks("corpus", classes[3], 2000.0)


def test_one_slow_ask_counts_as_a_few():
    choice = StoreChoice()
    for _ in range(200):
        choice.learn("corpus", 0, 0.1, 10e-6)
    choice.learn("corpus", 0, 0.1, 5.0)
    assert choice.asks("corpus", 0, 2000.0)


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
def test_stores_that_rest_change_no_text(rule):
    """Under every rule: stores' tokens are fixed, so the same dice write the same text whoever is asked."""
    asked: list[str] = []
    stores = tuple(counting(f"store{k}", random_trees(VOCABULARY, k, silence=0.3), asked) for k in range(3))
    target, price = FakeScorer("target", VOCABULARY, seed=3), costs(1e-3, 1e-5)
    pace = AdaptivePace(price, Appraiser(price))

    class Dear(StoreChoice):
        def learn(self, store, promise, gained, seconds):
            super().learn(store, promise, gained, 1.0)

    pace.store_choice = Dear()
    plain = written(Tier(target), rule)
    adaptive = written(Tier(target, 1, stores, 12, True, pace=pace), rule)
    assert 0 < asked.count("store1") < asked.count("store0")
    if rule == "coupled":
        assert adaptive == plain
    assert all(len(text) == 60 for text in adaptive)
