"""Let a model write text of its own, for a corpus: the answers of its conversations with itself, as JSON lines.

Half of them are greedy, half are sampled at 0.8. With --prompts a third of the conversations begin with one of those:
use other prompts than you will measure with. On a GPU this takes minutes for millions of tokens, on a CPU hours.

examples:
  hierspec train text --conversations 64 --output own.jsonl
  hierspec train text --conversations 20000 --prompts prompts.jsonl --batch 2048 --seed 1 --output own.jsonl.gz
  hierspec store build corpus --files own.jsonl.gz books/*.txt
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.files import OutputFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("--output", type=OutputFile, required=True, metavar="FILE", help="such as own.jsonl.gz")
    parser.add_argument("--conversations", type=int, default=256, metavar="N", help="to write (default 256)")
    parser.add_argument("--length", type=int, default=640, metavar="N", help="tokens of each (default 640)")
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="conversations at once (default 256)")
    options.add_prompts_file(parser, "JSON lines with turns: what users may ask")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
    options.add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "conversations", "length", "batch")
    from hierspec.prompts import read_prompts
    from hierspec.train.own_text import write_own_text

    given = [prompt.turns[0] for prompt in read_prompts(arguments.prompts)] if arguments.prompts else []
    with progress_bars() as progress:
        tokens = write_own_text(
            arguments.model,
            arguments.output,
            arguments.conversations,
            arguments.length,
            given,
            arguments.seed,
            arguments.batch,
            arguments.device,
            progress,
        )
    note(f"{tokens:,} tokens in {arguments.output}")
    return 0
