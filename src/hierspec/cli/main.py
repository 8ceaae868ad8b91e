"""`hierspec`: find the command, run it, turn what goes wrong into one sentence and an exit status."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points

from hierspec import __version__
from hierspec.cli.files import check_files
from hierspec.cli.old_spellings import new_spelling
from hierspec.cli.parser import Parser, add_command, add_commands, refuse
from hierspec.cli.status import CLOSED_PIPE, DIFFERENT, INTERRUPTED, USER_ERROR
from hierspec.core.errors import DifferentTexts, HierspecError

COMMANDS = {
    "generate": "stream a model's answer to a prompt",
    "chat": "talk to a model",
    "serve": "serve a model to OpenAI's clients, curl and browsers",
    "plan": "find the hierarchy of tiers that should be fastest",
    "store": "build, look at and drop token databases",
    "train": "train exits and drafts for a model, or find layers it can skip",
    "cache": "list what the cache holds, and delete from it",
    "completion": "print a script that makes a shell complete commands",
}
# Commands of other packages: functions of their arguments, which entry points of this group name. A module that has
# `make_parser` beside its function is completed by shells too.
GROUP = "hierspec.commands"
EXTRAS = {"bench": "compare plans on a file of prompts: equality first, then time"}


def main(arguments: list[str] | None = None) -> int:
    return run_safely(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in EXTRAS or (name and not name.startswith("-") and name not in COMMANDS and _entry_points(name)):
        return int(_of_another_package(name)(arguments[1:]))
    parser = make_parser()
    return run_chosen(parser.parse_args(new_spelling(arguments, parser)))


def run_chosen(chosen: Namespace) -> int:
    check_files(chosen)
    return int(chosen.run(chosen))


def make_parser() -> ArgumentParser:
    parser = Parser(
        prog="hierspec",
        description="Language models write faster without changing what they write.",
        epilog='example: hierspec generate -p "Why is the sky blue?" --colour --check',
    )
    parser.add_argument("--version", action="version", version=f"hierspec {__version__}")
    commands = add_commands(parser, "command", "COMMAND")
    for name, summary in COMMANDS.items():
        add_command(commands, name, summary, import_module(f"hierspec.cli.{name}"))
    for name, summary in EXTRAS.items():
        commands.add_parser(name, help=summary)
    return parser


def extra_parsers() -> dict[str, ArgumentParser]:
    """The parsers of commands of other packages that are installed."""
    parsers = {}
    for name in EXTRAS:
        for entry_point in _entry_points(name):
            with suppress(ImportError, AttributeError):
                parsers[name] = import_module(entry_point.module).make_parser()
    return parsers


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


def run_safely(command: Callable[[], int]) -> int:
    """Its exit status. What goes wrong becomes one sentence on standard error."""
    _prepare_streams()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can still be told from a defect
    except DifferentTexts as error:
        _refuse(str(error))
        return DIFFERENT
    except HierspecError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("\nhierspec: stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        _discard_output()
        return CLOSED_PIPE
    except MemoryError:
        return _refuse("There is not enough memory for this; close other programs, or lower --kv-memory.")
    except OSError as error:
        _discard_output()
        where = error.filename if isinstance(error.filename, str) else "A file or standard output"
        return _refuse(f"{where} cannot be read or written ({error.strerror or 'an error of the system'}).")


def run_script(
    document: str | None,
    add_arguments: Callable[[ArgumentParser], None],
    run: Callable[[Namespace], int],
    arguments: list[str] | None = None,
) -> int:
    """The same for a script with a command line of its own; `document` is its docstring."""
    parser = Parser(description=document)
    add_arguments(parser)
    parser.set_defaults(run=run)
    return run_safely(lambda: run_chosen(parser.parse_args(arguments)))


def _refuse(sentence: str) -> int:
    refuse(sentence)
    return USER_ERROR


def _prepare_streams() -> None:
    """Letters that a terminal's encoding lacks are shown as escapes; a stream that was closed swallows everything."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


def _discard_output() -> None:
    """So that the interpreter does not complain when it flushes what nobody will read."""
    with suppress(OSError, ValueError):  # of a test there is no such file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
