"""One chain of several draft trees, for hosts that verify chains only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hierspec.core.proposal import NOTHING, Proposal
from hierspec.pacing.acceptance import AcceptanceRates

_AGREED, _CONTESTED = 1 << 10, 1 << 11  # added to classes of evidence, which are below


def best_chain(
    proposals: Sequence[Proposal], rates: AcceptanceRates, most: int, prices: Sequence[float] = ()
) -> tuple[Proposal, float]:
    """The path of at most `most` tokens of which the most should be accepted, and its expected gain, less its price.

    Acceptance rates are those learnt so far. `prices` are what the time of each token is worth, in tokens: with them
    the path ends where another token would cost more than it gains. If several trees draft the same token, the rate of
    the first counts, as in `Appraiser.appraise`.
    """
    first = proposals[0]
    # A text that is also in the history gives the same tree twice, which adds nothing.
    proposals = [
        first,
        *(other for other in proposals[1:] if other.tokens != first.tokens or other.parents != first.parents),
    ]
    if len(proposals) == 1 and first.parents == tuple(range(-1, len(first) - 1)):  # a chain already
        tokens, sources, evidence, probabilities = _single(first, rates, most)
    else:
        tokens, sources, evidence, probabilities = _merged(proposals, rates, most)
    best = sum(probabilities)
    if prices:
        worth, best, gain = 0, 0.0, 0.0
        for count, probability in enumerate(probabilities):
            gain += probability - prices[count]
            if gain > best:
                worth, best = count + 1, gain
        tokens, sources, evidence = tokens[:worth], sources[:worth], evidence[:worth]
    if not tokens:
        return NOTHING, 0.0
    return Proposal(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(sources), (), tuple(evidence)), best


def compare(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The same proposals, with evidence of where the others agree with the first, which a draft model wrote.

    Of two different tokens at least one is wrong, so each is accepted less often than by itself.
    """
    first, *others = proposals
    spine: list[tuple[int, int]] = []  # node and token of the first proposal's main path
    at = -1
    for node, (token, parent) in enumerate(zip(first.tokens, first.parents, strict=True)):
        if parent == at:
            spine.append((node, token))
            at = node
    evidence = list(first.evidence)
    said: dict[int, int] = {}  # depth of the main path -> whether others agree there
    compared = [_compared(other, spine, said) for other in others]
    for depth, what in said.items():
        evidence[spine[depth][0]] += what
    return [replace(first, evidence=tuple(evidence)), *compared]


def _compared(proposal: Proposal, spine: Sequence[tuple[int, int]], said: dict[int, int]) -> Proposal:
    """The proposal with such evidence; notes in `said` where it agrees with the spine."""
    evidence, depths = list(proposal.evidence), {-1: 0}  # of nodes on the spine: the depth of what comes after them
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        depth = depths.get(parent, len(spine))
        if depth == len(spine):
            continue
        if token == spine[depth][1]:
            depths[node] = depth + 1
            evidence[node] += _AGREED
            said[depth] = _AGREED
        else:
            evidence[node] += _CONTESTED
            said.setdefault(depth, _CONTESTED)
    return replace(proposal, evidence=tuple(evidence))


_Chain = tuple[Sequence[int], Sequence[str], Sequence[int], list[float]]


def _single(chain: Proposal, rates: AcceptanceRates, most: int) -> _Chain:
    sources, evidence = chain.sources[:most], chain.evidence[:most]
    probabilities, path = [], 1.0
    for depth, source in enumerate(sources):
        path *= rates.rate(source, evidence[depth], depth)
        probabilities.append(path)
    return chain.tokens[:most], sources, evidence, probabilities


def _merged(proposals: Sequence[Proposal], rates: AcceptanceRates, most: int) -> _Chain:
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    evidence: list[int] = []
    depths: list[int] = []
    paths: list[float] = []  # the probability that all up to a node is accepted
    index: dict[tuple[int, int], int] = {}  # parent and token -> node
    rate = rates.rate
    for proposal in proposals:
        moved: list[int] = []
        for token, parent, source, kind in zip(
            proposal.tokens, proposal.parents, proposal.sources, proposal.evidence, strict=True
        ):
            after = moved[parent] if parent >= 0 else -1
            node = index.get((after, token), -1)
            if node < 0 and (parent < 0 or after >= 0):
                depth = depths[after] + 1 if after >= 0 else 0
                if depth < most:
                    node = index[after, token] = len(tokens)
                    tokens.append(token)
                    parents.append(after)
                    sources.append(source)
                    evidence.append(kind)
                    depths.append(depth)
                    paths.append(rate(source, kind, depth) * (paths[after] if after >= 0 else 1.0))
            moved.append(node)
    # The best continuation of each node; children have higher numbers than their parents.
    after_it, best_child = [0.0] * (len(tokens) + 1), [-1] * (len(tokens) + 1)  # the last: after the context
    for node in range(len(tokens) - 1, -1, -1):
        value, parent = paths[node] + after_it[node], parents[node]
        if value > after_it[parent]:
            after_it[parent], best_child[parent] = value, node
    chain, node = [], best_child[-1]
    while node >= 0:
        chain.append(node)
        node = best_child[node]
    return (
        [tokens[node] for node in chain],
        [sources[node] for node in chain],
        [evidence[node] for node in chain],
        [paths[node] for node in chain],
    )
