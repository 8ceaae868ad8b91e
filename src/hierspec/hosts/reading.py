"""How much of a text a draft model prefills: what its drafts should save in the rest, against the time of prefill.

Drafts need not be exact, and what is copied from far above is mostly in the stores. So only the end of a long prompt is
read if all of it would cost a large part of what drafts save. Beside stores, a small model that has read the last 128
tokens of 800 gets as many tokens accepted as one that has read them all.
"""

from __future__ import annotations

from collections.abc import Callable

_PRIOR_TOKENS, _PRIOR_SAVED = 64.0, 0.2  # prior: as if drafts had saved 0.2 tokens for each of 64 written
_HALF_LIFE = 2048.0  # tokens after which older ones count half
_UNREAD = 0.9  # weight of the counts after each text that was not read: texts may change
_LEAST = 32  # least tokens to read: with fewer a draft is hardly better than none
_SHARE = 1 / 4  # of what drafts should save: most that reading more than `_LEAST` may cost


class Reading:
    """Shared by all requests of a host. Time is counted in the tokens that could be written in it."""

    def __init__(self) -> None:
        self._tokens = self._saved = 0.0

    def learn(self, tokens: int, saved: float) -> None:
        """A round of a text that was read wrote `tokens` tokens.

        Its draft saved `saved` tokens beyond those of the stores, less the price of its time.
        """
        self._tokens, self._saved = self._tokens + tokens, self._saved + saved
        if self._tokens > _HALF_LIFE:
            self._tokens, self._saved = self._tokens / 2, self._saved / 2

    def left_unread(self) -> None:
        """A text has ended that nobody read."""
        self._tokens, self._saved = _UNREAD * self._tokens, _UNREAD * self._saved

    def window(self, price: Callable[[int], float], lacking: int, room: int) -> int:
        """How many of the last `lacking` tokens a draft model should read; 0: it should not draft here.

        Reading n of them costs `price(n)`, and `room` tokens are still to be written.
        """
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
