"""HiSpec's setting without its models: 32 layers with exits at 1/8 and 1/4 that agree as often as the paper says.

The model is random, so what it writes means nothing. Every pass runs, and only which guesses stand is played
(`models/synthetic.py`). Beside what is measured stands what the paper reports and what the latency formula predicts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hierspec.assembly.drafts import LoadOptions
from hierspec.backends.base import Backend
from hierspec.backends.torch.backend import TorchBackend
from hierspec.core.plan import Plan, TierPlan
from hierspec.language_model import LanguageModel
from hierspec.pacing.costs import Costs
from hierspec.pacing.pace import AdaptivePace
from hierspec.planner.formula.figures import AcceptanceRates, Figures, TierConfig, TierFigures
from hierspec.planner.formula.latency import score
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec.scorers.catalogue import ScorerCatalogue
from hierspec.scorers.pool import StaircasePool
from hierspec.testing.checkpoints import random_weights, tiny_config, write_byte_tokenizer
from hierspec.text.tokenizer import Tokenizer

# What the paper reports (arXiv 2510.01336): tokens accepted by the target, drafted by one exit and through two.
SINGLE, THROUGH_TWO = 0.397, 0.581
# A token that the middle verifier corrected survives at this share of the rate of one that it accepted (0.63 to 0.73).
CORRECTED = 0.68
PAPER = {
    "hispec over layerskip": "1.28x mean, up to 2.01x",
    "hispec over plain": "1.84x to 2.08x (Llama-3-8B, H100)",
}
READINGS = ("block", "token")
_DRAFTED = 4  # tokens that a block has in the paper
_TEXT = "The keeper of the lighthouse wrote down every ship that passed. "


@dataclass(frozen=True)
class Setting:
    """Rates at which tiers agree: one exit with the target, and of two the lower with the upper, the upper with the
    target where it accepted and where it corrected."""

    single: float
    lower: float
    accepted: float
    corrected: float

    @property
    def upper(self) -> float:
        return self.lower * self.accepted + (1 - self.lower) * self.corrected


def setting(reading: str) -> Setting:
    """The paper's rates as chances of one token.

    It does not say what its rates are shares of. `block`: of all tokens drafted, those after a refused one counted
    too. `token`: of those whose predecessors stood. The rest follows: a token that the lower exit guessed right is
    one that the upper accepted and that then stood.
    """
    single, upper = (_chance(rate) if reading == "block" else rate for rate in (SINGLE, THROUGH_TWO))
    accepted = single + (upper - single) / CORRECTED
    return Setting(single, single / accepted, accepted, CORRECTED * accepted)


def _chance(share: float) -> float:
    """The chance of each token by which this share of all tokens of a block stands."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        standing = sum(middle**depth for depth in range(1, _DRAFTED + 1)) / _DRAFTED
        low, high = (middle, high) if standing < share else (low, middle)
    return low


def plans(layers: int, rates: Setting) -> dict[str, Plan]:
    """The named plans with rates."""
    found = {}
    for name in ("layerskip", "hispec", "hispec+"):
        plan = Plan.named(name, layers)
        upper, *lower = plan.tiers
        tiers: list[TierPlan] = [replace(upper, agrees=rates.single)]
        if lower:
            tiers = [replace(upper, agrees=rates.accepted, agrees_corrected=rates.corrected)]
            tiers += [replace(lower[0], agrees=rates.lower)]
        found[name] = replace(plan, tiers=tuple(tiers))
    return found


def random_model() -> LanguageModel:
    """32 layers of 512, a head that is as small a part as that of an 8B model, in memory alone."""
    config = tiny_config(
        layers=32, hidden=512, heads=8, kv_heads=4, head_size=64, intermediate=1408, vocabulary=15360, context=2048
    )
    weights = random_weights(config)
    backend: Backend
    try:
        from hierspec.backends.cpu.backend import CpuBackend
    except ImportError:
        backend = TorchBackend()
    else:
        backend = CpuBackend(torch.get_num_threads())
    decoder = backend.decoder(config, weights, "float32")
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_folder(Path(folder))
    options = LoadOptions()
    catalogue = ScorerCatalogue("random-32x512", decoder, StaircasePool(decoder, options.kv_memory), None)
    return LanguageModel(catalogue, tokenizer, Path("random-32x512"), options)


def some_prompts(count: int) -> list[BenchPrompt]:
    return [BenchPrompt("random", (_TEXT[: 20 + 5 * number],)) for number in range(count)]


def predictions(model: LanguageModel, rates: Setting, progress: Progress = silent) -> dict[str, float]:
    """Speed-ups over plain that the latency formula gives for the fixed plans, by costs measured here and now."""
    found = {}
    upper, lower = (tier.exit_layer or 1 for tier in Plan.named("hispec", model.config.layers).tiers)
    target, middle, bottom = (model.scorer(layers) for layers in (model.config.layers, upper, lower))
    model.costs.measure_anew([(target, lower), (target, upper), (middle, lower), (bottom, 0)], progress)
    agreeing = {"layerskip": [rates.single], "hispec": [rates.upper, rates.lower]}
    for name, chances in agreeing.items():
        plan = Plan.named(name, model.config.layers)
        weighing = replace(plan, tiers=tuple(replace(tier, until="worth") for tier in plan.tiers))
        costs = [tier.pace.costs for tier in model.hierarchy(weighing).tiers if isinstance(tier.pace, AdaptivePace)]
        found[name] = predicted_speedup(costs, chances, [tier.gather for tier in plan.tiers])
    return found


def predicted_speedup(costs: Sequence[Costs], chances: Sequence[float], gathers: Sequence[int]) -> float:
    """Of tiers from the target down: costs of each, the chance of a token of each at the one above, what it gathers."""
    names = [str(place) for place in range(len(costs))]
    tiers = tuple(TierFigures(name, own) for name, own in zip(names, costs, strict=True))
    stands = {pair: AcceptanceRates((chance,)) for pair, chance in zip(pairwise(names), chances, strict=True)}
    hierarchy = tuple(TierConfig(name, gather) for name, gather in zip(names, (1, *gathers), strict=True))
    return costs[0].seconds(1) / score(Figures(tiers, stands), hierarchy).seconds


def compared(result: dict[str, Any], predicted: dict[str, float]) -> dict[str, Any]:
    """What was measured, predicted and reported, side by side."""
    speedups = {name: plan["speedup"] for name, plan in result["plans"].items()}
    measured = {
        f"{name} over {base}": round(speedups[name] / speedups[base], 3)
        for name in ("layerskip", "hispec", "hispec+")
        for base in ("plain", "layerskip")
        if name != base
    }
    known = {**predicted, "plain": 1.0}
    formula = {
        pair: round(known[pair.split(" over ")[0]] / known[pair.split(" over ")[1]], 3)
        for pair in measured
        if pair.split(" over ")[0] in known
    }
    return {"measured": measured, "formula": formula, "paper": PAPER}
