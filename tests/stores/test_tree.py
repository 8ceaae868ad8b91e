"""The tree of continuations against a naive trie."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.proposal import Proposal
from hierspec.stores import tree
from hierspec.stores.chains import ChainIndex
from hierspec.stores.tree import evidence, grow, grow_after

texts = st.lists(st.integers(-1, 3), min_size=1, max_size=60)


@st.composite
def places(draw):
    text = draw(texts)
    found = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(0, len(text) - 1)), max_size=20))
    found.sort(key=lambda place: -place[0])
    return text, [length for length, _ in found], [end for _, end in found]


def naive_trie(text, lengths, ends, depth):
    """path -> (chance, longest match, places there were before the choice, share of their weight)."""
    follows = [float(chance) for chance in tree._FOLLOWS]
    weights, left = {}, 1.0
    for length in sorted(set(lengths), reverse=True):
        of_it = [place for place, other in enumerate(lengths) if other == length]
        weights |= {place: left * follows[min(length, 16)] / len(of_it) for place in of_it}
        left *= 1 - follows[min(length, 16)]
    trie = {}
    chances = {(): 1.0}
    going = {(): list(range(len(ends)))}
    for below in range(depth):
        for path in [path for path in going if len(path) == below]:
            alive = [place for place in going[path] if (text[ends[place] + below :] or [-1])[0] >= 0]
            total = sum(weights[place] for place in alive)
            for token in {text[ends[place] + below] for place in alive}:
                here = [place for place in alive if text[ends[place] + below] == token]
                weight, longest = sum(weights[place] for place in here), max(lengths[place] for place in here)
                chance = chances[path] * follows[min(longest + below, 16)] * weight / total if path else weight
                chances[*path, token], going[*path, token] = chance, here
                trie[*path, token] = (chance, longest, len(alive), weight / total)
    return trie


def grown(text, lengths, ends, budget, depth):
    arrays = np.array(text, np.int32), np.array(ends, np.int64), np.array(lengths, np.int32)
    return grow(*arrays, budget, depth, "here")


@given(places(), st.integers(0, 20), st.integers(1, 8))
@settings(max_examples=300, deadline=None)  # the first call may compile
def test_it_takes_the_likeliest_paths_in_turn(found, budget, depth):
    text, lengths, ends = found
    trie = naive_trie(text, lengths, ends, depth)
    proposal = grown(text, lengths, ends, budget, depth)
    paths = [tuple(proposal.path(node)) for node in range(len(proposal))]
    assert len(set(paths)) == len(paths) == min(budget, len(trie))
    chances = [trie[path][0] for path in paths]
    assert all(next_one <= chance + 1e-12 for chance, next_one in pairwise(chances))
    left_out = [chance for path, (chance, *_) in trie.items() if path not in paths]
    assert not paths or max(left_out, default=0.0) <= chances[-1] + 1e-12
    assert proposal.sources == ("here",) * len(paths)


@given(places(), st.integers(1, 8))
@settings(deadline=None)
def test_evidence_tells_length_and_support(found, depth):
    text, lengths, ends = found
    trie = naive_trie(text, lengths, ends, depth)
    proposal = grown(text, lengths, ends, 100, depth)
    for node, given_class in enumerate(proposal.evidence):
        _, longest, among, share = trie[tuple(proposal.path(node))]
        near = {evidence(longest, among, share + slack) for slack in (-1e-9, 0.0, 1e-9)}
        assert given_class in near


def test_classes_of_evidence():
    assert evidence(1, 1, 1.0) == 1
    assert [evidence(1, 9, share) for share in (0.1, 0.2, 0.5, 0.85, 1.0)] == [2, 3, 4, 5, 5]
    buckets = [(evidence(length, 1, 1.0) - 1) // 5 for length in (1, 2, 3, 4, 5, 6, 7, 9, 10, 15, 16, 64)]
    assert buckets == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert evidence(64, 2, 1.0) == tree.CLASSES - 1


def test_a_longer_match_is_believed_before_many_shorter_ones():
    text = [5, 6, -1, 8, 9, -1, 8, 9, -1, 8, 9]
    proposal = grown(text, [12, 1, 1, 1], [0, 3, 6, 9], 3, 4)
    assert proposal.tokens[:2] == (5, 6)
    assert proposal.evidence[0] == evidence(12, 4, 0.85)


def test_nothing_known_is_nothing_guessed():
    assert grown([1, 2], [], [], 5, 5) == Proposal()
    assert grown([1, 2], [1], [0], 0, 5) == Proposal()
    assert grown([1, -1], [1], [1], 5, 5) == Proposal()


@given(texts, st.lists(st.integers(0, 3), max_size=5), st.integers(0, 20), st.integers(1, 8), st.integers(1, 40))
@settings(deadline=None)
def test_the_one_call_grows_what_the_two_would(text, tail, budget, depth, most):
    index = ChainIndex(50)
    index.append(text)
    context = np.array([*text, *tail], np.int32)
    found = index.find(context, most)
    two = grow(index.tokens, found.ends, found.lengths, budget, depth, "here")
    one = grow_after(index, context, budget, depth, "here", most)
    assert one == two
    assert one.evidence == two.evidence
