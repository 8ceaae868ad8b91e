"""Which lower tier drafts for a tier: the next one down, or one further down, skipping those in between.

A tier in the middle pays where it rejects what the tier above would reject; on other texts it is only in the way. So
routes are compared while they are used, by the tokens that rounds with each wrote and their expected time. Like all
decisions about blocks this depends only on what is already written, so it changes no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hierspec.core.interfaces import Written
from hierspec.pacing.blocks import WhileWorthwhile
from hierspec.pacing.costs import ALONE, PROBE, Costs, Load

_TRIALS = 8  # rounds for which each route is tried at first
_DECAY = 0.95  # weight of earlier rounds of a route after each new one


@dataclass(frozen=True)
class Route:
    """A lower tier as seen from the tier that it drafts for."""

    policy: WhileWorthwhile  # when it hands up
    costs: Costs  # of passes that verify its drafts
    known: Callable[[np.ndarray], int] = lambda context: 0  # tokens of a new text that it finds in the KV cache


class Router:
    """The routes down from one tier, the nearest first; shared by all requests of a model.

    Usually the fastest so far is taken, if its policy finds that drafting pays. The others are tried in turn, each for
    as long as it is ahead of all others and of plain decoding since its trial began; so one that has become better
    stays. Trials may lose one second in `PROBE`. While drafting does not pay, trials wait until the fastest is tried
    again.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._rounds = [0] * len(self.routes)
        self._brought = [[0.0, 0.0] for _ in self.routes]  # tokens and seconds, older rounds decayed
        self._trial = 0  # the route that was last tried though it was not the fastest
        self._trying = False  # whether that trial still runs
        self._ahead = 0.0  # seconds by which the trial is ahead
        self._credit = 0.0  # seconds that trials may lose

    def choose(
        self, other_gain: float = 0.0, load: Load = ALONE, to_prefill: Sequence[int] = (), room: int = 0
    ) -> int | None:
        """The index of the route to take now; None: nothing should be drafted.

        Arguments are those of `WhileWorthwhile.pays`, `to_prefill` for every route.
        """

        def pays(index: int) -> bool:
            unseen = to_prefill[index] if to_prefill else 0
            return self.routes[index].policy.pays(other_gain, load, unseen, room)

        if len(self.routes) == 1:
            return 0 if pays(0) else None
        if all(route.policy.hopeless(load) for route in self.routes):
            return None
        indices = range(len(self.routes))
        fewest = min(indices, key=self._rounds.__getitem__)
        if self._rounds[fewest] < _TRIALS and pays(fewest):
            return fewest
        tried = [index for index in indices if self._rounds[index]]
        if not tried:
            return None
        fastest = max(tried, key=self._speed)
        if self._trying and self._trial != fastest:
            return self._trial
        self._trying = False
        if not pays(fastest):
            return None
        if self._credit < 0:
            return fastest
        turns = ((self._trial + step) % len(self.routes) for step in range(1, len(self.routes) + 1))
        self._trial = next(index for index in turns if index != fastest)
        self._trying, self._ahead = True, 0.0
        return self._trial

    def explore(self, load: Load = ALONE, to_prefill: Sequence[int] = (), room: int = 0) -> int | None:
        """The index of the nearest route that can be explored though no route should pay; None: none can."""
        for index, (route, unseen) in enumerate(zip(self.routes, to_prefill, strict=True)):
            if route.policy.explore(load, unseen, room):
                return index
        return None

    def idle(self, rounds: int) -> None:
        """Nobody will be asked for so many rounds."""
        for route in self.routes:
            route.policy.idle(rounds)

    def prefill(self, to_prefill: Sequence[int], load: Load = ALONE) -> float:
        """Seconds until the cheapest route could draft, where its tier has to prefill this many tokens first."""
        routes = zip(self.routes, to_prefill, strict=True)
        return min(route.policy.prefill.seconds(tokens, load.context) for route, tokens in routes)

    def learn(
        self,
        taken: int | None,
        block: Sequence[Written],
        written: Sequence[int],
        seconds: float,
        beside: bool = False,
        load: Load = ALONE,
    ) -> None:
        """A round with this route is over; arguments as in `WhileWorthwhile.learn_block`. All routes learn from it."""
        for index, route in enumerate(self.routes):
            route.policy.learn_block(block if index == taken else (), written, seconds, beside, load)
        if len(self.routes) == 1:
            return
        nearest = self.routes[0]
        seconds = nearest.policy.alone(seconds, load)
        self._credit += seconds / PROBE
        if taken is None:
            return
        if self._trying and taken == self._trial:
            others = [self._speed(index) for index in range(len(self.routes)) if index != taken]
            plain = nearest.costs.seconds(1)
            self._ahead += min(plain * len(written), len(written) / max(others)) - seconds
            if self._ahead < 0:
                self._trying, self._credit = False, self._ahead
        self._rounds[taken] += 1
        tokens, spent = self._brought[taken]
        self._brought[taken] = [_DECAY * tokens + len(written), _DECAY * spent + seconds]

    def learnt(self) -> dict[str, Any]:
        """The counts, with time in plain passes."""
        plain = self.routes[0].costs.seconds(1) or 1.0
        return {"rounds": self._rounds, "brought": [[tokens, spent / plain] for tokens, spent in self._brought]}

    def begin_with(self, learnt: Mapping[str, Any]) -> None:
        """Take what was learnt before as a prior."""
        rounds, brought = learnt["rounds"], learnt["brought"]
        if not len(rounds) == len(brought) == len(self.routes):
            raise ValueError("these are not the same routes")
        self._rounds = [int(count) for count in rounds]
        plain = self.routes[0].costs.seconds(1)
        self._brought = [[float(tokens), float(spent) * plain] for tokens, spent in brought]

    def _speed(self, index: int) -> float:
        """Tokens per second in rounds with this route."""
        tokens, seconds = self._brought[index]
        return tokens / seconds if seconds else math.inf
