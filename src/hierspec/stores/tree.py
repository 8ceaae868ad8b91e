"""Turns matches into one draft tree: the continuations of all matches, most probable nodes first."""

from __future__ import annotations

from typing import Any

import numpy as np

from hierspec.compiled import CompiledCalls, compiled_brief, compiled_part
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.stores.ngram_index import LONGEST, NgramIndex, append_tokens, find_matches

_INT32 = np.dtype(np.int32)
_NO_TOKENS = np.empty(0, _INT32)
CLASSES = 41  # of evidence: 0 for none, then 8 match lengths x 5 kinds of support

# Prior probability that a match of 0 to 16 tokens continues as it did before. It only orders the nodes: acceptance
# rates by class of evidence are learnt while requests run.
_PRIOR = np.array(
    [0.0, 0.20, 0.35, 0.45, 0.55, 0.62, 0.68, 0.72, 0.76, 0.79, 0.82, 0.84, 0.86, 0.88, 0.89, 0.90, 0.91], np.float64
)


@compiled_part
def evidence(match_length: int, parent_matches: int, share: float) -> int:
    """The class of evidence, 1 to 40, of a node after a match of `match_length` tokens.

    `parent_matches` matches continue below its parent, and `share` of their weight continues with this node. A single
    match always has the whole share, which says little, so it is a class of support by itself.
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
    if parent_matches == 1:
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


def draft_from_matches(
    tokens: np.ndarray, ends: np.ndarray, lengths: np.ndarray, budget: int, depth: int, source: str
) -> Proposal:
    """A trie of the continuations `tokens[end:]`: at most `budget` nodes, at most `depth` deep.

    `lengths` are the match lengths, longest first. A continuation stops at a negative token and at the end of the
    array. Nodes come in the order of the estimated probability of their whole path.
    """
    if budget < 1 or not len(ends):
        return NOTHING
    nodes = np.empty((3, budget), _INT32)
    return _proposal(nodes, _build_tree(tokens, ends, lengths, depth, nodes), source)


def draft_from_index(
    index: NgramIndex,
    context: np.ndarray,
    budget: int,
    depth: int,
    source: str,
    max_matches: int = 32,
    drafted_matches: int | None = None,
    new: np.ndarray = _NO_TOKENS,
) -> Proposal:
    """`index.append(new)`, `index.find(context)` and `draft_from_matches` in one compiled call: microseconds faster.

    If `drafted_matches` is given, only that many of the best matches become drafts.
    """
    nodes = np.empty((3, max(0, budget)), _INT32)
    tail = context[-LONGEST:].astype(_INT32)  # astype copies, so the compiled code sees one array type only
    drafted = max_matches if drafted_matches is None else drafted_matches
    count = _find_and_build(*index.arrays, new, tail, max_matches, drafted, depth, nodes)
    return _proposal(nodes, count, source)


def _proposal(nodes: np.ndarray, count: int, source: str) -> Proposal:
    if not count:
        return NOTHING
    tokens, parents, classes = nodes[:, :count].tolist()
    return Proposal(tuple(tokens), tuple(parents), (source,) * count, (None,) * count, tuple(classes))


@compiled_part
def _weigh(lengths: np.ndarray, weights: np.ndarray) -> None:
    """Weights of the matches: those of one length share its prior, times the probability that longer ones are wrong."""
    count = lengths.shape[0]
    remaining, start = 1.0, 0
    while start < count:
        stop = start + 1
        while stop < count and lengths[stop] == lengths[start]:
            stop += 1
        prior = _PRIOR[min(int(lengths[start]), _PRIOR.shape[0] - 1)]
        for match in range(start, stop):
            weights[match] = remaining * prior / (stop - start)
        remaining *= 1.0 - prior
        start = stop


@compiled_brief
def _build_tree(tokens: np.ndarray, ends: np.ndarray, lengths: np.ndarray, depth: int, nodes: np.ndarray) -> int:
    """Fills nodes[0] with tokens, nodes[1] with parents, nodes[2] with evidence; returns the number of nodes."""
    matches, budget, size = ends.shape[0], nodes.shape[1], tokens.shape[0]
    # The frontier holds candidates for the next node. Each has a linked list of the matches that continue through it,
    # longest first. No match is in two lists, so the frontier never outgrows the matches.
    integers, reals = np.empty((7, matches), np.int64), np.empty((3, matches), np.float64)
    next_match = integers[0]  # match -> the next one of its list
    first, last, token, parent = integers[1], integers[2], integers[3], integers[4]
    level, parent_matches = integers[5], integers[6]
    weights, probability, share = reals[0], reals[1], reals[2]
    _weigh(lengths, weights)
    for match in range(matches):
        next_match[match] = match + 1 if match + 1 < matches else -1
    frontier, count = 0, 0
    match, node, below, path_probability = 0, -1, 0, 1.0  # to be expanded: first the context, with all matches
    while True:
        first_child, continuing, total = frontier, 0, 0.0
        while match >= 0 and below < depth:
            following, at = next_match[match], ends[match] + below
            if at < size and tokens[at] >= 0:
                child = first_child
                while child < frontier and token[child] != tokens[at]:
                    child += 1
                if child == frontier:
                    token[child], share[child], first[child] = tokens[at], 0.0, match
                    frontier += 1
                else:
                    next_match[last[child]] = match
                last[child], next_match[match] = match, -1
                share[child] += weights[match]
                total += weights[match]
                continuing += 1
            match = following
        for child in range(first_child, frontier):
            prior = _PRIOR[min(int(lengths[first[child]]) + below, _PRIOR.shape[0] - 1)]
            probability[child] = share[child] if node < 0 else path_probability * prior * share[child] / total
            share[child] /= total
            parent[child], level[child], parent_matches[child] = node, below, continuing
        if frontier == 0 or count == budget:
            return count
        best = 0
        for other in range(1, frontier):
            if probability[other] > probability[best]:
                best = other
        match, node, below, path_probability = first[best], count, level[best] + 1, probability[best]
        nodes[0, count], nodes[1, count] = token[best], parent[best]
        nodes[2, count] = evidence(int(lengths[match]), int(parent_matches[best]), share[best])
        count += 1
        frontier -= 1
        first[best], last[best] = first[frontier], last[frontier]
        token[best], parent[best], level[best] = token[frontier], parent[frontier], level[frontier]
        probability[best], share[best] = probability[frontier], share[frontier]
        parent_matches[best] = parent_matches[frontier]


@compiled_brief
def _find_and_build(
    state: np.ndarray,
    ring: np.ndarray,
    older: np.ndarray,
    heads: np.ndarray,
    new: np.ndarray,
    context: np.ndarray,
    max_matches: int,
    drafted_matches: int,
    depth: int,
    nodes: np.ndarray,
) -> int:
    append_tokens(state, ring, older, heads, new)
    if not nodes.size:
        return 0
    ends, lengths = np.empty(max_matches, np.int64), np.empty(max_matches, np.int32)
    count = min(drafted_matches, find_matches(state, ring, older, heads, context, ends, lengths))
    return _build_tree(ring, ends[:count], lengths[:count], depth, nodes) if count else 0


def _typical_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    index, token, nodes = NgramIndex(8), np.array([1], _INT32), np.empty((3, 1), _INT32)
    return [
        (append_tokens, (*index.arrays, token)),
        (_find_and_build, (*index.arrays, _NO_TOKENS, token, 1, 1, 1, nodes)),
    ]


DRAFTING = CompiledCalls(f"{__name__}:DRAFTING", 4.0, _typical_calls)  # what every lookup needs
