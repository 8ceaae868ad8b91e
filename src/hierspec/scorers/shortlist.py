"""A head that scores a draft vocabulary: frequent tokens, and those that a request itself brings.

What it does not score has the logit minus infinity, so picks and laws are made as ever. It guesses only: what it leaves
out the target can still write.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hierspec.core.interfaces import Ask, RequestView


@dataclass(frozen=True, eq=False)
class Extra:
    """Tokens of one request that are not among the frequent ones, and their rows of the head."""

    tokens: np.ndarray  # [count] int32
    rows: Tensor | np.ndarray  # as the head's product takes them


class Product(Protocol):
    """Rows of a head, as some device multiplies with them. One for all norms that lead to it."""

    tokens: np.ndarray  # [count] int32, rising: what is scored for every request
    bytes: int

    def gather(self, tokens: np.ndarray) -> Extra:
        """The rows of other tokens."""

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[Extra], counts: Sequence[int]) -> Tensor:
        """[rows, vocabulary]; the rows come in runs of `counts`, each with its extra. Good until the next call."""


class DraftHead:
    """Scores the frequent tokens of a pack, and a request's own: its prompt's, its stop tokens, those it favours."""

    def __init__(self, product: Product, norm: Tensor | None) -> None:
        self.product, self.norm = product, norm
        self._extras: weakref.WeakKeyDictionary[RequestView, Extra] = weakref.WeakKeyDictionary()

    def logits(self, asks: Sequence[Ask], states: Sequence[Tensor]) -> Sequence[Tensor]:
        extras, counts = [self._extra(ask.request) for ask in asks], [len(part) for part in states]
        if len(states) == 1:
            return [self.product.logits(states[0], self.norm, extras, counts)]
        return self.product.logits(torch.cat(list(states)), self.norm, extras, counts).split(counts)

    def release(self, request: RequestView) -> None:
        self._extras.pop(request, None)

    def _extra(self, request: RequestView) -> Extra:
        found = self._extras.get(request)
        if found is None:
            tokens = own_tokens(request, self.product.tokens)
            found = self._extras[request] = self.product.gather(tokens)
        return found


def own_tokens(request: RequestView, frequent: np.ndarray) -> np.ndarray:
    """What a request adds to the frequent tokens, in rising order."""
    bias = request.sampling.logit_bias or {}
    favoured = [token for token, value in bias.items() if value > 0]
    own = np.unique(np.concatenate((request.prompt, np.array([*request.stop_ids, *favoured], np.int32))))
    own = np.setdiff1d(own, frequent, assume_unique=True).astype(np.int32)
    forbidden = [token for token, value in bias.items() if value == -math.inf]
    if forbidden and not len(np.setdiff1d(np.union1d(own, frequent), forbidden)):
        # Everything is forbidden that would be scored: one token that is not, so that there is something to guess.
        left = np.setdiff1d(np.arange(len(frequent) + len(own) + len(forbidden) + 1), forbidden)
        own = np.union1d(own, left[:1]).astype(np.int32)
    return own


class TorchProduct:
    """Through torch, on any device."""

    def __init__(self, weight: Tensor, tokens: np.ndarray, eps: float) -> None:
        self._weight, self.tokens, self._eps = weight, tokens, eps
        self._index = torch.as_tensor(tokens, dtype=torch.long, device=weight.device)
        self._rows = weight[self._index]
        self.bytes = self._rows.numel() * self._rows.element_size()

    def gather(self, tokens: np.ndarray) -> Extra:
        return Extra(tokens, self._weight[torch.as_tensor(tokens, dtype=torch.long, device=self._weight.device)])

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[Extra], counts: Sequence[int]) -> Tensor:
        states = states.to(self._weight.dtype)
        if norm is not None:
            states = functional.rms_norm(states, (states.shape[-1],), norm.to(states), self._eps)
        logits = torch.full((len(states), len(self._weight)), -math.inf, device=states.device)
        logits[:, self._index] = functional.linear(states, self._rows).float()
        row = 0
        for extra, count in zip(extras, counts, strict=True):
            if len(extra.tokens):
                assert isinstance(extra.rows, Tensor)
                own = functional.linear(states[row : row + count], extra.rows).float()
                logits[row : row + count, torch.as_tensor(extra.tokens, dtype=torch.long, device=states.device)] = own
            row += count
        return logits
