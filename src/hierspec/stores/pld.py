"""Prompt lookup decoding (PLD) as published: what followed the first earlier match of the last three tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.core.interfaces import Store
from hierspec.core.proposal import NOTHING, Proposal


class PromptLookupStore(Store):
    """One chain of exactly `length` tokens, copied from after the *first* earlier match of the text's last tokens.

    It matches the last three tokens, else the last two, else the last one. `copy` is better: it takes the newest of the
    longest matches.
    """

    name = "pld"

    def __init__(self, longest: int = 3, length: int = 10) -> None:
        self.longest, self.length = longest, length

    def learn(self, tokens: Sequence[int]) -> None:
        """Does nothing: it searches the context itself."""

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        for size in range(min(self.longest, len(context)), 0, -1):
            starts = len(context) - size - self.length + 1  # positions where a match is followed by `length` tokens
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
