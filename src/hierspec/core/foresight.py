"""How many tokens a tier may write in one call, predicted from its pace's earlier decisions.

A drafter that writes one token per call spends half its time between calls. So a scorer may write several at once, as
many as the pace will likely want. This is only a prediction: the pace still decides after every token, and tokens
beyond the end of a block are dropped.
"""

from __future__ import annotations

from bisect import bisect

import numpy as np

LEADS = (0.25, 0.5, 1.0, 1.75, 2.75, 4.0, 6.0)  # bounds of the classes of leads, in nats
SUREST = len(LEADS)  # the highest class

_DEEPEST = 16  # deeper tokens are counted together
_LIKELY = 0.7  # go on above this probability: a dropped token costs about twice what a used one saves
_MEMORY = 0.75  # weight of earlier decisions after a new one of the same kind


def lead_class(lead: float) -> int:
    """A class for how far a token was ahead of all others, in nats: from 0 (hardly) up."""
    return bisect(LEADS, lead)


class Foresight:
    """Predicts one tier's pace from the length of a block and the least lead of its tokens."""

    def __init__(self) -> None:
        self._went_on = np.full((_DEEPEST, SUREST + 1), 0.5)  # share of decisions to go on, older ones decayed

    def learn(self, tokens: int, least: int, went_on: bool) -> None:
        """Whether the pace went on after a block of `tokens` tokens whose least lead was of class `least`.

        If it went on, it would have done so after surer tokens too; if not, then not after less sure ones either.
        """
        share = self._went_on[min(tokens, _DEEPEST) - 1]
        decided = share[least:] if went_on else share[: least + 1]
        decided += (1 - _MEMORY) * (went_on - decided)

    def ahead(self, tokens: int, least: int, most: int) -> np.ndarray:
        """[most - 1, classes]: whether to go on after each of the next tokens but the last, by the least lead of them.

        The block already has `tokens` tokens, whose least lead was of class `least`.
        """
        if least == SUREST and tokens + most <= _DEEPEST:
            return self._went_on[tokens : tokens + most - 1] > _LIKELY
        lengths = np.minimum(np.arange(tokens, tokens + most - 1), _DEEPEST - 1)
        classes = np.minimum(np.arange(SUREST + 1), least)
        return self._went_on[lengths[:, None], classes] > _LIKELY
