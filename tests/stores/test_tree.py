"""The draft tree against a naive trie of continuations."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.proposal import Proposal
from hierspec.stores import tree
from hierspec.stores.ngram_index import NgramIndex
from hierspec.stores.tree import draft_from_index, draft_from_matches, evidence

texts = st.lists(st.integers(-1, 3), min_size=1, max_size=60)


@st.composite
def texts_and_matches(draw):
    text = draw(texts)
    matches = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(0, len(text) - 1)), max_size=20))
    matches.sort(key=lambda match: -match[0])
    return text, [length for length, _ in matches], [end for _, end in matches]


def naive_trie(text, lengths, ends, depth):
    """path -> (probability, longest match, matches that continue below the parent, share of their weight)."""
    prior = tree._PRIOR.tolist()
    weights, remaining = {}, 1.0
    for length in sorted(set(lengths), reverse=True):
        same_length = [match for match, other in enumerate(lengths) if other == length]
        weights |= {match: remaining * prior[min(length, 16)] / len(same_length) for match in same_length}
        remaining *= 1 - prior[min(length, 16)]
    trie = {}
    probabilities = {(): 1.0}
    matches = {(): list(range(len(ends)))}  # by path
    for below in range(depth):
        for path in [path for path in matches if len(path) == below]:
            continuing = [match for match in matches[path] if (text[ends[match] + below :] or [-1])[0] >= 0]
            total = sum(weights[match] for match in continuing)
            for token in {text[ends[match] + below] for match in continuing}:
                child = [match for match in continuing if text[ends[match] + below] == token]
                weight, longest = sum(weights[match] for match in child), max(lengths[match] for match in child)
                probability = weight
                if path:
                    probability = probabilities[path] * prior[min(longest + below, 16)] * weight / total
                probabilities[*path, token], matches[*path, token] = probability, child
                trie[*path, token] = (probability, longest, len(continuing), weight / total)
    return trie


def draft(text, lengths, ends, budget, depth):
    arrays = np.array(text, np.int32), np.array(ends, np.int64), np.array(lengths, np.int32)
    return draft_from_matches(*arrays, budget, depth, "here")


@given(texts_and_matches(), st.integers(0, 20), st.integers(1, 8))
@settings(max_examples=300, deadline=None)  # the first call may compile
def test_nodes_come_in_order_of_probability(text_and_matches, budget, depth):
    text, lengths, ends = text_and_matches
    trie = naive_trie(text, lengths, ends, depth)
    proposal = draft(text, lengths, ends, budget, depth)
    paths = [tuple(proposal.path(node)) for node in range(len(proposal))]
    assert len(set(paths)) == len(paths) == min(budget, len(trie))
    probabilities = [trie[path][0] for path in paths]
    assert all(following <= probability + 1e-12 for probability, following in pairwise(probabilities))
    left_out = [probability for path, (probability, *_) in trie.items() if path not in paths]
    assert not paths or max(left_out, default=0.0) <= probabilities[-1] + 1e-12
    assert proposal.sources == ("here",) * len(paths)


@given(texts_and_matches(), st.integers(1, 8))
@settings(deadline=None)
def test_evidence_tells_length_and_support(text_and_matches, depth):
    text, lengths, ends = text_and_matches
    trie = naive_trie(text, lengths, ends, depth)
    proposal = draft(text, lengths, ends, 100, depth)
    for node, node_class in enumerate(proposal.evidence):
        _, longest, parent_matches, share = trie[tuple(proposal.path(node))]
        expected = {evidence(longest, parent_matches, share + slack) for slack in (-1e-9, 0.0, 1e-9)}
        assert node_class in expected


def test_classes_of_evidence():
    assert evidence(1, 1, 1.0) == 1
    assert [evidence(1, 9, share) for share in (0.1, 0.2, 0.5, 0.85, 1.0)] == [2, 3, 4, 5, 5]
    buckets = [(evidence(length, 1, 1.0) - 1) // 5 for length in (1, 2, 3, 4, 5, 6, 7, 9, 10, 15, 16, 64)]
    assert buckets == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert evidence(64, 2, 1.0) == tree.CLASSES - 1


def test_a_longer_match_comes_before_many_shorter_ones():
    text = [5, 6, -1, 8, 9, -1, 8, 9, -1, 8, 9]
    proposal = draft(text, [12, 1, 1, 1], [0, 3, 6, 9], 3, 4)
    assert proposal.tokens[:2] == (5, 6)
    assert proposal.evidence[0] == evidence(12, 4, 0.85)


def test_without_a_continuation_nothing_is_drafted():
    assert draft([1, 2], [], [], 5, 5) == Proposal()
    assert draft([1, 2], [1], [0], 0, 5) == Proposal()
    assert draft([1, -1], [1], [1], 5, 5) == Proposal()


@given(texts, st.lists(st.integers(0, 3), max_size=5), st.integers(0, 20), st.integers(1, 8), st.integers(1, 40))
@settings(deadline=None)
def test_the_compiled_call_equals_find_and_draft(text, tail, budget, depth, max_matches):
    index = NgramIndex(50)
    index.append(text)
    context = np.array([*text, *tail], np.int32)
    matches = index.find(context, max_matches)
    expected = draft_from_matches(index.tokens, matches.ends, matches.lengths, budget, depth, "here")
    proposal = draft_from_index(index, context, budget, depth, "here", max_matches)
    assert proposal == expected
    assert proposal.evidence == expected.evidence
