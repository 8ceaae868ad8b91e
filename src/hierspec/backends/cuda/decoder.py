"""The decoder on a GPU: the results of torch's decoder, with five kernels per layer (seven in large models), recorded
as CUDA graphs.

Weights are bfloat16 or int8. Hidden states are float32, so that a token may stop at any tap and continue later with the
same bits. A row's bits depend on its own text alone: not on the width of the pass, on other requests, on chain or tree,
on pages, or on where layer ranges or prompts were cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Backend, Batch, Memory
from hierspec.backends.cuda.attention import Places, attend
from hierspec.backends.cuda.fused import Heads, gated, queries_keys_values
from hierspec.backends.cuda.graphs import Graphs, Inbox, on_device
from hierspec.backends.cuda.launching import SMALL
from hierspec.backends.cuda.memory import CudaMemory
from hierspec.backends.cuda.norms import Norm, add_norm, enter_norm, norm
from hierspec.backends.cuda.products import ADD, ADD_AND_TAP, STORE_PARTS, Weight, product, weight
from hierspec.backends.cuda.scratch import Scratch
from hierspec.backends.cuda.tiling import DOWN, GATED, HEAD, OUTPUT, QKV
from hierspec.backends.cuda.work import MOST_ROWS, Work, bucket, in_passes, work_of
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.rotary import rotary_table

_ADD, _ADD_AND_TAP, _STORE_PARTS = ADD.value, ADD_AND_TAP.value, STORE_PARTS.value
_TOKENS = 1024  # up to this many tokens use a persistent input buffer
_LOGIT_ROWS = (1, 2, 4, 8, 16, 32, 64)
_FEWEST_POSITIONS = (
    4096  # of the rotary table: graphs are recorded again when it moves, so it has a whole context at once
)


@dataclass(frozen=True, eq=False)
class Layer:
    attention_norm: Tensor  # float32
    qkv: Weight
    heads: Heads
    output: Weight
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight

    @property
    def weights(self) -> tuple[tuple[Weight, int], ...]:
        """The weights, each with the number of its tiles that a program multiplies at once."""
        return (self.qkv, 2), (self.output, 1), (self.gate_up, 2), (self.down, 1)


class CudaDecoder:
    """Holds weights and scratch memory, and no state of any text."""

    def __init__(self, backend: Backend, config: DecoderConfig, weights: Mapping[str, Tensor], format: str) -> None:
        self.backend, self.config, self.device = backend, config, backend.device
        self.dtype = torch.float32
        self.products = f"cuda {format}"
        self.layer_rows = 0
        self.embedding = weights["model.embed_tokens.weight"].to(self.device, torch.bfloat16)
        self.head_weight = self.embedding
        if not config.tied and "lm_head.weight" in weights:
            self.head_weight = weights["lm_head.weight"].to(self.device, torch.bfloat16)
        self.norm = weights["model.norm.weight"].to(self.device, torch.float32)
        self.layers = [self._layer(number, weights, format) for number in range(config.layers)]
        # Extra layers beside a checkpoint have no embedding and no head.
        self.head = weight(HEAD, self.head_weight, format, self.device) if len(self.embedding) else None
        used = [each for layer in self.layers for each, _ in layer.weights]
        self.weight_bytes = sum(each.bytes for each in used) + (self.head.bytes if self.head else 0)
        multiplied = [*self.layers[0].weights, *([(self.head, 1)] if self.head else [])]
        self._norms_apart = config.hidden > SMALL  # with kernels of their own (`norms.py`)
        parts = max(self.layers[0].output.tiles.splits, self.layers[0].down.tiles.splits) if self._norms_apart else 0
        self.scratch = Scratch(config, multiplied, parts, self.device)
        self._positions = max(config.context, _FEWEST_POSITIONS)  # positions of the rotary table
        self.rotary = self._rotary(self._positions)
        self.graphs = Graphs(self.device)
        self._made = 0  # number of memories so far
        self._memories: WeakKeyDictionary[CudaMemory, int] = WeakKeyDictionary()  # numbers of memories, for graph keys
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._logits: dict[int, Tensor] = {}  # by rows
        self._tokens = Inbox(_TOKENS, torch.int64, self.device)

    def _layer(self, number: int, weights: Mapping[str, Tensor], format: str) -> Layer:
        config, device = self.config, self.device

        def get(name: str) -> Tensor:
            return weights[f"model.layers.{number}.{name}"]

        def floats(name: str) -> Tensor:
            return get(name).to(device, torch.float32)

        def joined(*names: str) -> Tensor:
            return torch.cat([get(f"{name}.weight").to(device) for name in names])

        projections = [f"self_attn.{part}_proj" for part in "qkv"]
        bias = torch.cat([floats(f"{name}.bias") for name in projections]) if config.attention_bias else None
        norms = None
        if config.qk_norm:
            norms = floats("self_attn.q_norm.weight"), floats("self_attn.k_norm.weight")
        heads = Heads(
            config.heads,
            config.kv_heads,
            config.head_size,
            config.rotary_layers[number],
            config.norm_eps,
            bias,
            norms,
        )
        half = config.head_size // 2
        return Layer(
            floats("input_layernorm.weight"),
            weight(QKV, joined(*projections), format, device, widest=half),
            heads,
            weight(OUTPUT, get("self_attn.o_proj.weight"), format, device),
            floats("post_attention_layernorm.weight"),
            weight(GATED, joined("mlp.gate_proj", "mlp.up_proj"), format, device),
            weight(DOWN, get("mlp.down_proj.weight"), format, device),
        )

    def _rotary(self, size: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `size` positions."""
        table = rotary_table(self.config.rotary, self.config.head_size, size)
        cos, sin = (torch.from_numpy(values).to(self.device) for values in table)
        return cos, sin

    def have_positions(self, count: int) -> None:
        """Makes the rotary table cover `count` positions. Graphs hold the old table's addresses, so they are
        dropped."""
        if count > self._positions:
            self._positions = 2 * count
            self.rotary = self._rotary(self._positions)
            self.graphs.clear()

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> CudaMemory:
        return CudaMemory(self.config, self.device, taps, most_bytes)

    def embed(self, tokens: np.ndarray) -> Tensor:
        if len(tokens) > _TOKENS:
            return self.embedding.index_select(0, on_device(tokens.astype(np.int64), self.device)).float()
        self._tokens.put(tokens)
        return self.embedding.index_select(0, self._tokens.buffer[: len(tokens)]).float()

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        assert isinstance(memory, CudaMemory)
        self.layer_rows += len(batch.positions) * (stop - start)
        self.have_positions(int(batch.positions.max()) + 1)
        group = self.config.heads // self.config.kv_heads
        windows = self.config.windows[start:stop]
        window = max(windows) if all(windows) else 0
        for rows, part in in_passes(batch, group):
            work = work_of(part, group, window, memory.spare)
            self.scratch.inbox.put(work.numbers)
            self.scratch.hidden[: work.rows].copy_(hidden[rows])
            self.replay(memory, work, start, stop)
            hidden[rows].copy_(self.scratch.hidden[: work.rows])
        return hidden

    def replay(self, memory: CudaMemory, work: Work, start: int, stop: int) -> None:
        """Runs layers start..stop over the rows whose numbers and states are in the scratch memory."""
        key = self.number_of(memory), start, stop, work.width, work.pieces, work.tree, work.tile
        places = self.scratch.places
        self.graphs.run(key, lambda: self.launch(memory, work, start, stop, places(work.width, work.pieces)))

    def number_of(self, memory: CudaMemory) -> int:
        """The memory's number, for graph keys: a graph holds the addresses of its memory."""
        number = self._memories.get(memory)
        if number is None:
            self._made += 1
            number = self._memories[memory] = self._made
        return number

    def launch(
        self,
        memory: CudaMemory,
        work: Work,
        start: int,
        stop: int,
        places: Places,
        head_gain: Tensor | None = None,
    ) -> None:
        """Runs layers start..stop over the rows whose states are in the scratch memory.

        `head_gain`: gain of the norm before the head, if the head comes next (`launch_head`).
        """
        first = self.layers[start].attention_norm if start < stop else head_gain
        if first is not None:
            self.launch_entry(first, work.width)
        for number in range(start, stop):
            tap = None
            if number + 1 in memory.taps:
                tap = memory.all_states[memory.taps.index(number + 1)], places.slots
            gain = self.layers[number + 1].attention_norm if number + 1 < stop else head_gain
            self.launch_layer(memory, number, work, places, tap, gain)

    def launch_layer(
        self,
        memory: CudaMemory,
        number: int,
        work: Work,
        places: Places,
        tap: tuple[Tensor, Tensor] | None,
        next_gain: Tensor | None,
    ) -> None:
        """Runs one layer on states that have entered its first norm; they leave having entered the next norm, if
        any."""
        layer, scratch, config, rows = self.layers[number], self.scratch, self.config, work.width
        cache = memory.keys[number], memory.values[number]
        entering, splitting = scratch.entering, scratch.splitting
        self.launch_keys(memory, number, rows, places)
        window = config.windows[number]
        attend(
            scratch.queries,
            cache,
            places,
            work.pieces,
            scratch.attention,
            scratch.attended,
            config.heads,
            window,
            work.tree,
            work.tile,
        )
        if self._norms_apart:
            self._add_product(scratch.attended, layer.output, rows, layer.mlp_norm)
            gated(entering.scaled, layer.gate_up, scratch.gated, rows, splitting, after_norm=True)
            self._add_product(scratch.gated, layer.down, rows, next_gain, tap)
            return
        inner = layer.mlp_norm, entering
        product(scratch.attended, layer.output, scratch.hidden, rows, splitting, _ADD, enters=inner)
        gated(entering.scaled, layer.gate_up, scratch.gated, rows, splitting, self.norm_left)
        end = _ADD if tap is None else _ADD_AND_TAP
        outer = None if next_gain is None else (next_gain, entering)
        product(scratch.gated, layer.down, scratch.hidden, rows, splitting, end, tap, enters=outer)

    def _add_product(
        self, x: Tensor, weight: Weight, rows: int, gain: Tensor | None, tap: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Adds a product to the states, and norms them with this gain, if any, for the next product."""
        scratch = self.scratch
        product(x, weight, scratch.parts, rows, scratch.splitting, _STORE_PARTS)
        normed, eps = scratch.entering.scaled, self.config.norm_eps
        add_norm(scratch.parts, weight.tiles.splits, scratch.hidden, gain, normed, rows, eps, tap)

    def launch_keys(self, memory: CudaMemory, number: int, rows: int, places: Places, first_head: int = 0) -> None:
        """Queries, keys and values of a layer from head `first_head` on, for states that have entered its norm."""
        layer, scratch = self.layers[number], self.scratch
        queries_keys_values(
            scratch.entering.scaled,
            layer.qkv,
            layer.heads,
            self.rotary,
            scratch.queries,
            (memory.keys[number], memory.values[number]),
            rows,
            (places.positions, places.slots, places.drafted),
            scratch.splitting,
            self.norm_left,
            first_head,
            after_norm=self._norms_apart,
        )

    def launch_entry(self, gain: Tensor, rows: int) -> None:
        """Norms the states in the scratch memory, or applies the first half of it, if no product did so
        (`norms.py`)."""
        scratch = self.scratch
        if self._norms_apart:
            norm(scratch.hidden, gain, scratch.entering.scaled, rows, self.config.norm_eps)
        else:
            enter_norm(scratch.hidden, gain, scratch.entering, rows)

    @property
    def norm_left(self) -> Norm | None:
        """The second half of the norm that the states have entered, for the next product; None if nothing is left."""
        return None if self._norms_apart else Norm(self.scratch.entering.squares, self.config.norm_eps)

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        """Logits as in `Decoder`; with few rows they are valid only until the next call."""
        gain, rows, most = self.gain(norm), states.shape[0], _LOGIT_ROWS[-1]
        if rows <= most:
            return self._head(states, gain)
        return torch.cat([self._head(states[first : first + most], gain).clone() for first in range(0, rows, most)])

    def _head(self, states: Tensor, gain: Tensor) -> Tensor:
        rows = states.shape[0]
        width = bucket(rows, _LOGIT_ROWS)
        out = self.room_for_logits(width)
        self.scratch.hidden[:rows].copy_(states)

        def launch() -> None:
            self.launch_entry(gain, width)
            self.launch_head(width, out)

        self.graphs.run(("head", gain.data_ptr(), width), launch)
        return out[:rows]

    def launch_head(self, rows: int, out: Tensor) -> None:
        """Logits of states that have entered the norm before the head."""
        assert self.head is not None
        x, splitting = self.scratch.entering.scaled, self.scratch.splitting
        product(x, self.head, out, rows, splitting, norm=self.norm_left, after_norm=self._norms_apart)

    def room_for_logits(self, rows: int) -> Tensor:
        """A buffer for the logits of this many rows, always at the same address."""
        most = bucket(rows, (_LOGIT_ROWS[-1], MOST_ROWS))
        if most not in self._logits:
            self._logits[most] = torch.zeros((most, self.head_weight.shape[0]), device=self.device)
        return self._logits[most]

    def gain(self, norm: Tensor | None) -> Tensor:
        """The gain of a norm before the head, by default the final norm, in the form that kernels read."""
        return self._floats(self.norm if norm is None else norm)

    def _floats(self, norm: Tensor) -> Tensor:
        """A norm weight in float32, always at the same address."""
        known = self._norms.get(id(norm))
        if known is None:  # hold the tensor too, so that no other gets its id
            known = self._norms[id(norm)] = norm, norm.to(self.device, torch.float32).contiguous()
        return known[1]


assert _LOGIT_ROWS[-1] <= MOST_ROWS
