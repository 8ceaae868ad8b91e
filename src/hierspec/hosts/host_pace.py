"""How much is drafted for a host: from the times of its own steps and from what it accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter

from hierspec.core.hierarchy import FixedPace
from hierspec.core.interfaces import Round
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.hosts.chains import best_chain
from hierspec.pacing.acceptance import AcceptanceRates
from hierspec.pacing.costs import Load
from hierspec.pacing.healing import HealingCosts
from hierspec.pacing.switch import Switch, Switches

_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a step whose costs are told apart
_ROW_SHARE = 1 / 16  # of a step of one row: what a further row is thought to cost before any was timed
_FIRST_STEPS = 3  # that are timed before anything is thought to be known; the fastest counts
_EAGER, _EVERY = 512, 8  # after so many rounds one in so many is learnt from
_DECAY = 0.998  # what a step counts for after the next


class HostPace(FixedPace):
    """The pace of tier 0 where it is a host's: all rows of a step share it.

    Where the plan adapts, the host's steps are timed between two calls. Each row's chain ends where its next token
    would cost more than it should bring, and in batches where drafts do not pay at all nothing is drafted, nor looked
    up, for a while (`Switch`). Otherwise every chain is as long as the host allows.
    """

    def __init__(self, most: int, adapts: bool, clock: Callable[[], float] = perf_counter) -> None:
        self.most, self.adapts = most, adapts
        self.acceptance = AcceptanceRates()
        self.costs: HealingCosts | None = None  # of the host's steps by their rows; None: not timed yet
        self._tokens = self._plain = (
            1.0  # that a request wrote, older ones decayed; in the time of how many plain steps
        )
        self._learnt = 0  # rounds
        self._clock, self._switches = clock, Switches()
        self._timed: list[float] = []  # the first steps of all
        self._drafting, self._prices = True, list[float]()
        self._load, self._rows = Load(), 0
        self._began = self._ended = 0.0  # the last call

    def step_begins(self, requests: int, same: bool, tokens: int) -> None:
        """The host calls: so many of its requests have written so many tokens. `same`: they are those of the call
        before, and none was prefilled meanwhile, so the time between tells what such a step costs."""
        now = self._clock()
        if self.adapts and same and self._rows:
            self._learn_time(now - self._ended, now - self._began, tokens / requests)
        self._began, self._load = now, Load(requests)
        self._drafting, self._prices = True, []
        if self.adapts:
            self._drafting = self.costs is not None and self._switch.drafts()
            if self._drafting and self.costs is not None:
                self._prices = self._worth_of_time(self.costs)

    def step_ends(self, rows: int) -> None:
        """All drafts of this call are made: the host's next step is this wide."""
        self._rows, self._ended = rows, self._clock()

    def drafts(self, round: Round) -> bool:
        return self._drafting

    def choose(self, round: Round) -> Proposal:
        return self.chain(round.proposals, round.room)

    def learn(self, round: Round) -> None:
        self.learn_drafts(round.proposals, round.tokens)

    @property
    def drafting(self) -> bool:
        """Whether anything is drafted in this step."""
        return self._drafting

    def chain(self, proposals: Sequence[Proposal], room: int) -> Proposal:
        """What is verified of these proposals."""
        return best_chain(proposals, self.acceptance, min(self.most, room), self._prices) if proposals else NOTHING

    def learn_drafts(self, proposals: Sequence[Proposal], written: Sequence[int]) -> None:
        """What was written in place of these proposals. Once much is known, some of them are enough."""
        self._learnt += 1
        if self._learnt < _EAGER or self._learnt % _EVERY == 0:
            for proposal in proposals:
                self.acceptance.learn(proposal, written)

    @property
    def _switch(self) -> Switch:
        return self._switches.of(self._load.requests)

    def _learn_time(self, host: float, whole: float, tokens: float) -> None:
        """A step of the host took so long, with our own time `whole`, and brought so many tokens a request."""
        if self.costs is None:
            self._timed.append(host / (1 + (self._rows - 1) * _ROW_SHARE))
            if len(self._timed) >= _FIRST_STEPS:
                alone = max(min(self._timed), 1e-6)
                self.costs = HealingCosts(_WIDTHS, [alone * (1 + (rows - 1) * _ROW_SHARE) for rows in _WIDTHS])
            return
        self.costs.observe(self._rows, host, 0, self._load.requests)
        plain = whole / self.costs.seconds(self._load.requests)
        self._switch.learn(tokens, plain)
        self._tokens, self._plain = _DECAY * self._tokens + tokens, _DECAY * self._plain + plain

    def _worth_of_time(self, costs: HealingCosts) -> list[float]:
        """What each further token of a row's draft costs, in tokens that could be written in its time."""
        share = costs.under(self._load)
        speed = self._tokens / self._plain / share.seconds(1)
        seconds = [share.seconds(1 + nodes) for nodes in range(self.most + 1)]
        return [speed * (after - before) for before, after in pairwise(seconds)]
