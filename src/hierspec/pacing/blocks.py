"""When a tier hands up its block.

It does so by count, at a correction, when it is no longer sure, or when another round is not worth its time. Every
decision is made from what is already written and from what became of earlier blocks, before the next token is sampled.
So none of this can change what is written, only how fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hierspec.core.foresight import lead_class
from hierspec.core.interfaces import ACCEPTED, CORRECTED, Written
from hierspec.core.proposal import Proposal
from hierspec.pacing.acceptance import AcceptanceRates
from hierspec.pacing.costs import ALONE, FREE, NO_PREFILL, PROBE, Costs, Load, Prefill

_TRIAL_BLOCKS = 16  # first blocks that are drafted on trial, whether they pay or not
_TRIAL_PASSES = 2.0  # plain passes that trials may lose in all
_TRIAL_SHARE = 1 / 32  # of the elapsed time, that trials may lose on top of that
_TRIAL_TOKENS = 4  # least tokens of a trial block
_EXPLORED = 4  # blocks that are drafted whether they should pay or not, at first and where that is allowed again
_LIKELY_SAVING = 0.3  # of a plain pass, for each token, while a tier is explored
_TRIAL_EVERY = 64  # one later block in this many is as long as a trial, so that the worth of long blocks stays known
_GOOD_DRAFT = 0.75  # tokens gained by the first token of a good draft: if even that is too little, none is tried
_PRIOR_ROUNDS = 8.0  # rounds after which a depth weighs as much as all depths together
_DECAY = 0.99  # weight of earlier passes after each new one
_HALF_LIFE = 256.0  # rounds after which older ones count half
_MOST_PRIOR = 48.0  # most rounds that the counts of earlier runs may weigh
_SURE = lead_class(1.0)  # a token of probability 0.75 is ahead by 1.1 nats at least
_LOOK_EVERY = 16  # one time in this many a tier drafts beside other drafts, however good those are


class BlockPolicy(Protocol):
    """Ends a tier's blocks before they have `gather` tokens. Shared by all requests of a model.

    The load is that of the current request.
    """

    def go_on(self, block: Sequence[Written], load: Load = ALONE) -> bool:
        """Whether a block that is not yet full should get another round."""

    def learn_round(self, tokens: int, seconds: float, load: Load = ALONE) -> None:
        """A round of this tier wrote `tokens` tokens in the expected time `seconds`, lower tiers included."""


class ByCount:
    """Hands up when the block is full."""

    def go_on(self, block: Sequence[Written], load: Load = ALONE) -> bool:
        return True

    def learn_round(self, tokens: int, seconds: float, load: Load = ALONE) -> None:
        return


class UntilCorrection(ByCount):
    """Hands up once the tier has replaced a draft by a token of its own: what comes after it is seldom accepted."""

    def go_on(self, block: Sequence[Written], load: Load = ALONE) -> bool:
        return block[-1].how != CORRECTED


class UntilUnsure(ByCount):
    """Hands up once a token was hardly ahead of the next best.

    That token stays in the block: only what would come after it is left to the tier above.
    """

    def go_on(self, block: Sequence[Written], load: Load = ALONE) -> bool:
        return block[-1].lead >= _SURE


class WhileWorthwhile:
    """Goes on while another round should gain more tokens for the tier above than it could write in that time.

    A round's expected gain is the probability that the block so far is accepted (by the evidence and depth of its
    tokens), times what rounds gained whose block was accepted up to there. Its price is its own time and that of the
    wider pass above. The same test with an empty block says whether to draft at all.

    Seconds are normalised to a single request after a short context. Those under another load are scaled by the ratio
    of the two plain passes, and those of this tier's rounds by the ratio of its own passes. So what is learnt under one
    load or context length serves another.
    """

    def __init__(
        self,
        above: Costs,
        prefill: Prefill = NO_PREFILL,
        own: Costs = FREE,
        undrafted: Costs | None = None,
        at_once: int = 1,
    ) -> None:
        self.above, self.own = above, own  # passes above that verify this tier's drafts, and its own passes
        # Passes above before which nothing was drafted: drafting may slow the next pass down, because it evicts
        # weights from the processor's caches.
        self.undrafted = undrafted or above
        self.prefill = prefill  # before this tier can draft
        self._at_once = at_once  # tokens that it writes in little more time than one, for a single request
        self.acceptance = AcceptanceRates()  # by the tier above
        self._blocks = 0
        # Blocks still to come that are drafted whether they should pay or not: the first of a process, too.
        self._exploring = _EXPLORED
        self._tokens = self._seconds = 0.0  # of the tier above, older passes decayed
        self._round = [0.0, 0.0, 0.0]  # rounds of this tier, their tokens, and their time in one-row passes
        self._gains: dict[int, list[float]] = {}  # depth at which rounds began -> rounds, tokens accepted; -1: all
        # Blocks beside other drafts, tokens gained by passes over both, and seconds of these beyond plain passes.
        self._beside = [0.0, 0.0, 0.0]
        self._aside = [0.0, 0.0]  # blocks alone, and tokens gained beyond their chains (by runners-up and the like)
        self._drafted = [0.0, 0.0, 0.0]  # blocks, their tokens, and the tokens written by the passes over them
        self._with_others = 0  # times that there were other drafts
        self._idle = 0.0  # seconds since drafting was last tried
        self._lost = self._passed = 0.0  # seconds that trials lost against plain decoding, and elapsed seconds

    @property
    def _plain(self) -> float:
        """Seconds of a plain pass of the tier above."""
        return self.undrafted.seconds(1)

    def pays(self, other_gain: float = 0.0, load: Load = ALONE, to_prefill: int = 0, room: int = 0) -> bool:
        """Whether this tier should draft now, or the tier above should run a pass without it.

        `other_gain` is what that pass should gain from other drafts: tokens, less the price of its time. This tier
        would have to prefill `to_prefill` tokens first, and at most `room` are still to be written.
        """
        if self.hopeless(load) or self.too_late(load, to_prefill, room):
            return False
        if self._exploring or self._on_trial():
            return True
        if other_gain > 0:
            blocks, gained, extra = self._beside
            self._with_others += 1
            if (gained - self._speed() * extra) / max(blocks, 1.0) < other_gain and self._with_others % _LOOK_EVERY:
                return False
        if self.go_on((), load):
            return True
        self._idle += self._plain
        if self._idle < PROBE * self._extra_seconds(0, load, self._least_rounds(load)):
            return False
        self._idle = 0.0
        return True

    def explore(self, load: Load = ALONE, to_prefill: int = 0, room: int = 0) -> bool:
        """Draft a few blocks that should not pay, from now on; False if nothing can be learnt from that here.

        Costs may have been measured while another program ran, or a few unlucky drafts may have been the first. Only
        more drafts can tell.
        """
        self._exploring = _EXPLORED
        if not self.hopeless(load) and not self.too_late(load, to_prefill, room):
            return True
        self._exploring = 0
        return False

    def idle(self, rounds: int) -> None:
        """Nobody will ask whether to draft for so many rounds."""
        self._idle += rounds * self._plain

    def hopeless(self, load: Load) -> bool:
        """Whether not even a good draft could pay under this load."""
        return load.requests > 1 and self._speed() * self._extra_seconds(0, load) > _GOOD_DRAFT

    def too_late(self, load: Load, to_prefill: int, room: int) -> bool:
        """Whether prefill takes longer than drafting could save in the rest of the text."""
        if not to_prefill or self.prefill == NO_PREFILL:
            return False
        blocks, drafted, written = self._drafted
        length = (drafted + _PRIOR_ROUNDS) / (blocks + _PRIOR_ROUNDS)
        brought = (written + _PRIOR_ROUNDS * (1 + _GOOD_DRAFT)) / (blocks + _PRIOR_ROUNDS)  # the prior is a good draft
        _, tokens, passes = self._round
        drafting = length * (passes / tokens * self._own_pass(load) if tokens else self.own.under(load).seconds(1))
        verifying = self.above.under(load).seconds(1 + round(length))
        plain = self.undrafted.under(load).seconds(1)
        saved = plain - (drafting + verifying) / brought  # for each token
        if self._exploring:
            saved = max(saved, _LIKELY_SAVING * plain)
        # If the machine is slower now than when it was measured, so is prefill, which nobody times.
        slower = self._plain / self.undrafted.measured[0] if self.undrafted.measured[0] else 1.0
        return slower * self.prefill.seconds(to_prefill, load.context) > room * saved

    def begin(self, load: Load = ALONE) -> int:
        """A block begins. Returns the tokens that it should have at least."""
        trial = self._on_trial()
        self._blocks += 1
        self._exploring = max(self._exploring - 1, 0)
        least = self._least_rounds(load)
        return max(_TRIAL_TOKENS, least) if trial or self._blocks % _TRIAL_EVERY == 0 else least

    def _on_trial(self) -> bool:
        """Whether to draft in order to learn what drafts are worth: the first blocks, as long as they lose little."""
        allowed = _TRIAL_PASSES * self._plain + _TRIAL_SHARE * self._passed
        return self._blocks <= _TRIAL_BLOCKS and self._lost <= allowed

    def go_on(self, block: Sequence[Written], load: Load = ALONE) -> bool:
        probability, rounds = 1.0, 1 if block else self._least_rounds(load)
        for depth, position in enumerate(block):
            probability *= self.acceptance.rate(position.source, position.evidence, depth)
        extra, gain = self._extra_seconds(len(block), load, rounds), self._gain(len(block), rounds)
        if not block:
            blocks, aside = self._aside
            gain += aside / (blocks + _PRIOR_ROUNDS)
        return probability * gain >= self._speed() * extra

    def _least_rounds(self, load: Load) -> int:
        """Least rounds of a block: if one call writes several tokens, a block of one costs almost as much."""
        return self._at_once if load.requests == 1 else 1

    def learn_round(self, tokens: int, seconds: float, load: Load = ALONE) -> None:
        own = self._own_pass(load)
        _count(self._round, tokens, seconds / own if own else 0.0)

    def learn_block(
        self, block: Sequence[Written], written: Sequence[int], seconds: float, beside: bool = False, load: Load = ALONE
    ) -> None:
        """The tier above wrote `written` in the expected time `seconds`, with `block` as this tier's draft.

        The block is empty if nothing was drafted; `beside` says whether there were other drafts too.
        """
        seconds = self.alone(seconds, load)
        self._tokens = _DECAY * self._tokens + len(written)
        self._seconds = _DECAY * self._seconds + seconds
        self._passed += seconds
        if not block:
            return
        if self._blocks <= _TRIAL_BLOCKS:
            self._lost += seconds - len(written) * self._plain
        tokens, sources, evidence = zip(*((p.token, p.source, p.evidence) for p in block), strict=True)
        chain = tuple(range(-1, len(tokens) - 1))
        self.acceptance.learn(Proposal(tokens, chain, sources, evidence=evidence), written)
        accepted = 0
        while accepted < min(len(tokens), len(written)) and tokens[accepted] == written[accepted]:
            accepted += 1
        _count(self._drafted, len(block), len(written))
        if beside:
            _count(self._beside, len(written) - 1, seconds - self._plain)
        else:
            _count(self._aside, max(len(written) - 1 - accepted, 0))
        if accepted >= self._speed() * self._extra_seconds(0, load, self._least_rounds(load)):
            self._idle = math.inf  # it would have paid: if drafting has stopped, try again at once
        start = 0
        for depth, position in enumerate(block):
            if position.how == ACCEPTED and depth + 1 < len(block):
                continue  # a round ends with the tier's own token
            if start > accepted or start >= len(written):
                break  # the block was rejected before this round began: it shows nothing
            for key in (-1, start):
                _count(self._gains.setdefault(key, [0.0, 0.0]), min(accepted, depth + 1) - start)
            start = depth + 1

    def learnt(self) -> dict[str, Any]:
        """The counts. Only `speed` and `beside` hold times, in plain passes."""
        plain = self._plain or 1.0
        return {
            "blocks": self._blocks,
            "speed": [self._seconds / plain, self._tokens],
            "rounds": self._round[:2],
            "gains": [[depth, *counts] for depth, counts in self._gains.items()],
            "beside": [*self._beside[:2], self._beside[2] / plain],
            "drafted": self._drafted,
            "acceptance": self.acceptance.counts(),
        }

    def begin_with(self, learnt: Mapping[str, Any]) -> None:
        """Take what was learnt before as a prior, which new rounds soon outweigh."""
        plain = self._plain
        self._blocks = int(learnt["blocks"])
        passes, tokens = _prior(*learnt.get("speed", (0.0, 0.0)))
        self._tokens, self._seconds = tokens, passes * plain
        rounds, tokens = _prior(*learnt["rounds"])
        self._round = [rounds, tokens, rounds if self.own.seconds(1) else 0.0]
        self._gains = {int(depth): _prior(*counts) for depth, *counts in learnt["gains"]}
        blocks, gained, extra = _prior(*learnt.get("beside", (0.0, 0.0, 0.0)))
        self._beside = [blocks, gained, extra * plain]
        self._drafted = _prior(*learnt["drafted"])
        self.acceptance.begin_with(learnt["acceptance"])

    def _gain(self, depth: int, rounds: int = 1) -> float:
        """Expected tokens accepted above from `rounds` rounds that begin at `depth`, if all before it are accepted."""
        gained, probability, (counted, tokens, _) = 0.0, 1.0, self._round
        each = max(tokens / counted, 1.0) if counted else 1.0  # tokens of a round
        for number in range(rounds):
            gain = self._gain_of_round(depth + number)
            gained += probability * gain
            probability *= min(gain / each, 1.0)
        return gained

    def _gain_of_round(self, depth: int) -> float:
        gain = 1.0
        for key in (-1, depth):
            rounds, tokens = self._gains.get(key, (0.0, 0.0))
            gain = (tokens + _PRIOR_ROUNDS * gain) / (rounds + _PRIOR_ROUNDS)
        return gain

    def _extra_seconds(self, depth: int, load: Load = ALONE, more: int = 1) -> float:
        """Seconds that `more` rounds after `depth` tokens add: their own, and those of the wider pass above."""
        rounds, tokens, passes = self._round
        wider = 1 + depth + (round(more * tokens / rounds) if rounds else more)
        above, without = self.above.under(load), self.above if depth else self.undrafted
        verifying = above.seconds(wider) - without.under(load).seconds(1 + depth)
        drafting = passes / rounds * self._own_pass(load) if rounds else self.own.under(load).seconds(1)
        return self.alone(more * drafting + max(verifying, 0.0), load)

    def _own_pass(self, load: Load) -> float:
        """The unit of this tier's rounds: one of its own passes, or a plain pass above if its own costs are unknown."""
        return self.own.under(load).seconds(1) or self.undrafted.under(load).seconds(1)

    def alone(self, seconds: float, load: Load) -> float:
        """Seconds under a load, converted to those of a single request after a short context."""
        plain = self.undrafted.under(load).seconds(1)
        return seconds * self._plain / plain if plain else seconds

    def _speed(self) -> float:
        """Tokens per second of the tier above, at least plain decoding's: the price of a second."""
        return max((self._tokens + 1) / (self._seconds + self._plain), 1 / self._plain) if self._plain else 0.0


def _count(counts: list[float], *values: float) -> None:
    """Count one more round with these values; counts[0] is the number of rounds."""
    for index, value in enumerate((1.0, *values)):
        counts[index] += value
    if counts[0] > _HALF_LIFE:
        counts[:] = [count / 2 for count in counts]


def _prior(count: float, *sums: float) -> list[float]:
    """Counts of earlier runs, scaled to weigh `_MOST_PRIOR` rounds at most."""
    weight = min(1.0, _MOST_PRIOR / count) if count > 0 else 0.0
    return [weight * float(value) for value in (count, *sums)]


def open_policy(until: str, above: Costs | None = None) -> BlockPolicy:
    """The policy of a plan's `until`; `worth` needs the costs of the tier above."""
    if until == "correction":
        return UntilCorrection()
    if until == "unsure":
        return UntilUnsure()
    if until == "worth":
        assert above is not None
        return WhileWorthwhile(above)
    return ByCount()
