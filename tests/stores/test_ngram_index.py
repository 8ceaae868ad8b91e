"""The n-gram index against a naive search of everything that is still in the ring."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec import compiled
from hierspec.stores import ngram_index
from hierspec.stores.ngram_index import LONGEST, NgramIndex

tokens = st.integers(-1, 3)  # -1 separates documents
texts = st.lists(tokens, max_size=80)
ngram_lengths = st.sampled_from([(1, 2, 4, 8), (1,), (2, 3), (1, 3, 5, 6)])


def naive_find(text: list[int], capacity: int, context: list[int], shortest: int) -> list[tuple[int, int]]:
    """(match length, position) of all matches among the newest `capacity` tokens, best first."""
    oldest = max(0, len(text) - capacity)
    matches = []
    for position in range(oldest, len(text)):
        length = 0
        while length < min(len(context), LONGEST) and position - length - 1 >= oldest:
            token = text[position - length - 1]
            if token < 0 or token != context[-1 - length]:
                break
            length += 1
        if length >= shortest and text[position] >= 0:
            matches.append((length, position))
    return sorted(matches, key=lambda match: (-match[0], -match[1]))


def indexed(text: list[int], capacity: int, lengths: tuple[int, ...], piece: int = 1000) -> NgramIndex:
    index = NgramIndex(capacity, lengths)
    for start in range(0, len(text), piece):
        index.append(np.array(text[start : start + piece], np.int32))
    return index


@given(texts, st.lists(st.integers(0, 3), max_size=10), st.integers(1, 100), ngram_lengths, st.integers(1, 9))
@settings(max_examples=300, deadline=None)  # the first call may compile
def test_it_finds_what_a_naive_search_finds(text, tail, capacity, lengths, piece):
    index = indexed(text, capacity, lengths, piece)
    context = [token for token in text if token >= 0][-20:] + tail
    matches = index.find(np.array(context, np.int32), max_matches=100)
    expected = naive_find(text, capacity, context, lengths[0])
    assert matches.lengths.tolist() == [length for length, _ in expected]
    assert matches.ends.tolist() == [position % (capacity + 1) for _, position in expected]
    assert [index.tokens[end] for end in matches.ends] == [text[position] for _, position in expected]
    assert index.size == len(text)


@given(texts, st.integers(1, 100), st.integers(1, 6))
@settings(deadline=None)
def test_a_bounded_search_returns_true_matches_longest_first_then_newest(text, capacity, max_matches):
    index = indexed(text, capacity, (1, 2, 4, 8))
    context = [token for token in text if token >= 0]
    matches = index.find(np.array(context, np.int32), max_matches)
    expected = {match[1] % (capacity + 1): match for match in naive_find(text, capacity, context, 1)}
    returned = [expected[end] for end in matches.ends.tolist()]
    assert [length for length, _ in returned] == matches.lengths.tolist()
    assert returned == sorted(returned, key=lambda match: (-match[0], -match[1]))
    assert len(set(returned)) == len(returned) <= max_matches


def test_a_text_that_repeats_one_token_gives_the_newest_matches():
    index = indexed([7] * 1000, 1000, (1, 2, 4, 8))
    matches = index.find(np.full(1000, 7, np.int32), max_matches=5)
    assert matches.lengths.tolist() == [LONGEST] * 5
    assert matches.ends.tolist() == [999, 998, 997, 996, 995]


def test_a_long_text_in_one_call_is_the_same_text_in_pieces():
    text = np.random.default_rng(0).integers(0, 50, 150_000).astype(np.int32)
    whole, pieces = NgramIndex(100_000), NgramIndex(100_000)
    whole.append(text)
    for piece in np.array_split(text, 40):
        pieces.append(piece)
    for at_once, in_pieces in zip(whole.arrays, pieces.arrays, strict=True):
        np.testing.assert_array_equal(at_once, in_pieces)


def test_positions_past_32_bits_wrap_around():
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    far = NgramIndex(100)
    far.arrays[0][0] = 2**32 - 4  # as if so many tokens had been appended before
    far.append(text)
    near = indexed(text, 100, (1, 2, 4, 8))
    matches, expected = far.find(np.array([9, 2, 3])), near.find(np.array([9, 2, 3]))
    assert matches.lengths.tolist() == expected.lengths.tolist() == [2]
    assert matches.ends.tolist() == expected.ends.tolist() == [3]


@given(texts, st.lists(st.integers(0, 3), max_size=10), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_without_numba_it_is_the_same(text, tail, capacity):
    slow = plain_python().NgramIndex(capacity)
    slow.append(text)
    fast = indexed(text, capacity, (1, 2, 4, 8))
    context = np.array([*text, *tail], np.int32)
    interpreted, compiled_matches = slow.find(context), fast.find(context)
    assert interpreted.ends.tolist() == compiled_matches.ends.tolist()
    assert interpreted.lengths.tolist() == compiled_matches.lengths.tolist()


def plain_python():
    """The module as imported without numba."""
    spec = importlib.util.spec_from_file_location("ngram_index_without_numba", ngram_index.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "njit", None)
        patch.setitem(importlib.sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def test_its_memory_is_counted_and_fixed():
    index = NgramIndex(1000)
    before = index.bytes
    index.append(np.arange(5000, dtype=np.int32))
    assert index.bytes == before == sum(array.nbytes for array in index.arrays)
    assert before < 60 * 1000


@pytest.mark.parametrize(("capacity", "lengths"), [(0, (1,)), (5, ()), (5, (2, 2)), (5, (0, 1)), (5, (1, 65))])
def test_it_refuses_what_it_cannot_hold(capacity, lengths):
    with pytest.raises(ValueError, match=r"index|lengths"):
        NgramIndex(capacity, lengths)
