"""Measure how often a pack's exits and drafts agree with their model: on its own greedy answers to prompts, by task.

examples:
  hierspec train measure --prompts prompts.jsonl --limit 60 --output agreement.json
  hierspec train measure ./my-model --pack my-pack --prompts prompts.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.files import OutputFile
from hierspec.cli.report import Report, command_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, enlarged=False)
    options.add_answered_prompts(parser, "JSON lines with task and turns", max_tokens=128, required=True)
    parser.add_argument(
        "--output", type=OutputFile, metavar="FILE", help="write the JSON document to a file too, and charts beside it"
    )
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    prompts = options.chosen_prompts(arguments) or []
    model = options.load_model(arguments)
    import torch

    from hierspec.checkpoints.load import load_checkpoint
    from hierspec.machine import machine
    from hierspec.paths import whole_file
    from hierspec.train.examine import charts, examine

    with progress_bars() as progress:
        checkpoint = load_checkpoint(arguments.model, torch.float32, progress, arguments.pack)
        result = examine(model, checkpoint, prompts, arguments.max_tokens, progress)
    report = Report.of(arguments)
    show_agreement(report, result["agreement"])
    if arguments.output is not None:
        for name, chart in charts(result["agreement"]).items():
            with whole_file(arguments.output.with_name(f"{arguments.output.stem}-{name}.svg")) as temporary:
                temporary.write_text(chart.svg(), encoding="utf-8")
    about = {"machine": machine(), "command": command_line(), "model": model.name, "dtype": model.dtype}
    report.document(
        {**about, "prompts": arguments.prompts.name, "max_tokens": arguments.max_tokens, **result}, arguments.output
    )
    return 0


def show_agreement(report: Report, figures: Mapping[str, Mapping[str, float]]) -> None:
    """How often each draft agrees with the model: a row for each task, a column for each draft."""
    drafts = list(figures["all"])
    tasks = [*sorted(task for task in figures if task != "all"), "all"]
    rows = [(task, *(f"{100 * figures[task].get(draft, 0):.0f}%" for draft in drafts)) for task in tasks]
    report.table("Agreement with the model", ("task", *drafts), rows)
