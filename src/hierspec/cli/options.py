"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hierspec.cli.console import progress_bars
from hierspec.cli.files import Folder, InputFile
from hierspec.cli.history import add_history, chosen_history
from hierspec.cli.parser import completes, name, text
from hierspec.core.errors import HierspecError
from hierspec.core.plan import NAMED, Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.progress import Timings
from hierspec.sizes import parse_size

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompts import BenchPrompt
    from hierspec.stores import Home
    from hierspec.text.tokenizer import Tokenizer

PLANS = ("auto", *NAMED)
_PACK_DRAFTS = ("feature", "small")
_NO_PACK = "none"
_MOST_THREADS = 1024


def add_source(parser: argparse.ArgumentParser) -> None:
    """MODEL, which stands right after the command everywhere."""
    action = parser.add_argument(
        "model",
        nargs="?",
        type=name,
        metavar="MODEL",
        help="a model folder, a GGUF file or a hub name (default: SmolLM2-135M)",
    )
    completes(action, ("default", "default-ee"), files=True)


def add_stores_folder(parser: argparse._ActionsContainer) -> None:
    help_text = "folder of its databases (default: in the cache)"
    parser.add_argument("--stores", type=Folder, metavar="DIR", help=help_text)
    add_history(parser)


def add_device(parser: argparse._ActionsContainer) -> None:
    completes(parser.add_argument("--device", default="auto", help="cpu, cuda or auto"), ("auto", "cpu", "cuda"))


def add_model(parser: argparse.ArgumentParser, weights_help: str = "", enlarged: bool = True) -> None:
    """A model that runs: MODEL, and how.

    With `weights_help`, --weights is a list of formats that the command reads; then there is no --dtype.
    `enlarged`: whether the command makes sense for a model that is enlarged.
    """
    add_source(parser)
    group = parser.add_argument_group("model")
    if weights_help:
        group.set_defaults(dtype="auto")
    else:
        dtype = group.add_argument(
            "--dtype", default="auto", help="float32, bfloat16, float16 or auto (on a CPU: the faster, as measured)"
        )
        completes(dtype, ("auto", "float32", "bfloat16", "float16"))
    add_device(group)
    backend = group.add_argument(
        "--backend", default="auto", help="compiled (CPU), compiled-vectors, cuda (GPU), torch or auto"
    )
    completes(backend, ("auto", "compiled", "compiled-vectors", "torch", "cuda"))
    weights = group.add_argument(
        "--weights",
        default="auto",
        help=weights_help
        or "auto (a GGUF file's own bits on a CPU, else as dtype says), file, int8, int4, or float32 and the like",
    )
    completes(weights, ("auto", "file", "int8", "int4", "float32", "bfloat16"))
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    add_stores_folder(group)
    pack = group.add_argument(
        "--pack",
        type=name,
        metavar="DIR",
        help="trained exits and drafters (default: the shipped ones; none: without any)",
    )
    completes(pack, (_NO_PACK,), files=True)
    if enlarged:
        add_enlarged(group)
    else:
        group.set_defaults(enlarged="")
    group.add_argument("--kv-memory", default="4G", metavar="SIZE", help="most memory for the KV cache (default 4G)")
    group.add_argument(
        "--no-learnt", action="store_true", help="do not use or keep how often drafts were accepted in earlier runs"
    )


def add_enlarged(group: argparse._ActionsContainer) -> None:
    action = group.add_argument(
        "--enlarged",
        default="",
        type=text,
        metavar="SIZE",
        help="the same function at the cost of a larger model, to measure with: 1B, 8B, 32B or hidden=4096,heads=32,…",
    )
    completes(action, ("1B", "8B", "32B"))


def add_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    plan = group.add_argument(
        "--plan", type=name, default="auto", help=f"auto (default), {', '.join(NAMED)}, or a TOML file"
    )
    completes(plan, PLANS, files=True)
    group.add_argument("--exit", type=int, metavar="LAYER", help="add a tier: the model's own exit after LAYER layers")
    draft = group.add_argument(
        "--draft",
        type=name,
        metavar="MODEL",
        help='add a tier: a draft model with the same vocabulary, or "feature" (the pack\'s)',
    )
    completes(draft, _PACK_DRAFTS, files=True)
    group.add_argument("--gather", type=int, default=4, metavar="N", help="draft length of those tiers (default 4)")


def add_prompts_file(parser: argparse.ArgumentParser, help_text: str, required: bool = False) -> None:
    parser.add_argument("--prompts", type=InputFile, required=required, metavar="FILE", help=help_text)


def add_answered_prompts(
    parser: argparse.ArgumentParser, help_text: str, max_tokens: int, required: bool = False
) -> None:
    """Prompts from a file that the model answers. `chosen_prompts` reads them."""
    add_prompts_file(parser, help_text, required)
    add_limit(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"of each answer (default {max_tokens})"
    )


def chosen_prompts(arguments: argparse.Namespace) -> list[BenchPrompt] | None:
    """None: no file was given."""
    at_least_one(arguments, "limit", "max-tokens")
    if arguments.prompts is None:
        return None
    from hierspec.prompts import read_prompts, spread

    prompts = read_prompts(arguments.prompts)
    return prompts if arguments.limit is None else spread(prompts, arguments.limit)


def add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")


def add_json(parser: argparse.ArgumentParser, help_text: str = "") -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help=help_text or "a JSON document, no table (always so where standard output is no terminal)",
    )


def add_colour(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--colour", "--color", action="store_true", help="show which tier drafted each token")


def add_sampling(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """`several`: --temperature may be a list; `chosen_samplings` then gives one sampling for each."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of each answer (default 256)")
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
    group.add_argument(
        "--stop", type=text, action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )


def load_model(
    arguments: argparse.Namespace, *, plans: tuple[str, ...] | None = None, timings: Timings | None = None
) -> LanguageModel:
    """The model that the options name, with progress on stderr. torch is imported here, not for --help.

    Every name is looked at first: `plans` are those of the command, by default what --plan says.
    """
    kv_memory = parse_size(arguments.kv_memory)
    if arguments.threads is not None and not 1 <= arguments.threads <= _MOST_THREADS:
        raise HierspecError(f"--threads must be from 1 to {_MOST_THREADS}, not {arguments.threads}.")
    if plans is None:
        plans = (arguments.plan,) if "plan" in arguments else ()
    read = {plan: read_plan(plan) for plan in plans}
    source = arguments.model
    if source is None and len(plans) == 1 and (only := read[plans[0]]) is not None:
        source = only.model
    _check_pack(arguments.pack)
    history = chosen_history(arguments)
    _check_tiers(source, [*(plan for plan in read.values() if plan is not None), Plan(tiers=added_tiers(arguments))])
    timings = timings or Timings()
    _start_compiling(arguments)
    import torch

    from hierspec.language_model import load

    if arguments.threads is not None:
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
            history=history,
            pack=arguments.pack,
            enlarged=arguments.enlarged,
            keep_learnt=not arguments.no_learnt,
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
        return open_home(arguments.model, arguments.stores, progress, chosen_history(arguments))


def read_plan(plan: str) -> Plan | None:
    """A plan of a file, not fitted to a model; None for one by name, which suits every model."""
    if plan in PLANS:
        return None
    if plan.endswith(".toml") or Path(plan).is_file():
        return Plan.read(plan)
    return Plan.named(plan, layers=1)  # refuses the name


def added_tiers(arguments: argparse.Namespace) -> tuple[TierPlan, ...]:
    """Tiers that --draft and --exit add below a plan."""
    tiers = []
    if getattr(arguments, "draft", None) is not None:
        tiers.append(TierPlan(draft=arguments.draft, gather=arguments.gather))
    if getattr(arguments, "exit", None) is not None:
        tiers.append(TierPlan(exit_layer=arguments.exit, gather=arguments.gather))
    return tuple(tiers)


def chosen_plan(model: LanguageModel, arguments: argparse.Namespace) -> Plan:
    """The named plan or file, with the tiers that options add below it."""
    added = added_tiers(arguments)
    # Tiers that were asked for replace those that `auto` would choose.
    plan = model.plan("lookup" if added and arguments.plan == "auto" else arguments.plan)
    return replace(plan, tiers=(*plan.tiers, *added))


def prepare(model: LanguageModel, plan: Plan) -> None:
    """Opens what the plan needs, with progress: the first time on a machine its passes are timed, for some seconds."""
    with progress_bars() as progress:
        progress("Preparing the plan", 0, 1)
        model.hierarchy(plan)


def chosen_sampling(arguments: argparse.Namespace) -> Sampling:
    chosen = [field.name for field in fields(Sampling) if hasattr(arguments, field.name)]
    return Sampling(**{each: getattr(arguments, each) for each in chosen})


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


def at_least_one(arguments: argparse.Namespace, *options: str) -> None:
    for option in options:
        number = getattr(arguments, option.replace("-", "_"))
        if number is not None and number < 1:
            raise HierspecError(f"--{option} must be at least 1, not {number}.")


def names(listed: str) -> list[str]:
    """What an option lists, separated by commas."""
    return [each for each in listed.split(",") if each]


def usable_name(option: str, value: str) -> str:
    """One of the names that an option lists, if the system can look for a file of that name."""
    try:
        return name(value)
    except argparse.ArgumentTypeError as error:
        raise HierspecError(f"A name of {option} {error}.") from None


def numbers(option: str, listed: str) -> list[int]:
    """Layer numbers of an option, separated by commas."""
    try:
        return [int(part) for part in listed.split(",")] if listed else []
    except ValueError:
        raise HierspecError(f"{option} takes layer numbers separated by commas, not {listed!r}.") from None


def _check_pack(pack: str | None) -> None:
    if pack is not None and pack != _NO_PACK and not (Path(pack).expanduser() / "pack.json").is_file():
        raise HierspecError(f"{pack} is not a pack, it has no pack.json; name the folder of one, or {_NO_PACK}.")


def _check_tiers(source: str | None, plans: list[Plan]) -> None:
    """Drafts that are nowhere, and exits that a model which is on this machine has not."""
    tiers = [tier for plan in plans for tier in plan.tiers]
    if not tiers:
        return
    from hierspec.checkpoints.load import find_source, known_config

    for draft in {tier.draft for tier in tiers if tier.draft is not None} - {*_PACK_DRAFTS}:
        find_source(draft)
    layers = max((tier.exit_layer for tier in tiers if tier.exit_layer is not None), default=0)
    if layers and (config := known_config(source)) is not None and layers > config.layers:
        raise HierspecError(f"exit_layer {layers} does not exist: {source or 'the model'} has {config.layers} layers.")
