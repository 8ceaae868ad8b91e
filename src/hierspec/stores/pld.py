"""Prompt lookup decoding (PLD) as published: what followed the first earlier match of the last three tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.core.interfaces import Store
from hierspec.core.proposal import NOTHING, Proposal


class PromptLookupStore(Store):
    """One chain of exactly `length` tokens, copied after the *first* place that ends in the text's last three tokens;
    where there is none, in its last two, or in its last one. `copy` is better: it takes the newest of the longest."""

    name = "pld"

    def __init__(self, longest: int = 3, length: int = 10) -> None:
        self.longest, self.length = longest, length

    def learn(self, tokens: Sequence[int]) -> None:
        """The context has all that it needs."""

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        for size in range(min(self.longest, len(context)), 0, -1):
            starts = len(context) - size - self.length + 1  # of matches that so many tokens follow
            if starts < 1:
                continue
            matches = context[:starts] == context[-size]
            for offset in range(1, size):
                matches &= context[offset : starts + offset] == context[offset - size]
            first = int(matches.argmax())
            if matches[first]:
                copied = context[first + size : first + size + self.length]
                return Proposal.chain(copied.tolist()[:budget], self.name)
        return NOTHING
