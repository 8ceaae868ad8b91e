"""Matrices in 8 bits with a scale per row, as packs store them: accurate enough for drafting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hierspec.checkpoints.tensor_files import check_shape, check_tensor

_SCALE = ".scale"
_MOST = 127
# Bits of a scale that stay zero. With the other 16 bits, scale * integer is exact in float32, so what was read can be
# written again without another rounding.
_UNUSED = (1 << 8) - 1


def in_eight_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every floating-point matrix as 8-bit integers and, under its name plus `.scale`, a float per row."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            stored[name] = tensor
            continue
        floats = tensor.float().cpu()
        steps = floats.abs().amax(dim=1) / _MOST if floats.shape[1] else floats.new_zeros(len(floats))
        bits = (steps.view(torch.int32) + _UNUSED) & ~_UNUSED  # rounded up, so that no number exceeds the last integer
        scale = bits.view(torch.float32)
        integers = (floats / scale.where(scale > 0, 1.0)[:, None]).round()
        stored[name], stored[name + _SCALE] = integers.to(torch.int8), scale
    return stored


def from_eight_bits(path: Path, tensors: Mapping[str, Tensor], remedy: str) -> dict[str, Tensor]:
    """The inverse: every matrix of the file `path` as floats again."""
    floats: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8 and (scale := tensors.get(name + _SCALE)) is not None:
            check_shape(path, name, tuple(tensor.shape), (len(scale) if scale.ndim else 1, *tensor.shape[1:2]), remedy)
            scale = check_tensor(path, name + _SCALE, scale, tuple(tensor.shape[:1]), remedy)
            floats[name] = tensor.float() * scale[:, None]
        elif not (name.endswith(_SCALE) and _is_matrix(tensors.get(name.removesuffix(_SCALE)))):
            floats[name] = tensor
    return floats


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values that these tensors have after they are stored and read again."""
    return from_eight_bits(Path(), in_eight_bits(tensors), "")


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that their numbers take in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in in_eight_bits(tensors).values())


def _is_matrix(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.int8
