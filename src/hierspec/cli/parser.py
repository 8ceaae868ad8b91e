"""The parser of every command: no abbreviated options, and a mistake is one sentence."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from hierspec.cli.status import USER_ERROR

# What argparse says, and how we say it. Versions of Python differ in quotes, so these match loosely.
_SENTENCES = (
    (r"argument (\S+): invalid int value: (.*)", r"\1 takes a whole number, not \2"),
    (r"argument (\S+): invalid float value: (.*)", r"\1 takes a number, not \2"),
    (
        r"argument (?:COMMAND|ACTION): invalid choice: (.*) \(choose from (.*)\)",
        r"There is no command \1; choose from \2",
    ),
    (r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", r"\1 cannot be \2; choose from \3"),
    (r"argument (\S+): expected one argument", r"\1 needs a value"),
    (r"argument (\S+): expected at least one argument", r"\1 needs a value"),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value, but has \2"),
    (r"argument (\S+): not allowed with argument (\S+)", r"\1 cannot be given together with \2"),
    (r"the following arguments are required: (.*)", r"\1 is missing"),
    (r"argument (\S+): (.*)", r"\1 \2"),
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence on standard error, with exit status 2."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # Here and not in `parse_args`, which only the outermost parser calls: the sentence names the command.
        chosen, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return chosen, []

    def error(self, message: str) -> NoReturn:
        for pattern, sentence in _SENTENCES:
            if match := re.fullmatch(pattern, message, re.DOTALL):
                message = match.expand(sentence)
                break
        refuse(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")
        raise SystemExit(USER_ERROR)

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"{argument!r} is one argument too many"
        name = argument.partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        nearest = difflib.get_close_matches(name, options, n=1)
        return f"There is no option {name}" + (f" (did you mean {nearest[0]}?)" if nearest else "")


def refuse(sentence: str) -> None:
    """Says on standard error what is wrong. Names in it may hold line ends, or what a terminal would obey."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in sentence)
    print(f"hierspec: {shown}", file=sys.stderr)


def add_commands(parser: argparse.ArgumentParser, dest: str, metavar: str) -> argparse._SubParsersAction[Any]:
    """Where the commands below this one are added."""
    return parser.add_subparsers(dest=dest, metavar=metavar, required=True)


def add_command(
    commands: argparse._SubParsersAction[Any], name: str, summary: str, module: ModuleType
) -> argparse.ArgumentParser:
    """A command that is a module: its docstring is the help, with examples; `add_arguments` and `run` do the rest."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=module.__doc__)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def completes(action: argparse.Action, words: Iterable[str], files: bool = False) -> None:
    """Words that a shell may complete the value of this option to, and whether also names of files."""
    action.completion = (tuple(words), files)  # type: ignore[attr-defined]


def is_text(value: str) -> bool:
    """Whether this came from UTF-8. Other bytes arrive as lone surrogates, which no tokenizer reads."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def text(value: str) -> str:
    """A text from the command line."""
    if not is_text(value):
        raise argparse.ArgumentTypeError("is not UTF-8 text")
    return value


def name(value: str) -> str:
    """What may be the name of a file or folder. It need not exist, but the system must be able to look for it."""
    if "\0" in value:
        raise argparse.ArgumentTypeError("holds a NUL, which no name does")
    try:
        os.stat(value)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError("is too long for a name") from None
    return value
