"""Guesses by copying: what followed the longest suffix of the text when it stood there before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.core.hierarchy import Store
from hierspec.core.proposal import Proposal


class ContextStore(Store):
    """Prompt and output of one request, indexed by their runs of 1 to `longest` tokens."""

    name = "context"

    def __init__(self, longest: int = 6, places: int = 4) -> None:
        self.longest = longest  # tokens of a suffix to look for; longer matches rarely tell more
        self.places = places  # newest places of a run that are looked at
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}  # run -> positions after it, oldest first

    def begin(self, prompt: np.ndarray) -> ContextStore:
        fresh = ContextStore(self.longest, self.places)
        fresh.learn(prompt.tolist())
        return fresh

    def learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # The run that ends before this token now has a continuation: index it only then.
            position = len(self._tokens)
            for length in range(1, min(self.longest, position) + 1):
                places = self._after.setdefault(tuple(self._tokens[position - length :]), [])
                places.append(position)
                if len(places) > self.places:
                    del places[0]
            self._tokens.append(int(token))

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        suffix = context[-self.longest :].tolist()
        for length in range(len(suffix), 0, -1):
            places = self._after.get(tuple(suffix[-length:]))
            if places:
                return self._tree(places, budget)
        return Proposal()

    def _tree(self, places: list[int], budget: int) -> Proposal:
        """The newest continuation; a quarter of the nodes goes to older ones where they differ."""
        newest = places[-1]
        older = [place for place in places[-2::-1] if self._tokens[place] != self._tokens[newest]]
        spare = budget // 4 if older else 0
        tree = self._copied(newest, budget - spare)
        for place in older:
            tree = tree.merge(self._copied(place, max(1, spare)), budget)
        return tree

    def _copied(self, place: int, length: int) -> Proposal:
        return Proposal.chain(self._tokens[place : place + length], self.name)
