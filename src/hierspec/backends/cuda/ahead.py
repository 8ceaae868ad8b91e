"""How many tokens one graph writes for a request; the host drops those that turn out to be unwanted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hierspec.backends.cuda.work import bucket
from hierspec.core.foresight import SUREST, lead_class
from hierspec.core.interfaces import Ask

# Few values: each has its own graph, and a surplus step takes less time than another call.
_STEPS = (0, 1, 2, 3, 4, 5, 7, 11, 15)


def steps_allowed(asks: Sequence[Ask], room: int, most: int, likely: int) -> Sequence[np.ndarray]:
    """For a single ask, whether to continue after each of the next tokens, by class of lead; empty for several asks.

    Steps that only some leads allow are limited to `likely` tokens: all steps run, whatever the leads turn out to be,
    and most blocks are short. Another call takes less time than steps that are mostly dropped.
    """
    if len(asks) != 1 or asks[0].ahead is None or not room:
        return ()
    allowed = asks[0].ahead[: min(room, most - 1)]
    steps = max(_leading(np.all(allowed, axis=1)), min(_leading(np.any(allowed, axis=1)), likely - 1))
    steps = bucket(steps, _STEPS)
    if steps > len(allowed):  # near the end of a text
        steps = max(each for each in _STEPS if each <= len(allowed))
    return list(allowed[:steps])


def _leading(allowed: np.ndarray) -> int:
    """How many entries come before the first that is not allowed."""
    return len(allowed) if allowed.all() else int(allowed.argmin())


def steps_wanted(ask: Ask, picks: np.ndarray, leads: np.ndarray, ahead: Sequence[np.ndarray]) -> int:
    """How many steps to answer: up to the first that ends the text, or after which the ask allows no more."""
    least = SUREST
    for step, allowed in enumerate(ahead):
        token = int(picks[step])
        if token < 0 or token in ask.request.stop_ids:
            return step + 1
        least = min(least, lead_class(float(leads[step])))
        if not allowed[least]:
            return step + 1
    return 1 + len(ahead)
