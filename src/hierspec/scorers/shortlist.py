"""A head that scores a draft vocabulary: frequent tokens, and those that a request itself brings.

Tokens that it does not score have the logit minus infinity, so picks and distributions are made as usual. It only
drafts: the target can still write the tokens that it leaves out.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hierspec.backends.base import ExtraRows, Shortlist
from hierspec.core.interfaces import Ask, RequestView


class DraftHead:
    """Scores the frequent tokens of a pack, and a request's own: its prompt's, its stop tokens, those it favours."""

    def __init__(self, shortlist: Shortlist, norm: Tensor | None) -> None:
        self.shortlist, self.norm = shortlist, norm
        self._extras: weakref.WeakKeyDictionary[RequestView, ExtraRows] = weakref.WeakKeyDictionary()

    def logits(self, asks: Sequence[Ask], states: Tensor) -> Tensor:
        extras, counts = [self.extra(ask.request) for ask in asks], [1 + len(ask.proposal) for ask in asks]
        return self.shortlist.logits(states, self.norm, extras, counts)

    def release(self, request: RequestView) -> None:
        self._extras.pop(request, None)

    def extra(self, request: RequestView) -> ExtraRows:
        """What the request adds to the frequent tokens."""
        extra = self._extras.get(request)
        if extra is None:
            tokens = added_tokens(request, self.shortlist.tokens)
            extra = self._extras[request] = self.shortlist.gather(tokens)
        return extra


def added_tokens(request: RequestView, frequent: np.ndarray) -> np.ndarray:
    """What a request adds to the frequent tokens, in rising order."""
    bias = request.sampling.logit_bias or {}
    favoured = [token for token, value in bias.items() if value > 0]
    added = np.unique(np.concatenate((request.prompt, np.array([*request.stop_ids, *favoured], np.int32))))
    added = np.setdiff1d(added, frequent, assume_unique=True).astype(np.int32)
    forbidden = [token for token, value in bias.items() if value == -math.inf]
    if forbidden and not len(np.setdiff1d(np.union1d(added, frequent), forbidden)):
        # All scored tokens are forbidden: add one that is not, so that there is something to draft.
        left = np.setdiff1d(np.arange(len(frequent) + len(added) + len(forbidden) + 1), forbidden)
        added = np.union1d(added, left[:1]).astype(np.int32)
    return added
