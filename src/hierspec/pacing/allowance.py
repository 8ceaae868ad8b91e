"""What drafts may lose: a little at the start, then a share of the time that has passed.

Whether drafts pay is only known when some were tried, on this machine and for this text. Trying them must not make
anybody notably slower, so every round that tries is paid from here. What drafts gain flows back.
"""

from __future__ import annotations

_AT_FIRST = 2.0  # plain passes, in time
_SHARE = 0.01  # of the time
_MOST = 8.0  # plain passes that may be saved up: what drafts gained long ago does not pay for a text where they lose


class Allowance:
    """Shared by all requests of a plan, however many run together: time passes for all of them. It is counted in plain
    passes, and falls below zero where one round took more than was left."""

    def __init__(self) -> None:
        self.left = _AT_FIRST

    def passed(self, passes: float) -> None:
        """So much time has passed."""
        self.left = min(self.left + _SHARE * passes, _MOST)

    def lost(self, passes: float) -> None:
        """By so much a round with drafts was slower; negative where it was faster."""
        self.left = min(self.left - passes, _MOST)

    def wait(self, needed: float) -> float:
        """The time after which so much may be tried: none where enough is left. What takes more than can be saved up
        may be tried too, and is paid for afterwards."""
        return max(min(needed, _MOST) - self.left, 0.0) / _SHARE
