"""Whether anything is drafted at all: tokens a second with drafts against those without, by the clock.

Everything else in this folder adds up what parts should take. That misses what no part shows: drafts displace weights
from caches, deciding takes time too, and a plain pass right after drafting is not the plain pass of plain decoding. So
both ways of writing are timed whole, in runs of rounds that follow each other, and the faster one is kept. What trying
the slower one may cost is limited (`allowance.py`).
"""

from __future__ import annotations

from hierspec.pacing.allowance import Allowance

_SETTLING = 1  # rounds without drafts after one with, of which nothing is learnt: the weights come back into caches
_SAMPLE = 4 + _SETTLING  # rounds without drafts, now and then: where drafts pay, each costs what one would have gained
_FIRST_RUN = 16  # rounds with drafts before the next sample, where they gain nothing,
_RUN_PER_GAIN = 400  # and so many more where they double the speed: samples cost a hundredth at most
_PROBE = 12  # rounds with drafts after a break
_BREAKS = (32, 512)  # rounds without drafts where those lose: at first, and at most, twice as long each time
_LOOK_EVERY = 32  # rounds of a break after which one may draft,
_LUCK = 3  # and so many tokens from it end the break: the text has become an easier one
_PROBED = 3  # rounds that the allowance must be enough for before a break ends
_SLOWER = 0.97  # of the speed without drafts: below it a run of drafts ends at once,
_ENOUGH = 6  # when it has had so many rounds
_MEMORY = {True: 0.97, False: 0.9}  # what a round with and without drafts counts for after the next
_FADED = 0.3  # what rounds with drafts before a break count for after it
_OUTLIER = 3.0  # times the usual: a round that took longer counts as this


class Switch:
    """Of one plan and of about so many requests that run together, which share it: all draft, or none does. Seconds are
    in plain passes as measured once, so that rounds after short and long contexts can be compared.

    With `looks`, single rounds of a break draft, and what they bring may end it."""

    def __init__(self, allowance: Allowance | None = None, looks: bool = True) -> None:
        self._allowance = allowance or Allowance()
        self._may_look = looks
        self._on = False
        self._left = float(_SAMPLE)  # rounds of this run
        self._rounds = 0.0  # that it has had
        self._length = _SAMPLE  # rounds of this break
        self._break = _BREAKS[0]
        self._looks = False  # this round drafts though it is a break
        self._settling = 0.0  # rounds that do not count
        self._counts = {True: [0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0]}  # rounds, tokens and seconds, older ones decayed

    def drafts(self) -> bool:
        """Whether the round that begins may draft."""
        looks = self._may_look and not self._on and self._left < self._length and self._left % _LOOK_EVERY == 1.0
        self._looks = looks and not self._allowance.wait(self._lost())
        return self._on or self._looks

    def rests(self) -> int:
        """In how many rounds, from the one that begins on, nothing is drafted for sure."""
        if self._on or self._looks:
            return 0
        return int(min(self._left, (self._left - 1) % _LOOK_EVERY or _LOOK_EVERY))

    @property
    def compares(self) -> bool:
        """Whether this run is of the slower way, as far as is known: only to compare."""
        return self._on != (self._gain() >= 0)

    def learn(self, tokens: float, seconds: float, requests: int = 1) -> None:
        """What a round of one of so many requests brought, and how long it took with all that belongs to it."""
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
        """What drafts brought and cost beside the rounds that are learnt from, as the prefill of a drafter does."""
        self._counts[True][1] += tokens
        self._counts[True][2] += seconds
        self._pay(tokens, seconds, requests)

    def _pay(self, tokens: float, seconds: float, requests: int) -> None:
        """For drafts that took so long and brought so many tokens."""
        self._allowance.lost((seconds - tokens * self._plain_seconds()) / requests)

    def _plain_seconds(self) -> float:
        """Of a token without drafts; a plain pass as measured where none was timed yet."""
        _, tokens, seconds = self._counts[False]
        return seconds / tokens if tokens else 1.0

    def _loses(self) -> bool:
        """Whether a run of drafts ends before its time."""
        gain = self._gain()
        return gain < 0 and (self._allowance.left <= 0 or (self._rounds >= _ENOUGH and gain < _SLOWER - 1))

    def _turn(self) -> None:
        """A run ends, and one of the other way begins; a break goes on while nothing is left to try drafts with."""
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
        """Rounds to be without: few where drafts are ahead, a break where they lose."""
        if self._gain() >= 0:
            self._break = _BREAKS[0]
            return _SAMPLE
        self._length = self._break
        self._break = min(2 * self._break, _BREAKS[1])
        return self._length

    def _gain(self) -> float:
        """By how much drafts are faster than plain decoding, as a share; 0 where one of them is unknown."""
        _, tokens, seconds = self._counts[True]
        return tokens / seconds * self._plain_seconds() - 1 if seconds and self._counts[False][1] else 0.0

    def _lost(self) -> float:
        """Seconds by which a round with drafts is slower than writing its tokens without. A GPU writes plainly in long
        calls, and a small model's drafts take it two or three rounds."""
        rounds, tokens, seconds = self._counts[True]
        return max(seconds - tokens * self._plain_seconds(), 0.0) / rounds if rounds else 0.0

    def _usual(self, drafted: bool, seconds: float) -> float:
        """What a round counts for that took so long."""
        rounds, _, spent = self._counts[drafted]
        return min(seconds, _OUTLIER * spent / rounds) if rounds >= 1 else seconds

    def _count(self, tokens: float, seconds: float) -> None:
        counts, seconds, memory = self._counts[self._on], self._usual(self._on, seconds), _MEMORY[self._on]
        self._counts[self._on] = [memory * old + new for old, new in zip(counts, (1.0, tokens, seconds), strict=True)]


class Stages:
    """What may draft in a round: nothing, stores alone, or lower tiers as well.

    Two switches, one in the other. In rounds that may draft, tiers are timed against stores alone; the faster of these
    two ways is timed against drafting nothing. With one switch, tiers that lose would take the stores with them.
    """

    def __init__(self, drafts: Allowance | None = None, tiers: Allowance | None = None) -> None:
        """What each may lose; without `tiers` there is one switch."""
        self._drafts = Switch(drafts)
        self._tiers = None if tiers is None else Switch(tiers, looks=False)
        self._drafting = False  # whether this round may draft
        self.last_plain_pass = -1.0  # when the pass without drafts ended that was learnt from last

    def drafts(self) -> bool:
        """Whether the round that begins may draft."""
        self._drafting = self._drafts.drafts()
        return self._drafting

    def tiers_draft(self) -> bool:
        """Whether lower tiers may, in a round that may draft."""
        return self._tiers is None or self._tiers.drafts()

    def rests(self) -> int:
        """In how many rounds, from the one that begins on, nothing is drafted for sure."""
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
        """As `Switch.charge`, of lower tiers."""
        if self._tiers is not None:
            self._tiers.charge(tokens, seconds, requests)
        self._drafts.charge(tokens, seconds, requests)


class Switches:
    """Those of one plan: what pays for one request may not for eight."""

    def __init__(self, tiers_apart: bool = False) -> None:
        """`tiers_apart`: it has stores and tiers, so each may pay without the other."""
        self._drafts = Allowance()
        self._tiers = Allowance() if tiers_apart else None
        self._stages: dict[int, Stages] = {}

    def of(self, requests: int) -> Stages:
        """For so many requests together, or half as many again."""
        stages = self._stages.get(requests.bit_length())
        if stages is None:
            stages = self._stages[requests.bit_length()] = Stages(self._drafts, self._tiers)
        return stages
