"""Fused rounds: a draft that is made and verified in one call of a device, as the recursion sees it."""

from __future__ import annotations

from dataclasses import replace

from hierspec.core.interfaces import Answer, Ask, Block, Pace, Round, RoundScorer
from hierspec.core.proposal import NOTHING
from hierspec.core.stats import TierStats


def can_be_fused(rounds: RoundScorer, round: Round) -> bool:
    """Whether this round could be drafted in one call, if its pace wants that.

    Not the first of a text, whose pass reads the prompt, nor with several requests, which share passes instead.
    """
    request = round.request
    if not request.output or request.running_requests > 1:
        return False
    return rounds.takes(request, len(round.context) - 1)


def fused_ask(rounds: RoundScorer, pace: Pace, round: Round, lower: Block | None, stats: TierStats) -> Ask | None:
    """An ask that drafts and verifies in one call; None if this round is drafted tier by tier.

    If a device is at work on such a round already, its draft costs next to nothing and is taken in any case.
    """
    round.fused = round.fused and lower is not None
    position = len(round.context) - 1
    if not (round.fused or (round.room > 0 and rounds.begun(round.request, position))):
        return None
    goes_on = round.room > 2 * rounds.depth + 1 and pace.goes_on(round)
    return Ask(rounds, round.context, NOTHING, round.request, 1, False, stats, goes_on=goes_on)


def take_fused(answer: Answer, lower: Block, round: Round, stats: TierStats) -> Answer:
    """Note what such a call has drafted, as if the lower tier, whose counters these are, had handed it up.

    Returns the answer about the draft, without nodes for which the text has no room.
    """
    draft = answer.draft
    round.fused = bool(draft.tokens)
    if not draft.tokens:
        return answer
    round.missed = max(len(round.context) - stats.reach, 0)
    stats.calls += 1
    stats.written += len(answer.chain)
    stats.reach = len(round.context) + len(answer.chain)
    if round.room < len(answer.chain):
        kept = [node for node, depth in enumerate(draft.depths()) if depth < round.room]
        draft = draft.subtree(kept)
        assert answer.picks is not None
        answer = replace(answer, picks=answer.picks[[0, *(1 + node for node in kept)]], draft=draft)
    lower.written += answer.chain[: round.room]
    round.proposals.insert(0, draft)
    round.drafted, round.draft = lower, draft
    return answer
