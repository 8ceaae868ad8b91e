"""Whole candidates as one draft tree: common prefixes become one path."""

from __future__ import annotations

from collections.abc import Sequence

from hierspec.core.proposal import Proposal


class PathTree:
    """A trie of paths, up to a number of nodes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._evidence: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, path: Sequence[int], evidence: int) -> bool:
        """Adds as much of the path as fits; returns whether all of it did."""
        node = -1
        for token in path:
            child = self._nodes.get((node, token))
            if child is None:
                if len(self.tokens) >= self.budget:
                    return False
                child = self._nodes[node, token] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
                self._evidence.append(evidence)
            node = child
        return True

    def truncate(self, size: int) -> None:
        """Keeps the first `size` nodes; nothing may be added afterwards."""
        del self.tokens[size:], self._parents[size:], self._evidence[size:]

    def proposal(self, source: str) -> Proposal:
        size = len(self.tokens)
        return Proposal(
            tuple(self.tokens), tuple(self._parents), (source,) * size, (None,) * size, tuple(self._evidence)
        )
