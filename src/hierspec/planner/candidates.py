"""What could draft for a model: its exits, the drafters of its pack, and draft models that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hierspec.assembly.vocabulary import Vocabulary
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.eagle import is_eagle, read_eagle
from hierspec.checkpoints.load import find_source, known_config, known_folder
from hierspec.checkpoints.packs import FEATURE, SMALL
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.planner.memory import added_weights
from hierspec.scorers.catalogue import PACKED_FEATURE, PACKED_SMALL
from hierspec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel

_DEPTHS = (1 / 8, 1 / 4, 1 / 2)  # of a model's layers: exits to try if none was trained for it
_PACKED = {PACKED_FEATURE: FEATURE, PACKED_SMALL: SMALL}


def candidate_tiers(
    model: LanguageModel, max_memory: int | None = None, drafts: Sequence[str] | None = None
) -> list[TierPlan]:
    """Everything that could draft for this model and adds at most `max_memory` bytes to its memory.

    `drafts` are folders and GGUF files of draft models, folders of EAGLE heads, "feature" or "small"; None: those of
    its pack. Its exits are candidates in any case.
    """
    tiers = [TierPlan(exit_layer=layer) for layer in _exits(model)]
    if drafts is None:
        drafts = [name for name, file in _PACKED.items() if model.pack is not None and model.pack.has(file)]
    check_drafts(model.vocabulary, model.config, drafts)
    for name, file in _PACKED.items():
        if name in drafts and (model.pack is None or not model.pack.has(file)):
            raise HierspecError(
                f"The draft {name} is of a pack, and {model.name} has none with it: give one (--pack FOLDER), or leave "
                "that draft out."
            )
    tiers += [TierPlan(draft=draft) for draft in drafts]
    if max_memory is None:
        return tiers

    def added(tier: TierPlan) -> int:
        return sum(size or 0 for size in added_weights(model, Plan(tiers=(tier,))).values())

    return [tier for tier in tiers if added(tier) <= max_memory]


def _exits(model: LanguageModel) -> list[int]:
    """Layers after which the model may exit early: those trained for that, or a few if none was."""
    if model.pack is not None:
        return sorted({*model.pack.exits(), *model.pack.exits_with_norm()})
    if model.config.early_exit is not None:
        return [model.config.early_exit]
    layers = model.config.layers
    return sorted({max(1, round(share * layers)) for share in _DEPTHS} - {layers})


def check_drafts_of(source: str | Path | None, drafts: Sequence[str]) -> None:
    """Refuse drafts that cannot draft for a model on this machine, before anything is loaded.

    What has to be fetched first is checked when it is opened.
    """
    config, folder = known_config(source), known_folder(source)
    vocabulary = None
    if config is not None and folder is not None:
        vocabulary = Vocabulary(str(source or "the model"), Tokenizer.from_folder(folder), config.vocabulary)
    check_drafts(vocabulary, config, drafts)


def check_drafts(vocabulary: Vocabulary | None, config: DecoderConfig | None, drafts: Sequence[str]) -> None:
    """Refuse a draft that does not exist, is named twice, or has other token ids, in a sentence that names it."""
    if twice := next((draft for number, draft in enumerate(drafts) if draft in drafts[:number]), None):
        raise HierspecError(f"The draft {twice} is named twice; name it once.")
    for draft in drafts:
        if draft in _PACKED:
            continue
        if is_eagle(draft):
            if config is not None:
                read_eagle(draft, config)
            continue
        find_source(draft)
        of_draft, folder = known_config(draft), known_folder(draft)
        if vocabulary is not None and of_draft is not None and folder is not None:
            vocabulary.check_draft(draft, of_draft.vocabulary, Tokenizer.from_folder(folder))
