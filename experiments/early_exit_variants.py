"""Variants of the early-exit recipe that `train_early_exit.py` compares, and what it aims at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hierspec.train.tuned import Exit

# What the paper's premise needs: agreement of the draft exit and of the verifier, the share that stands at the target
# of what the verifier accepts, and perplexity over the original's.
AIMS = {"draft": 0.60, "verifier": 0.75, "stands": 0.88, "perplexity": 1.10}


@dataclass(frozen=True)
class Variant:
    """Layers of the two adapters (0: a norm alone), ranks of the change, and what each exit counts and pulls."""

    depths: tuple[int, int]
    ranks: tuple[int, int, int]
    weights: tuple[float, float] = (0.5, 1.5)
    pulls: tuple[float, float] = (0.05, 0.5)

    def exits(self, layers: Sequence[int]) -> list[Exit]:
        described = zip(layers, self.depths, self.weights, self.pulls, strict=True)
        return [Exit(layer, depth, weight, pull) for layer, depth, weight, pull in described]


# Ranks are such that each takes at most 16.5 MB for the default model.
VARIANTS = {
    "two-layers": Variant((1, 2), (40, 40, 8)),
    "weighted": Variant((1, 1), (96, 72, 8)),
    "pulled": Variant((1, 2), (40, 40, 8), weights=(0.3, 2.0), pulls=(0.0, 1.5)),
    "norm-draft": Variant((0, 2), (80, 80, 8), weights=(1.0, 1.5)),
}
_BELOW = 0.007  # rounding and another measure may add a little
USUAL = "two-layers,weighted,pulled"


def shortfall(reached: Mapping[str, float]) -> float:
    """By how much the aims are missed, added up."""
    missed = [max(0.0, AIMS[name] - reached[name]) for name in ("draft", "verifier", "stands")]
    excess = max(0.0, reached["perplexity"] - AIMS["perplexity"])
    return round(math.fsum([*missed, excess]), 4)


def next_drift(drift: float, perplexity: float) -> float:
    """What a variant may drift when it goes on, after it came to this perplexity: up to just below the aim, by steps
    that are not too large. A drift in nats a token is about the logarithm of the perplexity's growth."""
    wanted = math.log(AIMS["perplexity"] - _BELOW) / math.log(max(perplexity, 1.001))
    return round(drift * min(max(wanted, 0.6), 1.25), 4)
