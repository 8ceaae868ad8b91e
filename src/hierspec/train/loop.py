"""The training loop: batches by number, warm-up and cosine decay, checkpoints from which a stopped run resumes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hierspec.core.errors import HierspecError
from hierspec.paths import whole_folder
from hierspec.progress import Progress, silent
from hierspec.train.synthesise import Texts

_OTHERS = 0.2  # share of the positions outside answers that are trained on


class Objective(Protocol):
    def trained(self) -> dict[str, nn.Parameter]: ...

    def loss(self, tokens: Tensor, selected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss at the selected positions [batch, length], and figures to show."""


@dataclass(frozen=True)
class Settings:
    steps: int = 1000
    minutes: float | None = None  # ends earlier; the learning rate then follows the clock
    batch: int = 32  # texts
    rate: float = 1e-3
    warm_up: float = 0.03  # share of the run
    seed: int = 0
    checkpoint: Path | None = None  # a folder, written every `every` seconds
    every: float = 120.0
    pause_at: float | None = None  # by time.monotonic(): when the run stops, for another to resume it

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise HierspecError(f"steps and batch must be at least 1, not {self.steps} and {self.batch}.")
        if self.rate <= 0 or (self.minutes is not None and self.minutes <= 0):
            raise HierspecError("The learning rate and the minutes to train must be more than 0.")


@dataclass(frozen=True)
class TrainingRun:
    """How a run went."""

    steps: int
    seconds: float
    log: list[tuple[int, float, dict[str, float]]]  # step, loss, figures
    finished: bool = True  # False: it paused


def selected_positions(answers: Tensor, seed: int) -> Tensor:
    """[rows, length]: positions to train on: all before a token of an answer, and some of the others.

    Most of a step's products are with a head, so fewer positions save time.
    """
    selected = torch.rand(answers.shape, generator=torch.Generator().manual_seed(seed)) < _OTHERS
    selected[:, :-1] |= answers[:, 1:]
    selected[:, -1] = False  # nothing comes after it
    selected[0, 0] = True  # at least one
    return selected


def fit(
    objective: Objective,
    texts: Texts,
    settings: Settings,
    progress: Progress = silent,
    report: Callable[[int, float, dict[str, float]], None] | None = None,
) -> TrainingRun:
    parameters = objective.trained()
    device = next(iter(parameters.values())).device
    optimiser = torch.optim.AdamW(parameters.values(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
    step, before = _resume(parameters, optimiser, settings)
    started, saved = time.perf_counter(), time.perf_counter()
    log: list[tuple[int, float, dict[str, float]]] = []
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    while True:
        elapsed = before + time.perf_counter() - started
        done = step / settings.steps
        if settings.minutes is not None:
            done = max(done, elapsed / (60 * settings.minutes))
        paused = settings.pause_at is not None and time.monotonic() >= settings.pause_at
        if done >= 1 or paused:
            break
        factor = min(1.0, done / settings.warm_up) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimiser.param_groups:
            group["lr"] = settings.rate * max(factor, 1e-3)
        tokens, answers = _batch(texts, step, settings)
        selected = selected_positions(answers, step).to(device, non_blocking=True)
        with autocast:
            loss, figures = objective.loss(tokens.to(device, torch.long, non_blocking=True), selected)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 0 or step == 1:
            shown = {name: round(float(value), 4) for name, value in figures.items()}
            value = float(loss.detach())
            if not math.isfinite(value):
                raise HierspecError(f"Training diverged at step {step} (loss {value}); use a lower --rate.")
            log.append((step, round(value, 4), shown))
            if report is not None:
                report(step, value, shown)
        progress("Training", int(1000 * done), 1000)
        if settings.checkpoint is not None and time.perf_counter() - saved > settings.every:
            _save(parameters, optimiser, settings.checkpoint, step, before + time.perf_counter() - started)
            saved = time.perf_counter()
    seconds = before + time.perf_counter() - started
    if settings.checkpoint is not None:
        _save(parameters, optimiser, settings.checkpoint, step, seconds)
    return TrainingRun(step, seconds, log, finished=done >= 1)


def _batch(texts: Texts, step: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """Rows of batch number `step`: a new order in every epoch."""
    size = min(settings.batch, len(texts))
    epoch, number = divmod(step, max(1, len(texts) // size))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(settings.seed + epoch))
    rows = order[number * size : (number + 1) * size]
    return texts.tokens[rows], texts.answers[rows]


def _save(
    parameters: dict[str, nn.Parameter], optimiser: torch.optim.Optimizer, folder: Path, step: int, seconds: float
) -> None:
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"value.{name}"] = parameter.detach()
        for key, moment in optimiser.state[parameter].items():
            tensors[f"{key}.{name}"] = moment
    with whole_folder(folder) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / "state.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, "seconds": seconds}), encoding="utf-8")


def _resume(
    parameters: dict[str, nn.Parameter], optimiser: torch.optim.Optimizer, settings: Settings
) -> tuple[int, float]:
    """Step and seconds of a stopped run; 0 if there was none."""
    folder = settings.checkpoint
    if folder is None or not (folder / "state.json").is_file():
        return 0, 0.0
    try:
        note = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "state.safetensors")
        for name, parameter in parameters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"value.{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors]
            optimiser.state[parameter] = {
                key: tensors[f"{key}.{name}"].to("cpu" if key == "step" else parameter.device) for key in keys
            }
        return int(note["step"]), float(note["seconds"])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise HierspecError(
            f"The checkpoint in {folder} does not belong to this run or is damaged; remove that folder."
        ) from error
