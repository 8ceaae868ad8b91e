"""The n-grams of the most documents, against a count in plain Python; and its file, whole or refused."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.errors import HierspecError
from hierspec.stores import Home, open_store
from hierspec.stores.frequent import FrequentStore, build_frequent, count_ngrams
from hierspec.stores.lookahead import WINDOW_EVIDENCE, LookaheadStore

DOCUMENTS = [np.array(document, np.int32) for document in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], [1, 7, 3, 4, 5])]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 4), max_size=20), max_size=8), st.integers(2, 4), st.integers(1, 12))
def test_counts_are_those_of_plain_python(documents, size, count):
    expected = Counter(
        ngram
        for document in documents
        for ngram in dict.fromkeys(tuple(document[at : at + size]) for at in range(len(document) - size + 1))
    )
    ngrams, counts = count_ngrams([np.array(document, np.int64) for document in documents], size, count)
    assert len(ngrams) == min(count, len(expected))
    assert [expected[tuple(ngram)] for ngram in ngrams.tolist()] == counts.tolist()
    assert counts.tolist() == sorted(expected.values(), reverse=True)[:count]
    assert len({tuple(ngram) for ngram in ngrams.tolist()}) == len(ngrams)


def test_the_last_token_leads_to_what_most_answers_wrote_after_it(tmp_path):
    path = tmp_path / "frequent.ngrams"
    assert build_frequent(path, DOCUMENTS, "words", size=3) == 7
    store = FrequentStore(path, "words", candidates=2)
    draft = store.propose(np.array([8, 1], np.int32), 10)
    assert [draft.path(node) for node in range(len(draft))] == [[2], [2, 3], [7], [7, 3]]  # two documents, then one
    assert draft.sources == ("frequent",) * 4
    assert draft.evidence == (1, 1, 2, 2)
    assert len(store.propose(np.array([1], np.int32), 3)) == 3
    assert not store.propose(np.array([6], np.int32), 10).tokens
    assert store.info()["ngrams"] == 7


def test_another_vocabulary_and_damage_are_refused(tmp_path):
    home = Home(tmp_path, "words")
    assert open_store("frequent?", home) is None
    with pytest.raises(HierspecError, match="store build frequent"):
        open_store("frequent", home)
    with pytest.raises(HierspecError, match="build a history first"):
        build_frequent(home.frequent, [], "words")
    build_frequent(home.frequent, DOCUMENTS, "words")
    assert open_store("frequent?", home) is not None
    with pytest.raises(HierspecError, match="another model's vocabulary"):
        FrequentStore(home.frequent, "other words")
    whole = home.frequent.read_bytes()
    for damaged in (whole[:-1], whole + b"x", whole[:-4] + b"\0\0\0\1", b"", b"[]\n", whole[1:], b"\xff" * 100):
        home.frequent.write_bytes(damaged)
        with pytest.raises(HierspecError, match="build it again"):
            FrequentStore(home.frequent, "words")


def test_seven_candidates_of_four_and_the_window_fill_the_budget_of_hd():
    """Context database first: where it has seven candidates, there is no room for another."""
    store, context = LookaheadStore().begin(np.arange(40, dtype=np.int32)), np.array([39], np.int32)
    for step in range(1, 7):  # until the window is full
        draft = store.propose(context, 55)
        store.observe(draft, 1000 * step + np.arange(1 + len(draft)))
    for first in range(100, 170, 10):
        store.learn([39, *range(first, first + 4)])
    draft = store.propose(context, 55)
    assert sum(evidence < WINDOW_EVIDENCE for evidence in draft.evidence) == 28
    assert len(draft) == 55
