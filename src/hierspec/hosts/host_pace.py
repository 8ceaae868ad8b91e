"""How much is drafted for a host: from the times of its own steps and from what it accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

from hierspec.core.hierarchy import FixedPace
from hierspec.core.interfaces import Block, Round, Written
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.hosts.chains import best_chain, compare
from hierspec.hosts.guest_request import GuestRequest
from hierspec.hosts.host_costs import HostCosts
from hierspec.hosts.reading import Reading
from hierspec.hosts.rest import Rest
from hierspec.pacing.acceptance import AcceptanceRates
from hierspec.pacing.asking import StoreChoice, promise
from hierspec.pacing.costs import Load
from hierspec.pacing.lengths import Lengths
from hierspec.pacing.pace import to_prefill
from hierspec.pacing.routing import Router

_EAGER, _EVERY = 512, 8  # after 512 rounds, only one in 8 is learnt from if many requests run
_MANY = 8  # requests above which that is so: learning takes a few microseconds per row
_DOUBT = 32  # steps without a draft after which prices are halved: widths that are never tried are never timed
_SAMPLE_EVERY = 16  # one step in this many may run without drafts, to be timed
_DRAFTERS = "draft models"  # as one source beside the stores
_DECAY = 0.998  # weight of earlier steps after each new one


class HostPace(FixedPace):
    """The pace of tier 0 if it runs in a host: all rows of a step share it.

    If the plan adapts, the host's steps are timed between two calls. Each row's chain ends where its next token should
    cost more than it gains. Draft models run if they should gain more than they cost (`router`). If all chains together
    should gain less than looking them up costs, nothing is looked up for a while (`Rest`). If the plan does not adapt,
    every chain is as long as the host allows.
    """

    def __init__(self, most: int, adapts: bool, clock: Callable[[], float] = perf_counter) -> None:
        self.most, self.adapts = most, adapts
        self.acceptance, self.lengths = AcceptanceRates(), Lengths()
        self.costs = HostCosts()  # of the host's steps by their rows
        self.router: Router | None = None  # chooses which draft model drafts; None: the next tier, always
        self._beside = StoreChoice()  # whether a draft model also runs if stores have a draft
        self._reading = Reading()  # how much of a text a draft model reads first
        self._reading_seconds = 0.0  # seconds of prefill in this call
        self._tokens = self._plain = 1.0  # tokens that a request wrote, and their time in plain steps, decayed
        self._learnt = 0  # rounds
        self._steps = 0  # steps
        self._undrafted = 0  # steps in a row in which nothing was worth drafting
        self._clock, self._rest, self._gain = clock, Rest(), 0.0
        self._drafting, self._prices = True, list[float]()
        self._load, self._rows = Load(), 0
        self._began = self._ended = 0.0  # the last call

    def sleeps(self, requests: int, tokens: int) -> bool:
        """The host calls, after writing `tokens` tokens: whether nothing is looked up in this step and the next.

        Then it does not matter which row wrote what.
        """
        if not (self.adapts and self._rest.sleeps(requests)):
            return False
        self._see(self._clock(), tokens)
        self._rows, self._drafting = 0, False  # the next call cannot time a step of known rows
        return True

    def _see(self, now: float, tokens: int) -> None:
        """The step since the last call has ended."""
        if self._began:
            self._rest.saw(self._drafting, tokens, now - self._began)
        self._began = now

    def step_begins(self, requests: int, same: bool, tokens: int) -> None:
        """The host calls: `requests` requests have written `tokens` tokens.

        `same`: they are those of the call before, and none was prefilled meanwhile, so the time between the calls is
        the cost of such a step.
        """
        now = self._clock()
        if self.adapts and same and self._rows:
            self._learn_time(now - self._ended, now - self._began, tokens / requests)
        if self.adapts:
            self._see(now, tokens)
        self._began, self._load = now, Load(requests)
        self._drafting, self._prices, self._gain, self._reading_seconds = True, [], 0.0, 0.0
        if self.adapts:
            self._drafting = self.costs.timed and self._rest.drafts(requests) and not self._samples()
            if self._drafting:
                self._prices = self._worth_of_time()

    def step_ends(self, rows: int) -> None:
        """All drafts of this call are made: the host's next step is this wide."""
        self._rows, self._ended = rows, self._clock()
        self._undrafted = self._undrafted + 1 if self._drafting and rows == self._load.requests else 0
        if self.adapts and self._drafting:
            self._rest.learn(self._gain, self._speed() * (self._ended - self._began - self._reading_seconds))

    def began_to_read(self, seconds: float) -> None:
        """Draft models took this time to read texts that were new to them.

        It is spent once per text, and was weighed before: it does not count as time for looking up drafts.
        """
        self._reading_seconds += seconds

    def drafts(self, round: Round) -> bool:
        return self._drafting

    def asks(self, round: Round, store: str) -> bool:
        return True  # one chain is chosen from what all of them draft

    def route(self, round: Round) -> Block | None:
        if self.router is None:
            return Block()
        if round.proposals:
            round.appraised, _ = self._best(round.proposals, round.room)
            if not self._beside.asks(_DRAFTERS, promise(self.acceptance, round.proposals), self._speed()):
                return None
        room = min(round.room, self.lengths.rest(len(round.request.output)))
        lacking = self._to_read(self.router, round, room)
        skipped = None if lacking is None else self.router.choose(0.0, self._load, lacking, room)
        return None if skipped is None else Block(skipped, least=self.router.routes[skipped].policy.begin(self._load))

    def _to_read(self, router: Router, round: Round, room: int) -> list[int] | None:
        """Tokens that each draft model would read before it drafts; None if none should draft.

        Once one of them has begun to read a text, all begin where it did.
        """
        request, lacking = round.request, to_prefill(router, round)
        assert isinstance(request, GuestRequest)
        if not _is_read(round):
            prefills = [route.policy.prefill for route in router.routes]
            speed, context = self._speed(), len(round.context)

            def price(tokens: int) -> float:  # of the cheapest: the router weighs what the others would take
                return speed * min(prefill.seconds(tokens, context) for prefill in prefills)

            window = self._reading.window(price, min(lacking), room)
            if not window:
                return None
            if window < min(lacking):
                request.read_from = context - window
        return [min(each, len(round.context) - request.read_from) for each in lacking]

    def choose(self, round: Round) -> Proposal:
        return self.chain(_compared(round), round.room)

    def learn(self, round: Round) -> None:
        self.learn_drafts(_compared(round), round.tokens)
        if self.router is None or not round.may_draft:
            return
        drafted, taken, block, saved = round.drafted, None, list[Written](), 0.0
        if drafted is not None:
            taken, block = drafted.skipped, drafted.written
            gained = self._gained(round, round.appraised or NOTHING)
            if round.appraised is not None:
                promised = promise(self.acceptance, round.proposals[1:])
                self._beside.learn(_DRAFTERS, promised, gained, drafted.seconds)
            saved = gained - self._speed() * drafted.seconds
        if _is_read(round):
            self._reading.learn(len(round.tokens), saved)
        seconds = round.seconds + self.costs.under(self._load).seconds(1 + len(round.draft))
        self.router.learn(taken, block, round.tokens, seconds, len(round.proposals) > 1, self._load)

    def _gained(self, round: Round, stores: Proposal) -> float:
        """What a draft model added to the stores' chain: the text shows how much of that would have been accepted."""
        gained = _right(round.draft, round.tokens) - sum(self._prices[: len(round.draft)])
        return gained - _right(stores, round.tokens) + sum(self._prices[: len(stores)])

    @property
    def drafting(self) -> bool:
        """Whether anything is drafted in this step."""
        return self._drafting

    def chain(self, proposals: Sequence[Proposal], room: int) -> Proposal:
        """What is verified of these proposals."""
        if not proposals:
            return NOTHING
        chain, gain = self._best(proposals, room)
        self._gain += gain
        return chain

    def learn_drafts(self, proposals: Sequence[Proposal], written: Sequence[int]) -> None:
        """Learn from what was written where these were proposed. Once much is known, a sample is enough."""
        self._learnt += 1
        if self._learnt < _EAGER or self._load.requests <= _MANY or self._learnt % _EVERY == 0:
            for proposal in proposals:
                self.acceptance.learn(proposal, written)

    def text_ends(self, request: GuestRequest) -> None:
        """The host has finished this text."""
        self.lengths.learn(len(request.output))
        if self.router is not None and not any(stats.calls for stats in request.stats.tiers[1:]):
            self._reading.left_unread()

    def learnt(self) -> dict[str, Any]:
        """The counts, for the next run."""
        return {"acceptance": self.acceptance.counts()}

    def begin_with(self, learnt: Mapping[str, Any]) -> None:
        """Take what was learnt before as a prior, which new rounds soon outweigh."""
        self.acceptance.begin_with(learnt["acceptance"])

    def _best(self, proposals: Sequence[Proposal], room: int) -> tuple[Proposal, float]:
        return best_chain(proposals, self.acceptance, min(self.most, room), self._prices)

    def _learn_time(self, host: float, whole: float, tokens: float) -> None:
        """A step of the host took `host` seconds, `whole` with our own time, and wrote `tokens` tokens per request."""
        if self.costs.timed:
            plain = whole / self.costs.seconds(self._load.requests)
            self._tokens, self._plain = _DECAY * self._tokens + tokens, _DECAY * self._plain + plain
        self.costs.observe(self._rows, host, 0, self._load.requests)

    def _samples(self) -> bool:
        """Whether this step runs without drafts, to be timed: if all steps are wide, narrow ones stay unknown."""
        self._steps += 1
        return self._steps % _SAMPLE_EVERY == 0 and not self.costs.known(self._load.requests)

    def _worth_of_time(self) -> list[float]:
        """The price of each further token of a row's draft: the tokens that could be written in its time."""
        share, speed = self.costs.under(self._load), self._speed()
        speed *= 0.5 ** (self._undrafted // _DOUBT)
        seconds = [share.seconds(1 + nodes) for nodes in range(self.most + 1)]
        return [speed * (after - before) for before, after in pairwise(seconds)]

    def _speed(self) -> float:
        """Tokens per second of all requests: the price of a second. At least that of one token per request and step.

        Plain decoding writes that much, so a lower speed with drafts would be the wrong price.
        """
        return self._load.requests * max(self._tokens / self._plain, 1.0) / self.costs.seconds(self._load.requests)


def _compared(round: Round) -> Sequence[Proposal]:
    """The round's proposals; a draft model's is compared with those of stores."""
    return round.proposals if round.drafted is None or len(round.proposals) < 2 else compare(round.proposals)


def _is_read(round: Round) -> bool:
    """Whether some draft model has read the round's text."""
    return any(stats.calls for stats in round.request.stats.tiers[1:])


def _right(chain: Proposal, written: Sequence[int]) -> int:
    """Tokens of a chain that were written."""
    right = 0
    while right < min(len(chain), len(written)) and chain.tokens[right] == written[right]:
        right += 1
    return right
