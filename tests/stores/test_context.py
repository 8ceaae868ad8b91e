"""The context store against a naive search, and what it promises: no hit, no guess; never more than the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.proposal import Proposal
from hierspec.stores.context import ContextStore, CopyStore

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
tails = st.lists(st.integers(0, 3), max_size=5)


def naive_places(known: list[int], context: list[int]) -> list[tuple[int, int]]:
    """(match length, position after the match) wherever the last token stands in what is known, best first."""
    found = []
    for end in range(1, len(known)):
        length = 0
        while length < min(end, len(context)) and known[end - 1 - length] == context[-1 - length]:
            length += 1
        if length:
            found.append((length, end))
    return sorted(found, reverse=True)


@given(texts, tails, st.integers(1, 12))
@settings(deadline=None)
def test_it_guesses_what_followed_the_end_of_the_text_before(known, tail, budget):
    store = ContextStore(places=100).begin(np.array(known, np.int32))
    found = store.propose(np.array(known + tail, np.int32), budget)
    places = naive_places(known, known + tail)
    assert bool(found.tokens) == bool(places)
    assert len(found) <= budget
    for node in range(len(found)):  # every path is a copy of what stood somewhere
        path = found.path(node)
        assert any(known[end : end + len(path)] == path for _, end in places)
    # All that followed somewhere is guessed where the budget allows it.
    full = store.propose(np.array(known + tail, np.int32), 2000)
    paths = {tuple(full.path(node)) for node in range(len(full))}
    assert paths == {tuple(known[end:stop]) for _, end in places for stop in range(end + 1, len(known) + 1)}


@given(texts, tails, st.integers(1, 12))
@settings(deadline=None)
def test_copying_takes_the_newest_of_the_longest_matches(known, tail, budget):
    store = CopyStore(places=100).begin(np.array(known, np.int32))
    found = store.propose(np.array(known + tail, np.int32), budget)
    places = naive_places(known, known + tail)
    expected = known[places[0][1] :][:budget] if places else []
    assert found == Proposal.chain(expected, "copy")
    assert len(set(found.evidence)) <= 1
    assert 0 not in found.evidence


@pytest.mark.parametrize("kind", [ContextStore, CopyStore])
@given(known=texts, size=st.integers(1, 6))
@settings(deadline=None)
def test_learning_in_pieces_is_learning_at_once(kind, known, size):
    whole, pieces = kind().begin(np.array(known, np.int32)), kind()
    for start in range(0, len(known), size):
        pieces.learn(tuple(known[start : start + size]))
    context = np.array(known, np.int32)
    assert whole.propose(context, 8) == pieces.propose(context, 8)


def test_a_growing_text_forgets_nothing():
    text = np.random.default_rng(0).permutation(5000).astype(np.int32)
    store = ContextStore().begin(text[:3])
    for start in range(3, len(text), 7):
        store.learn(text[start : start + 7].tolist())
    for place in (1, 2, 1023, 1024, 2999, 4998):
        found = store.propose(text[:place], 3)
        assert list(found.tokens) == text[place : place + 3].tolist()


def test_every_request_has_a_store_of_its_own():
    shared = ContextStore()
    one = shared.begin(np.array([1, 2, 3, 1], np.int32), "someone")
    two = shared.begin(np.array([7, 8], np.int32))
    assert one.propose(np.array([1]), 4).tokens == (2, 3, 1)
    assert two.propose(np.array([1]), 4) == Proposal()
    assert shared.propose(np.array([1]), 4) == Proposal()


def test_a_text_of_one_token_again_and_again_is_guessed_on():
    store = ContextStore().begin(np.full(100, 7, np.int32))
    assert store.propose(np.full(100, 7, np.int32), 8) == Proposal.chain([7] * 8, "context")
