"""A pack's small model as a separate checkpoint: it shares the target's embeddings and head, but no states."""

from __future__ import annotations

from dataclasses import replace

from hierspec.checkpoints.load import Checkpoint
from hierspec.checkpoints.packs import SMALL
from hierspec.core.errors import HierspecError

_SHARED = ("model.embed_tokens.weight", "lm_head.weight")  # with the target, if it has them


def small_checkpoint(target: Checkpoint) -> Checkpoint:
    """The checkpoint of the small model in the target's pack."""
    pack = target.pack
    if pack is None or not pack.has(SMALL):
        raise HierspecError(
            f'{target.name} has no pack with a small model (draft = "small"): name another model as the draft.'
        )
    branch = pack.small(target.config)
    assert branch.norm is not None
    weights = {name: tensor.to(target.dtype) for name, tensor in branch.layer.items()}
    weights["model.norm.weight"] = branch.norm.to(target.dtype)
    weights |= {name: target.weights[name] for name in _SHARED if name in target.weights}
    return replace(
        target,
        name=f"{target.name}-small",
        config=replace(branch.config, tied=target.config.tied),
        weights=weights,
        variant=pack.hashes[SMALL],
    )
