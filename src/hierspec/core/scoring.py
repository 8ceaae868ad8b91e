"""Scores a given text: a scorer's picks and logits at each of its tokens."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask, Scorer
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats

ROWS = 128  # per pass: logits of a whole vocabulary are large


def score_tokens(scorer: Scorer, text: np.ndarray, first: int) -> Generator[tuple[np.ndarray, Answer]]:
    """Yield the tokens of `text` from `first` (at least 1) on, pass by pass, each time with an answer for them.

    The answer has a row of picks and logits for every token: a pass verifies a draft that is the text itself.
    """
    request = Request(text, Sampling(), Hierarchy((Tier(scorer),)))
    try:
        for start in range(first, len(text), ROWS):
            targets = text[start : start + ROWS]
            draft, stats = Proposal.chain(targets[:-1]), TierStats(scorer.name)
            [answer] = scorer.score([Ask(scorer, text[:start], draft, request, 1, False, stats, logits=True)])
            yield targets, answer
    finally:
        request.cancel()
