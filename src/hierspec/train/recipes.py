"""From a model to a pack: exits of a frozen target, an early-exit variant of it, and drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hierspec.checkpoints.packs import EARLY_EXIT, EXITS, FEATURE, SMALL, VOCABULARY, Pack, fingerprint, write_pack
from hierspec.core.errors import HierspecError
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec.train.loop import Settings, TrainingRun, fit
from hierspec.train.material import Material
from hierspec.train.measure import agreement, perplexity, table
from hierspec.train.network import Network, compile_blocks
from hierspec.train.students import ExitAdapter, FeatureDrafter, FrozenTargetObjective, SmallModel, with_weights
from hierspec.train.synthesise import Texts, greedy_answers
from hierspec.train.tuned import Exit, TunedObjective

Report = Callable[[int, float, dict[str, float]], None]
_FILES = ((FeatureDrafter, FEATURE), (SmallModel, SMALL))  # the file of a pack for each student
RANKS = (128, 64, 8)  # of a variant's change: before its first exit, up to its last one, after that


@dataclass(frozen=True)
class Result:
    """A trained part: its folder, and what was measured on text that was not trained on."""

    folder: Path
    run: TrainingRun
    figures: dict[str, dict[str, float]]  # agreement by task
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What every recipe is given: data, the pack to write, how to train, and prompts to measure with."""

    material: Material
    folder: Path
    settings: Settings
    prompts: Sequence[BenchPrompt] = ()
    progress: Progress = silent
    report: Report | None = None

    def fit(self, objective: FrozenTargetObjective | TunedObjective) -> TrainingRun:
        return fit(objective, self.material.texts, self.settings, self.progress, self.report)

    def measured_texts(self, network: Network) -> tuple[Texts, list[str]]:
        """Answers of this network to the prompts; without any, conversations that were held back."""
        if not self.prompts:
            held_back = self.material.held_back
            return held_back, ["chat"] * len(held_back)
        questions = [prompt.turns[0] for prompt in self.prompts]
        texts = greedy_answers(network, self.material.tokenizer, questions, progress=self.progress)
        return texts, [prompt.task for prompt in self.prompts]


def train_exits(
    material: Material,
    layers: Sequence[int],
    folder: Path,
    settings: Settings,
    begin: Pack | None = None,
    prompts: Sequence[BenchPrompt] = (),
    progress: Progress = silent,
    report: Report | None = None,
) -> Result:
    """An adapter for each of these exits; the target does not change. Those in the pack `begin` continue from there."""
    _check_exits(layers, material)
    students = [ExitAdapter(material.target, layer) for layer in layers]
    if begin is not None and begin.has(EXITS):
        stored = begin.read(EXITS)
        for student in students:
            student.begin(stored)
    return _train_frozen(Job(material, folder, settings, prompts, progress, report), students, EXITS)


def train_feature(
    material: Material,
    folder: Path,
    settings: Settings,
    steps: int = 4,
    layers: int = 1,
    taps: Sequence[int] = (),
    begin: Pack | None = None,
    prompts: Sequence[BenchPrompt] = (),
    progress: Progress = silent,
    report: Report | None = None,
) -> Result:
    """A feature drafter of `layers` layers, trained on `steps` steps of drafting.

    It reads the target's last state, and those after the layers in `taps`. If the pack `begin` has one of the same
    shape, it continues from there.
    """
    depth = material.checkpoint.config.layers
    if not 1 <= layers <= depth:
        raise HierspecError(f"A feature drafter has between 1 and {depth} layers, as many as its model, not {layers}.")
    if taps:
        _check_exits(taps, material, "Taps")
    student = FeatureDrafter(material.target, steps, layers, taps)
    _begin_as(begin, [student])
    return _train_frozen(Job(material, folder, settings, prompts, progress, report), [student], FEATURE)


def train_small(
    material: Material,
    folder: Path,
    settings: Settings,
    layers: int = 4,
    begin: Pack | None = None,
    prompts: Sequence[BenchPrompt] = (),
    progress: Progress = silent,
    report: Report | None = None,
) -> Result:
    """A small model: a tuned copy of the target's first layers."""
    _check_exits([layers], material)
    student = SmallModel(material.target, layers)
    _begin_as(begin, [student])
    return _train_frozen(Job(material, folder, settings, prompts, progress, report), [student], SMALL)


def train_tuned(
    material: Material,
    exits: Sequence[Exit],
    folder: Path,
    settings: Settings,
    drift: float = 0.075,
    ranks: tuple[int, int, int] = RANKS,
    norms: Sequence[int] = (),
    begin: Pack | None = None,
    text: Tensor | None = None,
    prompts: Sequence[BenchPrompt] = (),
    progress: Progress = silent,
    report: Report | None = None,
) -> Result:
    """The low-rank change of an early-exit variant, and its exits; those in `norms` have only a norm and count little.

    `text` is rows that were not trained on, for its perplexity. If the pack `begin` has a variant, training continues
    from it, else from its adapters of the unchanged model. Everything is measured as stored. A run that pauses before
    its end has no figures, and no pack.
    """
    job = Job(material, folder, settings, prompts, progress, report)
    objective = tuned_objective(material, exits, drift, ranks, norms, begin)
    compile_blocks(material.target, objective.model, objective.adapters)
    run = job.fit(objective)
    if not run.finished:
        return Result(folder, run, {})
    objective.round_as_stored()
    figures, more = measure_tuned(job, objective, text)
    about = {"recipe": "tuned", "exits": [vars(each) for each in exits], "norms": list(norms), "drift": drift}
    result = Result(folder, run, figures, more)
    _write_pack(job, EARLY_EXIT, objective.tensors(), result, {**about, "ranks": list(ranks), **more})
    return result


def measure_tuned(
    job: Job, objective: TunedObjective, text: Tensor | None
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Agreement of its exits with its last layer, alone and in pairs, and its perplexity on rows of text."""
    target, copied = job.material.target, objective.model
    names = [f"exit {each.layer}" for each in sorted(objective.exits.values(), key=lambda each: each.layer)]
    figures = agreement(objective, target.head, *job.measured_texts(copied), list(combinations(names, 2)))
    if text is None:
        return figures, {}
    return figures, {"perplexity before": perplexity(target, text), "perplexity after": perplexity(copied, text)}


def tuned_objective(
    material: Material,
    exits: Sequence[Exit],
    drift: float,
    ranks: tuple[int, int, int],
    norms: Sequence[int],
    begin: Pack | None,
) -> TunedObjective:
    """What `train_tuned` trains, before its first step."""
    layers = [each.layer for each in exits]
    _check_exits(layers, material)
    if norms:
        _check_exits(norms, material)
    if both := set(layers) & set(norms):
        raise HierspecError(f"Exit {min(both)} cannot have both an adapter and a norm only; name it once.")
    if drift <= 0 or min(ranks) < 1:
        raise HierspecError(f"drift must be more than 0 and ranks at least 1, not {drift} and {min(ranks)}.")
    checkpoint, target = material.checkpoint, material.target
    copied = Network(checkpoint.config, checkpoint.weights).frozen(target.embedding.device, target.embedding.dtype)

    def rank(layer: int) -> int:
        # Layers after the last exit only have to adapt.
        return ranks[0] if layer < layers[0] else ranks[1] if layer < layers[-1] else ranks[2]

    objective = TunedObjective(target, copied, exits, material.vocabulary, drift, rank, norms)
    if begin is not None and (begin.has(EARLY_EXIT) or begin.has(EXITS)):
        objective.begin(begin.read(EARLY_EXIT if begin.has(EARLY_EXIT) else EXITS))
    return objective


def _train_frozen(job: Job, students: Sequence[nn.Module], file: str) -> Result:
    target = job.material.target
    objective = FrozenTargetObjective(target, students, job.material.vocabulary)
    compile_blocks(target, objective.students)
    run = job.fit(objective)
    result = Result(job.folder, run, agreement(objective, target.head, *job.measured_texts(target)))
    about = {"recipe": type(students[0]).__name__, "students": len(students)}
    _write_pack(job, file, objective.tensors(), result, about)
    return result


def _begin_as(pack: Pack | None, students: Iterable[nn.Module]) -> None:
    """A student starts with the weights of the pack's part of the same kind and shape, if there is one."""
    for student in students:
        [file] = [file for student_class, file in _FILES if isinstance(student, student_class)]
        if pack is None or not pack.has(file):
            continue
        stored, initial = pack.read(file), student.tensors()  # type: ignore[operator]
        if all(
            name in stored
            and stored[name].shape == tensor.shape
            and (tensor.is_floating_point() or torch.equal(stored[name], tensor))
            for name, tensor in initial.items()
        ):
            with_weights(student, stored)


def _check_exits(layers: Sequence[int], material: Material, what: str = "Exits") -> None:
    depth = material.checkpoint.config.layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= depth:
        raise HierspecError(
            f"{what} must be rising layer numbers between 1 and {depth - 1}, not {', '.join(map(str, layers)) or 0}."
        )


def _write_pack(job: Job, file: str, tensors: Mapping[str, Tensor], result: Result, about: Mapping[str, Any]) -> None:
    checkpoint = job.material.checkpoint
    files = {file: {name: tensor.detach() for name, tensor in tensors.items()}}
    files[VOCABULARY] = {"tokens": job.material.vocabulary}
    write_pack(
        job.folder,
        checkpoint.name,
        fingerprint(checkpoint.config, checkpoint.weights),
        files,
        hidden=checkpoint.config.hidden,
        vocabulary=checkpoint.config.vocabulary,
        texts={file.replace(".safetensors", ".md"): _model_card(job, file, result, about)},
    )


def _model_card(job: Job, file: str, result: Result, about: Mapping[str, Any]) -> str:
    """What the part is, what it was trained on and how, and its agreement; for people."""
    model, texts, settings, run = job.material.checkpoint.name, job.material.texts, job.settings, result.run
    rows, length = texts.tokens.shape
    return (
        f"# {file} for {model}\n\n"
        f"Drafts for {model}; what the model writes does not change.\n\n"
        f"- Data: {rows:,} texts of {length} tokens, {int(texts.answers.sum()):,} of them tokens of the model's own "
        "answers.\n"
        f"- Recipe: {json.dumps(dict(about))}; {run.steps:,} steps of {settings.batch} texts, rate {settings.rate}, "
        f"{run.seconds:.0f} seconds.\n\n"
        "Share of answer tokens, on text not trained on, where its best token is the target's:\n\n"
        + table(result.figures)
        + "\n"
    )
