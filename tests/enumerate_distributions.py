"""Exact distributions of what hierspec writes, by running the real program once for every way its randomness can fall.

The program runs with a `Branches` in place of randomness. Every random choice asks it; it takes one branch, multiplies
the branch's probability into `weight`, and remembers which branches are still to do. Running again until none is left
visits every outcome exactly once (depth-first), and the weights of the outcomes are their exact probabilities.
Nothing is estimated: what differs from plain decoding by more than rounding is wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from hierspec.core.engine import Engine
from hierspec.core.interfaces import Answer, Ask, Store
from hierspec.core.proposal import Distribution, Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Dice, Sampling, adjust, distribution
from hierspec.testing.fakes import FakeScorer, Logits

# A branch this rare is rounding (1 - p where p should be 1). What is left out this way is bounded by the check that
# all weights sum to 1.
RARE = 1e-15

Text = tuple[int, ...]


class TooManyBranches(Exception):
    """The case is larger than the test wants to pay for."""


class Branches:
    """A path through the tree of choices, and what is still to do."""

    def __init__(self, most: int = 1_000_000) -> None:
        self.weight = 1.0
        self.leaves = 0
        self.intervals: dict[int, tuple[float, float]] = {}  # position -> where its uniform number may still be
        self._most = most
        self._visited = 0.0  # the part of the tree that is done, where every branch of a choice counts the same
        self._widths: list[int] = []  # for every choice, how many branches it has
        self._trail: list[list[tuple[int, float]]] = []  # for every choice the branches still to do, the current last
        self._depth = 0

    def __iter__(self) -> Iterator[Branches]:
        """One round for every outcome."""
        while True:
            self.weight, self._depth, self.intervals = 1.0, 0, {}
            yield self
            self.leaves += 1
            self._visited += 1 / math.prod(self._widths)
            if self.leaves > self._most or self._looks_hopeless():
                raise TooManyBranches
            assert self._depth == len(self._trail), "the program did not repeat itself"
            while self._trail:
                self._trail[-1].pop()
                if self._trail[-1]:
                    break
                self._trail.pop()
                self._widths.pop()
            if not self._trail:
                return

    def _looks_hopeless(self) -> bool:
        """After a twentieth of what the test pays for: whether there seems to be twice as much. Else most of the time
        would go into cases that are given up."""
        return self.leaves > self._most / 20 and self.leaves / self._visited > 2 * self._most

    def choose(self, weights: Sequence[float]) -> int:
        """An index of `weights`, with that probability."""
        if self._depth == len(self._trail):
            self._trail.append([(index, weight) for index, weight in enumerate(weights) if weight > RARE])
            self._widths.append(len(self._trail[-1]))
        index, weight = self._trail[self._depth][-1]
        self._depth += 1
        self.weight *= weight
        return index

    def pick(self, position: int, probabilities: Distribution) -> int:
        """The token that the position's one uniform number picks from this distribution, by its cumulative sum.

        The number is the same for all tiers and passes. It is not sampled but narrowed: each distribution asked at the
        position cuts the interval that is still possible at its thresholds, and the parts are the branches.
        """
        low, high = self.intervals.get(position, (0.0, 1.0))
        ends = np.minimum(np.cumsum(probabilities), 1.0)
        ends[int(np.flatnonzero(probabilities)[-1]) :] = 1.0
        starts = np.concatenate(([0.0], ends[:-1]))
        overlap = np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0.0) / (high - low)
        token = self.choose(overlap.tolist())
        self.intervals[position] = (max(float(starts[token]), low), min(float(ends[token]), high))
        return token


class EnumeratingDice(Dice):
    """The residual rule's randomness, all of it."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1 + 1e-12
        return self.branches.choose((probability, 1 - probability)) == 0

    def choose(self, distribution: Distribution) -> int:
        assert abs(distribution.sum() - 1) < 1e-12
        return self.branches.choose(distribution.tolist())


class _Rows:
    """Rows made when they are read. What is never read needs no branches: its randomness sums out."""

    def __init__(self, row: Callable[[int], np.ndarray]) -> None:
        self._row = row

    def __getitem__(self, row: int) -> np.ndarray:
        return self._row(row)


class EnumeratingScorer(FakeScorer):
    """A scorer whose coupled picks at one position all come from one shared uniform number.

    For a vocabulary of 2 this *is* the coupling of Gumbel-max: token 0 wins where E0 / p0 < E1 / p1 for exponential
    E0, E1, that is where E0 / (E0 + E1) < p0, and E0 / (E0 + E1) is one uniform number shared by all distributions. For
    larger vocabularies it is another coupling with the same marginals. That the output's distribution is still right
    shows that `verify` takes picks as they come and needs nothing of Gumbel-max but that the pick has its distribution.

    Runners-up are the likeliest other tokens: fixed, given distribution and pick. Distributions are cached by text, so
    a scorer serves one sampling and prompt only.
    """

    def __init__(self, name: str, vocabulary: int, logits: Logits) -> None:
        super().__init__(name, vocabulary, logits)
        self._distributions: dict[Text, Distribution] = {}

    def distribution_after(self, text: Text, prompt_length: int, sampling: Sampling) -> Distribution:
        if text not in self._distributions:
            ids = np.array(text, np.int32)
            z = adjust(self.logits(ids), ids, prompt_length, sampling)
            self._distributions[text] = distribution(z, sampling)
        return self._distributions[text]

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        self.packed.append(len(asks))
        return [self._lazy(ask) for ask in asks]

    def _lazy(self, ask: Ask) -> Answer:
        request, context = ask.request, tuple(ask.context.tolist())
        branches = cast(EnumeratingDice, request.dice).branches

        def after(row: int) -> tuple[Distribution, int]:
            text = context + tuple(ask.proposal.path(row - 1))
            return self.distribution_after(text, len(request.prompt), request.sampling), len(text)

        def picks(row: int) -> np.ndarray:
            probabilities, position = after(row)
            token = branches.pick(position, probabilities)
            others = [int(other) for other in np.argsort(-probabilities, kind="stable") if other != token]
            return np.array([token, *others][: ask.candidates])

        def lead(row: int) -> np.ndarray:
            probability = float(after(row)[0][picks(row)[0]])
            return np.array(np.log(probability / max(1 - probability, 1e-9)))

        if ask.distributions:
            return Answer(distributions=cast(Any, _Rows(lambda row: after(row)[0])))
        return Answer(picks=cast(Any, _Rows(picks)), leads=cast(Any, _Rows(lead)) if ask.leads else None)


class SampledTree(Store):
    """A draft of one given shape whose tokens are sampled from its scorer, siblings without replacement.

    It is a store only because a store can be put anywhere; its proposals carry the distributions they were sampled
    from. A node for which no token is left is not proposed: that is known before any token of it is sampled.
    """

    def __init__(
        self, name: str, parents: Sequence[int], scorer: EnumeratingScorer, sampling: Sampling, branches: Branches
    ) -> None:
        self.name, self.parents, self.scorer, self.sampling, self.branches = name, parents, scorer, sampling, branches
        self._prompt_length = 0

    def begin(self, prompt: np.ndarray, namespace: str = "") -> SampledTree:
        self._prompt_length = len(prompt)
        return self

    def learn(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        distributions: list[Distribution] = []
        text = {-1: tuple(context.tolist())}  # of nodes of the shape
        moved = {-1: -1}  # node of the shape -> node of the proposal
        left: dict[int, Distribution] = {}  # parent -> what its earlier children left of the distribution
        for node, parent in enumerate(self.parents):
            if parent not in moved:
                continue
            if parent not in left:
                left[parent] = self.scorer.distribution_after(text[parent], self._prompt_length, self.sampling)
            sampled_from = left[parent]
            if not sampled_from.any():
                continue
            token = self.branches.choose(sampled_from.tolist())
            rest = sampled_from.copy()
            rest[token] = 0
            left[parent] = rest / rest.sum() if rest.any() else rest
            moved[node] = len(tokens)
            text[node] = (*text[parent], token)
            tokens.append(token)
            parents.append(moved[parent])
            distributions.append(sampled_from)
        return Proposal(tuple(tokens), tuple(parents), (self.name,) * len(tokens), tuple(distributions))


Make = Callable[[Branches], Request]


def output_distribution(make: Make, most: int = 1_000_000) -> tuple[dict[Text, float], int]:
    """The exact distribution of a request's whole output, and the number of outcomes it took."""
    weights: dict[Text, float] = defaultdict(float)
    branches = Branches(most)
    for _ in branches:
        request = make(branches)
        request.dice = EnumeratingDice(branches)
        for _ in Engine().run([request]):
            pass
        assert request.error is None
        weights[tuple(request.output)] += branches.weight
    return weights, branches.leaves


def step_distribution(make: Make, most: int = 1_000_000) -> tuple[dict[Text, float], int]:
    """The exact distribution of the tokens of the target's first pass."""
    weights: dict[Text, float] = defaultdict(float)
    branches = Branches(most)
    for _ in branches:
        request = make(branches)
        request.dice = EnumeratingDice(branches)
        # Not with an engine: it would go on to what the second pass asks, and that randomness is not wanted here.
        outcome = request.ask(None)
        while isinstance(outcome, Ask):
            outcome = request.ask(outcome.scorer.score([outcome])[0])
        weights[outcome.tokens] += branches.weight
    return weights, branches.leaves


def plain_distribution(
    scorer: EnumeratingScorer, prompt: Sequence[int], sampling: Sampling, stop_ids: Iterable[int] = ()
) -> dict[Text, float]:
    """Of plain decoding: the product of the scorer's distributions. Shares no code with requests."""
    stops, weights = set(stop_ids) | set(sampling.stop_ids), {}
    open_texts: list[tuple[Text, float]] = [((), 1.0)]
    while open_texts:
        text, weight = open_texts.pop()
        probabilities = scorer.distribution_after((*prompt, *text), len(prompt), sampling)
        for token in np.flatnonzero(probabilities).tolist():
            longer, share = (*text, token), weight * float(probabilities[token])
            if token in stops or len(longer) == sampling.max_tokens:
                weights[longer] = share
            else:
                open_texts.append((longer, share))
    return weights


def distribution_error(weights: dict[Text, float], expected: dict[Text, float]) -> float:
    """The largest difference of a probability; the sum of all counts as one."""
    texts = weights.keys() | expected.keys()
    largest = max(abs(weights.get(text, 0.0) - expected.get(text, 0.0)) for text in texts)
    return max(largest, abs(sum(weights.values()) - 1))


def step_error(
    weights: dict[Text, float], scorer: EnumeratingScorer, prompt: Sequence[int], sampling: Sampling
) -> float:
    """How far a step's distribution is from lossless.

    After a step that wrote few tokens, plain decoding goes on. So all longer outputs have plain decoding's distribution
    exactly if for every text and next token x: weight(text, x written) = weight(text and one more written) * p(x).
    """
    reached: dict[Text, float] = defaultdict(float)
    for text, weight in weights.items():
        for length in range(len(text) + 1):
            reached[text[:length]] += weight
    longer: dict[Text, float] = defaultdict(float)  # weight of the outcomes that wrote more than this
    for text, weight in reached.items():
        if text:
            longer[text[:-1]] += weight
    error = abs(sum(weights.values()) - 1)
    for text, weight in longer.items():
        probabilities = scorer.distribution_after((*prompt, *text), len(prompt), sampling)
        wrong = [abs(reached.get((*text, token), 0.0) - weight * p) for token, p in enumerate(probabilities.tolist())]
        error = max(error, *wrong)
    return error


def forests(nodes: int) -> list[tuple[int, ...]]:
    """Every ordered forest of so many nodes, as parents in depth-first order: 1, 2, 5, 14, 42, 132 of them."""
    shapes: list[tuple[int, ...]] = [()]
    for node in range(nodes):
        grown = []
        for parents in shapes:
            # Depth-first, the next node hangs under the last node, one of its ancestors, or the context.
            ancestor = node - 1
            while ancestor >= 0:
                grown.append((*parents, ancestor))
                ancestor = parents[ancestor]
            grown.append((*parents, -1))
        shapes = grown
    return shapes


def renumbered(parents: Sequence[int], generator: np.random.Generator) -> tuple[int, ...]:
    """The same ordered forest with its nodes in another order that keeps parents first and siblings in order."""
    waiting: dict[int, list[int]] = defaultdict(list)  # children still to number, by parent
    for node, parent in enumerate(parents):
        waiting[parent].append(node)
    number, new_parents = {-1: -1}, list[int]()
    while len(new_parents) < len(parents):
        ready = [parent for parent, children in waiting.items() if children and parent in number]
        parent = ready[int(generator.integers(len(ready)))]
        number[waiting[parent].pop(0)] = len(new_parents)
        new_parents.append(number[parent])
    return tuple(new_parents)
