"""When a tier hands up what it has written: after a count, at a correction, or when going on is not worth its time.

Every decision is made from what is already written and from what became of earlier blocks, before the next token is
drawn. So none of this can change what is written, only how fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hierspec.core.proposal import Proposal
from hierspec.core.verify import Candidate
from hierspec.pacing.appraisal import Chances, Costs

OWN, STOOD, CORRECTED, RUNNER_UP = range(4)  # how a token came to be written, or to be handed up beside one
_HOWS = 4

_TRIAL_BLOCKS = 16  # with which it begins
_TRIAL_TOKENS = 4  # that a trial block has at least
_EVERY = 64  # of later blocks one is such a trial, so that what longer ones are worth is not forgotten
_HOPED = 0.75  # tokens that a good draft's first would bring: under a load at which that is too little none is tried
_DOUBT = 8.0  # rounds that a depth must have seen to weigh as much as all depths together
_FADING_PASSES = 0.99  # what a pass counts for after the next
_FADING_ROUNDS = 256.0  # rounds after which older ones count half
_LOOK = 16  # one in so many times there is drafting beside other guesses, however good they are
PROBE = 64.0  # where drafting does not pay: time without it for each second of trying again


class Written(NamedTuple):
    """A position that a tier has written: its token and runners-up, who guessed it first, how it came about, and a
    class for how far the token was ahead of others."""

    candidates: list[Candidate]
    source: str
    how: int
    sure: int = 0

    @property
    def token(self) -> int:
        return self.candidates[0][0]

    @property
    def evidence(self) -> int:
        """The class that its chance to stand above is learnt by."""
        return self.how + _HOWS * self.sure


class Policy(Protocol):
    """Ends a tier's blocks before they have `gather` tokens. Shared by all requests of a model; `requests` is how many
    are run side by side now, which share the time of a pass."""

    def pays(self, instead: float = 0.0, requests: int = 1, unread: int = 0, room: int = 0) -> bool:
        """Whether the tier above should have anything drafted now, or run a pass without. `instead` is what that pass
        should bring by other guesses: tokens, less what its time is worth. The tier has not seen `unread` tokens of
        the text, and at most `room` are still to be written."""

    def at_least(self) -> int:
        """Tokens that the block which begins now should have in any case."""

    def go_on(self, block: Sequence[Written], requests: int = 1) -> bool:
        """Whether a block that is not yet long enough should get another round."""

    def wrote(self, tokens: int, seconds: float, requests: int = 1) -> None:
        """What a round of this tier brought, and what it should have taken, the tiers below included."""

    def verified(
        self, block: Sequence[Written], written: Sequence[int], seconds: float, beside: bool = False, requests: int = 1
    ) -> None:
        """What the tier above wrote in place of a block (of nothing, where none was drafted), and in which time; and
        whether there were other guesses beside it."""


class UntilCorrection:
    """Hands up once the tier has replaced a guess by a token of its own: what comes after it seldom survives."""

    def pays(self, instead: float = 0.0, requests: int = 1, unread: int = 0, room: int = 0) -> bool:
        return True

    def at_least(self) -> int:
        return 1

    def go_on(self, block: Sequence[Written], requests: int = 1) -> bool:
        return block[-1].how != CORRECTED

    def wrote(self, tokens: int, seconds: float, requests: int = 1) -> None:
        return

    def verified(
        self, block: Sequence[Written], written: Sequence[int], seconds: float, beside: bool = False, requests: int = 1
    ) -> None:
        return


class WhileWorthwhile:
    """Goes on while another round should bring the tier above more tokens than that time would bring otherwise.

    A round brings what survives above: the chance that the block so far stands, by how its tokens came about and
    their depths, times what rounds brought that began where the text still stood. It takes its own time and that of
    the wider pass above. The same weighing with an empty block says whether to draft at all.

    Seconds are kept as those of one request alone: where several share passes, as many plain passes alone as they are
    of the plain passes shared. So what was learnt under one load serves under another.
    """

    def __init__(self, above: Costs, reading: float = 0.0) -> None:
        self.above = above  # of the passes of the tier above
        self.reading = reading  # seconds for each token of a text that this tier must read before it can draft
        self.chances = Chances()  # to stand above
        self._plain = above.seconds(1)
        self._blocks = 0
        self._tokens = self._seconds = 0.0  # of the tier above, older passes fading
        self._round = [0.0, 0.0, 0.0]  # rounds of this tier, their tokens and seconds
        self._brought: dict[int, list[float]] = {}  # depth at which rounds began -> rounds, tokens that stood; -1: all
        # Blocks beside other guesses, tokens that passes over both brought, and seconds beyond those of plain passes.
        self._beside = [0.0, 0.0, 0.0]
        self._drafted = [0.0, 0.0, 0.0]  # blocks, their tokens, and the tokens written in their places
        self._passed_by = 0  # times that there were other guesses
        self._idle = 0.0  # seconds since drafting was last tried

    def pays(self, instead: float = 0.0, requests: int = 1, unread: int = 0, room: int = 0) -> bool:
        if self.hopeless(requests) or self._too_late(requests, unread, room):
            return False
        if self._blocks < _TRIAL_BLOCKS:
            return True
        if instead > 0:
            blocks, gained, extra = self._beside
            self._passed_by += 1
            if (gained - self._rate() * extra) / max(blocks, 1.0) < instead and self._passed_by % _LOOK:
                return False
        if self.go_on((), requests):
            return True
        self._idle += self._plain
        if self._idle < PROBE * self._extra(0, requests):
            return False
        self._idle = 0.0
        return True

    def hopeless(self, requests: int) -> bool:
        """Whether under this load not even a good draft could pay."""
        return requests > 1 and self._rate() * self._extra(0, requests) > _HOPED

    def _too_late(self, requests: int, unread: int, room: int) -> bool:
        """Whether reading this text takes longer than drafting could save in the rest of it, for which others wait."""
        if requests == 1 or not unread or not self.reading:
            return False
        blocks, drafted, written = self._drafted
        length = (drafted + _DOUBT) / (blocks + _DOUBT)
        brought = (written + _DOUBT * (1 + _HOPED)) / (blocks + _DOUBT)  # good until it is known better
        _, tokens, seconds = self._round
        drafting = length * seconds / tokens if tokens else 0.0
        passing = self.alone(self.above.shared(requests).seconds(1 + round(length)), requests)
        saved = self._plain - (drafting + passing) / brought  # for each token
        return self.alone(unread * self.reading, requests) > room * saved

    def at_least(self) -> int:
        self._blocks += 1
        return _TRIAL_TOKENS if self._blocks <= _TRIAL_BLOCKS or self._blocks % _EVERY == 0 else 1

    def go_on(self, block: Sequence[Written], requests: int = 1) -> bool:
        standing = 1.0
        for depth, one in enumerate(block):
            standing *= self.chances.chance(one.source, one.evidence, depth)
        return standing * self._brings(len(block)) >= self._rate() * self._extra(len(block), requests)

    def wrote(self, tokens: int, seconds: float, requests: int = 1) -> None:
        _count(self._round, tokens, self.alone(seconds, requests))

    def verified(
        self, block: Sequence[Written], written: Sequence[int], seconds: float, beside: bool = False, requests: int = 1
    ) -> None:
        seconds = self.alone(seconds, requests)
        self._tokens = _FADING_PASSES * self._tokens + len(written)
        self._seconds = _FADING_PASSES * self._seconds + seconds
        if not block:
            return
        guess = tuple(one.token for one in block)
        chain = Proposal(
            guess, tuple(range(-1, len(guess) - 1)), tuple(one.source for one in block),
            evidence=tuple(one.evidence for one in block),
        )  # fmt: skip
        self.chances.learn(chain, written)
        stood = next((i for i, pair in enumerate(zip(guess, written, strict=False)) if pair[0] != pair[1]), None)
        stood = min(len(guess), len(written)) if stood is None else stood
        _count(self._drafted, len(block), len(written))
        if beside:
            _count(self._beside, len(written) - 1, seconds - self._plain)
        if stood >= self._rate() * self._extra(0, requests):
            self._idle = math.inf  # it would have paid: where drafting is left out, try again at once
        start = 0
        for place, one in enumerate(block):
            if one.how == STOOD and place + 1 < len(block):
                continue  # a round ends with a token of the tier's own
            if start > stood or start >= len(written):
                break  # nothing is known of what began after the text had left the block
            for depth in (-1, start):
                _count(self._brought.setdefault(depth, [0.0, 0.0]), min(stood, place + 1) - start)
            start = place + 1

    def _brings(self, depth: int) -> float:
        """Tokens of a round that begins at this depth which stand above, if all before it do."""
        known = 1.0
        for key in (-1, depth):
            rounds, tokens = self._brought.get(key, (0.0, 0.0))
            known = (tokens + _DOUBT * known) / (rounds + _DOUBT)
        return known

    def _extra(self, depth: int, requests: int = 1) -> float:
        """Seconds that a round after so many tokens adds: its own, and those of the wider pass above."""
        rounds, tokens, seconds = self._round
        wider = 1 + depth + (round(tokens / rounds) if rounds else 1)
        above = self.above.shared(requests)
        return (seconds / rounds if rounds else 0.0) + self.alone(
            above.seconds(wider) - above.seconds(1 + depth), requests
        )

    def alone(self, seconds: float, requests: int) -> float:
        """These seconds of shared passes as seconds of passes alone."""
        shared = self.above.shared(requests).seconds(1)
        return seconds * self._plain / shared if shared else seconds

    def _rate(self) -> float:
        """Tokens a second of the tier above: what time is worth. Plain passes are always to be had."""
        return max((self._tokens + 1) / (self._seconds + self._plain), 1 / self._plain) if self._plain else 0.0


def _count(counts: list[float], *values: float) -> None:
    """One more round with these values, the number of rounds first."""
    for place, value in enumerate((1.0, *values)):
        counts[place] += value
    if counts[0] > _FADING_ROUNDS:
        counts[:] = [count / 2 for count in counts]


UNTIL = ("count", "correction", "worth")


def open_policy(until: str, above: Costs | None = None, reading: float = 0.0) -> Policy | None:
    """What a plan's `until` stands for; `worth` weighs against the costs of the tier above and those of reading."""
    if until == "correction":
        return UntilCorrection()
    if until == "worth":
        assert above is not None
        return WhileWorthwhile(above, reading)
    return None
