"""What requests are told about the time of a forward pass that they shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hierspec.core.interfaces import Answer, Ask, PassTime
from hierspec.core.request import Request


class PassClock(NamedTuple):
    """How long a pass took."""

    seconds: float
    between: float  # seconds that its requests took to ask for it
    prepared: bool  # whether something was made ready meanwhile that later passes find ready


def tell_times(group: Sequence[tuple[Request, Ask]], answers: Sequence[Answer], clock: PassClock, spent: float) -> None:
    """Tell the requests of a pass its time, which they share; `spent` are the seconds of all passes so far.

    What lies between passes is part of it: it is not the same where something was drafted, and where passes are fast it
    is much of the time. Of one for which something was prepared there is no telling: the device worked meanwhile.
    """
    seconds, between, prepared = clock
    rows, contexts, usual = 0, 0, True
    for (request, ask), answer in zip(group, answers, strict=True):
        stats = ask.stats
        stats.seconds += seconds / len(group)
        request.last_pass = None
        request.pass_seconds = (between + seconds) / (1 + len(answer.ahead))
        # Passes that were made ahead count when their answers are taken.
        request.spent = spent - len(answer.ahead) * request.pass_seconds
        # Prefill, also of what a drafter was not asked about for a while, says nothing about the rows asked for.
        # Of a drafter's block its last token is new to it, and the token that was written after the block.
        request.prefilled = prepared or len(ask.context) > stats.reach + 2
        usual = usual and not request.prefilled
        stats.reach = len(ask.context) + len(ask.proposal) + len(answer.ahead)
        rows += 1 + len(ask.proposal)
        contexts += (1 + len(ask.proposal)) * len(ask.context)
    for request, _ in () if usual else group:
        request.prefilled = True  # one request's prefill makes the pass longer for all of them
    if usual:  # one request of the pass observes its cost
        # A scorer that went on from its own picks was alone: as many passes as answers, all of one width.
        group[0][0].last_pass = PassTime(rows, group[0][0].pass_seconds, contexts / rows, len(group))
