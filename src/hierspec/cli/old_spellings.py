"""How commands were spelled before MODEL had one place, right after the command. Old spellings work, with a hint."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

_CORPUS = ["store", "build", "corpus"]


def new_spelling(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments as they are spelled today, with a hint on standard error where that differs."""
    words, parser = _command(arguments, parser)
    command, rest = arguments[:words], arguments[words:]
    model: list[str] = []
    if not any("--model" in action.option_strings for action in parser._actions):
        model, rest = _without_model(rest)
    files: list[str] = []
    if command == _CORPUS and "--files" not in rest:
        while rest and not rest[0].startswith("-") and not _is_model(rest[0]):
            files.append(rest.pop(0))
    spelled = [*command, *model, *(["--files", *files] if files else []), *rest]
    if spelled != arguments:
        print(f"hierspec: this is now spelled: {shlex.join(['hierspec', *spelled])}", file=sys.stderr)
    return spelled


def _command(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[int, argparse.ArgumentParser]:
    """How many of the first arguments name the command, and its parser."""
    count = 0
    while subparsers := next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None):
        if count >= len(arguments) or arguments[count] not in subparsers.choices:
            break
        parser = subparsers.choices[arguments[count]]
        count += 1
    return count, parser


def _without_model(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What --model names, and the other arguments."""
    for index, argument in enumerate(arguments):
        if argument == "--model" and index + 1 < len(arguments):
            return [arguments[index + 1]], [*arguments[:index], *arguments[index + 2 :]]
        if argument.startswith("--model="):
            return [argument.removeprefix("--model=")], [*arguments[:index], *arguments[index + 1 :]]
    return [], arguments


def _is_model(text: str) -> bool:
    try:
        return text.endswith(".gguf") or Path(text).is_dir()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL: the parser will say so
        return False
