"""HiSpec's setting without its models: exits at 1/8 and 1/4 of the layers that agree as often as the paper says.

The model is random, so what it writes means nothing: 32 layers of 512, or with --shape as large as those of the paper
(8B on a GPU of 24 GB and more; 70B needs 140 GB, or 70 GB with --weights int8). Every pass runs; only which draft
tokens are accepted is simulated (`hierspec/scorers/synthetic.py`). Shown beside it are what the paper reports and what
the latency formula predicts.

It made docs/results/synthetic-block.json and docs/results/synthetic-token.json.

examples:
  python experiments/hispec_synthetic.py --rates token --limit 4 --max-tokens 96 --output synthetic.json
  python experiments/hispec_synthetic.py --shape 8B --device cuda --limit 8 --max-tokens 128 --output synthetic-8b.json
  python experiments/hispec_synthetic.py --shape 70B --weights int8 --device cuda --output synthetic-70b.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hierspec.assembly.drafts import LoadOptions
from hierspec.assembly.opening import why_not_compiled, why_not_cuda
from hierspec.backends.base import Backend
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import DecoderConfig
from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import hand_out
from hierspec.core.errors import HierspecError
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
from hierspec_bench.cli import common
from hierspec_bench.cli.table import show
from hierspec_bench.document import document
from hierspec_bench.gpu.random_models import SHAPES, RandomWeights, shape_config
from hierspec_bench.record import Record
from hierspec_bench.run import run_plans

# What the paper reports (arXiv 2510.01336): share of tokens that the target accepts, drafted by one exit and by two.
SINGLE, THROUGH_TWO = 0.397, 0.581
# The target accepts a token that the middle verifier corrected at this fraction of its rate for others (0.63 to 0.73).
CORRECTED = 0.68
PAPER = {
    "hispec over layerskip": "1.28x mean, up to 2.01x",
    "hispec over plain": "1.84x to 2.08x (Llama-3-8B, H100)",
}
READINGS = ("block", "token")
SMALL = "32x512"
_DRAFTED = 4  # tokens per block in the paper
_TEXT = "The keeper of the lighthouse wrote down every ship that passed. "


@dataclass(frozen=True)
class Setting:
    """Acceptance rates: of a single exit at the target; of two exits, the lower's at the upper, and the upper's at the
    target for tokens that it accepted and for those that it corrected."""

    single: float
    lower: float
    accepted: float
    corrected: float

    @property
    def upper(self) -> float:
        return self.lower * self.accepted + (1 - self.lower) * self.corrected


def setting(reading: str) -> Setting:
    """The paper's rates as acceptance probabilities of one token.

    The paper does not define its rates. `block`: share of all drafted tokens, including those after a rejected one.
    `token`: share of those whose predecessors were accepted. The rest follows: the lower exit drafted a token correctly
    if the upper exit accepted it and the target then accepted it.
    """
    single, upper = (_probability(rate) if reading == "block" else rate for rate in (SINGLE, THROUGH_TWO))
    accepted = single + (upper - single) / CORRECTED
    return Setting(single, single / accepted, accepted, CORRECTED * accepted)


def _probability(share: float) -> float:
    """The acceptance probability per token at which this share of all tokens of a block is accepted."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        accepted = sum(middle**depth for depth in range(1, _DRAFTED + 1)) / _DRAFTED
        low, high = (middle, high) if accepted < share else (low, middle)
    return low


def plans(layers: int, rates: Setting) -> dict[str, Plan]:
    """The named plans with rates."""
    with_rates = {}
    for name in ("layerskip", "hispec", "hispec+"):
        plan = Plan.named(name, layers)
        upper, *lower = plan.tiers
        tiers: list[TierPlan] = [replace(upper, agrees=rates.single)]
        if lower:
            tiers = [replace(upper, agrees=rates.accepted, agrees_corrected=rates.corrected)]
            tiers += [replace(lower[0], agrees=rates.lower)]
        with_rates[name] = replace(plan, tiers=tuple(tiers))
    return with_rates


def random_model(shape: str = SMALL, device: str = "auto", weights: str = "auto") -> LanguageModel:
    """A random model of this shape, in memory only."""
    if device == "auto":
        device = "cuda" if shape != SMALL and torch.cuda.is_available() else "cpu"
    # The head is as small a part of the model as in an 8B model.
    small = tiny_config(
        layers=32, hidden=512, heads=8, kv_heads=4, head_size=64, intermediate=1408, vocabulary=15360, context=2048
    )
    config, dtype = small if shape == SMALL else shape_config(shape), torch.bfloat16
    if device == "cpu":
        dtype = torch.float32
    numbers: Mapping[str, torch.Tensor] = RandomWeights(config, torch.device(device), dtype)
    if shape == SMALL:
        numbers = {name: tensor.to(device, dtype) for name, tensor in random_weights(config).items()}
    format = weights if weights != "auto" else "float32" if device == "cpu" else "bfloat16"
    backend = _backend(device, config, format)
    if reason := backend.refuses(config, format):
        raise HierspecError(f"A model of the shape {shape} cannot run here with weights in {format}: {reason}.")
    decoder = backend.decoder(config, numbers, format)
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_folder(Path(folder))
    loading, name = LoadOptions(), f"random-{shape}"
    catalogue = ScorerCatalogue(name, decoder, StaircasePool(decoder, loading.kv_memory), None)
    return LanguageModel(catalogue, tokenizer, Path(name), loading)


def _backend(device: str, config: DecoderConfig, format: str) -> Backend:
    """The fastest backend for this device."""
    if not why_not_cuda(config, format, device):
        from hierspec.backends.cuda.backend import CudaBackend

        return CudaBackend(device)
    if not why_not_compiled(config, format, device):
        from hierspec.backends.cpu.backend import CpuBackend

        return CpuBackend(torch.get_num_threads())
    return TorchBackend(device)


def some_prompts(count: int) -> list[BenchPrompt]:
    return [BenchPrompt("random", (_TEXT[: 20 + 5 * number],)) for number in range(count)]


def predictions(model: LanguageModel, rates: Setting, progress: Progress = silent) -> dict[str, float]:
    """Speed-ups over plain that the latency formula predicts for the fixed plans, from costs measured now."""
    speedups = {}
    upper, lower = (tier.exit_layer or 1 for tier in Plan.named("hispec", model.config.layers).tiers)
    target, middle, bottom = (model.scorer(layers) for layers in (model.config.layers, upper, lower))
    model.costs.measure_again([(target, lower), (target, upper), (middle, lower), (bottom, 0)], progress)
    acceptance = {"layerskip": [rates.single], "hispec": [rates.upper, rates.lower]}
    for name, probabilities in acceptance.items():
        plan = Plan.named(name, model.config.layers)
        weighing = replace(plan, tiers=tuple(replace(tier, until="worth") for tier in plan.tiers))
        costs = [tier.pace.costs for tier in model.hierarchy(weighing).tiers if isinstance(tier.pace, AdaptivePace)]
        speedups[name] = predicted_speedup(costs, probabilities, [tier.gather for tier in plan.tiers])
    return speedups


def predicted_speedup(costs: Sequence[Costs], probabilities: Sequence[float], blocks: Sequence[int]) -> float:
    """The predicted speed-up; `costs` from the target down, acceptance and block size of each tier below the target."""
    names = [str(level) for level in range(len(costs))]
    tiers = tuple(TierFigures(name, cost) for name, cost in zip(names, costs, strict=True))
    survivals = {pair: AcceptanceRates((p,)) for pair, p in zip(pairwise(names), probabilities, strict=True)}
    ladder = tuple(TierConfig(name, block) for name, block in zip(names, (1, *blocks), strict=True))
    return costs[0].seconds(1) / score(Figures(tiers, survivals), ladder).seconds


def compared(result: dict[str, Any], predicted: dict[str, float]) -> dict[str, Any]:
    """What was measured, predicted and reported, side by side."""
    speedups = {name: plan["speedup"] for name, plan in result["plans"].items()}
    measured = {
        f"{name} over {base}": round(speedups[name] / speedups[base], 3)
        for name in ("layerskip", "hispec", "hispec+")
        for base in ("plain", "layerskip")
        if name != base
    }
    formula = {}
    for pair in measured:
        name, base = pair.split(" over ")
        if name in predicted:
            formula[pair] = round(predicted[name] / (1.0 if base == "plain" else predicted[base]), 3)
    return {"measured": measured, "formula": formula, "paper": PAPER}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--rates",
        choices=READINGS,
        default="block",
        help="what the paper's rates are shares of: all drafted tokens, or those whose predecessors were accepted",
    )
    parser.add_argument(
        "--shape", choices=(SMALL, *SHAPES), default=SMALL, help=f"of the random model, where none is named ({SMALL})"
    )
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="prompts (default 8)")
    common.add_output(parser)
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "limit")
    sampling = options.chosen_sampling(arguments)
    if arguments.threads is not None:
        torch.set_num_threads(max(1, arguments.threads))
    if arguments.model is None:
        model = random_model(arguments.shape, arguments.device, arguments.weights)
    else:
        model = options.load_model(arguments)
    rates = setting(arguments.rates)
    with progress_bars() as progress:
        predicted = predictions(model, rates, progress)
        chosen = plans(model.config.layers, rates)
        results = run_plans(model, some_prompts(arguments.limit), chosen, sampling, (), progress)
    about = common.about_model(model) | {
        "synthetic": True,
        "rates": {"reading": arguments.rates, **vars(rates)},
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }
    result = document(results, [], about)
    result["setting"] = compared(result, predicted)
    record = Record.of(result)
    if not arguments.json:
        show(record)
        for pair, measured in result["setting"]["measured"].items():
            formula, paper = (result["setting"][which].get(pair, "-") for which in ("formula", "paper"))
            note(f"{pair}: measured {measured}x, the formula {formula}, the paper {paper}")
    hand_out(result, arguments.output)
    return 1 if any(entry.figures.different for entry in record.main.entries) else 0


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
