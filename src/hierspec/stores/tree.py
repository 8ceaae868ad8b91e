"""What followed at the places that were found, as one tree of guesses, the likeliest first."""

from __future__ import annotations

import numpy as np

from hierspec.core.proposal import NOTHING, Proposal
from hierspec.stores.chains import LONGEST, ChainIndex, append_tokens, find_places
from hierspec.stores.compiled import compiled_brief

_INT32 = np.dtype(np.int32)
_NO_TOKENS = np.empty(0, _INT32)
CLASSES = 41  # of evidence: 0 says nothing, then 8 match lengths x 5 kinds of support

# How often the token after a match of so many tokens (0 to 16) comes again. Only the order of the nodes depends on it;
# what a class of evidence is worth for a model and a text is learnt while they run.
_FOLLOWS = np.array(
    [0.0, 0.20, 0.35, 0.45, 0.55, 0.62, 0.68, 0.72, 0.76, 0.79, 0.82, 0.84, 0.86, 0.88, 0.89, 0.90, 0.91], np.float64
)


@compiled_brief
def evidence(match_length: int, places_here: int, share: float) -> int:
    """The class, 1 to 40, of a node that a match of `match_length` tokens speaks for.

    `places_here` places were left where the text went on with this node or another, `share` of their weight with
    this one. A single place always has the whole share, which says little: a kind of support of its own.
    """
    if match_length <= 4:
        bucket = max(match_length, 1) - 1
    elif match_length <= 6:
        bucket = 4
    elif match_length <= 9:
        bucket = 5
    elif match_length <= 15:
        bucket = 6
    else:
        bucket = 7
    if places_here == 1:
        support = 0
    elif share < 0.2:
        support = 1
    elif share < 0.5:
        support = 2
    elif share < 0.85:
        support = 3
    else:
        support = 4
    return 1 + 5 * bucket + support


def grow(tokens: np.ndarray, ends: np.ndarray, lengths: np.ndarray, budget: int, depth: int, source: str) -> Proposal:
    """At most `budget` nodes, at most `depth` deep, of the trie of what stands in `tokens` from each of `ends` on.

    `lengths` are the tokens that agree before each end, longest first. A continuation stops at a negative token and at
    the end of the array. Nodes come in the order of the estimated chance of their whole path.
    """
    if budget < 1 or not len(ends):
        return NOTHING
    nodes = np.empty((3, budget), _INT32)
    return _proposal(nodes, _grow(tokens, ends, lengths, depth, nodes), source)


def grow_after(
    index: ChainIndex,
    context: np.ndarray,
    budget: int,
    depth: int,
    source: str,
    most: int = 32,
    followed: int | None = None,
    new: np.ndarray = _NO_TOKENS,
) -> Proposal:
    """`index.append` of `new`, `find` for `context` and `grow` in one compiled call: microseconds less than three.

    Of `most` places that are found only the first `followed` are grown from, where that is given.
    """
    nodes = np.empty((3, max(0, budget)), _INT32)
    tail = context[-LONGEST:].astype(_INT32)  # a copy always has the one type that is compiled for
    count = _grow_after(*index.arrays, new, tail, most, most if followed is None else followed, depth, nodes)
    return _proposal(nodes, count, source)


def _proposal(nodes: np.ndarray, count: int, source: str) -> Proposal:
    if not count:
        return NOTHING
    guessed, parents, classes = nodes[:, :count].tolist()
    return Proposal(tuple(guessed), tuple(parents), (source,) * count, (None,) * count, tuple(classes))


@compiled_brief
def _weigh(lengths: np.ndarray, weights: np.ndarray) -> None:
    """What each place has to say: a length has its say as far as no longer one was right, shared by its places."""
    count = lengths.shape[0]
    left, start = 1.0, 0
    while start < count:
        stop = start + 1
        while stop < count and lengths[stop] == lengths[start]:
            stop += 1
        follows = _FOLLOWS[min(int(lengths[start]), _FOLLOWS.shape[0] - 1)]
        for place in range(start, stop):
            weights[place] = left * follows / (stop - start)
        left *= 1.0 - follows
        start = stop


@compiled_brief
def _grow(tokens: np.ndarray, ends: np.ndarray, lengths: np.ndarray, depth: int, nodes: np.ndarray) -> int:
    """Fills nodes[0] with tokens, nodes[1] with parents, nodes[2] with evidence; returns how many there are."""
    places, budget, size = ends.shape[0], nodes.shape[1], tokens.shape[0]
    # The frontier holds nodes that may be taken next. Each has the places that go its way as a list, longest match
    # first; no place is in two lists, so the frontier never outgrows the places.
    whole, real = np.empty((7, places), np.int64), np.empty((3, places), np.float64)
    following = whole[0]  # place -> the next one of its list
    first, last, token, parent, level, among = whole[1], whole[2], whole[3], whole[4], whole[5], whole[6]
    weights, chance, share = real[0], real[1], real[2]
    _weigh(lengths, weights)
    for place in range(places):
        following[place] = place + 1 if place + 1 < places else -1
    frontier, count = 0, 0
    place, node, below, path = 0, -1, 0, 1.0  # what is expanded next: the context itself, with all places
    while True:
        opened, alive, total = frontier, 0, 0.0
        while place >= 0 and below < depth:
            after, at = following[place], ends[place] + below
            if at < size and tokens[at] >= 0:
                child = opened
                while child < frontier and token[child] != tokens[at]:
                    child += 1
                if child == frontier:
                    token[child], share[child], first[child] = tokens[at], 0.0, place
                    frontier += 1
                else:
                    following[last[child]] = place
                last[child], following[place] = place, -1
                share[child] += weights[place]
                total += weights[place]
                alive += 1
            place = after
        for child in range(opened, frontier):
            follows = _FOLLOWS[min(int(lengths[first[child]]) + below, _FOLLOWS.shape[0] - 1)]
            chance[child] = share[child] if node < 0 else path * follows * share[child] / total
            share[child] /= total
            parent[child], level[child], among[child] = node, below, alive
        if frontier == 0 or count == budget:
            return count
        best = 0
        for other in range(1, frontier):
            if chance[other] > chance[best]:
                best = other
        place, node, below, path = first[best], count, level[best] + 1, chance[best]
        nodes[0, count], nodes[1, count] = token[best], parent[best]
        nodes[2, count] = evidence(int(lengths[place]), int(among[best]), share[best])
        count += 1
        frontier -= 1
        first[best], last[best] = first[frontier], last[frontier]
        token[best], parent[best], level[best] = token[frontier], parent[frontier], level[frontier]
        chance[best], share[best], among[best] = chance[frontier], share[frontier], among[frontier]


@compiled_brief
def _grow_after(
    state: np.ndarray,
    ring: np.ndarray,
    before: np.ndarray,
    heads: np.ndarray,
    new: np.ndarray,
    context: np.ndarray,
    most: int,
    followed: int,
    depth: int,
    nodes: np.ndarray,
) -> int:
    append_tokens(state, ring, before, heads, new)
    if not nodes.size:
        return 0
    ends, lengths = np.empty(most, np.int64), np.empty(most, np.int32)
    count = min(followed, find_places(state, ring, before, heads, context, ends, lengths))
    return _grow(ring, ends[:count], lengths[:count], depth, nodes) if count else 0
