"""When to fuse a round, so that a lower tier drafts in one call with the pass that verifies: time saved against drafts
left out.

Such a round asks the host nothing between its passes. But its draft has a fixed shape, and what stores draft is not
verified beside it.
"""

from __future__ import annotations

_MEMORY = 0.9  # weight of earlier rounds after each new one
_OTHER_TEXT = 4.0  # rounds that those of earlier texts weigh in a new one, at most
_ALTERNATING = 1.1  # times their seconds: other rounds among these leave the device idle before and after
_AT_FIRST = 0.3  # tokens that other drafts must promise, until both kinds of rounds were timed


class FusedRounds:
    """Times rounds drafted in one call, and those that verify other drafts. Shared by all requests of a plan."""

    def __init__(self) -> None:
        # Rounds, their tokens and their seconds, older ones decayed.
        self._fused, self._others = [0.0] * 3, [0.0] * 3

    def new_text(self) -> None:
        """How much is accepted differs from text to text."""
        weight = min(1.0, _OTHER_TEXT / self._fused[0]) if self._fused[0] else 1.0
        self._fused = [weight * value for value in self._fused]

    @property
    def seconds(self) -> float:
        """Of a usual round in one call; 0 if none was timed yet."""
        return self._fused[2] / self._fused[0] if self._fused[0] else 0.0

    def better(self, others: float) -> bool:
        """Whether to draft in one call though other drafts should gain `others` tokens."""
        if others <= 0:
            return True
        (fused, tokens, together), (rounds, _, apart) = self._fused, self._others
        if not (fused and rounds):
            return others < _AT_FIRST
        return tokens * _ALTERNATING * apart >= (1 + others) * rounds * together

    def learn(self, fused: bool, tokens: int, seconds: float) -> None:
        """A round of this kind wrote these tokens and took so long, everything included."""
        counts = self._fused if fused else self._others
        for index, value in enumerate((1.0, tokens, seconds)):
            counts[index] = _MEMORY * counts[index] + value
