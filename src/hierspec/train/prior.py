"""The prior of a pack: how often its drafts are accepted, counted on the model's answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hierspec.assembly.paces import ROUTES
from hierspec.checkpoints.packs import Pack, write_pack
from hierspec.core.errors import HierspecError
from hierspec.language_model import LanguageModel
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt

_OF_THIS_MACHINE = ("speed", "beside")  # depend on what passes cost here, as do routes


def learn_prior(
    model: LanguageModel,
    prompts: Sequence[BenchPrompt],
    plan: str = "auto",
    max_tokens: int = 128,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Counts by the names of scorers and stores, after the first turns of these prompts were answered under a plan.

    The families of prompts take turns, so that the counts do not end with a single one.
    """
    families: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.task, []).append(prompt)
    most = max(map(len, families.values()), default=0)
    order = [family[turn] for turn in range(most) for family in families.values() if turn < len(family)]
    learning = model.apart()
    for number, prompt in enumerate(order, 1):
        learning.generate(prompt.turns[0], plan=plan, max_tokens=max_tokens)
        progress("Answering", number, len(order))
    return {
        name: {key: value for key, value in part.items() if key not in _OF_THIS_MACHINE}
        for name, part in learning.assembler.learnt().items()
        if not name.startswith(ROUTES)
    }


def pack_of(model: LanguageModel) -> Pack:
    if model.pack is None:
        raise HierspecError(f"{model.name} has no pack that could ship what was learnt; train a part of it first.")
    return model.pack


def add_prior(model: LanguageModel, learnt: dict[str, Any], folder: Path) -> Path:
    """Write what was learnt into the model's pack, or a copy of its description in another folder."""
    pack = pack_of(model)
    return write_pack(
        folder, pack.model, pack.target, {}, hidden=pack.hidden, vocabulary=pack.vocabulary, learnt=learnt
    )
