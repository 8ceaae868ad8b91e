"""`hierspec`: find the command, run it, turn what goes wrong into one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points

from hierspec import __version__
from hierspec.core.errors import HierspecError

COMMANDS = {
    "generate": "stream a model's answer to a prompt",
    "chat": "talk to a model",
    "store": "build, look at and drop token databases",
    "train": "train exits and drafts for a model, or find layers it can skip",
    "plan": "find the hierarchy of tiers that should be fastest",
}
# Commands of other packages: functions of their arguments, which entry points of this group name.
GROUP = "hierspec.commands"
EXTRAS = {"bench": "compare plans on a file of prompts: equality first, then time"}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if name in EXTRAS or (name and not name.startswith("-") and name not in COMMANDS and _entry_points(name)):
        return run_safely(lambda: _of_another_package(name)(arguments[1:]))
    chosen = _parser().parse_args(arguments)
    return run_safely(lambda: int(chosen.run(chosen)))


def _entry_points(name: str) -> EntryPoints:
    return entry_points(group=GROUP, name=name)


def _of_another_package(name: str) -> Callable[[list[str]], int]:
    reason = "it is not installed"
    for entry_point in _entry_points(name):
        try:
            command: Callable[[list[str]], int] = entry_point.load()
        except ImportError as error:
            reason = str(error)
        else:
            return command
    raise HierspecError(f"The command {name} cannot run ({reason}); install it with: pip install 'hierspec[{name}]'")


def _parser() -> argparse.ArgumentParser:
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
    for name, summary in EXTRAS.items():
        commands.add_parser(name, help=summary)
    return parser


def run_safely(command: Callable[[], int]) -> int:
    """Its exit status. What goes wrong becomes one sentence on standard error."""
    try:
        return command()
    except HierspecError as error:
        print(f"hierspec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nhierspec: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run_script(
    document: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    arguments: list[str] | None = None,
) -> int:
    """The same for a script with a command line of its own; `document` is its docstring."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    chosen = parser.parse_args(arguments)
    return run_safely(lambda: run(chosen))


if __name__ == "__main__":
    sys.exit(main())
