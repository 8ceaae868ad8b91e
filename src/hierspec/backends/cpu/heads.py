"""What drafters need on a CPU, compiled: the head of a draft vocabulary, and what joins tokens and features."""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Decoder, ExtraRows
from hierspec.backends.cpu.compiled import compiled, kernel_version
from hierspec.backends.cpu.features import has_wide_registers
from hierspec.backends.cpu.layers import normalise, share
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.packing import packed
from hierspec.backends.cpu.product import FLOAT32, prepare_inputs, product
from hierspec.backends.cpu.quantised import INT4_GROUP, WORDS_PER_GROUP
from hierspec.backends.cpu.threads import ThreadTeam

_FLOAT = 4  # bytes
_AT_ONCE = 32  # rows that are joined together
_FEW = 6  # rows up to which waking the others takes longer than what they would take over


@compiled(kernel_version)
def run_draft_head(
    thread, threads, hidden, norm, eps, kind, parts, tokens, normed, inputs, records, small, logits, version=0
):
    """logits[row, token] for the tokens of each part; norm is empty where there is none.

    parts [n, 5]: first row, rows, address of the weights, blocks of 16 tokens, index of the first in `tokens`.
    """
    rows, size = hidden.shape
    mine, scores = normed[thread], small[thread]
    x, ready, record, out = (
        mine.ctypes.data,
        inputs[thread].ctypes.data,
        records[thread].ctypes.data,
        scores.ctypes.data,
    )
    for row in range(rows):
        if len(norm):
            normalise(hidden[row], norm, eps, mine[row])
        else:
            mine[row] = hidden[row]
    for part in range(len(parts)):
        start, count, weights, blocks, first_token = parts[part]
        begin = x + start * size * _FLOAT
        prepare_inputs(begin, count, size, kind, ready, record)
        first, last = share(blocks, thread, threads)
        step = scores.shape[1]
        # As many blocks at once as the thread's scratch memory holds, from its beginning on.
        block = first
        while block < last:
            until = min(last, block + step // LANES)
            product(begin, ready, record, count, weights, size, kind, out - block * LANES * _FLOAT, step, block, until)
            for row in range(count):
                for i in range((until - block) * LANES):
                    logits[start + row, tokens[first_token + block * LANES + i]] = scores[row, i]
            block = until


@compiled(kernel_version)
def run_join(
    thread,
    threads,
    embedded,
    states,
    taps,
    slots,
    norms,
    eps,
    weights,
    kind,
    joined,
    inputs,
    records,
    out,
    version=0,
):
    """out = (embedded rows, beside them features) times packed weights.

    Features are states[tap, slot] at each of `taps` and a row's slot, through one of `norms`; where there are no norms,
    as they are; zeros for a slot below zero. As many rows at once as `joined` has room for.
    """
    rows, size = embedded.shape
    width, mine = (1 + len(taps)) * size, joined[thread]
    x, ready, record = mine.ctypes.data, inputs[thread].ctypes.data, records[thread].ctypes.data
    first, last = share(size // LANES, thread, threads)
    start = 0
    while start < rows:
        count = min(len(mine), rows - start)
        for row in range(count):
            mine[row, :size] = embedded[start + row]
            slot = slots[start + row]
            for number in range(len(taps)):
                part = mine[row, (1 + number) * size : (2 + number) * size]
                if slot < 0:
                    part[:] = 0
                elif len(norms):
                    normalise(states[taps[number], slot], norms[number], eps, part)
                else:
                    part[:] = states[taps[number], slot]
        prepare_inputs(x, count, width, kind, ready, record)
        product(
            x, ready, record, count, weights, width, kind, out.ctypes.data + start * size * _FLOAT, size, first, last
        )
        start += count


class CpuJoin:
    """`Join`, compiled."""

    def __init__(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None, kind: int, team: ThreadTeam) -> None:
        self._decoder, self._team, self._kind, self._packed = decoder, team, kind, packed(matrix, kind)
        self._bias = None if bias is None else bias.float()
        self._eps = np.float32(decoder.config.norm_eps)
        self.bytes = self._packed.nbytes
        self._address, self._norms = self._packed.ctypes.data, Norms()
        self._scratch = _join_scratch(self._team.threads, matrix.shape[1])

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        out = np.empty((len(tokens), self._decoder.config.hidden), np.float32)
        arguments = (
            self._decoder.embed(tokens).numpy(),
            states.numpy(),
            np.array(taps, np.int64),
            slots,
            self._norms.floats(norms, 2),
            self._eps,
            self._address,
            self._kind,
            *self._scratch,
            out,
        )
        if len(tokens) <= _FEW:
            run_join(0, 1, *arguments)
        else:
            self._team.run(run_join, *arguments)
        joined = torch.from_numpy(out)
        return joined if self._bias is None else joined + self._bias


def _join_scratch(threads: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Memory of `run_join` between its parts: rows side by side, as products take them, and what goes with those."""
    return (
        np.empty((threads, _AT_ONCE, width), np.float32),
        np.empty((threads, _AT_ONCE, width * (4 if has_wide_registers() else 1)), np.int8),
        np.empty((threads, _AT_ONCE, -(-width // INT4_GROUP) * WORDS_PER_GROUP), np.float32),
    )


class Norms:
    """Norm weights as compiled code takes them: no norm is an empty array."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Tensor | None, np.ndarray]] = {}

    def floats(self, norm: Tensor | None, dimensions: int = 1) -> np.ndarray:
        entry = self._arrays.get(id(norm))
        if entry is None:  # the tensor is held too, so that no other one gets its id
            floats = np.empty((0,) * dimensions, np.float32) if norm is None else norm.float().numpy()
            entry = self._arrays[id(norm)] = norm, floats
        return entry[1]


class CpuShortlist:
    """Rows in 8 bits (a draft may always be), or as the target has them where its sizes do not allow that."""

    def __init__(self, weight: Tensor, tokens: np.ndarray, eps: float, kind: int, team: ThreadTeam) -> None:
        self._weight, self._eps, self._kind, self._team = weight, np.float32(eps), kind, team
        self.tokens = tokens
        self._frequent = self.gather(tokens)
        assert isinstance(self._frequent.rows, np.ndarray)
        self.bytes = self._frequent.rows.nbytes
        self._norms, self._rows = Norms(), 0
        self._shape: tuple[list[ExtraRows], list[int]] = [], []
        self._touched: list[ExtraRows | None] = []  # by row: whose tokens have logits there that are not minus infinity

    def gather(self, tokens: np.ndarray) -> ExtraRows:
        padded = np.append(tokens, np.repeat(tokens[-1:], -len(tokens) % LANES)).astype(np.int64)
        if not len(tokens):
            return ExtraRows(padded, np.empty(0, np.uint8))
        rows = self._weight[torch.from_numpy(padded)]
        return ExtraRows(padded, packed(rows, self._kind))  # padded with one token again: twice the same logit

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[ExtraRows], counts: Sequence[int]) -> Tensor:
        rows = len(states)
        self._make_room(rows)
        shape = [*extras], [*counts]
        if shape != self._shape:  # drafting asks for the same again and again
            self._parts, self._tokens = self._arranged(rows, extras, counts)
            self._clear([extra for extra, count in zip(extras, counts, strict=True) for _ in range(count)])
            self._shape = shape  # last: where Ctrl-C came before, the next call arranges again
        self._team.run(
            run_draft_head,
            states.contiguous().numpy(),
            self._norms.floats(norm),
            self._eps,
            self._kind,
            self._parts,
            self._tokens,
            self._normed,
            self._inputs,
            self._records,
            self._small,
            self._logits,
        )
        return torch.from_numpy(self._logits[:rows])

    def _arranged(self, rows: int, extras: Sequence[ExtraRows], counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """`parts` and `tokens` as `run_draft_head` takes them."""
        parts, tokens = [(0, rows, *_address(self._frequent), 0)], [self._frequent.tokens]
        first_token, row = len(self._frequent.tokens), 0
        for extra, count in zip(extras, counts, strict=True):
            if len(extra.tokens):
                parts.append((row, count, *_address(extra), first_token))
                tokens.append(extra.tokens)
                first_token += len(extra.tokens)
            row += count
        return np.array(parts, np.int64), np.concatenate(tokens)

    def _clear(self, extras: Sequence[ExtraRows]) -> None:
        """Let no row show what another request's tokens were last given there."""
        for row, extra in enumerate(extras):
            if self._touched[row] is not extra:
                if (before := self._touched[row]) is not None:
                    self._logits[row, before.tokens] = -np.inf
                self._touched[row] = extra

    def _make_room(self, rows: int) -> None:
        if rows <= self._rows:
            return
        self._shape = [], []  # also where Ctrl-C, or a lack of memory, leaves the following half done
        rows = max(rows, 2 * self._rows)
        threads, (vocabulary, hidden) = self._team.threads, self._weight.shape
        self._normed = np.empty((threads, rows, hidden), np.float32)
        self._inputs = np.empty((threads, rows, hidden * (4 if has_wide_registers() else 1)), np.int8)
        self._records = np.empty((threads, rows, -(-hidden // INT4_GROUP) * WORDS_PER_GROUP), np.float32)
        self._small = np.empty((threads, rows, 32 * LANES), np.float32)
        self._logits = np.full((rows, vocabulary), -np.inf, np.float32)
        self._touched = [None] * rows
        self._rows = rows


def _address(extra: ExtraRows) -> tuple[int, int]:
    """Of the rows, and how many blocks of 16 there are."""
    assert isinstance(extra.rows, np.ndarray)
    return extra.rows.ctypes.data, len(extra.tokens) // LANES


def compile_heads(team: ThreadTeam) -> None:
    """Compile what is in this file, or read it compiled."""
    weight = torch.zeros(LANES, LANES)
    with torch.inference_mode():
        row, no_norms = weight[:1].numpy(), np.empty((0, 0), np.float32)
        joint, zero = packed(torch.zeros(LANES, 2 * LANES), FLOAT32), np.zeros(1, np.int64)
        run_join(
            0,
            1,
            row,
            row[None],
            zero,
            zero,
            no_norms,
            np.float32(0),
            joint.ctypes.data,
            FLOAT32,
            *_join_scratch(1, 2 * LANES),
            row.copy(),
        )
        head = CpuShortlist(weight, np.arange(LANES, dtype=np.int32), 1e-5, FLOAT32, team)
        head.logits(weight[:1], weight[0], [head.gather(np.empty(0, np.int32))], [1])
