"""Which guesses stand. One function a rule, each the same short walk down the tree.

A scorer's answer has a row for the context (row 0) and one after every node (row node + 1). The walk starts at the
context and goes down while a child stands; the scorer's own token ends it. Whatever was guessed, the tokens written
have the law of the scorer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hierspec.core.proposal import Distribution, Proposal
from hierspec.core.sampling import Dice

Candidate = tuple[int, Distribution | None]  # a token and the law it was drawn from, given the candidates before it


@dataclass(frozen=True, slots=True)
class Answer:
    """What a scorer says about context and proposal: picks [rows, candidates or more], or laws [rows, vocabulary]."""

    picks: np.ndarray | None = None
    distributions: np.ndarray | None = None
    leads: np.ndarray | None = None  # [rows]: how far each pick's score is ahead of the next best, where asked for


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` nodes stand, in order. `written[i]` holds position i's token, then its runners-up.

    There is one position more than there are accepted nodes: the last token is the scorer's own.
    """

    accepted: list[int]
    written: list[list[Candidate]]


Rule = Callable[[Proposal, Answer, Dice, int], Verdict]


def coupled(proposal: Proposal, answer: Answer, dice: Dice, candidates: int = 1) -> Verdict:
    """A guess stands where it equals the pick."""
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
    """A guess x drawn from q stands with probability min(1, p(x) / q(x)); a refused one leaves max(p - q, 0).

    Several candidates at one position are tried in turn, each against what the refused ones left of p.
    """
    assert answer.distributions is not None
    verdict, children = Verdict([], []), proposal.children()
    _walk_down(
        proposal, answer.distributions, dice, candidates, children, -1, answer.distributions[0], children[0], verdict
    )
    return verdict


def block(proposal: Proposal, answer: Answer, dice: Dice, candidates: int = 1) -> Verdict:
    """The first guess of every position is accepted or refused jointly with those before it (arXiv 2403.10444).

    A guess that is too likely under the scorer makes up for one before it that was too unlikely, so that on the
    average no fewer tokens stand than under `residual`. Where the spine of first guesses ends, the others at that
    position are tried against what it left, as under `residual`.
    """
    distributions = answer.distributions
    assert distributions is not None
    children, node = proposal.children(), -1
    spine: list[int] = []
    while children[node + 1]:
        node = children[node + 1][0]
        spine.append(node)
    # How much of what was drafted so far the scorer would have written, never more than all; one entry a position.
    kept, standing = [1.0], 0
    for place, node in enumerate(spine):
        before = spine[place - 1] if place else -1
        token, drawn_from = proposal.tokens[node], proposal.distributions[node]
        own = distributions[before + 1][token]
        kept.append(min(1.0, kept[-1] * float(own if drawn_from is None else own / drawn_from[token])))
        chance = kept[-1]
        if place + 1 < len(spine):
            more = float(_above(kept[-1] * distributions[node + 1], proposal, spine[place + 1]).sum())
            chance = more / (more + 1 - kept[-1]) if more + 1 - kept[-1] > 0 else 1.0
        if dice.accept(chance):
            standing = place + 1
    verdict, node = Verdict([], []), -1
    for node in spine[:standing]:
        parent = proposal.parents[node]
        verdict.accepted.append(node)
        verdict.written.append(_with_runners_up(proposal.tokens[node], distributions[parent + 1], dice, candidates))
    own, others = distributions[node + 1], children[node + 1]
    left = own
    if standing < len(spine):
        left, others = _normalised(_above(kept[standing] * own, proposal, spine[standing]), own), others[1:]
    _walk_down(proposal, distributions, dice, candidates, children, node, left, others, verdict)
    return verdict


def _above(weights: np.ndarray, proposal: Proposal, node: int) -> np.ndarray:
    """The part of these weights that is more than what the node was drawn with."""
    drawn_from = proposal.distributions[node]
    if drawn_from is not None:
        return np.maximum(weights - drawn_from, 0)
    left = weights.copy()
    left[proposal.tokens[node]] = 0.0  # a chosen token was drawn with probability 1, and no weight is more
    return left


def _walk_down(
    proposal: Proposal, distributions: np.ndarray, dice: Dice, candidates: int, children: list[list[int]], node: int,
    left: Distribution, tried: list[int], verdict: Verdict,
) -> None:  # fmt: skip
    """From `node` down while a guess stands: `tried` are those after it, `left` the law they are tried against."""
    while True:
        standing = -1
        for child in tried:
            token, drawn_from = proposal.tokens[child], proposal.distributions[child]
            chance = left[token] if drawn_from is None else min(1.0, left[token] / drawn_from[token])
            if dice.accept(float(chance)):
                standing = child
                break
            left = _without(left, token) if drawn_from is None else _normalised(np.maximum(left - drawn_from, 0), left)
        token = proposal.tokens[standing] if standing >= 0 else dice.choose(left)
        verdict.written.append(_with_runners_up(token, distributions[node + 1], dice, candidates))
        if standing < 0:
            return
        verdict.accepted.append(standing)
        node, left, tried = standing, distributions[standing + 1], children[standing + 1]


def _with_runners_up(token: int, distribution: Distribution, dice: Dice, candidates: int) -> list[Candidate]:
    """The token under its own law, and further tokens drawn without replacement."""
    found: list[Candidate] = [(token, distribution)]
    for _ in range(min(candidates, int(np.count_nonzero(distribution))) - 1):
        distribution = _without(distribution, token)
        token = dice.choose(distribution)
        found.append((token, distribution))
    return found


def _without(distribution: Distribution, token: int) -> Distribution:
    left = distribution.copy()
    left[token] = 0.0
    return _normalised(left, distribution)


def _normalised(weights: np.ndarray, otherwise: Distribution) -> Distribution:
    total = weights.sum()
    # Nothing is left only where a guess of probability 1 was refused, by rounding: then any law is right.
    return weights / total if total > 0 else otherwise


RULES: dict[str, Rule] = {"coupled": coupled, "residual": residual, "block": block}
BY_DISTRIBUTION = frozenset({"residual", "block"})  # rules that need whole laws, not picks
