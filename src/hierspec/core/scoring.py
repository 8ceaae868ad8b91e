"""Scores a text that is given, not written: what a scorer says at each of its tokens."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask, Scorer
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats

ROWS = 128  # of a pass whose logits are looked at: rows of a whole vocabulary are large


def score_tokens(scorer: Scorer, text: np.ndarray, first: int) -> Generator[tuple[np.ndarray, Answer]]:
    """The tokens of `text` from `first` (at least 1) on, a pass at a time: tokens, and an answer with a row of picks
    and logits for each. A pass is over a draft that is the text itself, so it answers for every token of it."""
    request = Request(text, Sampling(), Hierarchy((Tier(scorer),)))
    try:
        for start in range(first, len(text), ROWS):
            targets = text[start : start + ROWS]
            draft, stats = Proposal.chain(targets[:-1]), TierStats(scorer.name)
            [answer] = scorer.score([Ask(scorer, text[:start], draft, request, 1, False, stats, logits=True)])
            yield targets, answer
    finally:
        request.cancel()
