"""How long texts become: whether a drafter's prefill pays depends on how much is still to be written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PRIOR_TEXTS, _PRIOR_TOKENS = 2.0, 128.0  # prior: as if this many texts of this length had been written
_MOST_TEXTS = 32.0  # texts after which older ones count half


class Lengths:
    """The lengths of finished texts. Shared by all requests of a model."""

    def __init__(self) -> None:
        self._texts = self._tokens = 0.0

    def learn(self, tokens: int) -> None:
        """A text has ended after this many tokens."""
        self._texts, self._tokens = self._texts + 1, self._tokens + tokens
        if self._texts > _MOST_TEXTS:
            self._texts, self._tokens = self._texts / 2, self._tokens / 2

    def rest(self, written: int) -> int:
        """Tokens expected after the first `written`: a text that is already long still goes on for a while."""
        mean = (self._tokens + _PRIOR_TEXTS * _PRIOR_TOKENS) / (self._texts + _PRIOR_TEXTS)
        return max(int(mean - written), int(mean / 4), 1)

    def learnt(self) -> dict[str, Any]:
        return {"texts": self._texts, "tokens": self._tokens}

    def begin_with(self, learnt: Mapping[str, Any]) -> None:
        texts, tokens = float(learnt["texts"]), float(learnt["tokens"])
        weight = min(1.0, _PRIOR_TEXTS / texts) if texts > 0 else 0.0
        self._texts, self._tokens = weight * texts, weight * tokens
