"""Tensors of a small decoder as tensors of a larger one that computes the same function.

Rows are wider, with zeros beyond the small model's part. Added heads and layers contribute nothing, because their
output weights are zero. Weights compensate for what a wider norm or a larger head would change:

- A norm divides by the root of a mean over more numbers, so its gain and epsilon are reduced accordingly.
- Rotary pair i of a small head becomes pair i * step of a large one, which has the same frequency.
- Attention divides by the root of the larger head size, so queries are scaled up accordingly. If heads are normed,
  their weights scale the mean so that the model's single epsilon has the same effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig, expected_tensors

# The dimensions of a tensor by the name of its module: outputs and, for a matrix, inputs.
_AXES = {
    "embed_tokens": ("vocabulary", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "gate_proj": ("intermediate", "hidden"),
    "up_proj": ("intermediate", "hidden"),
    "down_proj": ("hidden", "intermediate"),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "norm": ("hidden",),
    "q_norm": ("head_size",),
    "k_norm": ("head_size",),
}
_LAYER = "model.layers."


@dataclass(frozen=True, eq=False)
class Enlargement:
    """From a small configuration to a larger one that contains it (`larger_sizes`). Tensors are made on `device`."""

    small: DecoderConfig
    large: DecoderConfig
    device: torch.device

    def is_idle(self, name: str) -> bool:
        """Whether a tensor belongs to an added layer: it is all zeros."""
        return name.startswith(_LAYER) and int(name.split(".")[2]) >= self.small.layers

    def idle(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._shapes[name], dtype=dtype, device=self.device)

    def tensor(self, name: str, small: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the small decoder, given by canonical name, enlarged."""
        part = name.split(".")[-2]
        axes = _AXES[part][: small.ndim]
        scaled = small.to(self.device, torch.float32) * self._scales.get(part, 1.0)
        large = torch.zeros([self._sizes[axis] for axis in axes], dtype=dtype or small.dtype, device=self.device)
        large[tuple(self._places[axis] for axis in axes)] = scaled.to(large.dtype)
        return large

    def join(self, small: Tensor, unit_norms: int = 0) -> Tensor:
        """A matrix over several concatenated rows, enlarged.

        The last `unit_norms` rows are normed without a gain that could compensate for the wider row.
        """
        parts = small.shape[1] // self.small.hidden
        scales = torch.ones(parts, 1, device=self.device)
        scales[parts - unit_norms :] = self._norm_scale
        hidden, wide = self.small.hidden, self.large.hidden
        large = torch.zeros(wide, parts, wide, dtype=small.dtype, device=self.device)
        scaled = small.to(self.device, torch.float32).view(hidden, parts, hidden) * scales
        large[:hidden, :, :hidden] = scaled.to(large.dtype)
        return large.view(wide, parts * wide)

    def matrix_size(self, name: str, small: Sequence[int]) -> int:
        """The size of a matrix of a layer or of a join after enlargement."""
        if (part := name.split(".")[-2]) in _AXES:
            return math.prod(self._sizes[axis] for axis in _AXES[part])
        return self.large.hidden * small[1] // self.small.hidden * self.large.hidden

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return expected_tensors(self.large)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        large = self.large
        return {
            "vocabulary": large.vocabulary,
            "hidden": large.hidden,
            "queries": large.heads * large.head_size,
            "keys": large.kv_heads * large.head_size,
            "intermediate": large.intermediate,
            "head_size": large.head_size,
        }

    @cached_property
    def _places(self) -> dict[str, slice | Tensor]:
        """Where the elements of a small dimension are in the large one."""
        small, large = self.small, self.large
        group, wide_group = small.heads // small.kv_heads, large.heads // large.kv_heads
        half, step = torch.arange(small.head_size // 2), large.head_size // small.head_size
        in_head = torch.cat((half * step, large.head_size // 2 + half * step))
        key_heads = torch.arange(small.kv_heads)
        query_heads = (key_heads[:, None] * wide_group + torch.arange(group)).flatten()

        def in_heads(heads: Tensor) -> Tensor:
            return (heads[:, None] * large.head_size + in_head).flatten().to(self.device)

        return {
            "vocabulary": slice(small.vocabulary),
            "hidden": slice(small.hidden),
            "queries": in_heads(query_heads),
            "keys": in_heads(key_heads),
            "intermediate": slice(small.intermediate),
            "head_size": in_head.to(self.device),
        }

    @property
    def _norm_scale(self) -> float:
        return math.sqrt(self.small.hidden / self.large.hidden)

    @cached_property
    def _scales(self) -> dict[str, float]:
        norm = self._norm_scale
        head = math.sqrt(self.small.head_size / self.large.head_size)
        scales = dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), norm)
        if self.small.qk_norm:
            # Epsilon was reduced for wider rows by norm²; the mean over a larger head is smaller by head².
            return scales | {"q_proj": norm / head, "k_proj": norm / head, "k_norm": head}
        return scales | {"q_proj": 1 / head}
