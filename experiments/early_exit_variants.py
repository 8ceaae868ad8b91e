"""Variants of the early-exit recipe that `train_early_exit.py` compares, and what it aims at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hierspec.train.tuned import Exit

# What the paper's premise needs: agreement of the draft exit and of the verifier with the target, the share of tokens
# accepted by the verifier that the target also accepts, and perplexity relative to the original's.
AIMS = {"draft": 0.60, "verifier": 0.75, "stands": 0.88, "perplexity": 1.10}


@dataclass(frozen=True)
class Variant:
    """Layers of the two adapters (0: only a norm), ranks of the change, and the weight and pull of each exit."""

    depths: tuple[int, int]
    ranks: tuple[int, int, int]
    weights: tuple[float, float] = (0.5, 1.5)
    pulls: tuple[float, float] = (0.05, 0.5)

    def exits(self, layers: Sequence[int]) -> list[Exit]:
        described = zip(layers, self.depths, self.weights, self.pulls, strict=True)
        return [Exit(layer, depth, weight, pull) for layer, depth, weight, pull in described]


# Ranks are chosen so that each variant takes at most 16.5 MB for the default model.
VARIANTS = {
    "two-layers": Variant((1, 2), (40, 40, 8)),
    "weighted": Variant((1, 1), (96, 72, 8)),
    "pulled": Variant((1, 2), (40, 40, 8), weights=(0.3, 2.0), pulls=(0.0, 1.5)),
    "norm-draft": Variant((0, 2), (80, 80, 8), weights=(1.0, 1.5)),
}
_BELOW = 0.007  # margin: rounding and another measurement may add a little
USUAL = "two-layers,weighted,pulled"


def shortfall(reached: Mapping[str, float]) -> float:
    """The sum of how far each aim is missed."""
    missed = [max(0.0, AIMS[name] - reached[name]) for name in ("draft", "verifier", "stands")]
    excess = max(0.0, reached["perplexity"] - AIMS["perplexity"])
    return round(math.fsum([*missed, excess]), 4)


def next_drift(drift: float, perplexity: float) -> float:
    """The drift that a variant may have when it continues, given the perplexity it reached.

    Aims just below the limit, in moderate steps. A drift in nats per token is about the logarithm of the growth in
    perplexity.
    """
    wanted = math.log(AIMS["perplexity"] - _BELOW) / math.log(max(perplexity, 1.001))
    return round(drift * min(max(wanted, 0.6), 1.25), 4)
