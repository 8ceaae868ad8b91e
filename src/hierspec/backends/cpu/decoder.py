"""The decoder on a CPU through `cpu_pass`: the same answers as `Decoder`, in one compiled function a pass.

Weights are float32, bfloat16, int8 or int4 and packed once; everything else is float32, but for the inputs of products
with few bits (`low_bits`) or by matrix units (`matrix_units`). A row's bits depend on its own text alone: not on the
width of the pass, on other requests, on chain or tree, or on where layer ranges were cut.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.cpu.amx import DEPTH
from hierspec.backends.cpu.features import has_wide_registers
from hierspec.backends.cpu.layers import QUERIES, run_head, run_layers
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.packing import PackedWeights, pack_in_memory
from hierspec.backends.cpu.pick import best_tokens
from hierspec.backends.cpu.product import AMX_SCRATCH_BYTES, BFLOAT16, FLOAT32
from hierspec.backends.cpu.quantised import INT4_GROUP, WORDS_PER_GROUP
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch.decoder import Kept, Span
from hierspec.checkpoints.config import DecoderConfig, inverse_frequencies


def unsuited(config: DecoderConfig, dtype: torch.dtype) -> str:
    """Why this checkpoint cannot run here; nothing where it can."""
    sizes = (config.hidden, config.intermediate, config.head_size, config.vocabulary)
    if any(size % LANES for size in sizes):
        return f"its sizes are not multiples of {LANES}"
    if config.output_bias or config.mlp_bias:
        return "it has biases outside of queries, keys and values"
    if dtype not in (torch.float32, torch.bfloat16):
        return "its weights must be float32 or bfloat16"
    return "" if os.name == "posix" else "this system is not supported"


class CpuDecoder:
    """Takes the place of `Decoder`. Holds weights and scratch memory, nothing of any text."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], threads: int, packed: PackedWeights | None = None,
        team: ThreadTeam | None = None,  # another decoder's, to share
    ) -> None:  # fmt: skip
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = torch.float32  # of hidden states, keys and values
        self.embedding = weights["model.embed_tokens.weight"]
        self._embedding = self.embedding.numpy() if self.embedding.dtype == torch.float32 else None
        self.head_weight = self.embedding if config.tied else weights["lm_head.weight"]
        self.norm = weights["model.norm.weight"]
        self.layer_rows = 0
        if packed is None:
            packed = pack_in_memory(config, weights, BFLOAT16 if self.embedding.dtype == torch.bfloat16 else FLOAT32)
        self._packed = packed
        self.weight_bytes = packed.bytes
        self.products = packed.name  # how they are computed: a name of KINDS
        self._team = team or ThreadTeam(threads)
        self.team: ThreadTeam | None = self._team
        self._norm = _floats(self.norm)

        def stacked(present: bool, *names: str) -> np.ndarray:
            """[layers, names, size]; empty where the architecture has none."""
            if not present:
                return np.empty((0, 0, 0), np.float32)
            layers = range(config.layers)
            return np.array([[_floats(weights[f"model.layers.{n}.{name}"]) for name in names] for n in layers])

        self._norms = stacked(True, "input_layernorm.weight", "post_attention_layernorm.weight")
        self._head_norms = stacked(config.qk_norm, "self_attn.q_norm.weight", "self_attn.k_norm.weight")
        self._biases = np.empty((0, 0), np.float32)
        if config.attention_bias:
            parts = [stacked(True, f"self_attn.{part}_proj.bias")[:, 0] for part in "qkv"]
            self._biases = np.ascontiguousarray(np.concatenate(parts, axis=1))
        self._windows = np.array(config.windows, np.int64)
        self._rotary_layers = np.array(config.rotary_layers)
        self._shape = (config.heads, config.kv_heads, config.head_size, config.intermediate)
        self._scale = np.array([config.head_size**-0.5], np.float32)
        frequencies, self._rotary_factor = inverse_frequencies(config.rotary, config.head_size)
        self._frequencies = torch.as_tensor(frequencies)
        self._cos, self._sin = (np.empty((0, config.head_size // 2), np.float32) for _ in range(2))  # by position
        self._scratch = Scratch(config, threads)

    def prepare(self, draft_heads: bool = False) -> None:
        """Have everything compiled now: seconds on the first use on a machine, later read from a file."""
        if draft_heads:
            from hierspec.backends.cpu.heads import compile_now

            compile_now(self._team)
        with torch.inference_mode():
            self.run(torch.zeros(0, self.config.hidden), np.zeros(0, np.int32), [], 0, 0)
            logits = self.head(torch.zeros(1, self.config.hidden)).numpy()
            best_tokens(logits, 0.0, np.zeros((1, 2), np.int64), np.empty((1, 1), np.int64)[:, 0])

    def new_memory(self) -> LaneMemory:
        return LaneMemory(self.config)

    def embed(self, tokens: np.ndarray) -> Tensor:
        if self._embedding is None:
            return self.embedding[torch.from_numpy(tokens)].float()
        return torch.from_numpy(self._embedding[tokens])

    def run(
        self, hidden: Tensor, positions: np.ndarray, spans: Sequence[Span], start: int, stop: int, kept: Kept = ()
    ) -> Tensor:
        """Layers start..stop over packed rows [rows, hidden]; keys and values are written on the way, and the states
        after the layers that `kept` names."""
        rows = len(positions)
        self.layer_rows += rows * (stop - start)
        most = int(positions.max()) if rows else 0
        if most >= len(self._cos):
            self._turn(most + 1)
        cos, sin = self._cos[positions], self._sin[positions]
        states = hidden.numpy()
        # Lists, not arrays: a pass has few rows, and there is much to say of each.
        slots: list[int] = []
        keys: list[int] = []
        values: list[int] = []
        capacity: list[int] = []
        ends: list[int] = []
        paths: list[int] = []
        groups: list[int] = []
        path_starts = [0]
        longest = 0
        for span in spans:
            staircase, memory, count = span.staircase, span.staircase.memory, len(span.slots)
            assert isinstance(memory, LaneMemory)
            chain, own = staircase.chain, span.slots.tolist()
            slots += own
            keys += [memory.keys_at] * count
            values += [memory.values_at] * count
            capacity += [memory.slots] * count
            ends += [min(slot + 1, chain) for slot in own]
            longest = max(longest, staircase.used)
            groups += range(span.rows.start, span.rows.stop, QUERIES)
            for slot in own:
                if slot >= chain:
                    paths += staircase.path(slot)
                path_starts.append(len(paths))
        scratch = self._scratch.for_rows(rows, longest)
        by_row = np.array([positions, slots, keys, values, capacity, ends], np.int64)
        self._team.run(
            run_layers, self._team.sync, start, stop, states, cos, sin,
            *by_row[:5], np.array([*groups, rows], np.int64),
            by_row[5], np.array(path_starts, np.int64), np.array(paths, np.int64),
            self._packed.layers, self._packed.kind,
            self._norms, self._head_norms, self._biases, self._windows, self._rotary_layers, self._shape,
            np.float32(self.config.norm_eps), *scratch.arrays, self._scale,
            np.array([(layer, after.data_ptr()) for layer, after in kept], np.int64).reshape(-1, 2),
        )  # fmt: skip
        return torch.from_numpy(states)

    def _turn(self, count: int) -> None:
        """Cosines and sines of the positions up to `count`, and as many again."""
        angles = torch.arange(2 * count)[:, None].float() * self._frequencies
        self._cos, self._sin = ((f(angles) * self._rotary_factor).numpy() for f in (torch.cos, torch.sin))

    def head(self, hidden: Tensor, norm: Tensor | None = None) -> Tensor:
        """Logits [rows, vocabulary] in float32 of hidden states after any layer, through the last norm, or another."""
        logits = np.empty((len(hidden), self.config.vocabulary), np.float32)
        scratch = self._scratch.for_rows(len(hidden), 0)
        weight = self._norm if norm is None else _floats(norm)
        self._team.run(
            run_head, hidden.contiguous().numpy(), weight, np.float32(self.config.norm_eps),
            self._packed.head, self._packed.head_kind, scratch.normed, scratch.inputs, scratch.records, logits,
        )  # fmt: skip
        return torch.from_numpy(logits)


def _floats(weight: Tensor) -> np.ndarray:
    found: np.ndarray = weight.float().numpy()
    return found


class LaneMemory:
    """Keys [layers, kv_heads, slots / 16, head_size, 16] and values [layers, kv_heads, head_size / 16, slots, 16]."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self.slots = 0
        self._allocate(0)

    @property
    def bytes_per_slot(self) -> int:
        config = self._config
        return 2 * config.layers * config.kv_heads * config.head_size * self.keys.element_size()

    def grow(self, slots: int, used: int) -> None:
        keys, values = self.keys, self.values
        self._allocate(slots)
        blocks = -(-used // LANES)
        self.keys[:, :, :blocks] = keys[:, :, :blocks]
        self.values[:, :, :, :used] = values[:, :, :, :used]

    def move(self, to: list[int], old: list[int]) -> None:
        (to_block, to_lane), (block, lane) = (np.divmod(slots, LANES) for slots in (to, old))
        self.keys[:, :, to_block, :, to_lane] = self.keys[:, :, block, :, lane]
        self.values[:, :, :, to] = self.values[:, :, :, old]

    def _allocate(self, slots: int) -> None:
        config = self._config
        self.slots = -(-slots // LANES) * LANES
        start = (config.layers, config.kv_heads)
        self.keys = torch.zeros(*start, self.slots // LANES, config.head_size, LANES)
        self.values = torch.zeros(*start, config.head_size // LANES, self.slots, LANES)
        self.keys_at, self.values_at = self.keys.data_ptr(), self.values.data_ptr()


def _aligned(count: int, size: int) -> np.ndarray:
    """[count, size] bytes that begin at a line of the cache; `size` is a multiple of 64."""
    memory = np.zeros(count * size + 64, np.int8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * size].reshape(count, size)


class Scratch:
    """Memory between the parts of a pass, kept from pass to pass and made larger as needed."""

    def __init__(self, config: DecoderConfig, threads: int) -> None:
        self._config, self._threads = config, threads
        self._rows, self._longest = 0, 0
        self.for_rows(16, 1024)

    def for_rows(self, rows: int, longest: int) -> Scratch:
        config, threads = self._config, self._threads
        self._now = rows
        if rows > self._rows:
            self._rows = rows = -(-rows // LANES) * LANES  # whole tiles
            self.normed = np.empty((threads, rows, config.hidden), np.float32)
            widest = max(config.hidden, config.intermediate, config.heads * config.head_size)
            # Inputs of products as they take them: bytes, tiles of bfloat16, or floats turned where registers are wide.
            self.inputs = _aligned(threads, rows * -(-widest // DEPTH) * DEPTH * (4 if has_wide_registers() else 2))
            self.records = _aligned(
                threads, max(4 * rows * -(-widest // INT4_GROUP) * WORDS_PER_GROUP, AMX_SCRATCH_BYTES)
            )
            width = (config.heads + 2 * config.kv_heads) * config.head_size
            self._qkv = np.empty((rows, width), np.float32)
            self._attended = np.empty((rows, config.heads * config.head_size), np.float32)
            self._gates = np.empty((threads, 2, rows, LANES), np.float32)
            self._gated = np.empty((rows, config.intermediate), np.float32)
            self._delta = np.empty((rows, config.hidden), np.float32)
            self._totals = np.empty((rows, config.heads), np.float32)
        if longest > self._longest:
            self._longest = 2 * longest
            self._scores = np.zeros((config.heads, QUERIES, self._longest + LANES), np.float32)
        return self

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """As `run_layers` takes them: cut to the rows of this pass."""
        rows = slice(self._now)
        shared = self._qkv[rows], self._attended[rows], self._gates, self._gated[rows], self._delta
        return self.normed, self.inputs, self.records, *shared, self._scores, self._totals
