"""Keeps the passes of requests together: half of them drafting while the others verify would make every pass half as
wide, which costs nearly as much as a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from hierspec.core.interfaces import Ask, Scorer
from hierspec.core.request import Request

_LONGEST = 1.5  # of its own passes that a pass may wait, for the sake of those who do not draft
_NEW = 0.25  # what the last pass counts for in the average


class Together:
    """Lets a scorer's pass wait until those who draft for it have come to it. Meanwhile their drafts are computed, so
    no time is lost, and the pass is shared by all."""

    def __init__(self) -> None:
        self._usual: WeakKeyDictionary[Scorer, float] = WeakKeyDictionary()  # seconds of a pass, on average
        self._waited: WeakKeyDictionary[Scorer, float] = WeakKeyDictionary()  # seconds since it could have run

    def choose(self, asks: Mapping[Request, Ask]) -> dict[Request, Ask]:
        """The asks of this round without those that wait."""
        awaited: set[int] = set()  # scorers to which drafts will come
        for request, ask in asks.items():
            # Nobody waits for a long prompt.
            if ask.stats.reach:
                for tier, stats in zip(request.hierarchy.tiers, request.stats.tiers, strict=True):
                    if stats is ask.stats:
                        break
                    awaited.add(id(tier.scorer))
        chosen = {request: ask for request, ask in asks.items() if not self._waits(ask.scorer, awaited)}
        return chosen or dict(asks)  # where one scorer is in several tiers, all could wait for each other

    def learn(self, scorer: Scorer, seconds: float) -> None:
        """A pass of this scorer took so long; so much longer the others have waited."""
        usual = self._usual.get(scorer)
        self._usual[scorer] = seconds if usual is None else (1 - _NEW) * usual + _NEW * seconds
        self._waited.pop(scorer, None)
        for other in self._waited:
            self._waited[other] += seconds

    def _waits(self, scorer: Scorer, awaited: set[int]) -> bool:
        if id(scorer) not in awaited:
            return False
        waited = self._waited.setdefault(scorer, 0.0)
        return waited <= _LONGEST * self._usual.get(scorer, 0.0)
