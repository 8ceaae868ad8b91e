"""Whether anything is looked up for a host at all.

That depends on what drafts should gain against the time that looking them up takes. With many requests it also depends
on the tokens per second with drafts and without.
"""

from __future__ import annotations

_TRIAL = 8  # steps with drafts before a rest
_ENOUGH, _FAR = 2, 0.8  # after 2 steps a trial ends early if it runs below 0.8 of plain speed
_FIRST = 16  # steps of the first rest; each further one doubles the last
_LONGEST = {False: 512, True: 2048}  # steps of the longest rest, with few requests and with many
_BALANCE = 0.9  # weight of earlier steps in the balance of drafts, after each new one
_MEMORY = 0.98  # weight of earlier steps in tokens per second, after each new one
_MANY = 8  # from this many requests on a rest comes first: there, trying drafts that do not pay costs most


class Rest:
    """Trials and rests for one batch size, up to a factor of two: at another one all begins anew."""

    def __init__(self) -> None:
        self._load = 0  # class of how many requests there are
        self._forget(0)

    def _forget(self, requests: int) -> None:
        self._many = requests >= _MANY
        # Steps without drafts: those left of this rest, and those of the next rest.
        self._left, self._next = _FIRST if self._many else 0, _FIRST
        self._steps, self._balance = 0, 0.0
        self._seen = dict.fromkeys((True, False), (0.0, 0.0))  # tokens and seconds, older ones decayed

    def drafts(self, requests: int) -> bool:
        """Whether the step that begins may draft."""
        if requests.bit_length() != self._load:
            self._load = requests.bit_length()
            self._forget(requests)
        self._left -= self._left > 0
        return not self._left

    def sleeps(self, requests: int) -> bool:
        """Whether the step that begins is one of a rest, and not the last."""
        if self._left <= 1 or requests.bit_length() != self._load:
            return False
        self._left -= 1
        return True

    def saw(self, drafted: bool, tokens: int, seconds: float) -> None:
        """A step with drafts or without wrote `tokens` tokens in `seconds`, with all overheads."""
        before, spent = self._seen[drafted]
        self._seen[drafted] = _MEMORY * before + tokens, _MEMORY * spent + seconds

    def learn(self, gain: float, worth: float) -> None:
        """A step's chains should gain `gain` tokens; `worth` could have been written while they were looked up."""
        self._steps += 1
        self._balance = _BALANCE * self._balance + gain - worth
        if self._steps < _TRIAL and not (self._steps >= _ENOUGH and self._slower(_FAR)):
            return
        if self._balance < 0 or self._slower():
            self._left, self._next = self._next, min(2 * self._next, _LONGEST[self._many])
            self._steps, self._balance = 0, 0.0
            self._seen[True] = 0.0, 0.0  # the next trial counts by itself: texts may change meanwhile
        else:
            self._next = _FIRST

    def _slower(self, share: float = 1.0) -> bool:
        """Whether speed with drafts was below this share of the speed without.

        Not used with few requests, whose speed differs too much from one text to the next: there the balance decides.
        """
        if not self._many:
            return False
        (tokens, seconds), (plain_tokens, plain_seconds) = self._seen[True], self._seen[False]
        return tokens * plain_seconds < share * plain_tokens * seconds
