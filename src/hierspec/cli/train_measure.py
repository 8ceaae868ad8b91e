"""Measure how often a pack's exits and drafts agree with their model: on its own greedy answers to prompts, by task.

examples:
  hierspec train measure --prompts prompts.jsonl --limit 60 --output agreement.json
  hierspec train measure ./my-model --pack my-pack --prompts prompts.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hierspec.cli import options
from hierspec.cli.console import command_line, hand_out, note, progress_bars
from hierspec.core.errors import HierspecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines with task and turns")
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of each answer (default 128)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the JSON document to a file too, and charts beside it"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.max_tokens < 1:
        raise HierspecError(f"--max-tokens must be at least 1, not {arguments.max_tokens}.")
    from hierspec.prompts import read_prompts, spread

    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = spread(prompts, max(1, arguments.limit))
    model = options.load_model(arguments)
    import torch

    from hierspec.checkpoints.load import load_checkpoint
    from hierspec.machine import machine
    from hierspec.paths import whole_file
    from hierspec.train.examine import charts, examine
    from hierspec.train.measure import table

    with progress_bars() as progress:
        checkpoint = load_checkpoint(arguments.model, torch.float32, progress, arguments.pack)
        result = examine(model, checkpoint, prompts, arguments.max_tokens, progress)
    note(table(result["agreement"]))
    if arguments.output is not None:
        for name, chart in charts(result["agreement"]).items():
            with whole_file(arguments.output.with_name(f"{arguments.output.stem}-{name}.svg")) as temporary:
                temporary.write_text(chart.svg(), encoding="utf-8")
    about = {"machine": machine(), "command": command_line(), "model": model.name, "dtype": model.dtype}
    hand_out(
        {**about, "prompts": arguments.prompts.name, "max_tokens": arguments.max_tokens, **result}, arguments.output
    )
    return 0
