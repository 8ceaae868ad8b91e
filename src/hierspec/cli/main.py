"""`hierspec`: find the subcommand, run it, turn what goes wrong into one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from hierspec import __version__
from hierspec.core.errors import HierspecError

COMMANDS = {
    "generate": "stream a model's answer to a prompt",
    "chat": "talk to a model",
    "store": "build, look at and drop token databases",
    "train": "train exits and drafts for a model, or find layers it can skip",
    "plan": "find the hierarchy of tiers that should be fastest",
    "bench": "compare plans on a file of prompts: equality first, then time",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hierspec",
        description="Language models write faster without changing what they write.",
        epilog='example: hierspec generate -p "Why is the sky blue?" --colour --check',
    )
    parser.add_argument("--version", action="version", version=f"hierspec {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = import_module(f"hierspec.cli.{name}")
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except HierspecError as error:
        print(f"hierspec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nhierspec: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
