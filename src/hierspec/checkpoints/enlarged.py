"""A small checkpoint at the cost of a large one: the same function with wider rows and more layers (`enlargement`).

Nothing is downloaded or written, and tensors are made only on access. Exits and drafters that were trained for the
small model are enlarged with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.enlargement import Enlargement
from hierspec.checkpoints.larger_sizes import enlarged_config, read_sizes
from hierspec.checkpoints.load import Checkpoint, load_checkpoint, stored_in_blocks
from hierspec.checkpoints.packs import Branch, FeatureBranch, Pack
from hierspec.progress import Progress


def load_enlarged(
    source: str | Path | None,
    sizes: str,
    dtype: torch.dtype | Callable[[DecoderConfig], torch.dtype] = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    pack: str | Path | None = None,
) -> Checkpoint:
    """The checkpoint that `load_checkpoint` finds, enlarged to these sizes (`larger_sizes`).

    Its tensors are made on the device in `dtype`, at each access.
    """
    wanted = read_sizes(sizes)
    # The weights of a GGUF file stay in it: the enlarged weights differ from its numbers anyway.
    checkpoint = load_checkpoint(source, torch.float32, progress, pack, as_stored=stored_in_blocks(source))
    config = enlarged_config(checkpoint.config, wanted)
    chosen = dtype if isinstance(dtype, torch.dtype) else dtype(config)
    enlargement = Enlargement(checkpoint.config, config, torch.device(device))
    return replace(
        checkpoint,
        name=f"{checkpoint.name} enlarged to {sizes}",
        config=config,
        weights=EnlargedWeights(checkpoint.weights, enlargement, chosen),
        dtype=chosen,
        pack=None if checkpoint.pack is None else EnlargedPack.of(checkpoint.pack, enlargement),
        enlarged=sizes,
    )


class EnlargedWeights(Mapping[str, Tensor]):
    """Enlarged tensors, made on access and not cached."""

    def __init__(self, small: Mapping[str, Tensor], enlargement: Enlargement, dtype: torch.dtype) -> None:
        self._small, self._enlargement, self._dtype = small, enlargement, dtype
        self._names = tuple(expected_tensors(enlargement.large))

    def __getitem__(self, name: str) -> Tensor:
        if self._enlargement.is_idle(name):
            return self._enlargement.idle(name, self._dtype)
        return self._enlargement.tensor(name, self._small[name], self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class EnlargedPack(Pack):
    """The pack of the small model, enlarged: its layers cost as much as the large model's."""

    enlargement: Enlargement = field(kw_only=True)

    @classmethod
    def of(cls, pack: Pack, enlargement: Enlargement) -> EnlargedPack:
        same = {each.name: getattr(pack, each.name) for each in fields(Pack)}
        return cls(**same, enlargement=enlargement)

    def matrix_size(self, name: str, shape: Sequence[int]) -> int:
        return self.enlargement.matrix_size(name, shape)

    def adapter(self, exit_layer: int, config: DecoderConfig) -> Branch:
        return self._branch(super().adapter(exit_layer, self.enlargement.small))

    def small(self, config: DecoderConfig) -> Branch:
        return self._branch(super().small(self.enlargement.small))

    def feature(self, config: DecoderConfig) -> FeatureBranch:
        branch = super().feature(self.enlargement.small)
        layers, join = self._branch(branch), self.enlargement.join
        return replace(
            branch,
            config=layers.config,
            layer=layers.layer,
            norm=layers.norm,
            fc=join(branch.fc),
            # The inputs after the first two are states at taps.
            first=None if branch.first is None else join(branch.first, len(branch.taps)),
        )

    def exit_norm(self, exit_layer: int) -> Tensor | None:
        return self._norm(super().exit_norm(exit_layer))

    def _branch(self, small: Branch) -> Branch:
        config = replace(self.enlargement.large, layer_configs=small.config.layer_configs, tied=True)
        layer = {name: self.enlargement.tensor(name, tensor) for name, tensor in small.layer.items()}
        return Branch(config, layer, self._norm(small.norm))

    def _norm(self, small: Tensor | None) -> Tensor | None:
        return None if small is None else self.enlargement.tensor("model.norm.weight", small)
