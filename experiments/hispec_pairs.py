"""Which exit should draft and which should verify: every pair of a model's exits, measured beside the formula.

This is HiSpec's figure 5 on your own model. Pairs run in the paper's fixed blocks (two tokens drafted, four handed to
the target), single exits with the draft length that the formula finds best for them. --output writes a chart, too.

It made docs/results/exits-table.json and docs/pictures/exits-table.svg; --draw makes the chart of a record again.

examples:
  python experiments/hispec_pairs.py default-ee --exits 2,4,8,12 --limit 12 --max-tokens 48 --output exits.json
  python experiments/hispec_pairs.py --draw docs/results/exits-table.json --output docs/pictures/exits-table.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from hispec_synthetic import predicted_speedup

from hierspec.checkpoints.load import load_checkpoint
from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import hand_out
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.language_model import LanguageModel
from hierspec.pacing.pace import AdaptivePace
from hierspec.paths import whole_file
from hierspec.plot import PAIRED, Axis, Chart, Line
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.train.examine import examine
from hierspec_bench.cli import common
from hierspec_bench.document import document
from hierspec_bench.provenance import prompt_set
from hierspec_bench.record import Record
from hierspec_bench.run import run_plans

DRAFTED, VERIFIED = 2, 4  # tokens of a block, as in the paper
_LONGEST = 6  # longest draft length to try for a single exit


def check_exits(exits: Sequence[int], layers: int) -> None:
    if len(exits) < 2 or list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] >= layers:
        raise HierspecError(
            f"--exits takes two or more rising layer numbers between 1 and {layers - 1}, separated by commas, not "
            f"{','.join(map(str, exits))}."
        )


def exit_plans(
    model: LanguageModel, exits: Sequence[int], agreement: Mapping[str, float], progress: Progress = silent
) -> tuple[dict[str, Plan], dict[str, float]]:
    """A plan for each single exit and each pair, and its speed-up over plain according to the formula.

    `agreement` has, as counted by `train.examine`, "exit 4" (with the target) and "exit 4 with exit 8".
    """
    target: StateScorer = model.scorer(model.config.layers)
    scorers: dict[int, StateScorer] = {}
    for layer in exits:
        scorer = model.hierarchy(Plan(tiers=(TierPlan(exit_layer=layer),))).tiers[1].scorer
        assert isinstance(scorer, StateScorer)
        scorers[layer] = scorer
    wanted = [(target, layer) for layer in exits] + [(scorers[layer], 0) for layer in exits]
    wanted += [(scorers[high], low) for low, high in combinations(exits, 2)]
    model.costs.measure_again(wanted, progress)
    plans: dict[str, Plan] = {}
    predicted: dict[str, float] = {}
    for layer in exits:
        by_length = {}
        for length in range(1, _LONGEST + 1):
            plan = Plan(tiers=(TierPlan(exit_layer=layer, gather=length),))
            by_length[length] = _predicted(model, plan, [agreement[f"exit {layer}"]])
        best = max(by_length, key=lambda length: by_length[length])
        plans[f"{layer} alone"] = Plan(tiers=(TierPlan(exit_layer=layer, gather=best),))
        predicted[f"{layer} alone"] = by_length[best]
    for low, high in combinations(exits, 2):
        tiers = TierPlan(exit_layer=high, gather=VERIFIED), TierPlan(exit_layer=low, gather=DRAFTED)
        name = f"{low} under {high}"
        plans[name] = Plan(tiers=tiers)
        predicted[name] = _predicted(
            model, plans[name], [agreement[f"exit {high}"], agreement[f"exit {low} with exit {high}"]]
        )
    return plans, predicted


def _predicted(model: LanguageModel, plan: Plan, probabilities: Sequence[float]) -> float:
    weighing = replace(plan, tiers=tuple(replace(tier, until="worth") for tier in plan.tiers))
    costs = [tier.pace.costs for tier in model.hierarchy(weighing).tiers if isinstance(tier.pace, AdaptivePace)]
    return predicted_speedup(costs, probabilities, [tier.gather for tier in plan.tiers])


def side_by_side(
    result: Mapping[str, Any], plans: Mapping[str, Plan], predicted: Mapping[str, float]
) -> list[dict[str, Any]]:
    """For each plan: draft and verifier layer, speed-up after the prompt, and the formula's prediction."""
    rows = []
    plain = result["plans"]["plain"]["decode_tokens_per_second"]
    for name, plan in plans.items():
        figures = result["plans"][name]
        rows.append(
            {
                "draft": plan.tiers[-1].exit_layer,
                "verifier": plan.tiers[0].exit_layer if len(plan.tiers) > 1 else None,
                "gather": [tier.gather for tier in plan.tiers],
                "measured": round(figures["decode_tokens_per_second"] / plain, 3),
                "formula": round(predicted[name], 3),
                "tokens_per_pass": figures["tokens_per_pass"],
            }
        )
    return rows


def chart(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """A line per draft layer over the verifier layer, measured and (dashed) predicted; single exits over themselves."""
    lines = []
    for number, draft in enumerate(sorted({row["draft"] for row in rows})):
        values = sorted(
            (row["verifier"] or draft, row["measured"], row["formula"]) for row in rows if row["draft"] == draft
        )
        measured, formula = ([(value[0], value[column]) for value in values] for column in (1, 2))
        lines.append(Line(f"draft {draft}", measured, colour=number))
        lines.append(Line(f"draft {draft}, formula", formula, dashed=True, colour=number + PAIRED))
    return Chart(
        "Draft layer and verifier layer",
        Axis("verifier layer (the draft's own: no verifier)"),
        Axis("speed-up over plain"),
        lines,
        "decoding alone, without prefill; dashed: the latency formula",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--exits", metavar="N,N,…", help="every pair of these layers, and each alone")
    what.add_argument("--draw", type=Path, metavar="RECORD", help="only write the chart of a record to --output")
    common.add_prompts(parser)
    common.add_output(parser, ", and a chart beside it")
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.draw is not None:
        _draw(json.loads(arguments.draw.read_text(encoding="utf-8"))["exits"], arguments.output or Path("exits.svg"))
        return 0
    name, prompts = common.chosen_prompts(arguments)
    sampling, layers = options.chosen_sampling(arguments), options.numbers("--exits", arguments.exits)
    model = options.load_model(arguments)
    check_exits(layers, model.config.layers)
    with progress_bars() as progress:
        checkpoint = load_checkpoint(arguments.model, torch.float32, progress, arguments.pack)
        agreement = examine(model, checkpoint, prompts, sampling.max_tokens, progress, layers)["agreement"]["all"]
        plans, predicted = exit_plans(model, layers, agreement, progress)
        results = run_plans(model, prompts, plans, sampling, (), progress)
    about = common.about_model(model) | {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    result = document(results, [], about | {"prompts": prompt_set(name, prompts)})
    result["agreement"], result["exits"] = agreement, side_by_side(result, plans, predicted)
    if not arguments.json:
        for row in result["exits"]:
            verifier = f"verifier {row['verifier']}" if row["verifier"] else f"alone, {row['gather'][0]} tokens"
            note(f"draft {row['draft']}, {verifier}: {row['measured']}x, the formula {row['formula']}x")
    if arguments.output is not None:
        _draw(result["exits"], arguments.output.with_suffix(".svg"))
    hand_out(result, arguments.output)
    return 1 if any(entry.figures.different for entry in Record.of(result).main.entries) else 0


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(chart(rows).svg(), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
