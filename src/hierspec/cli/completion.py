"""Print a script that makes a shell complete commands, options and names of plans.

examples:
  hierspec completion bash > ~/.local/share/bash-completion/completions/hierspec
  hierspec completion zsh > ~/.zfunc/_hierspec        (a folder of fpath, before compinit)
  hierspec completion fish > ~/.config/fish/completions/hierspec.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from hierspec.cli import completion_scripts

SHELLS = {
    "bash": completion_scripts.bash,
    "zsh": completion_scripts.zsh,
    "fish": completion_scripts.fish,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    from hierspec.cli.main import extra_parsers, make_parser

    words = list(command_words("", make_parser(), extra_parsers()))
    print(SHELLS[arguments.shell](words), end="")
    return 0


def command_words(
    path: str, parser: argparse.ArgumentParser, extras: dict[str, argparse.ArgumentParser]
) -> Iterator[completion_scripts.Command]:
    """What can follow each command, this one first, read off the parsers. `extras` stand in for commands of other
    packages, of which the outermost parser knows only the names."""
    command = completion_scripts.Command(path)
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, subparser in action.choices.items():
                command.commands[name] = summaries.get(name, "")
                below.append((name, subparser if path else extras.get(name) or subparser))
            continue
        words, files = _values(action)
        if not action.option_strings:
            command.words += words
            command.files |= files
            continue
        summary = "" if action.help in (None, argparse.SUPPRESS) else str(action.help) % {"prog": parser.prog}
        command.options.append(
            completion_scripts.Option(tuple(action.option_strings), summary, action.nargs != 0, words, files)
        )
    yield command
    for name, subparser in below:
        yield from command_words(f"{path} {name}".strip(), subparser, extras)


def _values(action: argparse.Action) -> tuple[tuple[str, ...], bool]:
    """Words that the value may be, and whether it may be the name of a file."""
    if (declared := getattr(action, "completion", None)) is not None:
        words, files = declared
        return tuple(words), bool(files)
    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices), False
    return (), isinstance(action.type, type) and issubclass(action.type, Path)
