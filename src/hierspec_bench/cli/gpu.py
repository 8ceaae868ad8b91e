"""Measure a GPU in one unattended run: its limits, passes by shape and width, plans, batches and other engines.

The model runs as it is, and enlarged to the cost of larger ones (docs/own-model.md). Parts come in the order of what
they matter; when time is up nothing new is begun, and with --output the file has what was measured so far at any
time. Plans are compared with plain decoding of the same run, text first. The document goes to standard output, and
tables after it to standard error. Exits with 1 where a plan wrote another text and no tie explains it.

examples:
  hierspec bench gpu --seconds 520 --output gpu.json
  hierspec bench gpu --enlarged 8B,32B --plans eagle+,auto --temperature 0
  hierspec bench gpu ./tiny --device cpu --seconds 60 --shapes tiny --enlarged hidden=128
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.options import names
from hierspec.cli.parser import completes, name, text
from hierspec.cli.report import Report, command_line, write_document
from hierspec.cli.status import DIFFERENT
from hierspec.core.errors import HierspecError
from hierspec_bench.cli import common

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel

_PARTS = ("roofline", "passes", "plans", "batches", "engines")
_MOST_SECONDS, _LARGEST = 1e6, 1 << 16
_PLANS = "lookup,hd+,draft,eagle,eagle+,layerskip,hispec+,auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, enlarged=False)
    parser.add_argument("--seconds", type=float, default=520.0, metavar="S", help="for all of it (default 520)")
    common.add_prompts(parser)
    parser.set_defaults(limit=24)
    plans = parser.add_argument("--plans", default=_PLANS, help=f"plans or TOML files (default: {_PLANS})")
    completes(plans, options.PLANS, files=True)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of each answer (default 128)")
    parser.add_argument("--temperature", default="0,1", metavar="T,…", help="each on its own (default 0,1)")
    parser.add_argument(
        "--batch", default="1,4,16,64", metavar="N,…", help='prompts at once (default 1,4,16,64; "": none)'
    )
    parser.add_argument(
        "--enlarged",
        type=text,
        default="8B",
        metavar="SIZES",
        help='sizes to run the model at too (default 8B; "": none)',
    )
    parser.add_argument("--only-enlarged", action="store_true", help="not at the model's own size")
    parser.add_argument(
        "--shapes", default="default,8B", metavar="NAMES", help="of passes: default, 1B, 8B (default: default,8B)"
    )
    parser.add_argument("--contexts", default="128,2048", metavar="N,…", help="before passes (default 128,2048)")
    parser.add_argument(
        "--widths", default="1,2,4,8,16,32,64", metavar="N,…", help="tokens of passes (default 1 to 64)"
    )
    engines = parser.add_argument(
        "--engines",
        default="vllm,transformers",
        metavar="NAMES",
        help="other engines beside ours, where they can be imported: vllm, vllm-exact (its batch-invariant mode), "
        'transformers (default vllm,transformers; "": none)',
    )
    completes(engines, ("vllm", "vllm-exact", "transformers"))
    parser.add_argument(
        "--engine-python",
        type=name,
        default="",
        metavar="FILE",
        help="a Python that can import them (default: this one)",
    )
    parts = parser.add_argument(
        "--parts", default=",".join(_PARTS), metavar="NAMES", help=f"only some of {', '.join(_PARTS)}"
    )
    completes(parts, _PARTS)
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.seconds <= _MOST_SECONDS:
        raise HierspecError(f"--seconds must be more than 0 and at most {_MOST_SECONDS:g}, not {arguments.seconds:g}.")
    options.at_least_one(arguments, "max-tokens")
    temperatures = [sampling.temperature for sampling in options.chosen_samplings(arguments)]
    numbers = {option: _numbers(option, getattr(arguments, option)) for option in ("batch", "contexts", "widths")}
    plans = common.chosen_plans(arguments)
    parts, engines = names(arguments.parts), names(arguments.engines)
    if wrong := [part for part in parts if part not in _PARTS]:
        raise HierspecError(f"There is no part {wrong[0]!r}; choose some of {', '.join(_PARTS)}.")
    _, prompts = common.chosen_prompts(arguments)
    import torch

    from hierspec.checkpoints.larger_sizes import read_sizes
    from hierspec_bench.gpu.bench import GpuBench, Settings
    from hierspec_bench.gpu.engines import gpu_engines
    from hierspec_bench.gpu.random_models import shape_config
    from hierspec_bench.gpu.table import show

    gpu_engines(engines, torch.device("cpu"), "float32", arguments.engine_python)  # raises for unknown names
    for shape in names(arguments.shapes):
        shape_config(shape)
    sizes = _sizes(arguments.enlarged)
    for size in sizes:
        read_sizes(size)
    if arguments.only_enlarged and not sizes:
        raise HierspecError("--only-enlarged leaves nothing to measure without a size in --enlarged.")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        raise HierspecError("There is no CUDA GPU here; --device cpu runs all of it on the CPU, for tests.")
    settings = Settings(
        device=torch.device("cuda" if arguments.device == "auto" else arguments.device),
        seconds=arguments.seconds,
        prompts=prompts,
        plans=plans,
        sizes=sizes if arguments.only_enlarged else ("", *sizes),
        temperatures=temperatures,
        batches=numbers["batch"],
        max_tokens=arguments.max_tokens,
        shapes=names(arguments.shapes),
        contexts=numbers["contexts"],
        widths=numbers["widths"],
        engines=engines,
        engine_python=arguments.engine_python,
        parts=parts,
    )

    def load(size: str) -> LanguageModel:
        return options.load_model(argparse.Namespace(**{**vars(arguments), "enlarged": size}), plans=plans)

    bench = GpuBench(settings, load, {"command": command_line()})

    def keep() -> None:
        if arguments.output is not None:
            write_document(bench.document, arguments.output)

    with progress_bars() as progress:
        bench.run(progress, keep)
    report = Report.of(arguments)
    report.document(bench.document)
    show(bench.document, report)
    return DIFFERENT if bench.different else 0


def _sizes(listed: str) -> list[str]:
    """Sizes by name, separated by commas, or a single list of differing sizes, which also contains commas."""
    return [listed] if "=" in listed else names(listed)


def _numbers(option: str, listed: str) -> list[int]:
    try:
        numbers = [int(part) for part in names(listed)]
    except ValueError:
        numbers = [0]
    if not all(1 <= number <= _LARGEST for number in numbers):
        raise HierspecError(
            f"--{option} takes numbers from 1 to {_LARGEST:,}, separated by commas, not {listed[:40]!r}."
        )
    return numbers
