"""How far a tier may write ahead: whether its pace will go on after a token, learnt from what the pace has done.

A drafter that writes one token a call spends half its time between the calls. So a scorer may write several at once,
as many as the pace will likely want. Nothing is decided here: the pace still decides after every token, and what was
written beyond the end of a block is dropped.
"""

from __future__ import annotations

from bisect import bisect

import numpy as np

LEADS = (0.25, 0.5, 1.0, 1.75, 2.75, 4.0, 6.0)  # bounds of the classes of leads, in nats
SUREST = len(LEADS)  # the highest class

_DEEPEST = 16  # deeper tokens are counted together
_LIKELY = 0.7  # a token too many takes about twice as long as what it saves otherwise
_MEMORY = 0.75  # what a decision counts for after the next of its kind


def lead_class(lead: float) -> int:
    """A class for how far a token was ahead of all others, in nats: from 0 (hardly) up."""
    return bisect(LEADS, lead)


class Foresight:
    """Of one tier. A pace goes on by how sure the tokens so far were: the least lead of a block and its length."""

    def __init__(self) -> None:
        self._went_on = np.full((_DEEPEST, SUREST + 1), 0.5)  # share of the decisions, older ones decayed

    def learn(self, tokens: int, least: int, went_on: bool) -> None:
        """What the pace did after a block of so many tokens whose least lead was of this class. Where it goes on it
        would after surer ones too, and where it does not, not after less sure ones."""
        share = self._went_on[min(tokens, _DEEPEST) - 1]
        decided = share[least:] if went_on else share[: least + 1]
        decided += (1 - _MEMORY) * (went_on - decided)

    def ahead(self, tokens: int, least: int, most: int) -> np.ndarray:
        """[most - 1, classes]: whether to go on after each of the next tokens but the last, by the least lead among
        them. The block has so many tokens already, whose least lead was of this class."""
        if least == SUREST and tokens + most <= _DEEPEST:
            return self._went_on[tokens : tokens + most - 1] > _LIKELY
        lengths = np.minimum(np.arange(tokens, tokens + most - 1), _DEEPEST - 1)
        classes = np.minimum(np.arange(SUREST + 1), least)
        return self._went_on[lengths[:, None], classes] > _LIKELY
