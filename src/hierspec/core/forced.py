"""Drafts from a request's grammar: the tokens that it forces."""

from __future__ import annotations

import numpy as np

from hierspec.core.foresight import SUREST
from hierspec.core.interfaces import ACCEPTED, Block, Constraint, RequestView, Round, Written
from hierspec.core.proposal import CERTAIN


def ask_grammar(constraint: Constraint, round: Round) -> None:
    """Add the tokens that the grammar forces to the round, before the proposals of others."""
    round.forced = constraint.forced(written_in(round), min(round.room, round.budget))
    if round.forced.tokens:
        round.proposals.append(round.forced)


def write_certain(context: np.ndarray, room: int, block: Block, request: RequestView) -> bool:
    """Add forced tokens that have no alternative to a draft after `context`: nobody needs to score them.

    Returns whether the draft ends with them.
    """
    if request.constraint is None:
        return False
    written = block.written
    forced = request.constraint.forced(after(context, written)[len(request.prompt) :], room - len(written))
    for token, source, evidence in zip(forced.tokens, forced.sources, forced.evidence, strict=True):
        if evidence != CERTAIN:
            break
        written.append(Written([(token, None)], source, ACCEPTED, SUREST))
    return bool(written) and (len(written) >= min(room, block.gather) or written[-1].token in request.stop_ids)


def after(context: np.ndarray, written: list[Written]) -> np.ndarray:
    """The context, followed by what a tier has written."""
    if not written:
        return context
    return np.concatenate((context, np.array([position.token for position in written], np.int32)))


def written_in(round: Round) -> np.ndarray:
    """The round's text after the prompt."""
    return round.context[len(round.request.prompt) :]
