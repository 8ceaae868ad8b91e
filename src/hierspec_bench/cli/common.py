"""What several commands of the bench share: options, prompts, and the beginning of every record."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.files import OutputFile
from hierspec.cli.options import names
from hierspec.cli.parser import completes, name
from hierspec.cli.report import command_line
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompts import BenchPrompt


def add_prompts(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument(
        "--prompts",
        type=name,
        metavar="SET",
        help="own (default: 36 that ship), spec-bench, or a file of JSON lines with task and turns",
    )
    completes(prompts, ("own", "spec-bench"), files=True)
    options.add_limit(parser)


def add_plans(parser: argparse.ArgumentParser) -> None:
    help_text = "plans or TOML files, separated by commas (default: auto)"
    completes(parser.add_argument("--plans", default="auto", help=help_text), options.PLANS, files=True)


def add_baselines(parser: argparse.ArgumentParser, which: str) -> None:
    parser.add_argument("--peers", "--baselines", default="", metavar="NAMES", help=which)


def add_load(parser: argparse.ArgumentParser, rounds: int) -> None:
    """How many clients make how many calls, `rounds` times by default."""
    parser.add_argument("--clients", default="1,4,16,64", metavar="N,…", help="clients at once (default 1,4,16,64)")
    rounds_help = f"interleaved repetitions (default {rounds})"
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help=rounds_help)
    parser.add_argument("--calls", type=int, default=16, metavar="N", help="per measurement, at least (default 16)")
    parser.add_argument("--each", type=int, default=3, metavar="N", help="calls of each client, at least (default 3)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer (default 64)")


def chosen_clients(arguments: argparse.Namespace) -> list[int]:
    """The numbers of --clients. All options of `add_load` are checked."""
    options.at_least_one(arguments, "rounds", "max-tokens", "calls", "each")
    try:
        counts = [int(count) for count in names(arguments.clients)]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise HierspecError(f"--clients must be numbers from 1 up, separated by commas, not {arguments.clients!r}.")
    return counts


def add_output(parser: argparse.ArgumentParser, more: str = "") -> None:
    help_text = f"write the JSON document to a file too{more}"
    parser.add_argument("--output", type=OutputFile, metavar="FILE", help=help_text)
    options.add_json(parser)


def chosen_prompts(arguments: argparse.Namespace) -> tuple[str, list[BenchPrompt]]:
    """The name of the prompt set, and its prompts."""
    from hierspec.prompt_sets import find_prompts
    from hierspec.prompts import spread

    options.at_least_one(arguments, "limit")
    with progress_bars() as progress:
        title, prompts = find_prompts(arguments.prompts, progress)
    return title, prompts if arguments.limit is None else spread(prompts, arguments.limit)


def chosen_plans(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The names and files of --plans, each checked before a model is loaded."""
    for plan in (plans := names(arguments.plans)):
        options.read_plan(options.usable_name("--plans", plan))
    return tuple(plans)


def about_model(model: LanguageModel) -> dict[str, Any]:
    return {
        "command": command_line(),
        "model": model.name,
        **({"enlarged": model.enlarged} if model.enlarged else {}),
        "dtype": model.dtype,
        "weights": model.weights,
        "decoder": type(model.decoder).__name__,
        "products": model.decoder.products,
        "dtype_seconds": dict(model.dtype_choice.seconds),
    }


def batch_sizes(option: str, listed: str) -> list[int]:
    """Prompts at once, separated by commas."""
    try:
        sizes = [int(size) for size in names(listed)]
    except ValueError as error:
        raise HierspecError(f"{option} must be numbers separated by commas, not {listed!r}.") from error
    if any(size < 1 for size in sizes):
        raise HierspecError(f"{option} must be at least 1, not {listed}.")
    return sizes
