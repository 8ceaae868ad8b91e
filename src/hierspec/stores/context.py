"""Guesses by copying: what followed when the end of the text stood in it before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from hierspec.core.interfaces import Store
from hierspec.core.proposal import Proposal
from hierspec.stores.chains import ChainIndex
from hierspec.stores.tree import grow_after

_SMALLEST = 512  # tokens of room at the start: making it takes microseconds


class ContextStore(Store):
    """Prompt and output of one request. Guesses are a tree of what followed at up to `places` earlier places."""

    name = "context"

    followed: int | None = None  # of the places that are found, all are followed

    def __init__(self, places: int = 32) -> None:
        _prepare()
        self.places = places
        self._index = ChainIndex(_SMALLEST)
        self._size = 0  # tokens in the index
        self._new: list[int] = []  # learnt since

    def begin(self, prompt: np.ndarray, namespace: str = "") -> ContextStore:
        fresh = type(self)(self.places)
        if len(prompt) > _SMALLEST:
            fresh._index = ChainIndex(2 * len(prompt))
        fresh._index.append(prompt)
        fresh._size = len(prompt)
        return fresh

    def learn(self, tokens: Sequence[int]) -> None:
        self._new += tokens

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        """`context` may go on after what was learnt: its end is what is looked for, in what was learnt."""
        new, known = self._new, self._index.tokens[: self._size]
        self._new, self._size = [], self._size + len(new)
        if self._size > self._index.capacity:  # nothing may fall out of the ring, so a larger one takes over
            self._index = ChainIndex(2 * self._size)
            self._index.append(known)
        added = np.array(new, np.int32)
        return grow_after(self._index, context, budget, budget, self.name, self.places, self.followed, added)


class CopyStore(ContextStore):
    """Prompt lookup as in the literature: one chain, copied from where the longest match stood last."""

    name = "copy"
    followed = 1


@cache
def _prepare() -> None:
    """Machine code is made, or read from the disk, when the first store is opened and not while a request waits."""
    index, context = ChainIndex(8), np.array([1], np.int32)
    index.append([1, 2])
    grow_after(index, context, 1, 1, "")
