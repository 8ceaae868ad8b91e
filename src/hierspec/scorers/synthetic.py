"""Synthetic tiers: they agree with the tier above at given rates, while their forward passes really run.

They show what a hierarchy would cost with exits or drafts that do not exist. What a tier picks at a position depends on
the position alone. From the lowest tier up, keyed noise decides whether it agrees with the tier above: at its rate
`agrees`, or at `corrected` where the tier below disagrees with it (it would correct that token). Tokens follow from the
top down: the target's is known, since it has written the text before; a tier that agrees picks what the tier above
picks, one that does not picks a token that no tier above picks. So a token that a tier accepted from below is accepted
above at the rate `agrees`, one that it corrected at the rate `corrected`, and positions are independent, also where the
text before them is wrong. The target itself is always real.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask, RequestView, Scorer
from hierspec.core.plan import TierPlan
from hierspec.core.request import Request
from hierspec.core.sampling import noise_keys

References = WeakKeyDictionary[RequestView, Sequence[int]]  # what the target writes for a request


@dataclass(frozen=True)
class Rates:
    """How often a tier agrees with the one above, and how often where the tier below does not agree with it."""

    agrees: float
    corrected: float


@dataclass(frozen=True, eq=False)
class SyntheticScorer:
    """A scorer whose passes run and whose picks are then replaced."""

    inner: Scorer
    rates: tuple[Rates, ...]  # of the synthetic tiers from the one below the target down
    tier: int  # which of those this one is
    references: References
    synthetic: bool = field(default=True, init=False)

    @property
    def name(self) -> str:
        return f"{self.inner.name} (synthetic)"

    @property
    def vocabulary(self) -> int:
        return self.inner.vocabulary

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        asks = [replace(ask, ahead=None) for ask in asks]  # else it would go on from picks that are replaced afterwards
        return [self._replaced(ask, answer) for ask, answer in zip(asks, self.inner.score(asks), strict=True)]

    def release(self, request: RequestView) -> None:
        self.inner.release(request)

    def _replaced(self, ask: Ask, answer: Answer) -> Answer:
        written = self.references.get(ask.request, ())
        assert answer.picks is not None
        picks = np.array(answer.picks)
        text = zlib.crc32(ask.request.prompt.tobytes())  # so that texts differ in where tiers agree
        first = len(ask.context) - len(ask.request.prompt)
        for row, depth in enumerate([0, *(depth + 1 for depth in ask.proposal.depths())]):
            if first + depth < len(written):
                token = self.token(text, first + depth, written[first + depth])
                if token in picks[row]:  # among the runners-up: they swap
                    picks[row, picks[row] == token] = picks[row, 0]
                picks[row, 0] = token
        return replace(answer, picks=picks)

    def token(self, text: int, position: int, true: int) -> int:
        """What this tier picks at a position of a text's output where the target picks `true`."""
        agreeing: list[bool] = []
        below = True
        for tier in reversed(range(len(self.rates))):
            rates = self.rates[tier]
            low, _ = noise_keys(text + (tier << 32), position)
            below = low / 2**32 < (rates.agrees if below else rates.corrected)
            agreeing.insert(0, below)
        distance = 0  # from the target's token; a tier that disagrees gets one that no tier above has
        for tier, agrees in enumerate(agreeing[: self.tier + 1], 1):
            distance = distance if agrees else tier
        return (true + distance) % self.vocabulary


class Synthetics:
    """The synthetic scorers of a model, and what its target wrote plainly, so that they can agree with it."""

    def __init__(self) -> None:
        self._references: References = WeakKeyDictionary()
        self._scorers: dict[tuple[object, ...], SyntheticScorer] = {}  # shared by all requests: passes are batched
        self._written: dict[tuple[bytes, str], tuple[int, ...]] = {}

    def scorers(self, tiers: Sequence[TierPlan], inner: Sequence[Scorer]) -> list[Scorer]:
        """The scorers of these tiers, those that have rates in their plan replaced."""
        chosen = [tier for tier in tiers if tier.agrees is not None]
        rates = tuple(_rates(tier) for tier in chosen)
        scorers: list[Scorer] = list(inner)
        for tier in range(len(chosen)):
            key = rates, tier, id(inner[tier])
            if key not in self._scorers:
                self._scorers[key] = SyntheticScorer(inner[tier], rates, tier, self._references)
            scorers[tier] = self._scorers[key]
        return scorers

    def know(self, request: Request) -> bool:
        """Tell this request's synthetic tiers what its target will write.

        Returns whether that had to be written first, by plain decoding.
        """
        sampling = replace(request.sampling, seed=request.seed, logprobs=None)
        key = request.prompt.tobytes(), repr(sampling)
        new = key not in self._written
        if new:
            plainly = Hierarchy((Tier(request.hierarchy.tiers[0].scorer),))
            plain = Request(request.prompt, sampling, plainly, request.stop_ids, len(request.prompt) + request.limit)
            for _ in Engine().run([plain]):
                pass
            if plain.error is not None:
                raise plain.error
            self._written[key] = tuple(plain.output)
        self._references[request] = self._written[key]
        return new


def _rates(tier: TierPlan) -> Rates:
    assert tier.agrees is not None
    return Rates(tier.agrees, tier.agrees if tier.agrees_corrected is None else tier.agrees_corrected)
