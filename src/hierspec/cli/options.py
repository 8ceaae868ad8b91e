"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli.console import progress_bars
from hierspec.core.errors import HierspecError
from hierspec.core.plan import NAMED, Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.progress import Timings

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.stores import Home
    from hierspec.text.tokenizer import Tokenizer

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_model(parser: argparse.ArgumentParser, name: str = "model") -> None:
    optional: dict[str, Any] = {"nargs": "?"} if name == "model" else {}
    parser.add_argument(
        name, metavar="MODEL", help="a model folder, a GGUF file or a hub name (default: SmolLM2-135M)", **optional
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16 or auto (on a CPU: the faster, as measured)"
    )
    group.add_argument("--device", default="auto", help="cpu, cuda or auto")
    group.add_argument("--backend", default="auto", help="compiled (CPU), compiled-vectors, torch or auto")
    group.add_argument("--weights", default="auto", help="auto (as dtype says), int8 or int4 (CPU, compiled backend)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    group.add_argument("--stores", type=Path, metavar="DIR", help="folder of its databases (default: in the cache)")
    group.add_argument(
        "--pack", metavar="DIR", help="trained exits and drafters (default: the shipped ones; none: without any)"
    )
    group.add_argument("--kv-memory", default="4G", metavar="SIZE", help="most memory for the KV cache (default 4G)")


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """The same as an option, for commands whose arguments are other things."""
    add_model(parser, "--model")


def add_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    group.add_argument("--plan", default="auto", help=f"auto (default), {', '.join(NAMED)}, or a TOML file")
    group.add_argument("--exit", type=int, metavar="LAYER", help="add a tier: the model's own exit after LAYER layers")
    group.add_argument(
        "--draft",
        metavar="MODEL",
        help='add a tier: a draft model with the same vocabulary, or "feature" (the pack\'s)',
    )
    group.add_argument("--gather", type=int, default=4, metavar="N", help="draft length of those tiers (default 4)")


def add_sampling(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """`several`: --temperature may be a list; `chosen_samplings` then gives one sampling for each."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N")
    if several:
        group.add_argument(
            "--temperature", default="0", metavar="T,…", help="0 is greedy (default); several, such as 0,0.8,1: each"
        )
    else:
        group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--seed", type=int, default=None, metavar="N", help="the same seed gives the same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")


def load_model(arguments: argparse.Namespace, timings: Timings | None = None) -> LanguageModel:
    """The model that the options name, with progress on stderr. torch is imported here, not for --help."""
    timings = timings or Timings()
    _start_compiling(arguments)
    import torch

    from hierspec.language_model import load

    kv_memory = parse_size(arguments.kv_memory)
    source = arguments.model
    if source is None and str(getattr(arguments, "plan", "")).endswith(".toml"):
        source = Plan.read(arguments.plan).model
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise HierspecError(f"--threads must be at least 1, not {arguments.threads}.")
        torch.set_num_threads(arguments.threads)
    timings.add("set-up")
    with progress_bars() as progress:
        model = load(
            source,
            dtype=arguments.dtype,
            device=arguments.device,
            backend=arguments.backend,
            weights=arguments.weights,
            kv_memory=kv_memory,
            stores=arguments.stores,
            pack=arguments.pack,
            progress=timings.reporting(progress),
        )
    timings.add("load")
    return model


def _start_compiling(arguments: argparse.Namespace) -> None:
    """Before torch is imported, which takes seconds too; where it is likely that a CPU will run the model."""
    likely = arguments.device == "cpu" or (arguments.device == "auto" and not Path("/dev/nvidiactl").exists())
    if likely and arguments.backend != "torch":
        from hierspec.assembly.ahead import start_compiling

        greedy = str(getattr(arguments, "temperature", 0)) in ("0", "0.0")
        start_compiling(stores=getattr(arguments, "plan", "") != "plain", sampling=not greedy)


def load_home(arguments: argparse.Namespace) -> tuple[Tokenizer, int, Home]:
    """What a model's databases need: its tokenizer, the size of its vocabulary, and where they lie."""
    from hierspec.assembly.vocabulary import open_home

    with progress_bars() as progress:
        return open_home(arguments.model, arguments.stores, progress)


def chosen_plan(model: LanguageModel, arguments: argparse.Namespace) -> Plan:
    """The named plan or file, with the tiers that options add below it."""
    added = []
    if arguments.draft is not None:
        added.append(TierPlan(draft=arguments.draft, gather=arguments.gather))
    if arguments.exit is not None:
        added.append(TierPlan(exit_layer=arguments.exit, gather=arguments.gather))
    # Tiers that were asked for replace those that `auto` would choose.
    plan = model.plan("lookup" if added and arguments.plan == "auto" else arguments.plan)
    return replace(plan, tiers=(*plan.tiers, *added))


def chosen_sampling(arguments: argparse.Namespace) -> Sampling:
    names = [field.name for field in fields(Sampling) if hasattr(arguments, field.name)]
    return Sampling(**{name: getattr(arguments, name) for name in names})


def chosen_samplings(arguments: argparse.Namespace) -> list[Sampling]:
    """One for each temperature."""
    try:
        temperatures = [float(part) for part in arguments.temperature.split(",")]
    except ValueError:
        raise HierspecError(
            f"--temperature takes numbers separated by commas, not {arguments.temperature!r}."
        ) from None
    if len(set(temperatures)) < len(temperatures):
        raise HierspecError(f"--temperature names one twice: {arguments.temperature}.")
    return [
        chosen_sampling(argparse.Namespace(**{**vars(arguments), "temperature": temperature}))
        for temperature in temperatures
    ]


def parse_size(text: str) -> int:
    """Bytes from 500M, 4G and the like."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise HierspecError(f"{text!r} is not a size; write it like 500M or 4G.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def numbers(option: str, text: str) -> list[int]:
    """Layer numbers of an option, separated by commas."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise HierspecError(f"{option} takes layer numbers separated by commas, not {text!r}.") from None
