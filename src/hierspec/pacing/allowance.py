"""How much time drafts may lose: a little at the start, then a share of the time that has passed.

Whether drafts pay is only known once some were tried, on this machine and for this text. Trials must not slow anybody
down noticeably, so every drafting round is paid from this allowance. What drafts gain is added to it.
"""

from __future__ import annotations

_AT_FIRST = 2.0  # plain passes
_AT_FIRST_IN_LARGE_BATCHES = 0.5  # plain passes: each round tells the worth of drafts for many requests at once
_SHARE = 0.01  # of the elapsed time
_LEAST_SHARE = 0.0025  # after many trials that failed
_RARER = 0.7  # times the share, after each trial that failed
_MOST = 8.0  # plain passes that may be saved up: old gains must not pay for a text where drafts lose


class Allowance:
    """What drafts may still lose, in plain passes. All requests of a plan that run with a similar batch size share it.

    It falls below zero if one round loses more than was left, but not far: if drafts lose much in a moment, a host may
    have taken a core away, and plain decoding would have lost as much. In a `large` batch the first trials are shorter,
    and trials that keep failing become rarer: many texts together change little, so the next trial would fail as well.
    A single text may become easy at any time.
    """

    def __init__(self, large: bool = False) -> None:
        self._least_share = _LEAST_SHARE if large else _SHARE
        self.left = _AT_FIRST_IN_LARGE_BATCHES if large else _AT_FIRST
        self._share = _SHARE

    def passed(self, passes: float) -> None:
        """Time has passed: add a share of it."""
        self.left = min(self.left + self._share * passes, _MOST)

    def lost(self, passes: float) -> None:
        """A round with drafts was slower by this much; negative if it was faster."""
        self.left = max(min(self.left - passes, _MOST), -_AT_FIRST)

    def tried(self, gained: bool) -> None:
        """A run of rounds with drafts has ended."""
        self._share = _SHARE if gained else max(_RARER * self._share, self._least_share)

    def wait(self, needed: float) -> float:
        """The time until a trial of this cost is allowed; 0 if enough is left.

        A trial that costs more than can be saved up is allowed too, and paid off afterwards.
        """
        return max(min(needed, _MOST) - self.left, 0.0) / self._share
