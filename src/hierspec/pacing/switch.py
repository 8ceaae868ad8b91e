"""Whether anything is drafted at all: tokens per second with drafts against those without, by the clock.

Everything else in this folder adds up the expected time of parts. That misses some costs: drafts evict weights from
caches, decisions take time too, and a plain pass right after drafting is slower than one in plain decoding. So both
modes are timed end to end, in runs of consecutive rounds, and the faster one is kept. What trials of the slower one may
cost is limited (`allowance.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from hierspec.pacing.allowance import Allowance
from hierspec.pacing.plain_rounds import LARGE_BATCH, ONE_TOKEN, WITH_STORES, PlainRounds

_SETTLING = 1  # plain rounds after drafting that are not timed: the weights must get back into caches first
_RUN_PER_GAIN = 400  # further drafting rounds, times the gain (1: double speed), so that samples cost 1% at most
_BREAKS = (32, 512)  # plain rounds of a break, while drafts lose: the first and the longest; each doubles the last
_LOOK_EVERY = 32  # one round in this many of a break may draft, to look whether drafts pay again; not in large batches
_LUCK = 3  # tokens from such a round that end the break: the text has become easier to draft
_PROBED = 3  # drafting rounds that the allowance must cover before a break ends
_FEW = 8  # requests of a larger batch that draft in a trial: their cost tells what all would take
_LEAST_OF_ALL = 0.5  # plain rounds: what a round in which all draft takes at least, judged by a few
_SLOWER = 0.97  # of plain speed: a run of drafts that is slower ends early
_MEMORY = 0.97  # weight of earlier drafting rounds after each new one
_GROWS = 3  # a run of drafts is at most this many times as long as the last one
_FADED = 0.3  # weight after a break of the drafting rounds before it
_OTHER_TEXT = 0.1  # weight in a new text of the drafting rounds of earlier ones
_SIMILAR_TEXTS = 0.3  # the same, at most: after several texts in which all drafts gained, or all lost
_RISES = 0.1  # by which that weight rises after each such text
_FRESH = 3  # rounds of stores alone at the beginning of a text, before lower tiers are compared with them
_MARGIN = 0.03  # what drafts must gain in a large batch, beyond doubt: their passes delay requests without drafts
_OUTLIER = 3.0  # a drafting round counts as at most this many times the average
_LIKELY_LOSS = 0.3  # plain passes that a drafting round loses where hardly any was timed


class Runs(NamedTuple):
    """How many rounds of a mode follow each other."""

    sample: int  # plain rounds after each run of drafts, to compare; each loses what drafts would gain
    first: int  # drafting rounds before the next sample if drafts gain nothing, and after a break
    probe: int  # drafting rounds after a break
    enough: int  # rounds of a run before it may end for being slower


_FEW_REQUESTS = Runs(4 + _SETTLING, 16, 12, 6)
_MANY_REQUESTS = Runs(2 + _SETTLING, 4, 4, 2)  # a round writes many tokens, and so tells more


class Attempt(NamedTuple):
    """What a round may do, decided when it begins. The switch may turn before it ends: other requests learn too."""

    drafts: bool
    looks: bool = False  # it drafts though this is a break
    share: float = 1.0  # of the batch's requests that draft: all, or in a trial only a few


_DRAFTS, _A_LOOK, REST = Attempt(True), Attempt(True, True), Attempt(False)


class Switch:
    """Turns drafting on and off for one plan and one batch size: all its requests draft, or none does.

    Seconds are in plain passes of as many requests as measured once, so that rounds after short and long contexts, and
    of 8 and of 15 requests, can be compared. Single rounds of a break draft, and what they write may end it; not in a
    large batch, where what one request writes says little about the others. There a few requests make a trial, and the
    others only share its passes.
    """

    def __init__(self, allowance: Allowance | None = None, large: bool = False, beside_stores: bool = False) -> None:
        """`large`: of a large batch, in which drafts must gain more, and many texts together change slowly.

        `beside_stores`: of lower tiers beside stores. What is called plain here is then drafted by stores alone, so
        that rounds write several tokens, and no round of a break drafts.
        """
        self._allowance = allowance or Allowance(large)
        self._large = large
        self._beside_stores = beside_stores
        self._runs = _MANY_REQUESTS if large else _FEW_REQUESTS
        self._on = False
        self._trial = True  # whether drafts of this run, or of the next one, are a trial
        self._turn = 0.0  # at 1 it is the next request's turn to draft in a trial
        self._samples = True  # the plain rounds of this run are a sample, and then it is decided how to go on
        self._left = float(self._runs.sample)  # rounds of this run
        self._rounds = 0.0  # of this run so far
        self._length = self._runs.sample  # rounds of this break
        self._break = _BREAKS[0]
        self._settling = 0.0  # plain rounds still to come that are not timed
        self._cold = 1.0  # drafting rounds that are not timed: the first uses code and memory for the first time
        self._longest = self._runs.first  # drafting rounds of the next run, at most
        self._other_texts = _OTHER_TEXT  # weight in the next text of the rounds so far
        self._gained = False  # with the last text that was drafted
        self._untried = False  # in this text, although lower tiers are to be compared with stores in each
        # Of drafting: rounds, tokens, seconds, and the squares of tokens and seconds, older ones decayed.
        self._counts = [0.0] * 5
        self._plain_then: float | None = None  # in a break: seconds of a plain token for which the counts are right
        self._plain = PlainRounds(WITH_STORES if beside_stores else LARGE_BATCH if large else ONE_TOKEN)

    def begin(self, requests: int = 1) -> Attempt:
        """What the round that begins may do. It is of one of `requests` requests."""
        if self._on:
            return self._try(_FEW / requests) if self._trial and requests > _FEW else _DRAFTS
        if self._large or self._beside_stores:
            return REST
        looks = 1 < self._left < self._length and round(self._left, 3) % _LOOK_EVERY == 1
        looks = looks and not self._allowance.wait(self._lost())
        return _A_LOOK if looks else REST

    def _try(self, share: float) -> Attempt:
        """An attempt in a trial with this share of the requests."""
        self._turn += share
        if self._turn < 1:
            return Attempt(False, share=share)
        self._turn -= 1
        return Attempt(True, share=share)

    def lends(self, prefill: float) -> bool:
        """Whether drafts may begin with a drafter's prefill of this many seconds."""
        return self._allowance.lends(prefill / self._plain.seconds)

    def new_text(self) -> None:
        """The only running text is a new one: what drafts gained with the last one says little about it.

        They are tried at once, unless their trials cost more than they may. Lower tiers beside stores are compared with
        the stores first: how much stores find differs from text to text. Then they are tried, whatever they did in
        other texts. Rounds of those count for more where drafts did the same in several texts.
        """
        gained = self._allowance.new_text()
        if not self._drafted[0]:
            return
        if gained:
            similar = (gained > 0) == self._gained
            self._other_texts = min(self._other_texts + _RISES, _SIMILAR_TEXTS) if similar else _OTHER_TEXT
            self._gained = gained > 0
        self._counts = [self._other_texts * value for value in self._drafted]
        if self._beside_stores:
            self._plain.forget()
            self._break = _BREAKS[0]
            self._begin_sample()
            self._left = self._length = _FRESH
            self._untried = True
        elif self._on:
            self._rounds = 0
        elif not (self._samples or self._allowance.wait(_PROBED * self._lost())):
            self._break, self._longest = _BREAKS[0], self._runs.first
            self._begin_trial()

    def goes_on(self) -> bool:
        """Whether the round after this one, which drafts, will most likely draft too."""
        return self._on and self._left > 1

    def rests(self) -> int:
        """For how many rounds, including one that begins now without drafts, nothing will be drafted for certain."""
        if self._on:
            return 0
        left = int(round(self._left, 3))
        return left if left <= _LOOK_EVERY else (left - 1) % _LOOK_EVERY or _LOOK_EVERY

    def compares(self, attempt: Attempt) -> bool:
        """Whether this round is of the slower mode, as far as is known: it only serves to compare."""
        return attempt.drafts != (self._gain() >= 0)

    def learn(self, attempt: Attempt, tokens: float, seconds: float, requests: int = 1, prefill: float = 0.0) -> None:
        """A round of one of `requests` requests wrote `tokens` tokens and took `seconds`, with all overheads.

        Of these, `prefill` are a drafter's prefill, which serves later rounds as well.
        """
        self._lend(prefill, requests)
        part = 1 / (attempt.share * requests)  # of a round of all that draft
        # A token without drafts is a plain pass, without averaging plain rounds after each of them.
        self._allowance.passed((seconds / self._plain.seconds if attempt.drafts else tokens) * part)
        cold = attempt.drafts and round(self._cold, 3) > 0
        if cold:
            self._cold -= part
            self._allowance.lost(_LIKELY_LOSS / requests)
        elif attempt.drafts:
            usual = self._usual(seconds - prefill)
            self.pay(tokens, usual, requests)
            if not attempt.looks:
                self._count(tokens, usual)
        elif self._settling <= 0:
            self._plain.add(tokens, seconds)
        if self._on != (attempt.drafts and not attempt.looks):
            return  # the round began before the switch turned
        if attempt.looks:
            self._settling = _SETTLING
            if tokens >= _LUCK:
                self._begin_drafts()
                return
        else:
            self._settling -= part
            self._rounds += 0.0 if cold else part
        self._left -= part
        if self._on and self._loses():
            self._left = 0
        if round(self._left, 3) <= 0:
            self._end_run()

    def rested(self, tokens: float) -> None:
        """A round that drafted nothing at all wrote so many tokens: a break goes on."""
        self._allowance.passed(tokens)
        if not (self._on or self._samples):
            self._left -= 1
            if round(self._left, 3) <= 0:
                self._end_run()

    def of_all(self, seconds: float, share: float) -> float:
        """How long a round would have taken in which all requests draft, where only this share of them did.

        What the few would have lost then pays for what the others beside them lose.
        """
        plain = self._plain.seconds
        return max(plain + (seconds - plain) / share, _LEAST_OF_ALL * plain)

    def charge(self, tokens: float, seconds: float, requests: int = 1, prefill: float = 0.0) -> None:
        """Count gains and costs of drafts outside the timed rounds; `prefill` as in `learn`."""
        self._lend(prefill, requests)
        self._drafted[1] += tokens
        self._drafted[2] += seconds - prefill
        self.pay(tokens, seconds - prefill, requests)

    def rest(self) -> int:
        """No drafts should pay at the moment: begin a short break. Returns its rounds."""
        self._on, self._samples, self._rounds, self._settling = False, False, 0, _SETTLING
        self._left = self._length = _BREAKS[0]
        return _BREAKS[0]

    def may_explore(self) -> bool:
        """Whether drafts that should not pay may be tried: nothing was learnt about them for long."""
        return self._allowance.may_explore()

    def explores(self) -> None:
        """Drafts that should not pay are tried now."""
        self._allowance.explores()

    def _lend(self, prefill: float, requests: int) -> None:
        if prefill:
            self._allowance.lend(prefill / self._plain.seconds / requests)

    def pay(self, tokens: float, seconds: float, requests: int = 1) -> None:
        """Charge the allowance for drafts that took `seconds` and wrote `tokens`.

        Its passes are those of now: a plain pass may have been measured wrongly, and the machine may have slowed down.
        """
        self._allowance.lost((seconds / self._plain.seconds - tokens) / requests)

    def _loses(self) -> bool:
        """Whether a run of drafts ends early. Not before every request of the batch had a round."""
        if round(self._rounds, 3) < 1:
            return False
        gain = self._gain()
        if gain >= 0:
            return False
        return self._allowance.left <= 0 or (self._rounds >= self._runs.enough and not self._may_gain(gain))

    def _may_gain(self, gain: float) -> bool:
        """Whether drafts that seem to lose may yet turn out to gain: rounds write one token or six, so few tell little.

        In a large batch a round tells of many requests.
        """
        return gain >= _SLOWER - 1 if self._large else gain + self._doubt() >= 0

    def _end_run(self) -> None:
        if self._on:
            if self._trial and not self._large and self._plain.timed and self._gain() > self._doubt():
                self._begin_drafts()  # plain rounds were timed right before the trial, and it leaves no doubt
            else:
                self._begin_sample()
                self._settling = _SETTLING
        elif self._samples:
            self._decide()
        elif wait := int(self._allowance.wait(_PROBED * self._lost())):
            self._left = self._length = wait  # until the allowance covers another trial
        else:
            self._begin_drafts()

    def _begin_sample(self) -> None:
        self._on, self._samples, self._rounds, self._settling = False, True, 0, 0
        self._left = self._length = self._runs.sample

    def _decide(self) -> None:
        """A sample is complete: go on drafting, or make the sample a break.

        Runs that seem to lose are sampled too: the machine may have become slower since the last sample. They go on
        while nobody can tell yet, as far as the allowance covers it.
        """
        gain = self._gain()
        tries = self._untried or (not self._large and self._may_gain(gain))
        self._untried = False
        self._allowance.tried(gain >= 0)
        if gain >= 0:
            self._break = _BREAKS[0]
            self._begin_drafts()
        elif tries and not self._allowance.wait(_PROBED * self._lost()):
            self._begin_trial()
        else:
            self._samples, self._longest = False, self._runs.first
            self._plain_then = None if self._beside_stores else self._plain.seconds
            self._left = self._length = self._break
            self._break = min(2 * self._break, _BREAKS[1])

    def _begin_drafts(self) -> None:
        gain = self._gain()
        if gain >= 0:
            self._turn_on(trial=not self._drafted[0])
            # A sample may be of an unusual moment, so its gain decides about few rounds; several samples about many.
            self._left = min(self._runs.first + int(_RUN_PER_GAIN * min(gain, 1.0)), self._longest)
            self._longest = _GROWS * self._left
        else:
            self._counts = [_FADED * value for value in self._counts]
            self._begin_trial()

    def _begin_trial(self) -> None:
        self._turn_on(trial=True)
        self._left = self._runs.probe

    def _turn_on(self, trial: bool) -> None:
        self._on, self._trial, self._rounds, self._settling = True, trial, 0, _SETTLING
        self._plain_then = None

    def _gain(self) -> float:
        """By how much drafts gain more than they must, as a share; 0 if either mode was not timed yet."""
        _, tokens, seconds, *_ = self._drafted
        if not seconds or not self._plain.timed:
            return 0.0
        needed = _MARGIN + self._doubt() if self._large else 0.0
        return tokens / seconds * self._plain.seconds - 1 - needed

    def _doubt(self) -> float:
        """The standard error of the gain: on a machine that others use too, rounds differ by a tenth and more."""
        return sqrt(_relative_variance(self._drafted) + self._plain.relative_variance)

    def _lost(self) -> float:
        """Passes of now by which a drafting round is slower than writing its tokens plainly.

        For a small model on a GPU that may be two or three plain rounds: its plain decoding runs many steps per call.
        Few rounds tell little: another program may have run meanwhile.
        """
        rounds, tokens, seconds, *_ = self._drafted
        return max(seconds / self._plain.seconds - tokens + _LIKELY_LOSS, 0.0) / (rounds + 1)

    def _usual(self, seconds: float) -> float:
        """The time that a drafting round counts for: an outlier counts less."""
        rounds, _, spent, *_ = self._drafted
        return min(seconds, _OUTLIER * spent / rounds) if rounds >= 1 else seconds

    def _count(self, tokens: float, seconds: float) -> None:
        new = 1.0, tokens, seconds, tokens**2, seconds**2
        self._counts = [_MEMORY * old + each for old, each in zip(self._drafted, new, strict=True)]

    @property
    def _drafted(self) -> list[float]:
        """The counts of drafting.

        If plain rounds have changed their time during a break, the machine has changed its speed. Drafts are not timed
        then, so their cost is scaled by the same factor. That needs rounds of one token, which stores do not write.
        """
        if self._plain_then is not None and self._plain_then != self._plain.seconds:
            change = self._plain.seconds / self._plain_then
            self._counts[2] *= change
            self._counts[4] *= change**2
            self._plain_then = self._plain.seconds
        return self._counts


def _relative_variance(counts: Sequence[float]) -> float:
    """Of the mean of tokens and of that of seconds, together, for these counts of `Switch`."""
    rounds, *sums = counts
    if not rounds:  # only a drafter's prefill was charged so far
        return 0.0
    means, squares = [each / rounds for each in sums[:2]], [each / rounds for each in sums[2:]]
    spreads = (max(square / mean**2 - 1, 0.0) for mean, square in zip(means, squares, strict=True) if mean > 0)
    return sum(spreads) / rounds
