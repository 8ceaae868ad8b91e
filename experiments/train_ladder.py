"""Trains a ladder of draft models for a model, unattended, from a file of token ids, within so many minutes.

For a machine without a network: it reads the model, the file of ids and nothing else. A file of ids has one text per
line, ids separated by spaces; the conversations.safetensors that `hierspec train` keeps beside its output works too.
All draft models learn at once (bfloat16 on a GPU) from one pass of the model. What was reached is written down every
two minutes, so a run that is stopped resumes when it is started again; with --call-minutes a call pauses by itself,
with models, record and all, and the same command goes on. In the end every draft model is an ordinary folder in
bfloat16, and the last line is a JSON document. It made docs/results/train-ladder.json.

example:
  python experiments/train_ladder.py --tokens ids.txt --minutes 20 --output ladder --results ladder.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from hierspec.checkpoints.load import load_checkpoint
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.cli.train_model import shapes
from hierspec.core.errors import HierspecError
from hierspec.machine import machine
from hierspec.train.draft_models import (
    LADDER,
    model_card,
    parameters,
    save_model,
    shapes_of,
    train_draft_models,
)
from hierspec.train.loop import Settings
from hierspec.train.network import Network
from hierspec.train.synthesise import Texts

_STARTED = time.monotonic()
_SAVING = 30.0  # seconds of a call that are reserved for measuring and writing
_HELD_BACK = 64  # texts that are not trained on, at most an eighth of all


def read_tokens(path: Path, length: int, separator: int, vocabulary: int) -> Texts:
    """Rows of `length` tokens: the texts of the file concatenated, with `separator` between them."""
    if path.suffix == ".safetensors":
        stored = load_file(path)
        return Texts(stored["tokens"], stored["answers"])
    ids: list[int] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                ids += [*map(int, line.split()), separator]
    except (OSError, ValueError) as error:
        raise HierspecError(f"{path} is no file of token ids, one text per line ({error}).") from error
    rows = len(ids) // length
    if rows < 2:
        raise HierspecError(f"{path} holds {len(ids)} tokens, less than two rows of {length}; give more text.")
    tokens = torch.tensor(ids[: rows * length], dtype=torch.int32).view(rows, length)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise HierspecError(f"{path} holds a token id outside the model's vocabulary of {vocabulary}.")
    return Texts(tokens, torch.ones_like(tokens, dtype=torch.bool))  # all of it is trained on


def train(arguments: argparse.Namespace) -> dict[str, object]:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if arguments.device == "auto" else arguments.device
    checkpoint = load_checkpoint(arguments.model, torch.float32)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    target = Network(checkpoint.config, checkpoint.weights).frozen(device, dtype)
    separator = checkpoint.config.eos_ids[0] if checkpoint.config.eos_ids else 0
    if not arguments.tokens.is_file():
        raise HierspecError(
            f"There is no file {arguments.tokens}: name a file of token ids, or a conversations.safetensors."
        )
    texts = read_tokens(arguments.tokens, arguments.length, separator, checkpoint.config.vocabulary)
    held = min(_HELD_BACK, max(1, len(texts) // 8))
    trained = Texts(texts.tokens[:-held], texts.answers[:-held])
    held_back = Texts(texts.tokens[-held:], texts.answers[-held:])
    wanted = shapes_of(shapes(arguments.shapes))
    settings = Settings(
        arguments.steps,
        arguments.minutes,
        arguments.batch,
        arguments.rate,
        seed=arguments.seed,
        checkpoint=arguments.output / ".work",
        pause_at=None if arguments.call_minutes is None else _STARTED + 60 * arguments.call_minutes - _SAVING,
    )
    print(f"{len(trained):,} texts of {texts.tokens.shape[1]} tokens, on {device}", flush=True)
    models, run, figures = train_draft_models(target, trained, held_back, wanted, settings, report=_report)
    for name, model in models.items():
        card = model_card(name, checkpoint.name, trained, run, figures[name])
        save_model(model, checkpoint.folder, arguments.output / name, card)
    tokens = run.steps * min(settings.batch, len(trained)) * texts.tokens.shape[1]
    return {
        "command": command_line(),
        "machine": machine(),
        "model": checkpoint.name,
        "device": device,
        "texts": len(trained),
        "length": texts.tokens.shape[1],
        "finished": run.finished,
        "steps": run.steps,
        "seconds": round(run.seconds, 1),
        "tokens_per_second": round(tokens / run.seconds, 1),
        "models": {name: {"parameters": parameters(model), **figures[name]} for name, model in models.items()},
        "log": run.log,
    }


def _report(step: int, loss: float, figures: dict[str, float]) -> None:
    shown = ", ".join(f"{name} {100 * value:.1f}%" for name, value in figures.items())
    print(f"{time.monotonic() - _STARTED:7.0f} s, step {step}: loss {loss:.3f}; {shown}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="the file of token ids")
    parser.add_argument("--minutes", type=float, required=True, metavar="M", help="to train")
    parser.add_argument(
        "--call-minutes",
        type=float,
        metavar="M",
        help="this call ends after M minutes; another goes on (default: none)",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a folder for the models' folders")
    parser.add_argument("--model", help="a folder or a GGUF file (default: the default model)")
    usual = ",".join(f"{layers}x{hidden}" for layers, hidden in LADDER)
    parser.add_argument("--shapes", default=usual, metavar="LxW", help=f"layers x width of each (default {usual})")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of a row (default 512)")
    parser.add_argument("--batch", type=int, default=48, metavar="N", help="rows of a step (default 48)")
    parser.add_argument(
        "--steps", type=int, default=1_000_000, metavar="N", help="at most (default: while time is left)"
    )
    parser.add_argument("--rate", type=float, default=1.5e-3, metavar="R", help="learning rate (default 0.0015)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the JSON document to a file as well")


def run(arguments: argparse.Namespace) -> int:
    hand_out(train(arguments), arguments.results)
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
