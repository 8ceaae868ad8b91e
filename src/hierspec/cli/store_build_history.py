"""Build a history, what the model itself wrote, by letting it answer prompts.

A stopped build resumes when the same command is given again.

examples:
  hierspec store build history --prompts prompts.jsonl
  hierspec store build history ./my-model --prompts prompts.jsonl --limit 60 --max-tokens 128
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, enlarged=False)
    options.add_prompts_file(parser, "JSON lines with turns", required=True)
    options.add_limit(parser)
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of each answer (default 256)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts at once (default 8)")


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "limit", "max-tokens", "batch")
    from hierspec.prompts import read_prompts, spread

    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = spread(prompts, arguments.limit)
    model = options.load_model(arguments)
    from hierspec.fill_history import fill_history

    with model.home.open_history() as store, progress_bars() as progress:
        conversations = [prompt.turns for prompt in prompts]
        written = fill_history(model, store, conversations, arguments.max_tokens, arguments.batch, progress)
    note(f"{written} answers added to {store.info()['path']}")
    return 0
