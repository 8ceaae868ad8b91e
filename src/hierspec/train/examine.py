"""How often the drafts of a pack agree with its model, on the model's own answers to prompts, by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hierspec.checkpoints.load import Checkpoint
from hierspec.checkpoints.packs import EARLY_EXIT, EXITS, FEATURE, SMALL, Pack
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.language_model import LanguageModel
from hierspec.plot import Axis, Chart, Line
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec.scorers.base import StateScorer
from hierspec.scorers.timing import PassTimer
from hierspec.train.measure import agreement
from hierspec.train.network import Network
from hierspec.train.students import (
    ExitAdapter,
    ExitNorm,
    FeatureDrafter,
    FrozenTargetObjective,
    SmallModel,
    with_weights,
)
from hierspec.train.synthesise import Texts

_STEPS = 4  # of a feature drafter that are measured
_CONTEXT, _RUNS = 64, 10  # tokens before a timed step; steps, of which the quickest counts

Figures = dict[str, dict[str, float]]  # by task and over "all", then by the name of the draft


def examine(
    model: LanguageModel,
    checkpoint: Checkpoint,
    prompts: Sequence[BenchPrompt],
    max_tokens: int = 128,
    progress: Progress = silent,
    exits: Sequence[int] = (),
) -> dict[str, Any]:
    """`agreement` by task as `train.measure` counts it, and the tokens it was counted over.

    It is counted on greedy answers of the model to the first turns. The checkpoint is the model's, in float32; the
    parts of its pack are read as stored, and run in float32 too. With `exits` only those are measured, each as a plan
    runs it: with an adapter of the pack, a norm of the pack, or the model's last norm.
    """
    pack = checkpoint.pack
    if pack is None and not exits:
        raise HierspecError(f"{model.name} has no pack to measure: give one (--pack FOLDER), or train one.")
    target = Network(checkpoint.config, checkpoint.weights).frozen("cpu", torch.float32)
    shortlist = None if pack is None else pack.draft_vocabulary()
    vocabulary = torch.arange(checkpoint.config.vocabulary) if shortlist is None else torch.from_numpy(shortlist)
    students = [] if pack is None else students_of(target, pack)
    if exits:
        in_pack = {student.layer: student for student in students if isinstance(student, (ExitAdapter, ExitNorm))}
        students = [in_pack.get(layer) or ExitNorm(target, layer) for layer in exits]
    objective = FrozenTargetObjective(target, students, vocabulary)
    measured = sorted(student.layer for student in students if isinstance(student, (ExitAdapter, ExitNorm)))
    pairs = [(f"exit {low}", f"exit {high}") for low, high in combinations(measured, 2)]
    sums: Figures = {}
    counts: dict[str, int] = {}
    for done, prompt in enumerate(prompts):
        progress("Measuring agreement", done, len(prompts))
        question = model.encode(prompt.turns[0])
        answer = model.generate(question, max_tokens=max_tokens).tokens
        tokens = torch.tensor([[*question, *answer]], dtype=torch.int32)
        answers = torch.arange(tokens.shape[1])[None] >= len(question)
        # One text at a time: their lengths differ.
        shares = agreement(objective, target.head, Texts(tokens, answers), [prompt.task], pairs)["all"]
        for task in (prompt.task, "all"):
            counts[task] = counts.get(task, 0) + len(answer)
            by_name = sums.setdefault(task, {})
            for name, share in shares.items():
                by_name[name] = by_name.get(name, 0.0) + share * len(answer)
    progress("Measuring agreement", len(prompts), len(prompts))
    figures = {
        task: {name: round(hits / counts[task], 4) for name, hits in by_name.items()} for task, by_name in sums.items()
    }
    return {"agreement": figures, "tokens": counts}


def step_costs(model: LanguageModel, draft: str) -> dict[str, float]:
    """Milliseconds of one more token by the pack's draft (`feature` or `small`), and of a plain pass of the target."""
    hierarchy = model.hierarchy(Plan(tiers=(TierPlan(draft=draft),)))
    milliseconds = {}
    for name, tier in zip(("target pass ms", "draft step ms"), hierarchy.tiers, strict=True):
        assert isinstance(tier.scorer, StateScorer)
        timer = PassTimer(tier.scorer, np.arange(_CONTEXT, dtype=np.int32) % model.config.vocabulary)
        milliseconds[name] = round(1e3 * min(sum(timer.run(np.array([1], np.int32))) for _ in range(_RUNS)), 3)
        timer.close()
    return milliseconds


def students_of(target: Network, pack: Pack) -> list[nn.Module]:
    """The trained parts of a pack, as students."""
    students: list[nn.Module] = []
    exits = pack.read(EARLY_EXIT if pack.is_variant else EXITS) if pack.exits() or pack.exits_with_norm() else {}
    for layer in pack.exits():
        depth = pack.adapter(layer, target.config).config.layers
        students.append(with_weights(ExitAdapter(target, layer, depth), exits))
    students += [with_weights(ExitNorm(target, layer), exits) for layer in pack.exits_with_norm()]
    if pack.has(FEATURE):
        feature = pack.read(FEATURE)
        taps = feature["feature.taps"].tolist() if "feature.taps" in feature else ()
        students.append(with_weights(FeatureDrafter(target, _STEPS, _layers(feature, "feature"), taps), feature))
    if pack.has(SMALL):
        small = pack.read(SMALL)
        students.append(with_weights(SmallModel(target, _layers(small, "small")), small))
    return students


def _layers(tensors: Mapping[str, Tensor], name: str) -> int:
    return len({key.split(".")[2] for key in tensors if key.startswith(f"{name}.layers.")})


def charts(figures: Figures) -> dict[str, Chart]:
    """Agreement by exit, and by step of the feature drafter, a line for each task."""
    by_name: dict[str, Chart] = {}
    for name, word, label in (("exits", "exit", "layers run"), ("steps", "step", "step of the drafter")):
        lines = []
        for task, agreements in sorted(figures.items()):
            points = [
                (float(key.split()[1]), 100 * share)
                for key, share in agreements.items()
                if key.startswith(f"{word} ") and len(key.split()) == 2
            ]
            lines.append(Line(task, points, dashed=task == "all"))
        if lines and len(lines[0].points) > 1:
            title = "Exits: agreement with the target" if name == "exits" else "Feature drafter: agreement by step"
            by_name[name] = Chart(title, Axis(label), Axis("% of answer tokens"), lines, "best token, by task")
    return by_name
