"""The lookahead store against the paper's algorithm, written with whole texts instead of a tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.interfaces import Answer
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Dice
from hierspec.core.verify import coupled
from hierspec.stores.lookahead import WINDOW_EVIDENCE, LookaheadStore

VOCABULARY = 23


def model(text: list[int]) -> int:
    """A made-up model: the next token depends on the last two."""
    return (text[-1] * 7 + text[-2] * 3 + 5) % VOCABULARY if len(text) > 1 else 1


def picks_of(context: list[int], proposal: Proposal) -> np.ndarray:
    return np.array([model(context)] + [model(context + proposal.path(node)) for node in range(len(proposal))])


class Reference:
    """The window as in the paper's code: past[0] is the spine, past[l] the tokens of level l, one per column."""

    def __init__(self, prompt: list[int], spine: list[int], columns: int, size: int, candidates: int) -> None:
        self.past, self.columns, self.size, self.candidates = [spine], columns, size, candidates
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.text: list[int] = []
        self.learn(prompt)

    def learn(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if len(self.text) >= self.size:
                self.add_to_pool(self.text[-self.size], tuple(self.text[-self.size + 1 :]))

    def add_to_pool(self, key: int, gram: tuple[int, ...]) -> None:
        grams = [other for other in self.pool.get(key, []) if other != gram]
        self.pool[key] = [*grams, gram][-self.candidates :]

    def look_ahead(self) -> None:
        """Moves the window by one pass, before the tokens of that pass are learnt."""
        text, past = self.text, self.past
        count = len(past[0]) + 1
        columns = [[past[level][column] for level in range(1, len(past))] for column in range(count)]
        new = [model(text + past[0][:column] + columns[column]) for column in range(count)]
        if len(past) < self.size - 1:
            self.past = [past[0][1:], *(level[1:] for level in [*past[1:], new])]
            return
        for column, key in enumerate([text[-1], *past[0]]):
            self.add_to_pool(key, (*columns[column], new[column]))
        levels = [*past[1:], new]
        self.past = [levels[0][1:], *levels[1:]]


@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    st.integers(1, 7),
    st.integers(2, 5),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
)
@settings(deadline=None)
def test_window_and_pool_are_those_of_the_paper(prompt, columns, size, candidates, steps):
    store = LookaheadStore(columns, size, candidates).begin(np.array(prompt, np.int32))
    reference = Reference(prompt, list(store._spine), columns, size, candidates)
    assert len(store._spine) == columns + size - 3
    text = list(prompt)
    for accepted in steps:
        assert store._pool == reference.pool
        assert [store._spine, *store._levels] == reference.past
        proposal = store.propose(np.array(text, np.int32), 1000)
        expected = [*reference.pool.get(text[-1], [])[::-1]]
        paths = [tuple(proposal.path(node)) for node in range(len(proposal))]
        assert all(gram in paths for gram in expected)
        store.observe(proposal, picks_of(text, proposal))
        reference.look_ahead()
        new = []
        for _ in range(accepted):
            new.append(model(text + new))
        text += new
        store.learn(new)
        reference.learn(new)


def test_the_first_window_depends_on_the_prompt_alone():
    prompt = np.arange(40, 60, dtype=np.int32)
    store, other = LookaheadStore().begin(prompt), LookaheadStore().begin(prompt, "someone")
    assert store._spine == other._spine
    assert len(set(store._spine)) > 4
    assert set(store._spine) <= set(prompt.tolist())


def test_candidates_come_first_and_the_window_whole_or_not_at_all():
    prompt = np.array([1, 2, 3, 4, 5, 9, 8, 1, 2, 3, 4, 6, 9, 8, 1], np.int32)
    store = LookaheadStore().begin(prompt)
    full = store.propose(prompt, 100)
    assert full.tokens[:5] == (2, 3, 4, 6, 5)  # the newest first, merged with the older one
    assert full.evidence[:5] == (1, 1, 1, 1, 2)
    assert set(full.evidence[5:]) == {WINDOW_EVIDENCE}
    assert store.propose(prompt, len(full)) == full
    assert store.propose(prompt, len(full) - 1) == full.first(5)
    assert store.propose(prompt, 3) == full.first(3)


def test_a_window_that_was_not_verified_whole_stays():
    prompt = np.arange(10, dtype=np.int32)
    store = LookaheadStore().begin(prompt)
    before = store.propose(prompt, 60)
    store.observe(before.first(len(before) - 1), np.arange(len(before)))
    store.observe(Proposal(), np.array([3]))
    assert store.propose(prompt, 60) == before
    others = Proposal.chain([20, 21], "other").merge(before, 100)
    store.observe(others, picks_of(prompt.tolist(), others))
    assert store.propose(prompt, 60) != before


def test_the_least_recently_seen_ngram_is_dropped():
    store = LookaheadStore(candidates=2)
    for gram in ([1, 2, 2, 2, 2], [1, 3, 3, 3, 3], [1, 2, 2, 2, 2], [1, 4, 4, 4, 4]):
        store._add_to_pool(gram[0], tuple(gram[1:]))
    assert store._pool[1] == [(2, 2, 2, 2), (4, 4, 4, 4)]
    assert store.propose(np.array([1]), 4).tokens == (4, 4, 4, 4)


def test_the_window_drafts_tokens_that_are_not_in_the_text_yet():
    text = [7, 8, 9]  # then the model counts: a token is its position, so it does not depend on wrong drafts before it
    store = LookaheadStore().begin(np.array(text, np.int32))
    passes, written = 0, 0
    while written < 200:
        proposal = store.propose(np.array(text, np.int32), 60)
        picks = len(text) + np.array([0] + [depth + 1 for depth in proposal.depths()])
        verdict = coupled(proposal, Answer(picks=picks[:, None]), Dice(0))
        store.observe(proposal, picks)
        new = [candidates[0][0] for candidates in verdict.written]
        store.learn(new)
        text += new
        passes, written = passes + 1, written + len(new)
    assert text[3:] == list(range(3, len(text)))
    assert written / passes > 1.8


@pytest.mark.parametrize("settings", [(0, 5, 7), (7, 1, 7), (7, 5, 0)])
def test_it_refuses_impossible_windows(settings):
    with pytest.raises(ValueError, match="lookahead needs"):
        LookaheadStore(*settings)
