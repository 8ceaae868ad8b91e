"""Random weights in the shapes of real models: passes cost the same, and nothing is downloaded."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig, LayerConfig, Rotary, expected_tensors
from hierspec.core.errors import HierspecError

SHAPES = {  # vocabulary, hidden, layers, heads, KV heads, head size, intermediate, tied
    "default": (49152, 576, 30, 9, 3, 64, 1536, True),
    "1B": (128256, 2048, 16, 32, 8, 64, 8192, True),
    "8B": (128256, 4096, 32, 32, 8, 128, 14336, False),
    "70B": (32000, 8192, 80, 64, 8, 128, 28672, False),
    "tiny": (320, 64, 2, 4, 2, 32, 96, True),  # for checking that it runs
}


def shape_config(shape: str) -> DecoderConfig:
    if shape not in SHAPES:
        raise HierspecError(f"There is no shape {shape!r}; choose some of {', '.join(SHAPES)}.")
    vocabulary, hidden, layers, heads, kv_heads, size, intermediate, tied = SHAPES[shape]
    return DecoderConfig(
        family="llama",
        vocabulary=vocabulary,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        intermediate=intermediate,
        norm_eps=1e-5,
        context=8192,
        tied=tied,
        rotary=Rotary(500000.0),
        layer_configs=(LayerConfig(),) * layers,
        bos_id=None,
        eos_ids=(),
    )


class RandomWeights(Mapping[str, Tensor]):
    """Random weights, made on the device on access, so that a whole model is never in memory twice."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._shapes, self._device, self._dtype = expected_tensors(config), device, dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        numbers = torch.empty(shape, dtype=self._dtype, device=self._device)
        return numbers.normal_(0, shape[1] ** -0.5, generator=generator)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
