"""How far a request goes on by itself: several tokens in one graph, of which the host drops what was not wanted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.core.foresight import LEADS
from hierspec.core.interfaces import Ask


def steps_allowed(asks: Sequence[Ask], room: int, most: int) -> Sequence[np.ndarray]:
    """What the one ask says about going on after each of the next tokens; nothing where several are answered."""
    if len(asks) != 1 or asks[0].ahead is None or not room:
        return ()
    return list(asks[0].ahead[: min(room, most - 1)])


def steps_wanted(ask: Ask, picks: np.ndarray, leads: np.ndarray, ahead: Sequence[np.ndarray]) -> int:
    """How many steps are answered: up to the first that ends the text, or after which the ask wants no more."""
    least = len(LEADS)
    for step, allowed in enumerate(ahead):
        token = int(picks[step])
        if token < 0 or token in ask.request.stop_ids:
            return step + 1
        least = min(least, sum(bool(leads[step] >= bound) for bound in LEADS))
        if not allowed[least]:
            return step + 1
    return 1 + len(ahead)
