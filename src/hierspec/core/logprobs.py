"""Log-probabilities of written tokens: the model's own, before penalties, bias, temperature and filters.

They come from raw logits, one row at a time in float64, so they depend on that row's logits alone. If a backend's
logits are bit-equal in every pass, log-probabilities are bit-equal under every plan and in every batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A written token's natural log-probability, and the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # token and log-probability; ties in the order of token ids


def token_logprobs(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of `token` and of the `count` most likely tokens, from one row of raw logits [vocabulary]."""
    row = np.array(logits, np.float64)
    largest = float(row.max())
    normaliser = largest + math.log(float(np.exp(row - largest).sum()))
    top: list[int] = []
    if count > 0:
        least = row.min() if count >= len(row) else np.partition(row, -count)[-count]
        likely = np.flatnonzero(row >= least)
        top = likely[np.argsort(-row[likely], kind="stable")][:count].tolist()
    of = {number: float(row[number]) - normaliser for number in (token, *top)}
    return TokenLogprobs(token, of[token], tuple((number, of[number]) for number in top))
