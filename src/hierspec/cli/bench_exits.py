"""`hierspec bench --exits` and `--synthetic`: measured beside what a formula or a paper says."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hierspec.cli import options
from hierspec.cli.bench_table import about_model, show
from hierspec.cli.console import hand_out, note, progress_bars
from hierspec.paths import whole_file

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompts import BenchPrompt


def synthetic_setting(arguments: argparse.Namespace) -> int:
    from hierspec_bench import synthetic
    from hierspec_bench.document import document
    from hierspec_bench.run import run_plans

    sampling = options.chosen_samplings(arguments)[0]
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(max(1, arguments.threads))
    model = synthetic.random_model() if arguments.model is None else options.load_model(arguments)
    rates = synthetic.setting(arguments.rates)
    plans = synthetic.plans(model.config.layers, rates)
    prompts = synthetic.some_prompts(arguments.limit or 8)
    with progress_bars() as progress:
        predicted = synthetic.predictions(model, rates, progress)
        found = run_plans(model, prompts, plans, sampling, (), progress)
    about = about_model(model) | {
        "synthetic": True, "rates": {"reading": arguments.rates, **vars(rates)},
        "temperature": sampling.temperature, "max_tokens": sampling.max_tokens,
    }  # fmt: skip
    result = document(found, [], about)
    result["setting"] = synthetic.compared(result, predicted)
    if not arguments.json:
        show(result)
        for pair, measured in result["setting"]["measured"].items():
            formula, paper = (result["setting"][which].get(pair, "-") for which in ("formula", "paper"))
            note(f"{pair}: measured {measured}x, the formula {formula}, the paper {paper}")
    hand_out(result, arguments.output)
    return 1 if any(plan["identical"] + plan["ties"] < plan["prompts"] for plan in result["plans"].values()) else 0


def pairs_of_exits(arguments: argparse.Namespace, model: LanguageModel, name: str, prompts: list[BenchPrompt]) -> int:
    import torch

    from hierspec.checkpoints.load import load_checkpoint
    from hierspec.train.examine import examine
    from hierspec_bench import exits
    from hierspec_bench.document import document
    from hierspec_bench.provenance import prompt_set
    from hierspec_bench.run import run_plans

    sampling = options.chosen_samplings(arguments)[0]
    layers = options.numbers("--exits", arguments.exits)
    exits.check_exits(layers, model.config.layers)
    with progress_bars() as progress:
        checkpoint = load_checkpoint(arguments.model, torch.float32, progress, arguments.pack)
        agreement = examine(model, checkpoint, prompts, sampling.max_tokens, progress, layers)["agreement"]["all"]
        plans, predicted = exits.exit_plans(model, layers, agreement, progress)
        found = run_plans(model, prompts, plans, sampling, (), progress)
    result = document(found, [], about_model(model) | {"temperature": sampling.temperature,
                      "max_tokens": sampling.max_tokens, "prompts": prompt_set(name, prompts)})  # fmt: skip
    result["agreement"], result["exits"] = agreement, exits.running_requests(result, plans, predicted)
    if not arguments.json:
        for row in result["exits"]:
            verifier = f"verifier {row['verifier']}" if row["verifier"] else f"alone, {row['gather'][0]} tokens"
            note(f"draft {row['draft']}, {verifier}: {row['measured']}x, the formula {row['formula']}x")
    if arguments.output is not None:
        with whole_file(arguments.output.with_suffix(".svg")) as temporary:
            temporary.write_text(exits.chart(result["exits"]).svg(), encoding="utf-8")
    hand_out(result, arguments.output)
    return 1 if any(plan["identical"] + plan["ties"] < plan["prompts"] for plan in result["plans"].values()) else 0
