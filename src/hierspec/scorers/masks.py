"""Masks tokens that a request's grammar forbids: their logits become minus infinity, so that nobody picks them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hierspec.core.interfaces import Ask


def mask(asks: Sequence[Ask], logits: Tensor) -> None:
    """Mask the rows of requests that have a constraint, in place: 1 + nodes rows for each ask."""
    first, vocabulary = 0, logits.shape[1]
    for ask in asks:
        constraint = ask.request.constraint
        if constraint is not None:
            allowed = constraint.allowed(ask.context[len(ask.request.prompt) :], ask.proposal)
            for row, bits in enumerate(allowed, first):
                if bits is not None:  # else a draft before it is forbidden: nobody reads this row
                    _forbid(logits[row], np.unpackbits(bits, count=vocabulary, bitorder="little") == 0)
        first += 1 + len(ask.proposal)


def _forbid(row: Tensor, forbidden: np.ndarray) -> None:
    if row.device.type == "cpu":
        np.copyto(row.numpy(), -math.inf, where=forbidden)
    else:
        row.masked_fill_(torch.from_numpy(forbidden).to(row.device), -math.inf)
