"""The context store against a naive search: no match, no draft; never more nodes than the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.proposal import Proposal
from hierspec.stores.context import ContextStore, CopyStore

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
tails = st.lists(st.integers(0, 3), max_size=5)


def naive_matches(text: list[int], context: list[int]) -> list[tuple[int, int]]:
    """(match length, position after the match) of every match of the last token, best first."""
    matches = []
    for end in range(1, len(text)):
        length = 0
        while length < min(end, len(context)) and text[end - 1 - length] == context[-1 - length]:
            length += 1
        if length:
            matches.append((length, end))
    return sorted(matches, reverse=True)


@given(texts, tails, st.integers(1, 12))
@settings(deadline=None)
def test_it_drafts_what_followed_earlier_matches(text, tail, budget):
    store = ContextStore(max_matches=100).begin(np.array(text, np.int32))
    proposal = store.propose(np.array(text + tail, np.int32), budget)
    matches = naive_matches(text, text + tail)
    assert bool(proposal.tokens) == bool(matches)
    assert len(proposal) <= budget
    for node in range(len(proposal)):  # every path is a copy of a continuation
        path = proposal.path(node)
        assert any(text[end : end + len(path)] == path for _, end in matches)
    # With a large budget, all continuations are drafted.
    full = store.propose(np.array(text + tail, np.int32), 2000)
    paths = {tuple(full.path(node)) for node in range(len(full))}
    assert paths == {tuple(text[end:stop]) for _, end in matches for stop in range(end + 1, len(text) + 1)}


@given(texts, tails, st.integers(1, 12))
@settings(deadline=None)
def test_copying_takes_the_newest_of_the_longest_matches(text, tail, budget):
    store = CopyStore(max_matches=100).begin(np.array(text, np.int32))
    proposal = store.propose(np.array(text + tail, np.int32), budget)
    matches = naive_matches(text, text + tail)
    expected = text[matches[0][1] :][:budget] if matches else []
    assert proposal == Proposal.chain(expected, "copy")
    assert len(set(proposal.evidence)) <= 1
    assert 0 not in proposal.evidence


@pytest.mark.parametrize("kind", [ContextStore, CopyStore])
@given(text=texts, size=st.integers(1, 6))
@settings(deadline=None)
def test_learning_in_pieces_is_learning_at_once(kind, text, size):
    whole, pieces = kind().begin(np.array(text, np.int32)), kind()
    for start in range(0, len(text), size):
        pieces.learn(tuple(text[start : start + size]))
    context = np.array(text, np.int32)
    assert whole.propose(context, 8) == pieces.propose(context, 8)


def test_a_growing_text_forgets_nothing():
    text = np.random.default_rng(0).permutation(5000).astype(np.int32)
    store = ContextStore().begin(text[:3])
    for start in range(3, len(text), 7):
        store.learn(text[start : start + 7].tolist())
    for end in (1, 2, 1023, 1024, 2999, 4998):
        assert list(store.propose(text[:end], 3).tokens) == text[end : end + 3].tolist()


def test_requests_do_not_see_each_others_text():
    shared = ContextStore()
    first = shared.begin(np.array([1, 2, 3, 1], np.int32), "someone")
    second = shared.begin(np.array([7, 8], np.int32))
    assert first.propose(np.array([1]), 4).tokens == (2, 3, 1)
    assert second.propose(np.array([1]), 4) == Proposal()
    assert shared.propose(np.array([1]), 4) == Proposal()


def test_a_text_that_repeats_one_token_is_drafted_on():
    store = ContextStore().begin(np.full(100, 7, np.int32))
    assert store.propose(np.full(100, 7, np.int32), 8) == Proposal.chain([7] * 8, "context")
