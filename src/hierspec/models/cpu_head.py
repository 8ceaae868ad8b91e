"""On a CPU, compiled: the head of a draft vocabulary (norm, product and scatter in one), and single products."""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor

from hierspec.models.cpu_pass import normalise, share
from hierspec.models.cpu_product import FLOATS, make_ready, product
from hierspec.models.draft_head import Extra
from hierspec.models.low_bits import GROUP, RECORD
from hierspec.models.packed import packed
from hierspec.models.team import Team
from hierspec.models.vector_code import CODE, LANES, WIDE

_FLOAT = 4  # bytes


@njit(nogil=True, cache=True, error_model="numpy")
def run_draft_head(
    thread, threads, hidden, norm, eps, kind, parts, tokens, normed, inputs, records, small, logits, code=CODE
):  # fmt: skip
    """logits[row, token] for the tokens of each part; norm is empty where there is none.

    parts [n, 5]: first row, rows, address of the weights, blocks of 16 tokens, where those tokens begin in `tokens`.
    """
    rows, size = hidden.shape
    mine, own = normed[thread], small[thread]
    x, ready, record, out = mine.ctypes.data, inputs[thread].ctypes.data, records[thread].ctypes.data, own.ctypes.data
    for row in range(rows):
        if len(norm):
            normalise(hidden[row], norm, eps, mine[row])
        else:
            mine[row] = hidden[row]
    for part in range(len(parts)):
        start, count, weights, blocks, place = parts[part]
        begin = x + start * size * _FLOAT
        make_ready(begin, count, size, kind, ready, record)
        first, last = share(blocks, thread, threads)
        step = own.shape[1]
        # In places that begin at zero, so that a thread's own memory holds its blocks whatever their number.
        block = first
        while block < last:
            until = min(last, block + step // LANES)
            product(
                begin, ready, record, count, weights, size, kind, out - block * LANES * _FLOAT, step, block, until
            )  # fmt: skip
            for row in range(count):
                for i in range((until - block) * LANES):
                    logits[start + row, tokens[place + block * LANES + i]] = own[row, i]
            block = until


@njit(nogil=True, cache=True, error_model="numpy")
def run_product(thread, threads, x, weights, kind, inputs, records, out, code=CODE):
    """out = x times packed weights."""
    rows, size = x.shape
    ready, record = inputs[thread].ctypes.data, records[thread].ctypes.data
    make_ready(x.ctypes.data, rows, size, kind, ready, record)
    first, last = share(out.shape[1] // LANES, thread, threads)
    product(x.ctypes.data, ready, record, rows, weights, size, kind, out.ctypes.data, out.shape[1], first, last)


class CpuLinear:
    """A packed matrix, and a bias where there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: int, team: Team) -> None:
        self._outputs, self._inputs_size = weight.shape
        self._packed, self._kind, self._team = packed(weight, kind), kind, team
        self._bias = None if bias is None else bias.float()
        self.bytes = self._packed.nbytes
        self._rows = 0

    def __call__(self, x: Tensor) -> Tensor:
        rows, size, threads = len(x), self._inputs_size, self._team.threads
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
            self._inputs = np.empty((threads, self._rows, size * (4 if WIDE else 1)), np.int8)
            self._records = np.empty((threads, self._rows, -(-size // GROUP) * RECORD), np.float32)
        out = np.empty((rows, self._outputs), np.float32)
        self._team.run(
            run_product, x.contiguous().numpy(), self._packed.ctypes.data, self._kind, self._inputs, self._records, out
        )  # fmt: skip
        found = torch.from_numpy(out)
        return found if self._bias is None else found + self._bias


class CpuProduct:
    """Rows in 8 bits (a draft may always be), or as the target has them where its sizes do not allow that."""

    def __init__(self, weight: Tensor, tokens: np.ndarray, eps: float, kind: int, team: Team) -> None:
        self._weight, self._eps, self._kind, self._team = weight, np.float32(eps), kind, team
        self.tokens = tokens
        self._own = self.gather(tokens)
        assert isinstance(self._own.rows, np.ndarray)
        self.bytes = self._own.rows.nbytes
        self._norms: dict[int, tuple[Tensor | None, np.ndarray]] = {}
        self._rows = 0
        self._touched: list[np.ndarray] = []  # by row: tokens whose logits are not minus infinity now

    def gather(self, tokens: np.ndarray) -> Extra:
        padded = np.append(tokens, np.repeat(tokens[-1:], -len(tokens) % LANES)).astype(np.int64)
        if not len(tokens):
            return Extra(padded, np.empty(0, np.uint8))
        rows = self._weight[torch.from_numpy(padded)]
        return Extra(padded, packed(rows, self._kind))  # padded with one token again: twice the same logit

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[Extra], counts: Sequence[int]) -> Tensor:
        rows = len(states)
        self._make_room(rows)
        for row, before in enumerate(self._touched[:rows]):
            self._logits[row, before] = -np.inf
        self._touched[:rows] = [extra.tokens for extra, count in zip(extras, counts, strict=True) for _ in range(count)]
        parts, tokens, place, row = [(0, rows, *_placed(self._own), 0)], [self._own.tokens], len(self._own.tokens), 0
        for extra, count in zip(extras, counts, strict=True):
            if len(extra.tokens):
                parts.append((row, count, *_placed(extra), place))
                tokens.append(extra.tokens)
                place += len(extra.tokens)
            row += count
        self._team.run(
            run_draft_head, states.contiguous().numpy(), self._floats(norm), self._eps, self._kind,
            np.array(parts, np.int64), np.concatenate(tokens) if len(tokens) > 1 else tokens[0],
            self._normed, self._inputs, self._records, self._small, self._logits,
        )  # fmt: skip
        return torch.from_numpy(self._logits[:rows])

    def _floats(self, norm: Tensor | None) -> np.ndarray:
        if id(norm) not in self._norms:
            self._norms[id(norm)] = norm, np.empty(0, np.float32) if norm is None else norm.float().numpy()
        return self._norms[id(norm)][1]

    def _make_room(self, rows: int) -> None:
        if rows <= self._rows:
            return
        self._rows = rows = max(rows, 2 * self._rows)
        threads, (vocabulary, hidden) = self._team.threads, self._weight.shape
        self._normed = np.empty((threads, rows, hidden), np.float32)
        self._inputs = np.empty((threads, rows, hidden * (4 if WIDE else 1)), np.int8)
        self._records = np.empty((threads, rows, -(-hidden // GROUP) * RECORD), np.float32)
        self._small = np.empty((threads, rows, 32 * LANES), np.float32)
        self._logits = np.full((rows, vocabulary), -np.inf, np.float32)
        self._touched = [np.empty(0, np.int64)] * rows


def _placed(extra: Extra) -> tuple[int, int]:
    assert isinstance(extra.rows, np.ndarray)
    return extra.rows.ctypes.data, len(extra.tokens) // LANES


def compile_now(team: Team) -> None:
    """Compile what is in this file, or read it compiled."""
    weight = torch.zeros(LANES, LANES)
    with torch.inference_mode():
        CpuLinear(weight, None, FLOATS, team)(weight[:1])
        head = CpuProduct(weight, np.arange(LANES, dtype=np.int32), 1e-5, FLOATS, team)
        head.logits(weight[:1], weight[0], [head.gather(np.empty(0, np.int32))], [1])
