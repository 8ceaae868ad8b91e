"""Lookahead decoding (Fu et al., arXiv 2402.02057) as a store: the model drafts its own n-grams while it verifies.

A window of columns follows the text. Column i drafts the positions from i on: its first token is on the spine, the path
to all further columns, and the others hang below it (column 0 starts with the last token of the text):

    last token - spine 1 - spine 2 - ...
        |           |         |
      level 1    level 1   level 1       each pass adds the level below: the model's pick after every column
      level 2    level 2   level 2

A full column and the pick after it are an n-gram for the pool. Then the spine is dropped, level 1 becomes the spine one
position further, and the picks are the last level. The pool's n-grams that start with the last token are candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.core.interfaces import Store
from hierspec.core.proposal import Proposal
from hierspec.stores.path_tree import PathTree

WINDOW_EVIDENCE = 40  # of window nodes, which are not expected to be accepted; candidates have 1, 2, ...


class LookaheadStore(Store):
    """One request's window and pool. The window is proposed whole or, if the budget is too small, not at all."""

    name = "lookahead"

    def __init__(self, columns: int = 7, size: int = 5, candidates: int = 7) -> None:
        if columns < 1 or size < 2 or candidates < 1:
            raise ValueError("lookahead needs a column, n-grams of at least 2 tokens and a candidate")
        self.columns = columns
        self.size = size  # tokens of an n-gram
        self.candidates = candidates  # n-grams per first token
        # First token -> the rest of its n-grams, least recently seen first.
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        self._tail: list[int] = []  # the last tokens learnt
        self._last = -1  # the token that column 0 starts with
        # Every pass drops a column, so the window starts with one more for each missing level.
        self._spine: list[int] = []
        self._levels: list[list[int]] = []

    def begin(self, prompt: np.ndarray, namespace: str = "") -> LookaheadStore:
        store = LookaheadStore(self.columns, self.size, self.candidates)
        store.learn(prompt.tolist())
        # Any tokens will do; the prompt's are more probable than others. The same prompt starts the same window.
        positions = [(i * 0x9E3779B1 >> 8) % len(prompt) for i in range(1, self.columns + self.size - 2)]
        store._spine = prompt[positions].tolist()
        return store

    def learn(self, tokens: Sequence[int]) -> None:
        text = self._tail + [int(token) for token in tokens]
        for start in range(len(text) - self.size + 1):
            self._add_to_pool(text[start], tuple(text[start + 1 : start + self.size]))
        self._tail = text[max(0, len(text) - self.size + 1) :]

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        tree = PathTree(budget)
        self._last = int(context[-1])
        for rank, rest in enumerate(reversed(self._pool.get(self._last, ()))):
            tree.add(rest, rank + 1)
        candidate_nodes = len(tree.tokens)
        for path in self._paths():
            if not tree.add(path, WINDOW_EVIDENCE):
                tree.truncate(candidate_nodes)
                break
        return tree.proposal(self.name)

    def observe(self, proposal: Proposal, picks: np.ndarray) -> None:
        """Adds a level to the window, if all of the window was verified; other nodes do not matter."""
        nodes = {
            key: node for node, key in reversed(list(enumerate(zip(proposal.parents, proposal.tokens, strict=True))))
        }
        level = []
        for path in self._paths():
            node = -1
            for token in path:
                child = nodes.get((node, token))
                if child is None:
                    return
                node = child
            level.append(int(picks[node + 1]))
        self._advance(level)

    def _paths(self) -> list[list[int]]:
        """Tokens from the text down to the end of each column."""
        return [
            self._spine[:column] + [level[column] for level in self._levels] for column in range(len(self._spine) + 1)
        ]

    def _advance(self, picks: list[int]) -> None:
        """Moves the window by one pass, given the model's pick after each column."""
        if not self._spine and not self._levels and self.columns > 1:
            return  # begin() was not called
        if len(self._levels) < self.size - 2:  # still filling: the text has grown, so the first column is dropped
            self._spine = self._spine[1:]
            self._levels = [level[1:] for level in [*self._levels, picks]]
            return
        for column, first in enumerate([self._last, *self._spine]):
            self._add_to_pool(first, (*(level[column] for level in self._levels), picks[column]))
        levels = [*self._levels, picks]
        self._spine, self._levels = levels[0][1:], levels[1:]

    def _add_to_pool(self, first: int, rest: tuple[int, ...]) -> None:
        ngrams = self._pool.setdefault(first, [])
        if rest in ngrams:
            ngrams.remove(rest)
        elif len(ngrams) == self.candidates:
            del ngrams[0]
        ngrams.append(rest)
