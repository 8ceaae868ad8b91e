"""Prompt lookup: drafts what followed earlier matches in the request's own text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.core.interfaces import Store
from hierspec.core.proposal import Proposal
from hierspec.stores.ngram_index import NgramIndex
from hierspec.stores.tree import DRAFTING, draft_from_index

_MIN_CAPACITY = 512  # tokens of the first index: allocating it takes microseconds


class ContextStore(Store):
    """Prompt and output of one request. Drafts a tree of what followed up to `max_matches` earlier matches."""

    name = "context"

    drafted_matches: int | None = None  # of the matches found, how many become drafts; None: all

    def __init__(self, max_matches: int = 32) -> None:
        DRAFTING.load()
        self.max_matches = max_matches
        self._index = NgramIndex(_MIN_CAPACITY)
        self._size = 0  # tokens in the index
        self._pending: list[int] = []  # learnt, not in the index yet

    def begin(self, prompt: np.ndarray, namespace: str = "") -> ContextStore:
        store = type(self)(self.max_matches)
        if len(prompt) > _MIN_CAPACITY:
            store._index = NgramIndex(2 * len(prompt))
        store._index.append(prompt)
        store._size = len(prompt)
        return store

    def learn(self, tokens: Sequence[int]) -> None:
        self._pending += tokens

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        """Looks up the end of `context`, which may be longer than what was learnt, in what was learnt."""
        pending, indexed = self._pending, self._index.tokens[: self._size]
        self._pending, self._size = [], self._size + len(pending)
        if self._size > self._index.capacity:  # the ring must not overwrite anything: move to a larger one
            self._index = NgramIndex(2 * self._size)
            self._index.append(indexed)
        new = np.array(pending, np.int32)
        return draft_from_index(
            self._index, context, budget, budget, self.name, self.max_matches, self.drafted_matches, new
        )


class CopyStore(ContextStore):
    """Prompt lookup as in the literature: one chain, copied after the newest of the longest matches."""

    name = "copy"
    drafted_matches = 1
