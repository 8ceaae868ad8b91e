"""Compare plans on prompts: equality with plain decoding first, then time.

examples:
  hierspec bench run --plans plain,lookup,layerskip         plans on 36 prompts; `hierspec bench` alone runs auto
  hierspec bench run --plans auto --baselines all --report report.html
  hierspec bench peers --install                            other engines to compare with
  hierspec bench passes                                     how long single forward passes take
  hierspec bench compare before.json after.json             what changed between two records
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from hierspec_bench.cli.old_spellings import new_spelling

COMMANDS = {
    "run": "answer prompts under several plans, interleaved, and compare text and time",
    "passes": "measure single forward passes by width, context and part",
    "compare": "show what changed between two records",
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
    parser = argparse.ArgumentParser(
        prog="hierspec bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = import_module(f"hierspec_bench.cli.{name}")
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))
