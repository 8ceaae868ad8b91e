"""Compare plans on prompts: equality with plain decoding first, then time.

examples:
  hierspec bench run --plans plain,lookup,layerskip         plans on 36 prompts; `hierspec bench` alone runs auto
  hierspec bench run --plans auto --baselines all --report report.html
  hierspec bench peers --install                            other engines to compare with
  hierspec bench passes                                     how long single forward passes take
  hierspec bench perplexity --text book.txt                 what formats of weights cost
  hierspec bench gpu --output gpu.json                      a GPU in one unattended run
  hierspec bench serve --clients 1,16                       a server under load
  hierspec bench compare before.json after.json             what changed between two records
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from importlib import import_module

from hierspec.cli.main import run_chosen
from hierspec.cli.parser import Parser, add_command, add_commands
from hierspec_bench.cli.old_spellings import new_spelling

COMMANDS = {
    "run": "answer prompts under several plans, interleaved, and compare text and time",
    "passes": "measure single forward passes by width, context and part",
    "perplexity": "measure what formats of weights cost: perplexity on a text, and how often the best token changes",
    "compare": "show what changed between two records",
    "gpu": "measure a GPU in one unattended run: limits, passes, plans, batches, other engines",
    "serve": "put servers under load: throughput, first token, gaps, and every text as alone",
    "peers": "list or install other engines to compare with",
}


def main(arguments: list[str]) -> int:
    """`arguments` are those after `hierspec bench`."""
    if not arguments:
        arguments = ["run"]
    elif arguments[0] not in (*COMMANDS, "-h", "--help"):
        spelling = new_spelling(arguments)
        print(f"hierspec: this is now spelled: {spelling}", file=sys.stderr)
        if spelling.script:
            return spelling.run_script()
        arguments = spelling.arguments
    return run_chosen(make_parser().parse_args(arguments))


def make_parser() -> ArgumentParser:
    parser = Parser(prog="hierspec bench", description=__doc__)
    commands = add_commands(parser, "command", "COMMAND")
    for name, summary in COMMANDS.items():
        add_command(commands, name, summary, import_module(f"hierspec_bench.cli.{name}"))
    return parser
