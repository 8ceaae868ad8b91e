"""The context store against a naive search, and what it promises: no hit, no guess; never more than the budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hierspec.core.proposal import Proposal
from hierspec.stores.context import ContextStore

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def naive_places(known: list[int], context: list[int], longest: int) -> list[int]:
    """Positions after the longest suffix of the context (up to `longest` tokens) in what is known, newest first."""
    for length in range(min(longest, len(context)), 0, -1):
        suffix = context[-length:]
        ends = range(len(known) - 1, length - 1, -1)
        places = [end for end in ends if known[end - length : end] == suffix]
        if places:
            return places
    return []


@given(texts, st.lists(st.integers(0, 3), max_size=5), st.integers(1, 12))
def test_it_copies_what_followed_the_longest_suffix(known, tail, budget):
    store = ContextStore().begin(np.array(known, np.int32))
    context = known + tail
    found = store.propose(np.array(context, np.int32), budget)
    places = naive_places(known, context, store.longest)
    assert bool(found.tokens) == bool(places)
    assert len(found) <= budget
    for node, parent in enumerate(found.parents):  # every path is a copy of what stood somewhere
        assert parent < node
        path = found.path(node)
        assert any(known[place : place + len(path)] == path for place in places)
    if places:
        newest = known[places[0] : places[0] + budget - budget // 4]
        assert found.path(len(newest) - 1) == newest


@given(texts, st.integers(1, 6))
def test_learning_in_pieces_is_learning_at_once(known, size):
    whole, pieces = ContextStore().begin(np.array(known, np.int32)), ContextStore()
    for start in range(0, len(known), size):
        pieces.learn(known[start : start + size])
    context = np.array(known, np.int32)
    assert whole.propose(context, 8) == pieces.propose(context, 8)


def test_every_request_has_a_store_of_its_own():
    shared = ContextStore()
    one = shared.begin(np.array([1, 2, 3, 1], np.int32))
    two = shared.begin(np.array([7, 8], np.int32))
    assert one.propose(np.array([1]), 4).tokens == (2, 3, 1)
    assert two.propose(np.array([1]), 4) == Proposal()
