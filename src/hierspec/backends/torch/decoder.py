"""One decoder for the Llama family through torch, on any device: the reference for all other decoders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hierspec.backends.base import Backend, Batch, Memory
from hierspec.backends.torch.memory import TorchMemory, index_of
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.rotary import rotary_table


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; None for weights that an architecture lacks."""

    attention_norm: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    output_bias: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


@dataclass(frozen=True)
class _Text:
    """What attention needs to know of one text of a batch, on the device."""

    rows: slice
    keys: slice | Tensor  # slots of everything that some row sees: the text's tokens, then its proposed tokens
    masks: dict[int, Tensor | None]  # by window: [rows, keys], True if the row sees the key; None: all True


# On recent GPUs torch prefers cuDNN's attention, which plans again for every key length: that takes longer than the
# pass, at each new token. The others need no plans.
NO_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TorchDecoder:
    """Holds weights and no state of any text; a memory holds what was computed before."""

    def __init__(self, backend: Backend, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
        self.backend = backend
        self.config = config
        self.device = backend.device
        placed = {name: tensor.to(self.device) for name, tensor in weights.items()}
        self.embedding = placed["model.embed_tokens.weight"]
        self.norm = placed["model.norm.weight"]
        self.head_weight = self.embedding if config.tied else placed["lm_head.weight"]
        self.dtype = self.embedding.dtype  # of hidden states, keys and values
        self.products = f"torch {self.dtype}".replace("torch.", "")
        self.layers = [
            Layer(**{field: placed.get(f"model.layers.{number}.{name}") for field, name in _NAMES.items()})  # type: ignore[arg-type]
            for number in range(config.layers)
        ]
        nothing = torch.empty(0, config.head_size // 2, device=self.device)
        self._rotary_table = nothing, nothing  # cosines and sines by position; one tuple, so both change at once
        self.layer_rows = 0  # rows times layers run so far; reuse of cached states keeps it low
        read = [tensor for name, tensor in placed.items() if config.tied or name != "model.embed_tokens.weight"]
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in read)

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> TorchMemory:
        return TorchMemory(self.config, self.dtype, self.device, taps, most_bytes)

    def embed(self, tokens: np.ndarray) -> Tensor:
        return functional.embedding(torch.as_tensor(tokens, device=self.device), self.embedding)

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        assert isinstance(memory, TorchMemory)
        cos, sin = self._rotary(batch.positions)
        self.layer_rows += len(batch.positions) * (stop - start)
        windows = set(self.config.windows[start:stop])
        slots = torch.as_tensor(batch.slots, device=self.device)
        texts = [self._text(memory, batch, text, windows) for text in range(len(batch.tables))]
        drafts = _drafted_rows(batch)
        for number in range(start, stop):
            layer = self.layers[number]
            hidden, x = self._entering(hidden, layer)
            if drafts:
                x = _numbers_only(x, drafts)
            hidden = hidden + self._attention(memory.numbers[number], slots, texts, number, x, cos, sin)
            x = self._normed(hidden, layer.mlp_norm)
            x = functional.silu(functional.linear(x, layer.gate, layer.gate_bias)) * functional.linear(
                x, layer.up, layer.up_bias
            )
            hidden = hidden + functional.linear(x, layer.down, layer.down_bias)
            if number + 1 in memory.taps:
                memory.states[memory.taps.index(number + 1), slots] = hidden
        return hidden

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        return functional.linear(self._normed(states, self.norm if norm is None else norm), self.head_weight).float()

    def _entering(self, hidden: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """The states that a layer adds to, and the input of its attention."""
        return hidden, self._normed(hidden, layer.attention_norm)

    def _attention(
        self, numbers: Tensor, slots: Tensor, texts: Sequence[_Text], number: int, x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config, rows, layer = self.config, len(x), self.layers[number]
        q = functional.linear(x, layer.q, layer.q_bias).view(rows, config.heads, config.head_size)
        k = functional.linear(x, layer.k, layer.k_bias).view(rows, config.kv_heads, config.head_size)
        v = functional.linear(x, layer.v, layer.v_bias).view(rows, config.kv_heads, config.head_size)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        if config.rotary_layers[number]:
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        # Query heads that share a KV head form one block, so that keys are read once and never repeated.
        group = config.heads // config.kv_heads
        q = q.view(rows, config.kv_heads, group, config.head_size)
        parts = []
        keys, values = numbers  # [kv_heads, slots, head_size]
        keys[:, slots] = k.transpose(0, 1)
        values[:, slots] = v.transpose(0, 1)
        for text in texts:
            count = text.rows.stop - text.rows.start
            block = q[text.rows].permute(1, 2, 0, 3).reshape(1, config.kv_heads, group * count, config.head_size)
            mask = text.masks[config.windows[number]]
            with sdpa_kernel(NO_PLANS) if self.device.type == "cuda" else nullcontext():
                seen = functional.scaled_dot_product_attention(
                    block,
                    keys[None, :, text.keys],
                    values[None, :, text.keys],
                    attn_mask=None if mask is None else mask.repeat(group, 1),
                )
            parts.append(
                seen.view(config.kv_heads, group, count, config.head_size).permute(2, 0, 1, 3).reshape(count, -1)
            )
        return functional.linear(parts[0] if len(parts) == 1 else torch.cat(parts), layer.output, layer.output_bias)

    def _text(self, memory: TorchMemory, batch: Batch, text: int, windows: set[int]) -> _Text:
        first, last = int(batch.text_starts[text]), int(batch.text_starts[text + 1])
        lengths, starts = batch.lengths[first:last], batch.path_starts[first : last + 1]
        length = int(lengths.max())
        proposed = np.unique(batch.paths[starts[0] : starts[-1]])
        pages = batch.tables[text, : -(-length // memory.page), None] * memory.page
        slots = np.concatenate(((pages + np.arange(memory.page)).ravel()[:length], proposed))
        seen = np.zeros((last - first, len(slots)), bool)
        seen[:, :length] = np.arange(length) < lengths[:, None]
        positions = np.arange(len(slots))
        for row in range(last - first):
            path = length + np.searchsorted(proposed, batch.paths[starts[row] : starts[row + 1]])
            seen[row, path] = True
            positions[path] = lengths[row] + np.arange(len(path))
        masks: dict[int, Tensor | None] = {}
        for window in windows:
            in_window = seen
            if window:
                in_window = seen & (batch.positions[first:last, None] - positions < window)
            masks[window] = None if in_window.all() else torch.as_tensor(in_window, device=self.device)
        return _Text(slice(first, last), index_of(slots, self.device), masks)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _rotary(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, 1, head_size / 2] of the positions, from a table that grows with the text."""
        needed = int(positions.max()) + 1
        cos, sin = self._rotary_table
        if needed > len(cos):
            size = max(needed, min(2 * len(cos), self.config.context), 512)
            table = rotary_table(self.config.rotary, self.config.head_size, size)
            cos, sin = (torch.from_numpy(values).to(self.device) for values in table)
            self._rotary_table = cos, sin
        rows = torch.as_tensor(positions, device=self.device)
        return cos[rows, None].to(self.dtype), sin[rows, None].to(self.dtype)


def _drafted_rows(batch: Batch) -> list[slice]:
    """For each text with drafted tokens, their rows, which follow the rows of its context."""
    drafts: list[slice] = []
    if not len(batch.drafted):
        return drafts
    for first, last in pairwise(batch.text_starts.tolist()):
        count = int(batch.drafted[first:last].sum())
        if count:
            drafts.append(slice(last - count, last))
    return drafts


def _numbers_only(x: Tensor, drafts: Sequence[slice]) -> Tensor:
    """The input of attention with zeros instead of NaN for drafted tokens.

    Rows that must not see a token give it weight zero, and zero times NaN is NaN: one bad draft would spoil the text
    that plain decoding writes. Its own row stays NaN, because the layers add to its NaN state.
    """
    x = x.clone()
    for rows in drafts:
        x[rows] = x[rows].nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return x


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, head_size]; the two halves of a head are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
