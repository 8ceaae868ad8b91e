"""Train draft models of their own for a model: few layers, narrow embeddings, its token ids. A stopped run resumes.

The model first writes conversations with itself (or answers --prompts); the draft models learn its distributions on
them, all at once. Each becomes an ordinary model folder under --output, which `--draft`, plans and
`hierspec plan --drafts` take.

examples:
  hierspec train model --output ladder --minutes 30
  hierspec train model ./my-model --shapes 2x256,6x512 --conversations 20000 --write-batch 4096 --output ladder
  hierspec plan --drafts ladder/draft-2x256,ladder/draft-4x384,ladder/draft-8x512
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.files import InputFile, OutputFolder
from hierspec.cli.report import Report
from hierspec.core.errors import HierspecError

_SHAPES = "2x256,4x384,8x512"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument(
        "--shapes", default=_SHAPES, metavar="LxW", help=f"layers x width of each, width in 64s (default {_SHAPES})"
    )
    parser.add_argument(
        "--output", type=OutputFolder, required=True, metavar="FOLDER", help="a folder for the models' folders"
    )
    options.add_device(parser)
    parser.add_argument("--minutes", type=float, metavar="M", help="end after M minutes of training")
    parser.add_argument("--steps", type=int, default=4000, metavar="N", help="end after N steps (default 4000)")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="texts a step (default 16)")
    parser.add_argument("--rate", type=float, default=1e-3, metavar="R", help="learning rate (default 0.001)")
    add_material(parser)
    parser.add_argument("--seed", type=int, default=0)
    options.add_json(parser)


def add_material(parser: argparse.ArgumentParser) -> None:
    """What is trained on: conversations that the model writes, and files."""
    parser.add_argument("--conversations", type=int, default=4096, metavar="N", help="to synthesise (default 4096)")
    parser.add_argument("--length", type=int, default=640, metavar="N", help="tokens of each (default 640)")
    parser.add_argument(
        "--write-batch",
        type=int,
        metavar="N",
        help="conversations written at once (default: 128 on a CPU, 2048 on a GPU); more need more memory",
    )
    options.add_prompts_file(parser, "JSON lines with turns: what users may ask")
    help_text = "real text to read as well"
    parser.add_argument("--text", type=InputFile, nargs="*", default=[], metavar="FILE", help=help_text)


def write_batch(arguments: argparse.Namespace) -> int:
    """Conversations that are written at once."""
    if arguments.write_batch is not None:
        options.at_least_one(arguments, "write-batch")
        return int(arguments.write_batch)
    return 128 if arguments.device == "cpu" else 2048


def shapes(listed: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(map(int, shape.split("x"))) for shape in listed.split(",")]
        return [(layers, width) for layers, width in pairs]
    except ValueError:
        raise HierspecError(f"--shapes takes layers x width, such as {_SHAPES}, not {listed!r}.") from None


def run(arguments: argparse.Namespace) -> int:
    wanted_shapes = shapes(arguments.shapes)
    from hierspec.prompts import read_prompts
    from hierspec.train.draft_models import model_card, save_model, shapes_of, train_draft_models
    from hierspec.train.loop import Settings
    from hierspec.train.material import MaterialSettings, gather_material

    by_name = shapes_of(wanted_shapes)
    given = [prompt.turns[0] for prompt in read_prompts(arguments.prompts)] if arguments.prompts else []
    work = arguments.output.with_name(arguments.output.name + ".work")
    settings = Settings(
        arguments.steps,
        arguments.minutes,
        arguments.batch,
        arguments.rate,
        seed=arguments.seed,
        checkpoint=work / ("models-" + "-".join(by_name)),
    )
    wanted = MaterialSettings(
        arguments.conversations,
        arguments.length,
        prompts=tuple(given),
        files=tuple(arguments.text),
        seed=arguments.seed,
        batch=write_batch(arguments),
    )
    with progress_bars() as progress:
        material = gather_material(arguments.model, work, wanted, arguments.device, progress)
        models, training, figures = train_draft_models(
            material.target, material.texts, material.held_back, by_name, settings, progress, _report
        )
        target = material.checkpoint
        for name, model in models.items():
            card = model_card(name, target.name, material.texts, training, figures[name])
            save_model(model, target.folder, arguments.output / name, card)
    report = Report.of(arguments)
    rows = [(name, *(f"{100 * of[what]:.0f}%" for what in ("agreement", "1 - TV"))) for name, of in figures.items()]
    report.table("On texts that were not trained on", ("model", "agreement", "1 - TV"), rows)
    report.line(f"written to {arguments.output}; {work} can be removed")
    report.document(
        {
            "folders": [str(arguments.output / name) for name in models],
            "steps": training.steps,
            "seconds": round(training.seconds, 1),
            "measured": figures,
        }
    )
    return 0


def _report(step: int, loss: float, figures: dict[str, float]) -> None:
    shares = ", ".join(f"{name} {100 * value:.0f}%" for name, value in figures.items())
    note(f"step {step}: loss {loss:.3f}; {shares}")
