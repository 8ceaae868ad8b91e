"""Tells requests how long the forward pass that they shared took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hierspec.core.interfaces import Answer, Ask, PassTime
from hierspec.core.request import Request


class PassClock(NamedTuple):
    """How long a pass took."""

    seconds: float
    between: float  # seconds that its requests took from their last answers to these asks
    prepared: bool  # whether it also did one-off work, such as compiling kernels


def tell_times(group: Sequence[tuple[Request, Ask]], answers: Sequence[Answer], clock: PassClock, spent: float) -> None:
    """Tell the requests of a pass its time, which they share; `spent` are the seconds of all passes so far.

    The time between passes counts too: it differs where something was drafted, and it is a large part where passes are
    fast. A pass that did one-off work is not used as a measurement: the device may have worked meanwhile.
    """
    seconds, between, prepared = clock
    rows, contexts, usual, fused = 0, 0, True, False
    for (request, ask), answer in zip(group, answers, strict=True):
        stats = ask.stats
        stats.seconds += seconds / len(group)
        request.last_pass = None
        request.pass_seconds = (between + seconds) / (1 + len(answer.ahead))
        # Passes computed ahead count when their answers are taken.
        request.spent = spent - len(answer.ahead) * request.pass_seconds
        # A pass that also prefills (a prompt, or what a drafter missed while it paused) says nothing about its rows.
        # Two new tokens are normal for a drafter: the last of its block, and the one written after the block.
        prefills = len(ask.context) > stats.reach + 2
        if prefills:
            stats.prefill_seconds += seconds
            stats.prefill_written += 1 + len(answer.ahead)
        request.prefilled = prepared or prefills
        usual = usual and not request.prefilled
        fused = fused or bool(answer.draft.tokens)
        stats.reach = len(ask.context) + max(len(ask.proposal), len(answer.draft)) + len(answer.ahead)
        rows += 1 + len(ask.proposal)
        contexts += (1 + len(ask.proposal)) * len(ask.context)
    for request, _ in () if usual else group:
        request.prefilled = True  # one request's prefill makes the pass longer for all of them
    if usual and not fused:  # a fused round is no pass of one scorer
        # One request observes the cost, so that it is learnt once. Only a single request gets answers ahead;
        # `pass_seconds` is then already that of one step.
        group[0][0].last_pass = PassTime(rows, group[0][0].pass_seconds, contexts / rows, len(group))
