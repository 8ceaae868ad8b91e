"""Which drafts are accepted. One function per rule, each the same short walk down the tree.

The walk starts at the context and goes down while a child is accepted. It ends with a token of the scorer's own.
Whatever was drafted, the tokens written have the distribution of the scorer alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hierspec.core.interfaces import Answer
from hierspec.core.proposal import Candidate, Distribution, Proposal
from hierspec.core.sampling import NO_TOKEN, Dice


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` nodes, in order. `written[i]` holds position i's token, then its runners-up.

    There is one position more than there are accepted nodes: the last token is the scorer's own, or `NO_TOKEN` if the
    logits of its row are not numbers. Such rows elsewhere do not matter: plain decoding never sees them.
    """

    accepted: list[int]
    written: list[list[Candidate]]


Rule = Callable[[Proposal, Answer, Dice, int], Verdict]


def coupled(proposal: Proposal, answer: Answer, dice: Dice, candidates: int = 1) -> Verdict:
    """A draft is accepted if it equals the scorer's pick."""
    assert answer.picks is not None
    node, accepted = -1, list[int]()
    written: list[list[Candidate]] = [[(int(token), None) for token in answer.picks[0][:candidates]]]
    for child, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        if parent == node and token == written[-1][0][0]:  # children come after their parents: one walk is enough
            node = child
            accepted.append(child)
            written.append([(int(token), None) for token in answer.picks[child + 1][:candidates]])
    return Verdict(accepted, written)


def residual(proposal: Proposal, answer: Answer, dice: Dice, candidates: int = 1) -> Verdict:
    """A token x drafted from q is accepted with probability min(1, p(x) / q(x)); a rejection leaves max(p - q, 0) of p.

    Several candidates at one position are tried in turn, each against what earlier rejections left of p.
    """
    assert answer.distributions is not None
    walk = _Walk(proposal, answer.distributions, proposal.children(), dice, candidates, Verdict([], []))
    return walk.down(-1, answer.distributions[0], walk.children[0])


def block(proposal: Proposal, answer: Answer, dice: Dice, candidates: int = 1) -> Verdict:
    """The first drafts of all positions are accepted or rejected jointly (arXiv 2403.10444).

    A draft that is likelier under the scorer than under the drafter makes up for an earlier one that was less likely.
    So on average no fewer tokens are accepted than under `residual`. Where this spine of first drafts ends, the other
    drafts at that position are tried against what is left of p, as under `residual`.
    """
    distributions = answer.distributions
    assert distributions is not None
    walk = _Walk(proposal, distributions, proposal.children(), dice, candidates, Verdict([], []))
    spine, node = list[int](), -1
    while _usable(distributions[node + 1]) and walk.children[node + 1]:
        node = walk.children[node + 1][0]
        spine.append(node)
    # shares[i]: the product of p / q over the first i drafts, capped at 1 after each.
    shares, accepted = [1.0], 0
    for depth, node in enumerate(spine):
        token, sampled_from = proposal.tokens[node], proposal.distributions[node]
        p = distributions[proposal.parents[node] + 1][token]
        share = min(1.0, shares[-1] * float(p if sampled_from is None else p / sampled_from[token]))
        shares.append(share)
        probability = share
        if depth + 1 < len(spine):
            more = float(_beyond_draft(share * distributions[node + 1], proposal, spine[depth + 1]).sum())
            probability = more / (more + 1 - share) if more + 1 - share > 0 else 1.0
        if dice.accept(probability):
            accepted = depth + 1
    for node in spine[:accepted]:
        walk.accept(node)
    node = spine[accepted - 1] if accepted else -1
    left, untried = distributions[node + 1], walk.children[node + 1]
    if accepted < len(spine):
        beyond = _beyond_draft(shares[accepted] * left, proposal, spine[accepted])
        left, untried = _normalised(beyond, left), untried[1:]
    return walk.down(node, left, untried)


def _beyond_draft(weights: np.ndarray, proposal: Proposal, node: int) -> np.ndarray:
    """The residual max(weights - q, 0), where q is the distribution that the node was sampled from."""
    sampled_from = proposal.distributions[node]
    if sampled_from is not None:
        return np.maximum(weights - sampled_from, 0)
    left = weights.copy()
    left[proposal.tokens[node]] = 0.0  # q of a fixed token is 1, which no weight exceeds
    return left


@dataclass(frozen=True, slots=True)
class _Walk:
    """The walk down a proposal by whole distributions, and its verdict so far."""

    proposal: Proposal
    distributions: np.ndarray
    children: list[list[int]]
    dice: Dice
    candidates: int
    verdict: Verdict

    def down(self, node: int, left: Distribution, untried: list[int]) -> Verdict:
        """Go down from `node` while a draft is accepted: first its children `untried`, against `left` of p."""
        while True:
            accepted = -1
            if not _usable(left):
                self.verdict.written.append([(NO_TOKEN, None)])
                return self.verdict
            for child in untried:
                token, sampled_from = self.proposal.tokens[child], self.proposal.distributions[child]
                probability = left[token] if sampled_from is None else min(1.0, left[token] / sampled_from[token])
                if self.dice.accept(float(probability)):
                    accepted = child
                    break
                if sampled_from is None:
                    left = _without(left, token)
                else:
                    left = _normalised(np.maximum(left - sampled_from, 0), left)
            if accepted < 0:
                self._write(self.dice.choose(left), node)
                return self.verdict
            self.accept(accepted)
            node, left, untried = accepted, self.distributions[accepted + 1], self.children[accepted + 1]

    def accept(self, node: int) -> None:
        self.verdict.accepted.append(node)
        self._write(self.proposal.tokens[node], self.proposal.parents[node])

    def _write(self, token: int, after: int) -> None:
        """Write the token with the scorer's distribution, then runners-up sampled without replacement."""
        distribution = self.distributions[after + 1]
        written: list[Candidate] = [(token, distribution)]
        for _ in range(min(self.candidates, int(np.count_nonzero(distribution))) - 1):
            distribution = _without(distribution, token)
            token = self.dice.choose(distribution)
            written.append((token, distribution))
        self.verdict.written.append(written)


def _usable(distribution: Distribution) -> bool:
    """Whether it is a distribution: where logits are not numbers the whole row is NaN."""
    return not math.isnan(distribution[0])


def _without(distribution: Distribution, token: int) -> Distribution:
    left = distribution.copy()
    left[token] = 0.0
    return _normalised(left, distribution)


def _normalised(weights: np.ndarray, otherwise: Distribution) -> Distribution:
    total = weights.sum()
    # Nothing is left only if rounding rejected a draft of probability 1: then any distribution will do.
    return weights / total if total > 0 else otherwise


RULES: dict[str, Rule] = {"coupled": coupled, "residual": residual, "block": block}
BY_DISTRIBUTION = frozenset({"residual", "block"})  # rules that need whole distributions, not picks
