"""The decoder on a CPU: the results of torch's decoder, with one compiled function per pass (`layers.py`).

Weights are float32, bfloat16, int8, int4 or in a GGUF file's format, and are packed once. Everything else is float32,
except the inputs of quantised (`quantised.py`) and AMX (`amx.py`) products and the KV cache (`backend.py`). A row's
bits depend on its own text alone: not on the width of the pass, on other requests, on chain or tree, or on where layer
ranges were cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Backend, Batch, Memory, Rows
from hierspec.backends.cpu.amx import DEPTH
from hierspec.backends.cpu.amx_attention import most_parts, rows_of_block, run_tile_attention
from hierspec.backends.cpu.amx_attention_kernels import attention_code
from hierspec.backends.cpu.amx_segments import ROW_TILES, part_floats, room_bytes
from hierspec.backends.cpu.amx_softmax import SEGMENT
from hierspec.backends.cpu.attention import QUERIES, run_attention, score_floats
from hierspec.backends.cpu.attention_kernels import vector_code
from hierspec.backends.cpu.byte_tiles import has_byte_tiles
from hierspec.backends.cpu.embedding import EmbeddingTable
from hierspec.backends.cpu.features import has_wide_registers, is_arm
from hierspec.backends.cpu.forms import SMALLEST_GROUP
from hierspec.backends.cpu.kernels import BYTES
from hierspec.backends.cpu.layers import run_head, run_layers
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.memory import CpuMemory
from hierspec.backends.cpu.packing import PackedWeights
from hierspec.backends.cpu.product import AMX_SCRATCH_BYTES, FORM_OF_KIND, product_code
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.checkpoints.cast_weights import CastWeights
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.gguf_weights import GgufWeights, StoredRows
from hierspec.checkpoints.rotary import rotary_table

_FIRST_TEXT = np.zeros(1, np.int64)  # the text of the only group of rows


class CpuDecoder:
    """Holds weights and scratch memory, and no state of any text."""

    def __init__(
        self,
        backend: Backend,
        team: ThreadTeam,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        packed: PackedWeights,
        stored: str = "float32",  # how keys and values are: float32, float16, or bfloat16 in tiles
    ) -> None:
        self.backend = backend
        self.config = config
        self.dtype = torch.float32  # of hidden states
        self.embedding: Rows = _rows(weights, "model.embed_tokens.weight")
        self._embed = _embedding(self.embedding)
        self.head_weight: Rows = self.embedding if config.tied else _rows(weights, "lm_head.weight")
        self.norm = weights["model.norm.weight"]
        self.layer_rows = 0
        self._packed = packed
        self.weight_bytes = packed.bytes
        self.products = packed.name  # how weights are stored and multiplied: a name in KINDS
        self._team = team
        self._norm = _floats(self.norm)
        self._eps = np.array([config.norm_eps], np.float32)
        self._codes = np.stack([product_code(kind) for kind in packed.kinds])
        self._head_code = product_code(packed.head_kind)

        def stacked(present: bool, *names: str) -> np.ndarray:
            """[layers, names, size]; empty if the architecture has no such weights."""
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
        sizes = (config.heads, config.kv_heads, config.head_size, config.intermediate, config.layers)
        self._shape = (*sizes, BYTES[stored])
        scale = config.head_size**-0.5
        self._scale = np.array([scale, scale * np.log2(np.e)], np.float32)  # for exp, and for exp2
        self._stored = stored
        self._tile_attention = tile_attention = stored == "bfloat16"
        self.attention_code = attention_code() if tile_attention else vector_code(stored)
        # Rows of one attention group: of a chain, and nodes of a tree.
        group = config.heads // config.kv_heads
        self.rows_together = rows_of_block(group) if tile_attention else QUERIES
        self._nodes_together = rows_of_block(group, 1) if tile_attention else QUERIES
        nothing = np.empty((0, config.head_size // 2), np.float32)
        self._rotary_table = nothing, nothing  # cosines and sines by position; one tuple, so both change at once
        self._scratch = Scratch(config, team.threads, tile_attention)
        # In the order of `run_layers`.
        self.weights = (
            self._packed.layers,
            self._packed.layer_kinds,
            self._codes,
            self._norms,
            self._head_norms,
            self._biases,
            self._windows,
            self._rotary_layers,
            self._shape,
            self._eps,
            _row_split(packed.kinds),
        )

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> CpuMemory:
        return CpuMemory(self.config, taps, most_bytes, self._stored)

    def embed(self, tokens: np.ndarray) -> Tensor:
        return torch.from_numpy(self._embed(tokens))

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        assert isinstance(memory, CpuMemory)
        positions = batch.positions
        rows = len(positions)
        self.layer_rows += rows * (stop - start)
        cos, sin = self.rotary(int(positions.max()) + 1 if rows else 1)
        states = hidden.numpy()
        assert memory.stored == self._stored
        groups, group_texts = self.groups(batch)
        longest = int(batch.lengths.max()) + len(batch.paths) if rows else 0
        self._team.run(
            run_layers,
            self._team.sync,
            start,
            stop,
            states,
            cos[positions],
            sin[positions],
            positions,
            batch.slots,
            batch.drafted,
            memory.address,
            batch.tables,
            groups,
            group_texts,
            batch.lengths,
            batch.path_starts,
            batch.paths,
            *self.weights,
            *self.scratch(rows, longest, len(group_texts)),
            memory.tap_addresses(start, stop),
        )
        return hidden

    @cached_property
    def embedding_table(self) -> EmbeddingTable:
        """The embedding table in the form that compiled functions read."""
        return EmbeddingTable(self.embedding)

    def head_arguments(self, norm: Tensor | None = None) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
        """Arguments of `run_head`: a norm, its epsilon, the weights, and the routines that multiply with them."""
        return self._norm if norm is None else _floats(norm), self._eps, self._packed.head, self._head_code

    @cached_property
    def _attention(self) -> int:
        """Address of the attention function that layers call."""
        return (run_tile_attention if self._tile_attention else run_attention).address()

    def scratch(self, rows: int, longest: int, groups: int) -> tuple[Any, ...]:
        """Arguments of `run_layers` from its scratch arrays up to the taps, for rows in `groups` groups that see at
        most `longest` tokens."""
        return *self._scratch.for_rows(rows, longest, groups).arrays, self._scale, self.attention_code, self._attention

    def groups(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Groups of rows that attend together: their first rows and the end, and the text of each group."""
        starts = batch.text_starts
        if not len(batch.paths):
            if len(starts) == 2 and 0 < starts[1] <= self.rows_together:  # most passes: one text, few rows
                return starts, _FIRST_TEXT
            return _groups(starts, np.arange(len(starts) - 1), [self.rows_together] * (len(starts) - 1))
        # Rows with paths are in groups of their own: they share the tokens before their paths.
        commons = np.where(np.diff(batch.path_starts) > 0, batch.lengths, -1)
        cuts = np.unique(np.concatenate((starts, np.flatnonzero(np.diff(commons)) + 1)))
        most = np.where(commons[cuts[:-1]] < 0, self.rows_together, self._nodes_together)
        return _groups(cuts, np.searchsorted(starts, cuts[:-1], side="right") - 1, most.tolist())

    def rotary(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of at least `count` positions; the table grows to twice that."""
        if count > len(self._rotary_table[0]):
            self._rotary_table = rotary_table(self.config.rotary, self.config.head_size, 2 * count)
        return self._rotary_table

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        logits = np.empty((len(states), self.config.vocabulary), np.float32)
        scratch = self._scratch.for_rows(len(states), 0)
        self._team.run(
            run_head,
            self._team.sync,
            states.contiguous().numpy(),
            *self.head_arguments(norm),
            scratch.normed,
            scratch.inputs,
            scratch.records,
            logits,
        )
        return torch.from_numpy(logits)


def _rows(weights: Mapping[str, Tensor], name: str) -> Rows:
    """A table of which few rows are used: a tensor, or rows that are computed on demand."""
    return weights.rows(name) if isinstance(weights, GgufWeights | CastWeights) else weights[name]


def _embedding(table: Rows) -> Callable[[np.ndarray], np.ndarray]:
    """A function from tokens to their embeddings in float32."""
    if isinstance(table, StoredRows):
        return table.few
    if isinstance(table, Tensor) and table.dtype == torch.float32:
        floats: np.ndarray = table.numpy()
        return lambda tokens: floats[tokens]
    return lambda tokens: _floats(table[torch.from_numpy(tokens)])


def _groups(cuts: np.ndarray, cut_texts: np.ndarray, most: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Splits the rows between cuts into groups of at most `most`: first rows and the end, and the text of each
    group."""
    firsts: list[int] = []
    texts: list[int] = []
    starts = cuts.tolist()
    for text, (first, last), step in zip(cut_texts.tolist(), pairwise(starts), most, strict=True):
        group = range(first, last, step)
        firsts += group
        texts += [text] * len(group)
    return np.array([*firsts, starts[-1]], np.int64), np.array(texts, np.int64)


def _row_split(kinds: Sequence[int]) -> tuple[int, int]:
    """Rows per thread from which on the threads of a pass split its rows, and what they split them into multiples of.

    Then every thread reads all weights, but no thread repeats norms and quantised inputs. With quantised weights and
    vectors, arithmetic is the bottleneck from few rows on: on two x86 cores passes over 32 and 64 tokens became 10%
    shorter. Float weights and AMX tiles are bound by memory there, and on ARM it was not measured.
    """
    by_vectors = all(kind in FORM_OF_KIND for kind in kinds) and not (has_byte_tiles() or is_arm())
    return (12, 4) if by_vectors else (64, LANES)


def _floats(weight: Tensor) -> np.ndarray:
    floats: np.ndarray = weight.float().numpy()
    return floats


def _aligned(count: int, size: int) -> np.ndarray:
    """[count, size] bytes that start at a cache line; `size` is a multiple of 64."""
    memory = np.zeros(count * size + 64, np.int8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * size].reshape(count, size)


def _aligned_floats(count: int, size: int) -> np.ndarray:
    return _aligned(count, 4 * size).view(np.float32)


class Scratch:
    """Memory between the parts of a pass, reused by later passes and enlarged when needed."""

    def __init__(self, config: DecoderConfig, threads: int, tile_attention: bool = False) -> None:
        self._config, self._threads, self._tile_attention = config, threads, tile_attention
        self._rows, self._longest, self._parts = 0, 0, 0
        self.rooms = _aligned(threads, room_bytes(config.head_size) if tile_attention else 0)
        self._of_heads = np.empty((0, 0, 0), np.float32), np.empty((0, 0, 0), np.float32)  # none with tiles
        self.for_rows(16, 1024)

    def for_rows(self, rows: int, longest: int, groups: int = 0) -> Scratch:
        config, threads = self._config, self._threads
        self._now = rows
        if rows > self._rows:
            rows = -(-rows // LANES) * LANES  # whole tiles
            self.normed = np.empty((threads, rows, config.hidden), np.float32)
            widest = max(config.hidden, config.intermediate, config.heads * config.head_size)
            # Inputs in the layout of the product: int8, bfloat16 tiles, or floats, transposed if registers are wide.
            self.inputs = _aligned(threads, rows * -(-widest // DEPTH) * DEPTH * (4 if has_wide_registers() else 2))
            self.records = _aligned(
                threads, max(4 * rows * -(-widest // SMALLEST_GROUP) * WORDS_PER_GROUP, AMX_SCRATCH_BYTES)
            )
            width = (config.heads + 2 * config.kv_heads) * config.head_size
            self._qkv = np.empty((rows, width), np.float32)
            self._attended = np.empty((rows, config.heads * config.head_size), np.float32)
            self._gates = np.empty((threads, 2, rows, LANES), np.float32)
            self._gated = np.empty((rows, config.intermediate), np.float32)
            self._delta = np.empty((rows, config.hidden), np.float32)
            if not self._tile_attention:
                self._totals = np.empty((rows, 2 * config.heads), np.float32)
                # What the query heads of a KV head have for each row: queries, and weighted sums of values.
                shape = config.kv_heads, rows, config.heads // config.kv_heads * config.head_size
                self._of_heads = np.empty(shape, np.float32), np.empty(shape, np.float32)
            self._rows = rows  # set last: if an allocation failed, the next pass tries again
        if self._tile_attention:
            self._for_segments(longest, groups)
        elif longest > self._longest:
            floats = score_floats(config.heads, config.kv_heads, config.head_size, 2 * longest, threads)
            self._scores = _aligned_floats(1, floats)[None]
            self._longest = 2 * longest
        return self

    def _for_segments(self, longest: int, groups: int) -> None:
        """Scores of one segment for each thread, and parts for as many segments as are kept."""
        config, threads = self._config, self._threads
        needed = most_parts(config.heads, config.kv_heads, groups, longest, threads)
        if needed > self._parts:
            size = part_floats(config.head_size)
            self._scores = _aligned_floats(threads * ROW_TILES, LANES * SEGMENT).reshape(threads, ROW_TILES, -1)
            self._totals = _aligned_floats(2 * needed, size)
            self._parts = 2 * needed

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Scratch arguments of `run_layers`, cut to the rows of this pass."""
        rows = slice(self._now)
        shared = self._qkv[rows], *self._of_heads, self._attended[rows], self._gates, self._gated[rows], self._delta
        return self.normed, self.inputs, self.records, *shared, self._scores, self._totals, self.rooms
