"""Lookahead decoding (Fu et al., arXiv 2402.02057) as a store: the model guesses its own n-grams while it verifies.

A window of columns stands after the text. Column i holds guesses for the positions from i on; its first token is on the
spine, the path to all further columns, and the others hang below it (column 0 begins with the text's own last token):

    last token - spine 1 - spine 2 - ...
        |           |         |
      level 1    level 1   level 1       each pass writes the level below: what the model says after every column
      level 2    level 2   level 2

A full column and what the model says after it are an n-gram for the pool. Then the spine goes, level 1 becomes the
spine one position on, and the new level is the last. Candidates are the pool's n-grams that begin with the last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.core.interfaces import Store
from hierspec.core.proposal import Proposal

WINDOW_EVIDENCE = 40  # of nodes that are there to be continued, not because they are likely; candidates: 1, 2, ...


class LookaheadStore(Store):
    """One request's window and pool. The window is proposed whole or, where the budget is too small, not at all."""

    name = "lookahead"

    def __init__(self, columns: int = 7, size: int = 5, candidates: int = 7) -> None:
        if columns < 1 or size < 2 or candidates < 1:
            raise ValueError("lookahead needs a column, n-grams of at least 2 tokens and a candidate")
        self.columns = columns
        self.size = size  # tokens of an n-gram
        self.candidates = candidates  # n-grams kept for a first token
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # first token -> what follows, least recently seen first
        self._ending: list[int] = []  # the last tokens learnt
        self._last = -1  # the token that column 0 begins with
        # Every pass moves the window on by a column, so it starts with one more for each level that is still missing.
        self._spine: list[int] = []
        self._levels: list[list[int]] = []

    def begin(self, prompt: np.ndarray, namespace: str = "") -> LookaheadStore:
        fresh = LookaheadStore(self.columns, self.size, self.candidates)
        fresh.learn(prompt.tolist())
        # Any tokens will do; those of the prompt are nearer than others. The same prompt starts the same window.
        scattered = [(place * 0x9E3779B1 >> 8) % len(prompt) for place in range(1, self.columns + self.size - 2)]
        fresh._spine = prompt[scattered].tolist()
        return fresh

    def learn(self, tokens: Sequence[int]) -> None:
        text = self._ending + [int(token) for token in tokens]
        for start in range(len(text) - self.size + 1):
            self._remember(text[start], tuple(text[start + 1 : start + self.size]))
        self._ending = text[max(0, len(text) - self.size + 1) :]

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        tree = _Tree(budget)
        self._last = int(context[-1])
        for rank, gram in enumerate(reversed(self._pool.get(self._last, ()))):
            tree.add(gram, rank + 1)
        before = len(tree.tokens)
        for path in self._paths():
            if not tree.add(path, WINDOW_EVIDENCE):
                tree.cut(before)
                break
        return tree.proposal(self.name)

    def observe(self, proposal: Proposal, picks: np.ndarray) -> None:
        """The next level of the window, where all of it was among the nodes: others may have been cut or added."""
        nodes = {
            key: node for node, key in reversed(list(enumerate(zip(proposal.parents, proposal.tokens, strict=True))))
        }
        level = []
        for path in self._paths():
            node = -1
            for token in path:
                found = nodes.get((node, token))
                if found is None:
                    return
                node = found
            level.append(int(picks[node + 1]))
        self._advance(level)

    def _paths(self) -> list[list[int]]:
        """Tokens from the text down to the end of each column."""
        return [
            self._spine[:column] + [level[column] for level in self._levels] for column in range(len(self._spine) + 1)
        ]

    def _advance(self, new: list[int]) -> None:
        """The window one pass later, given what the model writes after each column."""
        if not self._spine and not self._levels and self.columns > 1:
            return  # no request has begun
        if len(self._levels) < self.size - 2:  # still filling: the text went on, so the first column goes
            self._spine = self._spine[1:]
            self._levels = [level[1:] for level in [*self._levels, new]]
            return
        for column, first in enumerate([self._last, *self._spine]):
            self._remember(first, (*(level[column] for level in self._levels), new[column]))
        levels = [*self._levels, new]
        self._spine, self._levels = levels[0][1:], levels[1:]

    def _remember(self, first: int, gram: tuple[int, ...]) -> None:
        grams = self._pool.setdefault(first, [])
        if gram in grams:
            grams.remove(gram)
        elif len(grams) == self.candidates:
            del grams[0]
        grams.append(gram)


class _Tree:
    """Paths joined where they begin alike, up to a number of nodes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._evidence: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, path: Sequence[int], evidence: int) -> bool:
        """As much of the path as there is room for; was it all?"""
        node = -1
        for token in path:
            found = self._nodes.get((node, token))
            if found is None:
                if len(self.tokens) >= self.budget:
                    return False
                found = self._nodes[node, token] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
                self._evidence.append(evidence)
            node = found
        return True

    def cut(self, size: int) -> None:
        """Back to the first `size` nodes; nothing is added afterwards."""
        del self.tokens[size:], self._parents[size:], self._evidence[size:]

    def proposal(self, source: str) -> Proposal:
        size = len(self.tokens)
        return Proposal(
            tuple(self.tokens), tuple(self._parents), (source,) * size, (None,) * size, tuple(self._evidence)
        )
