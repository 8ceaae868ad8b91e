"""Chunked prefill: long prompts are prefilled in pieces along with the passes of others, so that no writer waits long.

A piece is an ask about a prefix of the context whose answer nobody uses: it leaves the prefix in the KV cache. A cache
never changes what is written, so neither do pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from hierspec.core.interfaces import Ask, Scorer
from hierspec.core.proposal import NOTHING
from hierspec.core.request import Request

_LONGER = 1.5  # usual passes: prefill may make a pass of writing requests longer by this much
_FIRST_PIECE = 16  # tokens, before the speed of prefill is known
_MOST_TOKENS = 512  # per round where nobody writes: scorers split longer passes anyway, so pieces cost nothing
_LITTLE = 8  # tokens: a pass that lacks no more than this does not count as prefill
_ROWS_TOGETHER = 4  # rows that kernels compute at once: passes over other numbers of rows waste some of them
_LATEST_USUAL, _LATEST_EACH = 31, 7  # passes in the medians: half a second of usual ones, and the latest with prefill
_LEAST_SHARE = 0.5  # of a pass's time per token: what a prefilled token takes at least


class _Times:
    """Times of one scorer's latest passes. Medians: neither a disturbed pass nor the very first one should decide."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_LATEST_USUAL)  # seconds of passes without prefill
        self._drafted: deque[int] = deque(maxlen=_LATEST_USUAL)  # and the drafted tokens that they verified
        self._each: deque[float] = deque(maxlen=_LATEST_EACH)  # seconds that each prefilled token adds

    def learn_usual(self, seconds: float, drafted: int) -> None:
        self._usual.append(seconds)
        self._drafted.append(drafted)

    def learn_each(self, seconds: float) -> None:
        self._each.append(seconds)

    @property
    def usual(self) -> float:
        """0: no such pass was timed yet."""
        return median(self._usual) if self._usual else 0.0

    @property
    def each(self) -> float:
        """0: no such pass was timed yet."""
        return median(self._each) if self._each else 0.0

    def expected(self, writers: int) -> float:
        """Seconds of a pass of `writers` requests. While prompts keep coming none is timed: `usual` may be too low."""
        return max(self.usual, writers * self.each)

    def unusual(self, drafted: int) -> float:
        """By how much this is more than the drafted tokens of a usual pass."""
        return max(drafted - median(self._drafted), 0.0) if self._drafted else 0.0


class Reading(NamedTuple):
    """What a pass has to prefill."""

    tokens: int
    writers: int  # asks without prefill
    drafted: int = 0  # tokens to verify; each takes about as long as one to prefill


class PromptReader:
    """Decides which asks of a round go to the scorers: whole, cut to a piece, or later.

    Prompts are prefilled one after the other: the first is soon done, and later ones take a common prefix from the KV
    cache.
    """

    def __init__(self) -> None:
        self._times: WeakKeyDictionary[Scorer, _Times] = WeakKeyDictionary()

    def choose(self, asks: Mapping[Request, Ask]) -> dict[Request, Ask]:
        """The asks of this round. Those of requests that are not in it wait for a later one."""
        chosen = {request: ask for request, ask in asks.items() if not _may_lack(ask)}
        readers = [request for request in asks if request not in chosen]
        asked = {id(ask.scorer) for ask in chosen.values()}
        writers = sum(bool(request.output) for request in chosen)
        left: dict[int, int] = {}  # tokens that may still be prefilled in this round, by scorer
        reading: list[Ask] = []
        for request in readers:
            ask, target = asks[request], request.hierarchy.tiers[0].scorer
            # Prefill joins a pass that runs anyway: one pass more would delay the requests that draft in this round.
            if writers and not asked & {id(ask.scorer), id(target)}:
                continue
            if id(ask.scorer) not in left:
                drafted = sum(len(each.proposal) for each in chosen.values() if each.scorer is ask.scorer)
                piece = self._piece(ask, target, writers, len(readers), drafted) if writers else _MOST_TOKENS
                left[id(ask.scorer)] = piece
            room = left[id(ask.scorer)]
            if room <= 0:
                continue
            lacking = _lacking(ask)
            if any(_gains(ask, lacking, other) for other in reading):
                continue
            if lacking > room:
                end = len(ask.context) - lacking + room
                ask = replace(ask, context=ask.context[:end], proposal=NOTHING, leads=False, logits=False, ahead=None)
            left[id(ask.scorer)] -= lacking
            chosen[request] = ask
            reading.append(ask)
        return chosen

    def reading(self, asks: Sequence[Ask]) -> Reading:
        """What a pass over these asks has to prefill."""
        lacking = [_lacking(ask) for ask in asks]
        tokens = sum(each for each in lacking if each > _LITTLE)
        return Reading(tokens, sum(each <= _LITTLE for each in lacking), sum(len(ask.proposal) for ask in asks))

    def learn(self, scorer: Scorer, reading: Reading, seconds: float) -> None:
        """A pass with this prefill took `seconds`."""
        times = self._times.setdefault(scorer, _Times())
        if not reading.tokens:
            times.learn_usual(seconds, reading.drafted)
        else:
            usual = times.expected(reading.writers) if reading.writers else 0.0
            usual += times.unusual(reading.drafted) * times.each
            # On a machine that was slow a moment ago the difference may vanish. A token is never as cheap as that: a
            # prompt would be read whole, and everybody would wait.
            least = _LEAST_SHARE * seconds / (reading.tokens + reading.writers)
            times.learn_each(max((seconds - usual) / reading.tokens, least))

    def _piece(self, ask: Ask, target: Scorer, writers: int, readers: int, drafted: int) -> int:
        """Tokens of prefill that make a pass as much longer as it may become.

        Once all readers write, passes will take longer anyway: that much is allowed now. A pass that verifies more
        drafts than usual is longer already.
        """
        times = self._times.get(ask.scorer, _Times())
        if not times.each:
            return _FIRST_PIECE
        usual = times.expected(writers) if times.usual else self._times.get(target, times).expected(writers)
        piece = int(_LONGER * (usual / times.each + readers - 1) - times.unusual(drafted))
        return max(piece - (writers + piece) % _ROWS_TOGETHER, _LITTLE + 1)


def _may_lack(ask: Ask) -> bool:
    """Whether its scorer may have much to prefill."""
    return len(ask.context) - ask.stats.reach > _LITTLE


def _lacking(ask: Ask) -> int:
    """Tokens of the context that its scorer has to prefill."""
    lacking = len(ask.context) - ask.stats.reach
    if not _may_lack(ask):
        return lacking
    known = getattr(ask.scorer, "known", None)  # tokens found in the KV cache, also from other texts
    return lacking if known is None else min(lacking, len(ask.context) - known(ask.context))


def _gains(ask: Ask, lacking: int, other: Ask) -> bool:
    """Whether prefilling the other ask first saves work: their common prefix is longer than what the KV cache holds."""
    if ask.scorer is not other.scorer:
        return False
    size = min(len(ask.context), len(other.context))
    differs = np.flatnonzero(ask.context[:size] != other.context[:size])
    common = int(differs[0]) if len(differs) else size
    return common - (len(ask.context) - lacking) > _LITTLE
