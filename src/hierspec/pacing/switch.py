"""Whether anything is drafted at all: tokens per second with drafts against those without, by the clock.

Everything else in this folder adds up the expected time of parts. That misses some costs: drafts evict weights from
caches, decisions take time too, and a plain pass right after drafting is slower than one in plain decoding. So both
modes are timed end to end, in runs of consecutive rounds, and the faster one is kept. What trials of the slower one may
cost is limited (`allowance.py`).
"""

from __future__ import annotations

from hierspec.pacing.allowance import Allowance

_SETTLING = 1  # plain rounds after drafting that are not timed: the weights must get back into caches first
_SAMPLE = 4 + _SETTLING  # plain rounds between runs of drafts that pay, to compare; each loses what drafts would gain
_FIRST_RUN = 16  # drafting rounds between two samples if drafts gain nothing
_RUN_PER_GAIN = 400  # further drafting rounds, times the gain (1: double speed), so that samples cost 1% at most
_PROBE = 12  # drafting rounds after a break
_BREAKS = (32, 512)  # plain rounds of a break, while drafts lose: the first and the longest; each doubles the last
_LOOK_EVERY = 32  # one round in this many of a break may draft, to look whether drafts pay again
_LUCK = 3  # tokens from such a round that end the break: the text has become easier to draft
_PROBED = 3  # drafting rounds that the allowance must cover before a break ends
_SLOWER = 0.97  # of plain speed: a run of drafts that is slower ends early
_ENOUGH = 6  # rounds of a run before it may end for being slower
_MEMORY = {True: 0.97, False: 0.9}  # weight of earlier rounds after each new one, with drafts and without
_FADED = 0.3  # weight after a break of the drafting rounds before it
_OUTLIER = 3.0  # a round counts as at most this many times the average


class Switch:
    """Turns drafting on and off for one plan and one batch size: all its requests draft, or none does.

    Seconds are in plain passes as measured once, so that rounds after short and long contexts can be compared. With
    `looks`, single rounds of a break draft, and what they write may end it.
    """

    def __init__(self, allowance: Allowance | None = None, looks: bool = True) -> None:
        self._allowance = allowance or Allowance()
        self._may_look = looks
        self._on = False
        self._left = float(_SAMPLE)  # rounds of this run
        self._rounds = 0.0  # of this run so far
        self._length = _SAMPLE  # rounds of this break
        self._break = _BREAKS[0]
        self._looks = False  # this round drafts though it is a break
        self._settling = 0.0  # rounds still to come that are not timed
        self._counts = {True: [0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0]}  # rounds, tokens and seconds, older ones decayed

    def drafts(self) -> bool:
        """Whether the round that begins may draft."""
        looks = self._may_look and not self._on and self._left < self._length and self._left % _LOOK_EVERY == 1.0
        self._looks = looks and not self._allowance.wait(self._lost())
        return self._on or self._looks

    def rests(self) -> int:
        """For how many rounds, including the one that begins, nothing will be drafted for certain."""
        if self._on or self._looks:
            return 0
        return int(min(self._left, (self._left - 1) % _LOOK_EVERY or _LOOK_EVERY))

    @property
    def compares(self) -> bool:
        """Whether this run is of the slower mode, as far as is known: it only serves to compare."""
        return self._on != (self._gain() >= 0)

    def learn(self, tokens: float, seconds: float, requests: int = 1) -> None:
        """A round of one of `requests` requests wrote `tokens` tokens and took `seconds`, with all overheads."""
        self._allowance.passed(seconds / requests)
        if self._on or self._looks:
            self._pay(tokens, self._usual(True, seconds), requests)
        if self._looks:
            self._left = 0 if tokens >= _LUCK else self._left - 1 / requests
            self._settling = _SETTLING
        else:
            if self._on or self._settling <= 0:
                self._count(tokens, seconds)
            self._settling -= 1 / requests
            self._left -= 1 / requests
            self._rounds += 1 / requests
            if self._on and self._loses():
                self._left = 0
        if self._left <= 0:
            self._turn()

    def charge(self, tokens: float, seconds: float, requests: int = 1) -> None:
        """Count gains and costs of drafts outside the timed rounds, such as the prefill of a drafter."""
        self._counts[True][1] += tokens
        self._counts[True][2] += seconds
        self._pay(tokens, seconds, requests)

    def _pay(self, tokens: float, seconds: float, requests: int) -> None:
        """Charge the allowance for drafts that took `seconds` and wrote `tokens`."""
        self._allowance.lost((seconds - tokens * self._plain_seconds()) / requests)

    def _plain_seconds(self) -> float:
        """Time of a token without drafts; that of one measured plain pass before any round was timed."""
        _, tokens, seconds = self._counts[False]
        return seconds / tokens if tokens else 1.0

    def _loses(self) -> bool:
        """Whether a run of drafts ends early."""
        gain = self._gain()
        return gain < 0 and (self._allowance.left <= 0 or (self._rounds >= _ENOUGH and gain < _SLOWER - 1))

    def _turn(self) -> None:
        """End this run and begin one of the other mode. A break goes on until the allowance covers another trial."""
        if not self._on and self._gain() < 0 and not self._looks:
            plain_rounds, _, plain_seconds = self._counts[False]
            wait = int(self._allowance.wait(_PROBED * self._lost()) * plain_rounds / plain_seconds)
            if wait:
                self._left = self._length = wait
                return
        self._on, self._rounds, self._settling = not self._on, 0, _SETTLING
        self._left = self._begin_drafts() if self._on else self._end_drafts()

    def _begin_drafts(self) -> int:
        gain = self._gain()
        if gain >= 0:
            return _FIRST_RUN + int(_RUN_PER_GAIN * min(gain, 1.0))
        self._counts[True] = [_FADED * value for value in self._counts[True]]
        return _PROBE

    def _end_drafts(self) -> int:
        """Plain rounds that follow: a sample if drafts are ahead, a break if they lose."""
        if self._gain() >= 0:
            self._break = _BREAKS[0]
            return _SAMPLE
        self._length = self._break
        self._break = min(2 * self._break, _BREAKS[1])
        return self._length

    def _gain(self) -> float:
        """By how much drafts are faster than plain decoding, as a share; 0 if either was not timed yet."""
        _, tokens, seconds = self._counts[True]
        return tokens / seconds * self._plain_seconds() - 1 if seconds and self._counts[False][1] else 0.0

    def _lost(self) -> float:
        """Seconds by which a drafting round is slower than writing its tokens plainly.

        For a small model on a GPU that may be two or three plain rounds: its plain decoding runs many steps per call.
        """
        rounds, tokens, seconds = self._counts[True]
        return max(seconds - tokens * self._plain_seconds(), 0.0) / rounds if rounds else 0.0

    def _usual(self, drafted: bool, seconds: float) -> float:
        """The time that a round counts for: an outlier counts less."""
        rounds, _, spent = self._counts[drafted]
        return min(seconds, _OUTLIER * spent / rounds) if rounds >= 1 else seconds

    def _count(self, tokens: float, seconds: float) -> None:
        counts, seconds, memory = self._counts[self._on], self._usual(self._on, seconds), _MEMORY[self._on]
        self._counts[self._on] = [memory * old + new for old, new in zip(counts, (1.0, tokens, seconds), strict=True)]


class Stages:
    """What may draft in a round: nothing, stores alone, or lower tiers as well.

    There are two nested switches. In rounds that may draft, drafting with tiers is timed against stores alone; the
    faster of the two is timed against drafting nothing. With one switch, tiers that lose would turn stores off too.
    """

    def __init__(self, drafts: Allowance | None = None, tiers: Allowance | None = None) -> None:
        """The allowance of each switch; without `tiers` there is only one."""
        self._drafts = Switch(drafts)
        self._tiers = None if tiers is None else Switch(tiers, looks=False)
        self._drafting = False  # whether this round may draft
        self.last_plain_pass = -1.0  # when the last plain pass that was counted ended: each counts once

    def drafts(self) -> bool:
        """Whether the round that begins may draft."""
        self._drafting = self._drafts.drafts()
        return self._drafting

    def tiers_draft(self) -> bool:
        """Whether lower tiers may draft, in a round that may draft at all."""
        return self._tiers is None or self._tiers.drafts()

    def rests(self) -> int:
        """As `Switch.rests`."""
        return self._drafts.rests()

    def learn(self, tokens: float, seconds: float, requests: int = 1) -> None:
        """As `Switch.learn`."""
        if self._drafting and self._tiers is not None:
            compares = self._tiers.compares
            self._tiers.learn(tokens, seconds, requests)
            if compares:
                return
        self._drafts.learn(tokens, seconds, requests)

    def charge(self, tokens: float, seconds: float, requests: int = 1) -> None:
        """As `Switch.charge`, for drafts of lower tiers."""
        if self._tiers is not None:
            self._tiers.charge(tokens, seconds, requests)
        self._drafts.charge(tokens, seconds, requests)


class Switches:
    """The stages of one plan, one per batch size: drafting may pay for one request and not for eight."""

    def __init__(self, tiers_apart: bool = False) -> None:
        """`tiers_apart`: the plan has both stores and tiers, and either may pay without the other."""
        self._drafts = Allowance()
        self._tiers = Allowance() if tiers_apart else None
        self._stages: dict[int, Stages] = {}

    def of(self, requests: int) -> Stages:
        """The stages for this batch size: 1, 2 to 3, 4 to 7 and so on share one."""
        stages = self._stages.get(requests.bit_length())
        if stages is None:
            stages = self._stages[requests.bit_length()] = Stages(self._drafts, self._tiers)
        return stages
