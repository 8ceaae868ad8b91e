"""Which of the tiers below a tier has drafted by: the next one, or one further down, with those between left out.

A tier in the middle pays where it refuses what the tier above would refuse; on other texts it is only in the way.
So the ways down are compared while they are used, by the tokens that rounds with each brought and the seconds that they
should have taken. As everything in `core.policy` it is decided from what is already written, and changes no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hierspec.pacing.appraisal import Costs
from hierspec.pacing.blocks import PROBE, WhileWorthwhile, Written

_TRIALS = 8  # rounds that each way is tried for to begin with
_FADING = 0.95  # what a round counts for after the next of the same way


@dataclass(frozen=True)
class Route:
    """A tier below as seen from one above it."""

    policy: WhileWorthwhile  # when it hands up to that one
    costs: Costs  # of passes of the one above over its guesses

    @property
    def plain(self) -> float:
        return self.costs.seconds(1)


class Router:
    """The ways down from one tier, the nearest first; shared by all requests of a model.

    Mostly the fastest so far is taken, where its own policy finds that drafting pays. The others are tried in turn,
    each for as long as it is ahead of the fastest since it was taken up; so one that has become better stays. Of the
    time one second in `PROBE` may be lost so. Where drafting does not pay they are tried when the fastest would be.
    """

    def __init__(self, ways: Sequence[Route]) -> None:
        self.ways = tuple(ways)
        self._rounds = [0] * len(self.ways)
        self._brought = [[0.0, 0.0] for _ in self.ways]  # tokens and seconds, older rounds fading
        self._tried = 0  # the last that was tried though it was not the fastest
        self._trying = False  # whether it still is,
        self._ahead = 0.0  # by how many seconds it is ahead then
        self._credit = 0.0  # seconds that may be lost by trying

    def choose(self, instead: float = 0.0, requests: int = 1, unread: Sequence[int] = (), room: int = 0) -> int | None:
        """The place of the way to take now; None: nothing should be drafted. What is given is as in `Policy.pays`,
        `unread` for every way."""
        if all(way.policy.hopeless(requests) for way in self.ways):
            return None
        places = range(len(self.ways))
        fewest = min(places, key=self._rounds.__getitem__)
        if self._rounds[fewest] < _TRIALS:
            return fewest if self._pays(fewest, instead, requests, unread, room) else None
        fastest = max(places, key=self._rate)
        if self._trying and self._tried != fastest:
            return self._tried
        self._trying = False
        if not self._pays(fastest, instead, requests, unread, room):
            return None
        if self._credit < 0:
            return fastest
        turns = ((self._tried + step) % len(self.ways) for step in range(1, len(self.ways) + 1))
        self._tried = next(place for place in turns if place != fastest)
        self._trying, self._ahead = True, 0.0
        return self._tried

    def verified(
        self, taken: int | None, block: Sequence[Written], written: Sequence[int], seconds: float, beside: bool = False,
        requests: int = 1,
    ) -> None:  # fmt: skip
        """What a round brought in which this way was taken, as `Policy.verified`; all learn what time is worth."""
        for place, way in enumerate(self.ways):
            way.policy.verified(block if place == taken else (), written, seconds, beside, requests)
        nearest = self.ways[0]
        seconds = nearest.policy.alone(seconds, requests)
        self._credit += seconds / PROBE
        if taken is None:
            return
        if self._trying and taken == self._tried:
            others = [self._rate(place) for place in range(len(self.ways)) if place != taken]
            self._ahead += min(nearest.plain * len(written), len(written) / max(others)) - seconds
            if self._ahead < 0:
                self._trying, self._credit = False, self._ahead
        self._rounds[taken] += 1
        tokens, spent = self._brought[taken]
        self._brought[taken] = [_FADING * tokens + len(written), _FADING * spent + seconds]

    def _pays(self, place: int, instead: float, requests: int, unread: Sequence[int], room: int) -> bool:
        return self.ways[place].policy.pays(instead, requests, unread[place] if unread else 0, room)

    def _rate(self, place: int) -> float:
        """Tokens a second of rounds with this way."""
        tokens, seconds = self._brought[place]
        return tokens / seconds if seconds else math.inf
