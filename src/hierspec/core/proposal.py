"""A proposal: drafted tokens as a tree in flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

Distribution = np.ndarray  # probabilities over the vocabulary, float64, sum 1
Candidate = tuple[int, Distribution | None]  # a token, and what it was sampled from, given the candidates before it

CERTAIN = 1 << 30  # evidence of a token that has no alternative


@dataclass(frozen=True, slots=True)
class Proposal:
    """Node i drafts `tokens[i]` after node `parents[i]` (-1: directly after the context). Parents come first.

    `sources[i]` says who drafted it. `distributions[i]` is what the token was sampled from, given the siblings before
    it; None means that it is fixed, not sampled (a store's draft, or the coupled rule). `evidence[i]` is the source's
    own class number for how good its reason was. How often each class is accepted is learnt, except for `CERTAIN`.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    distributions: tuple[Distribution | None, ...] = field(default=(), compare=False)
    evidence: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        size = len(self.tokens)
        if not self.sources:
            object.__setattr__(self, "sources", ("?",) * size)
        if not self.distributions:
            object.__setattr__(self, "distributions", (None,) * size)
        if not self.evidence:
            object.__setattr__(self, "evidence", (0,) * size)
        if not (size == len(self.parents) == len(self.sources) == len(self.distributions) == len(self.evidence)):
            raise ValueError("tokens, parents, sources, distributions and evidence differ in length")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before their children")

    @staticmethod
    def chain(tokens: Iterable[int], source: str = "?") -> Proposal:
        tokens = tuple(int(token) for token in tokens)
        return Proposal(tokens, tuple(range(-1, len(tokens) - 1)), (source,) * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def nodes(self) -> Iterator[tuple[int, int, str, Distribution | None, int]]:
        """Token, parent, source, distribution and evidence of each node in turn."""
        return zip(self.tokens, self.parents, self.sources, self.distributions, self.evidence, strict=True)

    def path(self, node: int) -> list[int]:
        """Tokens from the context down to `node`, the node's own token last."""
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def depths(self) -> list[int]:
        """Depth of every node; 0 is the position right after the context."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def children(self) -> list[list[int]]:
        """children()[node + 1]: the nodes after `node`, in the order in which they are tried."""
        children: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return children

    def followed_by(self, other: Proposal) -> Proposal:
        """This chain, and the other proposal after its last token."""
        size = len(self)
        if not size:
            return other
        return Proposal(
            self.tokens + other.tokens,
            self.parents + tuple(parent + size for parent in other.parents),
            self.sources + other.sources,
            self.distributions + other.distributions,
            self.evidence + other.evidence,
        )

    def cut(self, depth: int) -> Proposal:
        """Only the nodes among the first `depth` positions."""
        if len(self.tokens) <= depth:
            return self
        depths = self.depths()
        if max(depths) < depth:
            return self
        return self.subtree([node for node, d in enumerate(depths) if d < depth])

    def fixed(self) -> Proposal:
        """The same tokens without what they were sampled from."""
        return Proposal(self.tokens, self.parents, self.sources, (), self.evidence)

    def first(self, nodes: int) -> Proposal:
        """Only the first `nodes` nodes: parents come first, so what is left is a tree."""
        return self if len(self) <= nodes else self.subtree(range(nodes))

    def merge(self, other: Proposal, nodes: int) -> Proposal:
        """One tree of at most `nodes` nodes: all of self, then what `other` adds to it.

        The order is what keeps the residual rule exact: a sampled token must never be dropped because of its value, so
        sampled proposals are `self` and only fixed ones may be `other`. A fixed token equal to a sampled sibling may
        be dropped: once that sibling is rejected, it has no probability left.
        """
        if not other.tokens:
            return self
        if not self.tokens:
            return other.first(nodes)
        if any(distribution is not None for distribution in other.distributions):
            raise ValueError("a sampled proposal cannot be merged into another: it must come first")
        tokens, parents = list(self.tokens), list(self.parents)
        sources, distributions, evidence = list(self.sources), list(self.distributions), list(self.evidence)
        index: dict[tuple[int, int], int] = {}  # parent and token -> node
        for node, key in enumerate(zip(parents, tokens, strict=True)):
            index.setdefault(key, node)  # of equal siblings only the first can be accepted
        moved = {-1: -1}  # node of other -> node of the merged tree
        for node, (token, parent) in enumerate(zip(other.tokens, other.parents, strict=True)):
            if parent not in moved:
                continue  # its parent did not fit
            key = (moved[parent], token)
            if key not in index:
                if len(tokens) >= nodes:
                    continue
                index[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                sources.append(other.sources[node])
                distributions.append(None)
                evidence.append(other.evidence[node])
            moved[node] = index[key]
        return Proposal(tuple(tokens), tuple(parents), tuple(sources), tuple(distributions), tuple(evidence))

    def subtree(self, nodes: Sequence[int]) -> Proposal:
        """Only these nodes, given in order; the parent of each is among them."""
        moved = {-1: -1} | {node: number for number, node in enumerate(nodes)}
        return Proposal(
            tuple(self.tokens[n] for n in nodes),
            tuple(moved[self.parents[n]] for n in nodes),
            tuple(self.sources[n] for n in nodes),
            tuple(self.distributions[n] for n in nodes),
            tuple(self.evidence[n] for n in nodes),
        )


NOTHING = Proposal()  # immutable, so one is enough
