"""From a model to a pack: exits beside a frozen target, an early-exit variant of it, and drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hierspec.checkpoints.packs import EARLY_EXIT, EXITS, FEATURE, SMALL, VOCABULARY, Pack, fingerprint, write_pack
from hierspec.core.errors import HierspecError
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec.train.loop import Course, Settings, fit
from hierspec.train.material import Material
from hierspec.train.measure import agreement, perplexity, table
from hierspec.train.network import Network, compile_blocks
from hierspec.train.students import ExitAdapter, FeatureDrafter, Frozen, SmallModel, restored
from hierspec.train.synthesise import Texts, greedy_answers
from hierspec.train.tuned import Tuned

Report = Callable[[int, float, dict[str, float]], None]
_FILES = ((ExitAdapter, EXITS), (FeatureDrafter, FEATURE), (SmallModel, SMALL))  # where a pack keeps what


@dataclass(frozen=True)
class Result:
    """A trained part: where it lies, and what was measured on text that it was not trained on."""

    folder: Path
    course: Course
    figures: dict[str, dict[str, float]]  # agreement by task
    more: dict[str, float] = field(default_factory=dict)


def train_exits(
    material: Material, layers: Sequence[int], folder: Path, settings: Settings, begin: Pack | None = None,
    prompts: Sequence[BenchPrompt] = (), progress: Progress = silent, report: Report | None = None,
) -> Result:  # fmt: skip
    """An adapter for each of these exits; the target stays as it is. Those that `begin` has begin as they are there."""
    _check_exits(layers, material)
    students = [ExitAdapter(material.target, layer) for layer in layers]
    _begin_as(begin, students)
    return _frozen(material, students, EXITS, folder, settings, prompts, progress, report)


def train_feature(
    material: Material, folder: Path, settings: Settings, steps: int = 4, layers: int = 1, taps: Sequence[int] = (),
    begin: Pack | None = None, prompts: Sequence[BenchPrompt] = (), progress: Progress = silent,
    report: Report | None = None,
) -> Result:  # fmt: skip
    """A feature drafter of so many layers, trained on so many steps of its own.

    It reads the target's last state, and beside it those after the layers in `taps`. Where `begin` has one of the same
    make it goes on from there.
    """
    depth = material.checkpoint.config.layers
    if not 1 <= layers <= depth:
        raise HierspecError(f"A feature drafter has between 1 and {depth} layers, as many as its model, not {layers}.")
    if taps:
        _check_exits(taps, material, "Taps")
    student = FeatureDrafter(material.target, steps, layers, taps)
    _begin_as(begin, [student])
    return _frozen(material, [student], FEATURE, folder, settings, prompts, progress, report)


def train_small(
    material: Material, folder: Path, settings: Settings, layers: int = 4, begin: Pack | None = None,
    prompts: Sequence[BenchPrompt] = (), progress: Progress = silent, report: Report | None = None,
) -> Result:  # fmt: skip
    """A small model: a tuned copy of the target's first layers."""
    _check_exits([layers], material)
    student = SmallModel(material.target, layers)
    _begin_as(begin, [student])
    return _frozen(material, [student], SMALL, folder, settings, prompts, progress, report)


def train_tuned(
    material: Material, layers: Sequence[int], folder: Path, settings: Settings, drift: float = 0.075, rank: int = 128,
    norms: Sequence[int] = (), begin: Pack | None = None, text: Tensor | None = None,
    prompts: Sequence[BenchPrompt] = (), progress: Progress = silent, report: Report | None = None,
) -> Result:  # fmt: skip
    """The low-rank change of an early-exit variant, and its exits: those in `layers` with an adapter, those in `norms`
    with a norm only. `text` is rows that nobody trained on, for its perplexity."""
    _check_exits(layers, material)
    if norms:
        _check_exits(norms, material)
    if both := set(layers) & set(norms):
        raise HierspecError(f"Exit {min(both)} cannot have both an adapter and a norm only; name it once.")
    if drift <= 0 or rank < 1:
        raise HierspecError(f"drift must be more than 0 and rank at least 1, not {drift} and {rank}.")
    checkpoint, target = material.checkpoint, material.target
    device, dtype = target.embedding.device, target.embedding.dtype
    copied = Network(checkpoint.config, checkpoint.weights).frozen(device, dtype)

    def own_rank(layer: int) -> int:
        # Layers before the exits learn the most; those behind the last need only follow.
        return rank if layer < layers[0] else max(1, rank // 2) if layer < layers[-1] else max(1, rank // 16)

    objective = Tuned(target, copied, layers, material.vocabulary, drift, own_rank, norms=norms)
    _begin_as(begin, objective.adapters)
    compile_blocks(target, copied, objective.adapters)
    course = fit(objective, material.texts, settings, progress, report)
    pairs = [(f"exit {low}", f"exit {high}") for low, high in pairwise(sorted((*layers, *norms)))]
    texts, tasks = _measured_texts(copied, material, prompts, progress)
    figures = agreement(objective, target.head, texts, tasks, pairs)
    more = {}
    if text is not None:
        more = {"perplexity before": perplexity(target, text), "perplexity after": perplexity(copied, text)}
    about = {"recipe": "tuned", "layers": list(layers), "norms": list(norms), "drift": drift, "rank": rank}
    _write(material, EARLY_EXIT, objective.tensors(), folder, settings, course, figures, {**about, **more})
    return Result(folder, course, figures, more)


def _frozen(
    material: Material, students: Sequence[nn.Module], file: str, folder: Path, settings: Settings,
    prompts: Sequence[BenchPrompt], progress: Progress, report: Report | None,
) -> Result:  # fmt: skip
    objective = Frozen(material.target, students, material.vocabulary)
    compile_blocks(material.target, objective.students)
    course = fit(objective, material.texts, settings, progress, report)
    texts, tasks = _measured_texts(material.target, material, prompts, progress)
    figures = agreement(objective, material.target.head, texts, tasks)
    about = {"recipe": type(students[0]).__name__, "students": len(students)}
    _write(material, file, objective.tensors(), folder, settings, course, figures, about)
    return Result(folder, course, figures)


def _begin_as(pack: Pack | None, students: Iterable[nn.Module]) -> None:
    """What the pack has of the same make goes on from there."""
    for student in students:
        [file] = [file for kind, file in _FILES if isinstance(student, kind)] or [""]
        if pack is None or not file or not pack.has(file):
            continue
        held, own = pack.read(file), student.tensors()  # type: ignore[operator]
        alike = all(name in held and held[name].shape == tensor.shape for name, tensor in own.items())
        if alike and all(tensor.is_floating_point() or torch.equal(held[name], tensor) for name, tensor in own.items()):
            restored(student, held)


def _measured_texts(
    network: Network, material: Material, prompts: Sequence[BenchPrompt], progress: Progress
) -> tuple[Texts, list[str]]:
    """Answers of this network to the prompts; without any, conversations that were held back."""
    if not prompts:
        return material.held_back, ["chat"] * len(material.held_back)
    texts = greedy_answers(network, material.tokenizer, [prompt.turns[0] for prompt in prompts], progress=progress)
    return texts, [prompt.task for prompt in prompts]


def _check_exits(layers: Sequence[int], material: Material, what: str = "Exits") -> None:
    depth = material.checkpoint.config.layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= depth:
        raise HierspecError(
            f"{what} must be rising layer numbers between 1 and {depth - 1}, not {', '.join(map(str, layers)) or 0}."
        )


def _write(
    material: Material, file: str, tensors: Mapping[str, Tensor], folder: Path, settings: Settings, course: Course,
    figures: Mapping[str, Mapping[str, float]], about: Mapping[str, Any],
) -> None:  # fmt: skip
    checkpoint = material.checkpoint
    files = {file: {name: tensor.detach() for name, tensor in tensors.items()}}
    files[VOCABULARY] = {"tokens": material.vocabulary}
    card = file.replace(".safetensors", ".md")
    write_pack(
        folder, checkpoint.name, fingerprint(checkpoint.config, checkpoint.weights), files,
        hidden=checkpoint.config.hidden, vocabulary=checkpoint.config.vocabulary,
        texts={card: model_card(checkpoint.name, file, material.texts, settings, course, figures, about)},
    )  # fmt: skip


def model_card(
    model: str, file: str, texts: Texts, settings: Settings, course: Course,
    figures: Mapping[str, Mapping[str, float]], about: Mapping[str, Any],
) -> str:  # fmt: skip
    """What it is, what it was trained on and how, and what it agrees on; for people."""
    rows, length = texts.tokens.shape
    return (
        f"# {file} for {model}\n\n"
        f"Guesses for {model}; what the model writes is not changed by it.\n\n"
        f"- Data: {rows:,} texts of {length} tokens, {int(texts.answers.sum()):,} of them tokens of the model's own "
        "answers.\n"
        f"- Recipe: {json.dumps(dict(about))}; {course.steps:,} steps of {settings.batch} texts, rate {settings.rate}, "
        f"{course.seconds:.0f} seconds.\n\n"
        "Share of answer tokens, on text not trained on, where its choice is the judge's:\n\n" + table(figures) + "\n"
    )
