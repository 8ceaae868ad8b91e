"""A Monte Carlo run of the recursion: an independent check of the latency formula, and nothing else.

It follows `core/hierarchy.py` token by token. Whether a token is accepted is one random draw, by how the token was
written and its position in the block; a store's proposal is one draw. Nothing here uses the formula of `latency.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hierspec.core.interfaces import ACCEPTED, CORRECTED, UNDRAFTED
from hierspec.planner.formula.figures import Figures, HierarchyConfig


@dataclass(frozen=True)
class MonteCarloResult:
    """Seconds per token over a number of passes of the target, with the standard error."""

    seconds: float
    error: float
    tokens_per_pass: float
    passes: int


def monte_carlo(figures: Figures, hierarchy: HierarchyConfig, passes: int = 10_000, seed: int = 0) -> MonteCarloResult:
    request = _RandomRequest(figures, hierarchy, random.Random(seed))
    tokens: list[int] = []
    seconds: list[float] = []
    for _ in range(passes):
        before = request.clock
        tokens.append(len(request.round(0)))
        seconds.append(request.clock - before)
    mean = sum(tokens) / passes
    ratio = sum(seconds) / sum(tokens)
    # Seconds and tokens of a pass are correlated, so the error of their ratio comes from the residuals.
    residuals = (taken - ratio * written for taken, written in zip(seconds, tokens, strict=True))
    spread = math.sqrt(sum(residual**2 for residual in residuals) / passes)
    return MonteCarloResult(ratio, spread / mean / math.sqrt(passes), mean, passes)


class _RandomRequest:
    """One request with random verdicts; its clock advances with every pass."""

    def __init__(self, figures: Figures, hierarchy: HierarchyConfig, rng: random.Random) -> None:
        self.figures, self.hierarchy, self.rng = figures, hierarchy, rng
        self.clock = 0.0

    def block(self, level: int) -> list[int]:
        """How each token of a block that this tier hands up was written."""
        config = self.hierarchy[level]
        written: list[int] = []
        while len(written) < config.gather:
            written += self.round(level)
            if config.until == "correction" and written[-1] == CORRECTED:
                break
        return written

    def round(self, level: int) -> list[int]:
        config = self.hierarchy[level]
        tier = self.figures.tier(config.tier)
        if config.store is not None:
            store = self.figures.store(config.tier, config.store)
            self.clock += store.seconds
            drawn = self.rng.random()
            for accepted, share in enumerate(store.accepted):
                drawn -= share
                if drawn < 0:
                    self.clock += tier.seconds(1 + store.rows)
                    return [ACCEPTED] * accepted + [UNDRAFTED if accepted == store.rows else CORRECTED]
        if level + 1 == len(self.hierarchy):
            self.clock += tier.seconds(1)
            return [UNDRAFTED]
        lower = self.hierarchy[level + 1]
        block = self.block(level + 1)[: config.budget]
        self.clock += tier.seconds(1 + len(block) * lower.candidates, lower.tier)
        below_lower = self.hierarchy[level + 2].tier if level + 2 < len(self.hierarchy) else None
        rates = self.figures.acceptance_rates(config.tier, lower.tier, below_lower)
        for position, how in enumerate(block):
            if self.rng.random() >= rates.rates(how, position + 1)[position]:
                if self.rng.random() < rates.runner_up_rate(lower.candidates):
                    return [ACCEPTED] * (position + 1) + [UNDRAFTED]
                return [ACCEPTED] * position + [CORRECTED]
        return [ACCEPTED] * len(block) + [UNDRAFTED]
