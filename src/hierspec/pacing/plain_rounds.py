"""How long a token takes without drafts at the moment.

Machines change their speed, and a host may take a core away for a second. So times of other moments say little about
now: drafts that ran before such a second seem fast compared with plain rounds during it.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import NamedTuple


class Window(NamedTuple):
    """Which rounds are averaged."""

    latest: int  # rounds that tell how long one takes now
    recent: int  # rounds that may be averaged
    agrees: float  # a round is averaged if its time is within this factor of theirs


ONE_TOKEN = Window(4, 12, 1.25)
LARGE_BATCH = Window(8, 32, 1.25)  # rounds differ more
WITH_STORES = Window(4, 24, 2.0)  # rounds of several tokens: drafts of stores differ in length


class PlainRounds:
    """The average of the recent rounds that agree with the latest ones."""

    def __init__(self, window: Window = ONE_TOKEN) -> None:
        self._window = window
        self._rounds: deque[tuple[float, float]] = deque(maxlen=window.recent)  # tokens and seconds
        self._agreeing: list[tuple[float, float]] = []
        self._seconds = 1.0  # before any round was timed: those of a measured plain pass
        self._averaged = True  # whether the last two are of the rounds so far

    def add(self, tokens: float, seconds: float) -> None:
        self._rounds.append((tokens, seconds))
        self._averaged = False  # until somebody asks: most rounds of a break are over before that

    def forget(self) -> None:
        """What comes next is of another kind. Until a round of it was timed, the average stays."""
        self._average()
        self._rounds.clear()

    @property
    def seconds(self) -> float:
        """Of a token."""
        self._average()
        return self._seconds

    def _average(self) -> None:
        if self._averaged:
            return
        rounds, agrees = list(self._rounds), self._window.agrees
        now = median_low([each for _, each in rounds[-self._window.latest :]])
        self._agreeing = [each for each in rounds if now / agrees <= each[1] <= now * agrees]
        self._seconds = sum(each for _, each in self._agreeing) / sum(each for each, _ in self._agreeing)
        self._averaged = True

    @property
    def timed(self) -> bool:
        """Whether any round was timed yet."""
        return bool(self._rounds)

    @property
    def relative_variance(self) -> float:
        """The variance of `seconds`, relative to its square."""
        self._average()
        count = len(self._agreeing)
        if not count:
            return 0.0
        tokens, seconds = (sum(each) / count for each in zip(*self._agreeing, strict=True))
        return sum((each[1] / seconds - each[0] / tokens) ** 2 for each in self._agreeing) / count**2
