"""What several commands of the bench share: options, prompts, and the beginning of every record."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli.console import command_line, progress_bars
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompts import BenchPrompt


def add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        metavar="SET",
        help="own (default: 36 that ship), spec-bench, or a file of JSON lines with task and turns",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")


def add_plans(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plans", default="auto", help="plans or TOML files, separated by commas (default: auto)")


def add_baselines(parser: argparse.ArgumentParser, which: str) -> None:
    parser.add_argument("--peers", "--baselines", default="", metavar="NAMES", help=which)


def add_output(parser: argparse.ArgumentParser, more: str = "") -> None:
    help_text = f"write the JSON document to a file too{more}"
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--json", action="store_true", help="only the JSON document, no table")


def chosen_prompts(arguments: argparse.Namespace) -> tuple[str, list[BenchPrompt]]:
    """The name of the prompt set, and its prompts."""
    from hierspec.prompt_sets import find_prompts
    from hierspec.prompts import spread

    at_least_one(arguments, "limit")
    with progress_bars() as progress:
        name, prompts = find_prompts(arguments.prompts, progress)
    return name, prompts if arguments.limit is None else spread(prompts, arguments.limit)


def at_least_one(arguments: argparse.Namespace, option: str) -> None:
    number = getattr(arguments, option)
    if number is not None and number < 1:
        raise HierspecError(f"--{option} must be at least 1, not {number}.")


def names(text: str) -> list[str]:
    """What an option lists, separated by commas."""
    return [name for name in text.split(",") if name]


def about_model(model: LanguageModel) -> dict[str, Any]:
    return {
        "command": command_line(),
        "model": model.name,
        "dtype": model.dtype,
        "weights": model.weights,
        "decoder": type(model.decoder).__name__,
        "products": model.decoder.products,
        "dtype_seconds": dict(model.dtype_choice.seconds),
    }
