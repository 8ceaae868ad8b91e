"""How much time drafts may lose: a little at the start, then a share of the time that has passed.

Whether drafts pay is only known once some were tried, on this machine and for this text. Trials must not slow anybody
down noticeably, so every drafting round is paid from this allowance. What drafts gain is added to it.
"""

from __future__ import annotations

import math

_AT_FIRST = 1.5  # plain passes
_DEEPEST = 2.0  # plain passes: what is left is never further below zero
_AT_FIRST_IN_LARGE_BATCHES = 0.5  # plain passes: each round tells the worth of drafts for many requests at once
_SHARE = 0.005  # of the elapsed time
_LEAST_SHARE = 0.00125  # in large batches, after many trials that failed
_RARER = 0.7  # times the share, after each trial that failed
_MOST = 8.0  # plain passes that one text may save up
_CARRIED = 1.5  # of what one text gained, the next may have this much: gains must not pay for losses with another
_FOR_A_TEXT = 1.2  # plain passes that a new text may lose at least, if drafts gained with the text before it
_LESS = 0.85  # times that, after each text with which they lost
_RISKED = 0.5  # of what drafts gained with a text on average, a new text may lose this much
_MOST_FOR_A_TEXT = 3.0  # plain passes: the most that it may lose for that
_NEWEST = 0.25  # weight of the newest text in that average
_FOR_PREFILL = 4.0  # plain passes: what drafters' prefills may take at first
_PREFILL_SHARE = 1 / 256  # of the elapsed time, that they may take on top of that
_SAVED = 0.25  # of what drafts gain beyond the loan of their text: this much is there for the next loans
_EXPLORING = 2.0  # of them, what it takes to try drafts that should not pay
_DEEPEST_FUND = 32.0  # plain passes: what is left for prefills is never further below zero
_SURPRISE = 2.0  # a prefill counts as at most so many times what was expected, and one pass more


class Allowance:
    """What drafts may still lose, in plain passes. All requests of a plan that run with a similar batch size share it.

    It falls below zero if one round loses more than was left, but not far: if drafts lose much in a moment, a host may
    have taken a core away, and plain decoding would have lost as much. In a `large` batch the first trials are shorter,
    and trials that keep failing become rarer: many texts together change little, so the next trial would fail as well.
    A single text may become easy at any time. Where drafts gained with the texts before it, it may lose more: rounds
    differ so much that a few of them tell little, and a text with which drafts pay gains many times that.

    A drafter's prefill serves the rest of the text, so no single round can pay for it. It is a loan from a fund of its
    own, which grows with time. What drafts gain in that text pays it back, and a share of all other gains is there for
    the next loans: some texts gain nothing, and then the others must not go without. A prefill that takes far longer
    than expected counts less: kernels were compiled, or a host took the core away. One that does so again counts fully.
    """

    def __init__(self, large: bool = False) -> None:
        self._least_share = _LEAST_SHARE if large else _SHARE
        self.left = _AT_FIRST_IN_LARGE_BATCHES if large else _AT_FIRST
        self._share = _SHARE
        self._grant = _FOR_A_TEXT
        self._worth = 0.0  # plain passes that a text gained on average, newer ones counting more
        self._lost = self._gained = 0.0  # with the current text: losses less gains, and what gains added to `left`
        self._fund, self._owed = _FOR_PREFILL, 0.0  # for prefills; what the current text has not paid back
        self._last = 0.0  # plain passes that the prefill before the current one took
        self._expected = math.inf  # plain passes that the last prefill should take

    def new_text(self) -> float:
        """The only running text is a new one: whether drafts pay for it is to be tried again.

        Returns what drafts gained with the last one.
        """
        if self._lost:
            self._grant = _FOR_A_TEXT if self._lost < 0 else _LESS * self._grant
            self._worth += _NEWEST * (max(min(-self._lost, _MOST), -_MOST) - self._worth)
        spare = max(min(self._gained, self.left - _CARRIED), 0.0)
        self.left = max(self.left - spare, self._grant, min(_RISKED * self._worth, _MOST_FOR_A_TEXT))
        gained = -self._lost
        self._lost = self._gained = self._owed = 0.0
        return gained

    def passed(self, passes: float) -> None:
        """Time has passed: add a share of it."""
        self.left = min(self.left + self._share * passes, _MOST)
        self._fund = min(self._fund + _PREFILL_SHARE * passes, _MOST)

    def lost(self, passes: float) -> None:
        """A round with drafts was slower by this much; negative if it was faster."""
        self.left = max(min(self.left - passes, _MOST), -_DEEPEST)
        self._lost += passes
        self._gained = max(self._gained - passes, 0.0)
        paid_back = min(max(-passes, 0.0), self._owed)
        self._owed -= paid_back
        self._fund += paid_back
        saved = _SAVED * (max(-passes, 0.0) - paid_back)
        self._fund += min(saved, max(_MOST - self._fund, 0.0))

    def lends(self, passes: float) -> bool:
        """Whether a drafter's prefill of this cost may begin. One that costs more than can be saved up may at times.

        What rounds could not lose, since no prefill could begin, is there for it too.
        """
        may = self._fund + self._spare() >= min(passes, _MOST)
        if may:
            self._expected = passes
        return may

    def lend(self, passes: float) -> None:
        """A drafter's prefill took this long."""
        passes, self._last = min(passes, max(_SURPRISE * self._expected + 1, self._last)), passes
        spare = min(self._spare(), max(passes - self._fund, 0.0))
        self.left -= spare
        self._fund = max(self._fund + spare - passes, -_DEEPEST_FUND)
        self._owed += passes

    def _spare(self) -> float:
        """What is left beyond the needs of a trial."""
        return max(self.left - _FOR_A_TEXT, 0.0)

    def may_explore(self) -> bool:
        """Whether a drafter may be tried that should not pay. So at first, and then seldom."""
        return self._fund >= _FOR_PREFILL

    def explores(self) -> None:
        """A drafter that should not pay is tried: its rounds lose more than others."""
        self._fund -= _EXPLORING
        self._owed += _EXPLORING  # what it gains pays this back too

    def tried(self, gained: bool) -> None:
        """A run of rounds with drafts has ended."""
        self._share = _SHARE if gained else max(_RARER * self._share, self._least_share)

    def wait(self, needed: float) -> float:
        """The time until a trial of this cost is allowed; 0 if enough is left.

        A trial that costs more than can be saved up is allowed too, and paid off afterwards.
        """
        return max(min(needed, _MOST) - self.left, 0.0) / self._share
