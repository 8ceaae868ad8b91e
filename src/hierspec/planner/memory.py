"""What the tiers of a plan add to a model's memory, known before any of them is loaded.

It is computed from shapes alone: configurations of draft models and headers of safetensors files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from hierspec.checkpoints.config import expected_tensors
from hierspec.checkpoints.eagle import is_eagle
from hierspec.checkpoints.load import known_config
from hierspec.checkpoints.packs import EXITS, FEATURE, SMALL
from hierspec.core.plan import Plan, TierPlan
from hierspec.scorers.catalogue import PACKED_FEATURE, PACKED_SMALL

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel


def added_weights(model: LanguageModel, plan: Plan) -> dict[str, int | None]:
    """Bytes of weights by what adds them, nearest to the target first; None if unknown until it is fetched.

    Tiers on the target's own weights add nothing and are left out. Files that cannot be read are reported on loading.
    """
    added: dict[str, int | None] = {}
    for tier in plan.tiers:
        if tier.skip_layers:
            continue
        name, size = _of_tier(model, tier)
        if size != 0:
            added[name] = size
        if _scores_few(model, tier):
            tokens = model.assembler.catalogue.tokens
            assert tokens is not None
            weights = None if tier.weights == "int4" else tier.weights  # a head never has fewer than 8 bits
            added["draft vocabulary"] = round(len(tokens) * model.config.hidden * _width(model, weights))
    return added


def stated(added: dict[str, int | None]) -> str:
    """The same as a line for people."""
    parts = [f"{name} {'not known' if size is None else f'{size / 1e6:,.1f} MB'}" for name, size in added.items()]
    return "weights to add: " + (", ".join(parts) or "none")


def _of_tier(model: LanguageModel, tier: TierPlan) -> tuple[str, int | None]:
    pack, width = model.pack, _width(model, tier.weights)
    if tier.exit_layer is not None:
        added = pack is not None and tier.head != "shared" and not pack.is_variant and pack.has(EXITS)
        prefix = f"exit.{tier.exit_layer}."
        size = _numbers([pack.folder / EXITS], prefix, pack.matrix_size) if added and pack is not None else 0
        return f"adapter of exit {tier.exit_layer}", _bytes(size, width)
    draft = tier.draft or ""
    for name, file in ((PACKED_FEATURE, FEATURE), (PACKED_SMALL, SMALL)):
        if draft == name:
            there = pack is not None and pack.has(file)
            size = _numbers([pack.folder / file], "", pack.matrix_size) if there and pack is not None else 0
            return draft, _bytes(size, width)
    if is_eagle(draft):
        files = sorted(Path(draft).expanduser().glob("*.safetensors"))
        return draft, _bytes(_numbers(files), float(model.decoder.dtype.itemsize))
    config = known_config(draft)
    if config is None:
        return draft, None
    weights = tier.weights or model.weights
    each = model.decoder.backend.bytes_per_weight(model.dtype if weights == "auto" else weights)
    return draft, _bytes(sum(math.prod(shape) for shape in expected_tensors(config).values()), each)


def _scores_few(model: LanguageModel, tier: TierPlan) -> bool:
    return tier.vocabulary != "full" and model.assembler.catalogue.tokens is not None


def _width(model: LanguageModel, weights: str | None) -> float:
    """Bytes that one weight of the pack takes here."""
    return model.decoder.backend.bytes_per_weight(model.assembler.catalogue.format(weights))


def _numbers(
    files: Iterable[Path],
    prefix: str = "",
    matrix_size: Callable[[str, Sequence[int]], int] = lambda _, shape: math.prod(shape),
) -> int | None:
    """How many numbers the matrices of these files hold; the rest is small."""
    total = 0
    try:
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as opened:
                names = [name for name in list(opened.keys()) if name.startswith(prefix)]
                shapes = {name: opened.get_slice(name).get_shape() for name in names}
            total += sum(matrix_size(name, shape) for name, shape in shapes.items() if len(shape) == 2)
    except (SafetensorError, OSError):
        return None
    return total


def _bytes(numbers: int | None, width: float) -> int | None:
    return None if numbers is None else round(numbers * width)
