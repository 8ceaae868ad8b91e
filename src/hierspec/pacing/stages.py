"""What may draft in a round: nothing, stores alone, or lower tiers as well, by two switches, one in the other.

`switch.py` times one choice against another. Every batch size has switches of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hierspec.pacing.switch import REST, Attempt, Switch

_LARGE = 4  # requests: from here on a batch is large


class Prefilled(NamedTuple):
    """Passes of lower tiers that also prefilled."""

    seconds: float
    written: int  # tokens


_NO_PREFILLS = Prefilled(0.0, 0)


@dataclass(slots=True)
class StagedAttempt:
    """The attempts of both switches in one round, and who decided them."""

    stages: Stages
    own: Attempt
    tiers: Attempt | None = None  # None: nobody asked whether tiers may draft
    prefilled: Prefilled = _NO_PREFILLS  # by lower tiers, before this round
    declined: bool = False  # nothing was drafted after all, so the round says nothing about drafts

    @property
    def drafts(self) -> bool:
        return self.own.drafts


class Stages:
    """What may draft in a round: nothing, stores alone, or lower tiers as well.

    There are two nested switches. In rounds that may draft, drafting with tiers is timed against stores alone; the
    faster of the two is timed against drafting nothing. With one switch, tiers that lose would turn stores off too.
    Breaks of tiers also go on while nothing is drafted: else stores that find nothing would end each trial before tiers
    have their turn.
    """

    def __init__(self, tiers_apart: bool = False, large: bool = False) -> None:
        """`tiers_apart`: with a switch for tiers. `large`: for a large batch. Each switch has its own allowance."""
        self._drafts = Switch(large=large)
        self._tiers = Switch(large=large, beside_stores=True) if tiers_apart else None
        self._rest = StagedAttempt(self, REST)  # of all rounds that draft nothing: nobody asks about their tiers
        # The last plain pass that was counted: when it ended, its requests, and the expected time of each one's share.
        # Each pass counts once.
        self.last_plain_pass, self.last_plain_share = (-1.0, 0), 0.0

    def new_text(self) -> None:
        """As `Switch.new_text`."""
        self._drafts.new_text()
        if self._tiers is not None:
            self._tiers.new_text()

    def begin(self, requests: int = 1) -> StagedAttempt:
        """What the round that begins may do. It is of one of `requests` requests."""
        own = self._drafts.begin(requests)
        return self._rest if own is REST else StagedAttempt(self, own)

    def tiers_draft(self, attempt: StagedAttempt, prefill: float = 0.0) -> bool:
        """Whether lower tiers may draft, in a round that may draft at all. `prefill`: seconds that they need first.

        A single round of a break is not worth a prefill.
        """
        if prefill and attempt.own.looks:
            return False
        if self._tiers is None:
            return not prefill or self._drafts.lends(prefill)
        tiers = self._tiers.begin()
        if tiers.drafts and prefill and not self._tiers.lends(prefill):
            tiers = REST
        attempt.tiers = tiers._replace(share=attempt.own.share)
        return tiers.drafts

    def decline(self, attempt: StagedAttempt) -> int:
        """No lower tier drafts for the only request. Without stores nothing is left to draft, so begin a break.

        Returns its rounds.
        """
        if self._tiers is not None or attempt.own.looks:
            return 0
        attempt.declined = True
        return self._drafts.rest()

    def may_explore(self) -> bool:
        """As `Switch.may_explore`, for lower tiers."""
        return (self._tiers or self._drafts).may_explore()

    def explores(self) -> None:
        """As `Switch.explores`, for lower tiers."""
        (self._tiers or self._drafts).explores()

    def goes_on(self) -> bool:
        """As `Switch.goes_on`, for lower tiers."""
        return self._drafts.goes_on() and (self._tiers is None or self._tiers.goes_on())

    def rests(self) -> int:
        """As `Switch.rests`."""
        return self._drafts.rests()

    def learn(
        self, attempt: StagedAttempt, tokens: float, seconds: float, requests: int = 1, prefill: float = 0.0
    ) -> None:
        """As `Switch.learn`. A round that only compares stores with tiers says nothing about drafting at all.

        What it loses is paid for all the same.
        """
        share = attempt.own.share
        if share < 1:
            if not attempt.own.drafts:
                return  # beside a trial: neither a plain round nor one with drafts
            seconds = prefill + self._drafts.of_all(seconds - prefill, share)
        if self._tiers is not None and not attempt.own.drafts:
            self._tiers.rested(tokens)
        if attempt.tiers is not None and self._tiers is not None:
            compares = self._tiers.compares(attempt.tiers)
            self._tiers.learn(attempt.tiers, tokens, seconds, requests, prefill)
            if compares:
                self._drafts.pay(tokens, seconds - prefill, requests)
                return
        self._drafts.learn(attempt.own, tokens, seconds, requests, prefill)

    def charge(self, tokens: float, seconds: float, requests: int = 1, prefill: float = 0.0) -> None:
        """As `Switch.charge`, for drafts of lower tiers."""
        if self._tiers is not None:
            self._tiers.charge(tokens, seconds, requests, prefill)
        self._drafts.charge(tokens, seconds, requests, prefill)


class Switches:
    """The stages of one plan, one per batch size: drafting may pay for one request and not for eight.

    Each has an allowance of its own. Otherwise gains with one batch size would pay for losses with another, and users
    who send four requests at a time would pay for those who send one.
    """

    def __init__(self, tiers_apart: bool = False) -> None:
        """`tiers_apart`: the plan has both stores and tiers, and either may pay without the other."""
        self._tiers_apart = tiers_apart
        self._stages: dict[int, Stages] = {}

    def of(self, requests: int) -> Stages:
        """The stages for this batch size: 1, 2 to 3, 4 to 7 and so on share one."""
        stages = self._stages.get(requests.bit_length())
        if stages is None:
            stages = Stages(self._tiers_apart, requests >= _LARGE)
            self._stages[requests.bit_length()] = stages
        return stages
