"""Measure what formats of weights cost: perplexity on a text, and how often the best token is another one.

The text is cut into windows of 1,024 tokens that overlap by half. The second half of each is scored, so every token has
at least 512 before it. Perplexity is exp of the mean of -ln p; intervals are 95% bootstrap intervals. Each format is
also compared with float32 (with the first, where float32 is left out) on the same tokens.

examples:
  hierspec bench perplexity --text book.txt --output perplexity.json
  hierspec bench perplexity MODEL --text book.txt --weights float32,int8,int4 --tokens 32768
"""

from __future__ import annotations

import argparse
import hashlib
from typing import TYPE_CHECKING

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.files import InputFile
from hierspec.cli.report import Report, command_line
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_text, refusal
from hierspec_bench.cli import common

if TYPE_CHECKING:
    from hierspec_bench.perplexity import Measured

_DTYPES = ("float32", "bfloat16", "float16")
_COMPILED = ("int8", "int4", "file")
_LEAST_WINDOW = 4  # tokens
_USUAL = ("float32", "bfloat16", *_COMPILED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = f"{', '.join(_USUAL)}, separated by commas (default: all that run here)"
    options.add_model(parser, weights_help=help_text, enlarged=False)
    parser.add_argument("--text", type=InputFile, required=True, metavar="FILE", help="plain text, such as a book")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="that are scored (default 8192)")
    help_text = "tokens of a window (default 1024, or the model's context where that is smaller)"
    parser.add_argument("--window", type=int, metavar="N", help=help_text)
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "tokens")
    if arguments.window is not None and arguments.window < _LEAST_WINDOW:
        raise HierspecError(f"--window must be at least {_LEAST_WINDOW}, not {arguments.window}.")
    text = read_text(arguments.text, refusal(arguments.text, "give a file of plain text"))
    formats = _chosen_formats(arguments)
    import torch

    from hierspec.machine import machine
    from hierspec_bench.perplexity import compare
    from hierspec_bench.provenance import versions

    text = text.replace("\r\n", "\n")  # as Python reads text; otherwise line ends would be much of what is scored
    measured = [_measured(arguments, weights, text) for weights in formats]
    name, compared = measured[0][0], compare([format for _, format in measured])
    report = Report.of(arguments)
    report.table(
        f"{name} on {arguments.text.name}: {compared['tokens']:,} tokens, windows of {compared['window']:,}",
        ("weights", "MB", "perplexity", "95% interval", f"over {compared['reference']}", "same best"),
        [
            (
                item["weights"],
                f"{item['weight_megabytes']:.0f}",
                f"{item['perplexity']:.3f}",
                "{:.2f} to {:.2f}".format(*item["perplexity_interval"]),
                f"{item['ratio']:.4f}",
                f"{100 * item['same_best']:.1f}%",
            )
            for item in compared["formats"]
        ],
    )
    file = {"text": arguments.text.name, "text_sha256": hashlib.sha256(arguments.text.read_bytes()).hexdigest()}
    about = {"command": command_line(), "model": name, "threads": torch.get_num_threads(), "versions": versions()}
    report.document({"machine": machine(), **about, **file, **compared}, arguments.output)
    return 0


def _measured(arguments: argparse.Namespace, weights: str, text: str) -> tuple[str, Measured]:
    """The model's name and its scores. The model is freed on return, so that only one is in memory at a time."""
    from hierspec_bench.perplexity import measure

    model = options.load_model(argparse.Namespace(**{**vars(arguments), "weights": weights}))
    with progress_bars() as progress:
        return model.name, measure(model, text, arguments.tokens, arguments.window, progress)


def _chosen_formats(arguments: argparse.Namespace) -> list[str]:
    """The formats of --weights, or all that run here: checked before anything is loaded."""
    if arguments.weights == "auto":
        return [weights for weights in _USUAL if not _refusal(arguments, weights)]
    formats = options.names(arguments.weights)
    if not formats or len({*formats}) < len(formats):
        what = "names one twice" if formats else "names none"
        raise HierspecError(f"--weights {what}: {arguments.weights!r}; give some of {', '.join(_USUAL)}.")
    for weights in formats:
        if weights not in (*_DTYPES, *_COMPILED):
            raise HierspecError(f"There are no weights {weights!r}; give some of {', '.join(_USUAL)}.")
        if reason := _refusal(arguments, weights):
            raise HierspecError(f"--weights {weights} cannot be measured here: {reason}; leave it out.")
    return formats


def _refusal(arguments: argparse.Namespace, weights: str) -> str:
    """Why a model cannot run in this format; "" if it can, or if the model must be fetched to know."""
    import torch

    from hierspec.assembly.opening import why_not_compiled
    from hierspec.checkpoints.load import find_source, known_config, stored_in_blocks

    find_source(arguments.model)
    if weights == "file" and not stored_in_blocks(arguments.model):
        return f"{arguments.model} is no GGUF file"
    config = known_config(arguments.model)
    if config is None or (weights in _DTYPES and not arguments.backend.startswith("compiled")):
        return ""
    gpu = arguments.device == "auto" and torch.cuda.is_available()
    reason = why_not_compiled(
        config, weights, "cuda" if gpu else arguments.device.replace("auto", "cpu"), arguments.backend
    )
    return f"it needs the compiled backend ({reason})" if reason else ""
