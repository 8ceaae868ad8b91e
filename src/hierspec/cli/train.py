"""Train what drafts for a model: early exits of it, or draft models beside it.

The model first writes conversations with itself (or answers --prompts), then the new parts learn from those and from
--text. The result is a pack: a folder that `--pack FOLDER` gives to generate, chat and bench. A stopped run resumes.

examples:
  hierspec train exits --layers 4,8 --minutes 20 --output my-pack
  hierspec train exits --recipe tuned --layers 4,8 --begin my-pack --text books/*.txt --output my-pack
  hierspec train draft --kind feature --minutes 20 --output my-pack
  hierspec train draft --kind feature --depth 2 --taps 8,16,24 --output my-pack
  hierspec train model --output ladder --minutes 30
  hierspec train skip --output skip.toml
  hierspec train measure --prompts prompts.jsonl --limit 60
  hierspec train prior --pack my-pack
  hierspec train text --conversations 1000 --output own.jsonl.gz
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hierspec.cli import options, train_measure, train_model, train_prior, train_skip, train_text
from hierspec.cli.console import note, progress_bars
from hierspec.cli.files import Folder, InputFile, OutputFolder
from hierspec.cli.parser import add_command, add_commands
from hierspec.cli.report import Report
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec.train.tuned import Exit

_EXITS = """Train exits of a model: adapters beside it, or an early-exit variant of it. A stopped run resumes.

examples:
  hierspec train exits --layers 4,8 --minutes 20 --output my-pack
  hierspec train exits ./my-model --recipe tuned --layers 4,8 --begin my-pack --text books/*.txt --output my-pack
  hierspec train exits --recipe tuned --layers 4,8 --depths 1,2 --exit-weights 0.5,1.5 --pulls 0,0.5 --output my-pack
"""
_DRAFT = """Train a draft that shares the model's embeddings and head. A stopped run resumes.

examples:
  hierspec train draft --kind feature --minutes 20 --output my-pack
  hierspec train draft ./my-model --kind feature --depth 2 --taps 8,16,24 --output my-pack
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = add_commands(parser, "part", "exits|draft|model|skip|measure|prior|text")
    help_text = "exits of the model: adapters beside it, or an early-exit variant of it"
    exits = parts.add_parser("exits", help=help_text, description=_EXITS)
    options.add_source(exits)
    exits.add_argument("--recipe", choices=("adapters", "tuned"), default="adapters", help="default: adapters")
    exits.add_argument("--layers", default="", metavar="N,N", help="default: near 1/8 and 1/4 of the depth")
    exits.add_argument(
        "--drift", type=float, default=0.075, help="tuned: nats a token that it may differ from the original (0.075)"
    )
    exits.add_argument(
        "--rank",
        default="128",
        metavar="N[,N,N]",
        help="tuned: rank of the change before the first exit (128), up to the last one (half), after it (a 16th)",
    )
    exits.add_argument(
        "--depths", default="", metavar="N,N", help="tuned: layers of each exit's adapter, 0 for a norm alone (1 each)"
    )
    exits.add_argument(
        "--exit-weights", default="", metavar="W,W", help="tuned: how much the loss of each exit counts (1 each)"
    )
    exits.add_argument(
        "--pulls", default="", metavar="W,W", help="tuned: how much each exit draws the last layer to itself (0.25)"
    )
    exits.add_argument(
        "--norm-layers", default="", metavar="N,N", help="tuned: more exits, each with a norm only (default none)"
    )
    help_text = "a draft that shares the model's embeddings and head"
    draft = parts.add_parser("draft", help=help_text, description=_DRAFT)
    options.add_source(draft)
    draft.add_argument("--kind", choices=("feature", "small"), default="feature", help="default: feature")
    draft.add_argument("--steps-ahead", type=int, default=4, metavar="N", help="feature: draft steps to train on (4)")
    draft.add_argument("--depth", type=int, metavar="N", help="number of its layers (default: feature 1, small 4)")
    draft.add_argument(
        "--taps",
        default="",
        metavar="N,N",
        help="feature: layers whose hidden states it reads besides the last (default none), such as 8,16,24",
    )
    for part in (exits, draft):
        _add_training(part)
        part.set_defaults(run=_train)
    help_text = "draft models of their own: few layers, narrow embeddings, the same token ids"
    add_command(parts, "model", help_text, train_model)
    help_text = "search for layers that the model can leave out when it drafts for itself (no training)"
    add_command(parts, "skip", help_text, train_skip)
    add_command(parts, "measure", "how often a pack's exits and drafts agree with their model, by task", train_measure)
    add_command(parts, "prior", "let a pack ship how often its drafts are accepted", train_prior)
    add_command(parts, "text", "let the model write text of its own, for a corpus", train_text)


def _add_training(part: argparse.ArgumentParser) -> None:
    """What exits and drafts have in common."""
    part.add_argument(
        "--begin",
        type=Folder,
        metavar="PACK",
        help="start from the same part of this pack (default: from layers of the model); tuned: from its variant, or "
        "from its adapters where it has none",
    )
    part.add_argument("--output", type=OutputFolder, required=True, metavar="FOLDER", help="the pack, made or added to")
    options.add_device(part)
    part.add_argument("--minutes", type=float, metavar="M", help="end after M minutes of training")
    part.add_argument("--steps", type=int, default=2000, metavar="N", help="end after N steps (default 2000)")
    part.add_argument("--batch", type=int, default=16, metavar="N", help="texts a step (default 16)")
    part.add_argument("--rate", type=float, metavar="R", help="learning rate (default 0.0006; tuned 0.001)")
    train_model.add_material(part)
    part.add_argument("--vocabulary", type=int, default=8192, metavar="N", help="draft vocabulary (default 8192)")
    part.add_argument("--measure", type=InputFile, metavar="FILE", help="prompts for the last measurement")
    part.add_argument("--held-text", type=InputFile, nargs="*", default=[], metavar="FILE", help="for the perplexity")
    part.add_argument("--seed", type=int, default=0)
    options.add_json(part)


def run(arguments: argparse.Namespace) -> int:
    raise AssertionError("one of its commands was chosen")


def _train(arguments: argparse.Namespace) -> int:
    from hierspec.checkpoints.packs import open_pack
    from hierspec.prompts import read_prompts
    from hierspec.train import recipes
    from hierspec.train.loop import Settings
    from hierspec.train.material import MaterialSettings, gather_material, text_rows

    # Before anything is written or read: a typing error should not wait for it.
    chosen = options.numbers("--layers", arguments.layers) if arguments.part == "exits" else []
    norms = options.numbers("--norm-layers", arguments.norm_layers) if arguments.part == "exits" else []
    tuned = arguments.part == "exits" and arguments.recipe == "tuned"
    ranks, of_exits = (_ranks(arguments.rank), _of_exits(arguments)) if tuned else ((1, 1, 1), {})
    if chosen:  # before hours of training
        _check_counts(chosen, of_exits)
    taps = options.numbers("--taps", arguments.taps) if arguments.part == "draft" else []
    if both := set(chosen) & set(norms):
        raise HierspecError(f"Exit {min(both)} is in --layers and in --norm-layers; name it once.")
    if arguments.begin is not None and not (arguments.begin / "pack.json").is_file():
        raise HierspecError(f"--begin {arguments.begin} is not a pack, it has no pack.json; name the folder of one.")
    given = [prompt.turns[0] for prompt in read_prompts(arguments.prompts)] if arguments.prompts else []
    measured = read_prompts(arguments.measure) if arguments.measure else []
    name = "exits-" + arguments.recipe if arguments.part == "exits" else "draft-" + arguments.kind
    work = arguments.output.with_name(arguments.output.name + ".work")
    rate = (1e-3 if tuned else 6e-4) if arguments.rate is None else arguments.rate
    settings = Settings(
        steps=arguments.steps,
        minutes=arguments.minutes,
        batch=arguments.batch,
        rate=rate,
        seed=arguments.seed,
        checkpoint=work / name,
    )
    wanted = MaterialSettings(
        arguments.conversations,
        arguments.length,
        arguments.vocabulary,
        tuple(given),
        tuple(arguments.text),
        arguments.seed,
        batch=train_model.write_batch(arguments),
    )
    with progress_bars() as progress:
        material = gather_material(arguments.model, work, wanted, arguments.device, progress)
        checkpoint = material.checkpoint
        begin = arguments.begin and open_pack(arguments.begin, checkpoint.config, checkpoint.weights)
        common: dict[str, Any] = {"begin": begin, "prompts": measured, "progress": progress, "report": _report}
        if arguments.part == "draft" and arguments.kind == "feature":
            depth = 1 if arguments.depth is None else arguments.depth
            result = recipes.train_feature(
                material, arguments.output, settings, arguments.steps_ahead, depth, taps, **common
            )
        elif arguments.part == "draft":
            depth = 4 if arguments.depth is None else arguments.depth
            result = recipes.train_small(material, arguments.output, settings, depth, **common)
        else:
            layers = chosen or _usual_exits(checkpoint.config.layers)
            if tuned:
                held = arguments.held_text
                text = text_rows(material.tokenizer, held, arguments.length, progress) if held else None
                result = recipes.train_tuned(
                    material,
                    _exits(layers, of_exits),
                    arguments.output,
                    settings,
                    arguments.drift,
                    ranks,
                    norms,
                    text=text,
                    **common,
                )
            else:
                result = recipes.train_exits(material, layers, arguments.output, settings, **common)
    report = Report.of(arguments)
    train_measure.show_agreement(report, result.figures)
    for what, value in result.more.items():
        report.line(f"{what}: {value:.2f}")
    more = dict(result.more)
    if arguments.part == "draft":
        import hierspec
        from hierspec.train.examine import step_costs

        more |= step_costs(
            hierspec.load(arguments.model, device=arguments.device, pack=arguments.output), arguments.kind
        )
        report.line(f"one step of the draft takes {more['draft step ms']} ms, a plain pass {more['target pass ms']} ms")
    report.line(f"written to {arguments.output}; {work} can be removed")
    document = {"folder": str(arguments.output), "steps": result.run.steps, "agreement": result.figures}
    report.document({**document, "seconds": round(result.run.seconds, 1), **more})
    return 0


def _ranks(listed: str) -> tuple[int, int, int]:
    """Before the first exit, up to the last one, after it."""
    ranks = options.numbers("--rank", listed)
    if len(ranks) == 1:
        return ranks[0], max(1, ranks[0] // 2), max(1, ranks[0] // 16)
    if len(ranks) != 3:
        raise HierspecError(f"--rank takes one rank or three, before, between and after the exits, not {listed!r}.")
    return ranks[0], ranks[1], ranks[2]


def _of_exits(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """What is said of each exit, by the names of `Exit`."""
    listed: dict[str, list[float]] = {}
    for name, option, kind in (("depth", "depths", int), ("weight", "exit-weights", float), ("pull", "pulls", float)):
        given = getattr(arguments, option.replace("-", "_"))
        try:
            listed[name] = [kind(part) for part in given.split(",")] if given else []
        except ValueError:
            numbers = "whole numbers" if kind is int else "numbers"
            raise HierspecError(f"--{option} takes {numbers} separated by commas, not {given!r}.") from None
    return {name: numbers for name, numbers in listed.items() if numbers}


def _check_counts(layers: list[int], of_exits: dict[str, list[float]]) -> None:
    for name, numbers in of_exits.items():
        if len(numbers) != len(layers):
            raise HierspecError(f"There are {len(layers)} exits, and a {name} of {len(numbers)}: give one for each.")


def _exits(layers: list[int], of_exits: dict[str, list[float]]) -> list[Exit]:
    from hierspec.train.tuned import Exit

    _check_counts(layers, of_exits)
    exits = []
    for place, layer in enumerate(layers):
        about: dict[str, Any] = {name: numbers[place] for name, numbers in of_exits.items()}
        exits.append(Exit(layer, **about | {"depth": int(about.get("depth", 1))}))
    return exits


def _report(step: int, loss: float, figures: dict[str, float]) -> None:
    shares = {name: value for name, value in figures.items() if name not in ("anchor", "drift")}
    agreeing = ", ".join(f"{name} {100 * value:.0f}%" for name, value in shares.items())
    note(f"step {step}: loss {loss:.3f}; {agreeing}")


def _usual_exits(depth: int) -> list[int]:
    return sorted({max(1, round(depth / 8)), max(1, round(depth / 4))})
