"""How much of a text a draft model reads before it drafts: what its drafts should save in the rest of the text, against
the time of its prefill.

Drafts need not be exact, and what was copied from far above is mostly in the stores. So of a long prompt the end is
read alone where all of it would cost much of what drafts save: with stores beside it, a small model that has read the
last 128 tokens of 800 has as much accepted as one that has read them all.
"""

from __future__ import annotations

from collections.abc import Callable

_PRIOR_TOKENS, _PRIOR_SAVED = 64.0, 0.2  # as if in so many tokens drafts had saved so many of each
_HALF_LIFE = 2048.0  # tokens after which older ones count half
_UNREAD = 0.9  # what was counted counts for, after each text that was not read: texts may change
_LEAST = 32  # tokens without which a draft is hardly better than none
_SHARE = 1 / 4  # of what drafts should save: for more of the text than that


class Reading:
    """Shared by all requests of a host. Time is counted in the tokens that could be written in it."""

    def __init__(self) -> None:
        self._tokens = self._saved = 0.0

    def learn(self, tokens: int, saved: float) -> None:
        """A round of a text that is read wrote so many tokens, and its draft saved so many beyond those of the stores,
        less the time that it took."""
        self._tokens, self._saved = self._tokens + tokens, self._saved + saved
        if self._tokens > _HALF_LIFE:
            self._tokens, self._saved = self._tokens / 2, self._saved / 2

    def left_unread(self) -> None:
        """A text has ended that nobody read."""
        self._tokens, self._saved = _UNREAD * self._tokens, _UNREAD * self._saved

    def window(self, price: Callable[[int], float], lacking: int, room: int) -> int:
        """How many of the last tokens to read, of those that the draft model lacks; 0: it should not draft here.
        Reading n of them costs `price(n)`, and so many tokens are still to be written."""
        worth = room * (self._saved + _PRIOR_TOKENS * _PRIOR_SAVED) / (self._tokens + _PRIOR_TOKENS)
        least = min(_LEAST, lacking)
        if price(least) > worth:
            return 0
        low, high = least, lacking
        while low < high:  # the most that costs no more than the share
            middle = (low + high + 1) // 2
            if price(middle) <= _SHARE * worth:
                low = middle
            else:
                high = middle - 1
        return low
