"""A serving engine runs as many requests as the KV cache holds, and seldom looks while there is plenty of room."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees


class SmallMemory(FakeScorer):
    """Notes passes whose texts do not fit into this many positions: a KV cache would evict some."""

    def __init__(self, positions):
        super().__init__("target", 8, seed=1)
        self.positions = positions
        self.looks = 0
        self.together = []  # requests of each pass
        self.too_long = []  # positions of passes that do not fit

    def share_of_memory(self, positions):
        self.looks += 1
        return positions / self.positions

    def score(self, asks):
        self.together.append(len(asks))
        taken = sum(len(ask.context) + len(ask.proposal) for ask in asks)
        if len(asks) > 1 and taken > self.positions:
            self.too_long.append(taken)
        return super().score(asks)


def request_of(scorer, length, tokens, seed=0):
    stores = (FakeStore("guesses", random_trees(8, seed)),)
    return Request([1] * length, Sampling(max_tokens=tokens, seed=seed), Hierarchy((Tier(scorer, 1, stores, 4),)))


def run(engine, arriving):
    """Run to the end; `arriving` are steps and the requests that are submitted then."""
    arriving, steps = sorted(arriving, key=lambda pair: pair[0]), 0
    while engine.busy or arriving:
        while arriving and arriving[0][0] <= steps:
            engine.submit(arriving.pop(0)[1])
        engine.step()
        steps += 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(60, 250),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=6),
)
def test_the_texts_of_a_pass_always_fit(positions, arriving):
    scorer, requests = SmallMemory(positions), []
    for seed, (step, length, tokens) in enumerate(arriving):
        requests.append((step, request_of(scorer, length, tokens, seed)))
    run(Engine(serving=True), requests)
    assert not scorer.too_long
    for seed, ((_, length, tokens), (_, request)) in enumerate(zip(arriving, requests, strict=True)):
        assert request.error is None
        alone = request_of(FakeScorer("target", 8, seed=1), length, tokens, seed)
        list(Engine().run([alone]))
        assert request.output == alone.output


def test_a_newcomer_waits_where_there_was_room_without_it():
    scorer = SmallMemory(100)
    run(Engine(serving=True), [(0, request_of(scorer, 10, 60)), (2, request_of(scorer, 85, 5, 1))])
    assert not scorer.too_long
    assert set(scorer.together) == {1}


@pytest.mark.parametrize(("positions", "often"), [(100_000, False), (300, True)])
def test_it_looks_seldom_where_there_is_plenty_of_room(positions, often):
    scorer = SmallMemory(positions)
    run(Engine(serving=True), [(0, request_of(scorer, 20, 200, seed)) for seed in range(2)])
    passes = len(scorer.together)
    assert (scorer.looks > 2 * passes) is often
    assert scorer.looks > 2
    assert any(before != after for before, after in pairwise(scorer.together)) or not often
