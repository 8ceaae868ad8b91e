"""Keeps requests in step, so that they share passes.

If half of them drafted while the others verify, every pass would be half as wide and cost nearly as much as a full one.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from hierspec.core.interfaces import Ask, Scorer
from hierspec.core.request import Request

_LONGEST = 1.5  # longest wait, in average passes of the scorer: requests that are ready need it too
_NEW = 0.25  # weight of the newest pass in the moving average


class Together:
    """Delays a scorer's pass until the requests that still draft for it are ready.

    Their drafts are computed meanwhile, so no time is lost, and all share the pass.
    """

    def __init__(self) -> None:
        self._usual: WeakKeyDictionary[Scorer, float] = WeakKeyDictionary()  # seconds of a pass, on average
        self._waited: WeakKeyDictionary[Scorer, float] = WeakKeyDictionary()  # seconds since it could have run

    def choose(self, asks: Mapping[Request, Ask]) -> dict[Request, Ask]:
        """The asks of this round without those that wait."""
        awaited: set[int] = set()  # scorers for which something is being drafted
        for request, ask in asks.items():
            # A scorer that has not read the prompt yet may take long: nobody waits for it.
            if ask.stats.reach:
                for tier, stats in zip(request.hierarchy.tiers, request.stats.tiers, strict=True):
                    if stats is ask.stats:
                        break
                    awaited.add(id(tier.scorer))
        chosen = {request: ask for request, ask in asks.items() if not self._waits(ask.scorer, awaited)}
        return chosen or dict(asks)  # with one scorer in several tiers, all could wait for each other

    def learn(self, scorer: Scorer, seconds: float) -> None:
        """A pass of this scorer took `seconds`: the scorers that wait have waited that much longer."""
        usual = self._usual.get(scorer)
        self._usual[scorer] = seconds if usual is None else (1 - _NEW) * usual + _NEW * seconds
        self._waited.pop(scorer, None)
        if self._waited:  # it seldom is, and iterating takes a while
            for other in self._waited:
                self._waited[other] += seconds

    def _waits(self, scorer: Scorer, awaited: set[int]) -> bool:
        if id(scorer) not in awaited:
            return False
        waited = self._waited.setdefault(scorer, 0.0)
        return waited <= _LONGEST * self._usual.get(scorer, 0.0)
