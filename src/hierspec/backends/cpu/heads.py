"""What drafters need on a CPU beside layers: the head of a draft vocabulary, and the join of tokens and features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Decoder, ExtraRows, Rows
from hierspec.backends.cpu.features import has_wide_registers
from hierspec.backends.cpu.forms import SMALLEST_GROUP
from hierspec.backends.cpu.head_passes import run_draft_head, run_join
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.packing import packed
from hierspec.backends.cpu.product import product_code
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP
from hierspec.backends.cpu.threads import ThreadTeam

_AT_ONCE = 32  # rows that are joined together
_FEW = 6  # up to this many rows, waking the other threads takes longer than the work they would take over


class CpuJoin:
    """`Join`, compiled."""

    def __init__(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None, kind: int, team: ThreadTeam) -> None:
        self._decoder, self._team, self._packed = decoder, team, packed(matrix, kind)
        self._bias = None if bias is None else bias.float()
        self.bytes, self._norms = self._packed.nbytes, Norms()
        eps, address = np.array([decoder.config.norm_eps], np.float32), self._packed.ctypes.data
        self._arguments = eps, address, product_code(kind), *_join_scratch(self._team.threads, matrix.shape[1])

    @property
    def bias(self) -> np.ndarray:
        """The bias; empty if there is none."""
        return np.empty(0, np.float32) if self._bias is None else self._bias.numpy()

    def arguments(self, norms: Tensor | None) -> tuple[Any, ...]:
        """Arguments of `run_join` from `norms` up to `records`."""
        return self._norms.floats(norms, 2), *self._arguments

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        out = np.empty((len(tokens), self._decoder.config.hidden), np.float32)
        arguments = (
            self._decoder.embed(tokens).numpy(),
            states.numpy(),
            np.array(taps, np.int64),
            slots,
            *self.arguments(norms),
            out,
        )
        if len(tokens) <= _FEW:
            run_join(0, 1, *arguments)
        else:
            self._team.run(run_join, *arguments)
        joined = torch.from_numpy(out)
        return joined if self._bias is None else joined + self._bias


def _join_scratch(threads: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scratch memory of `run_join`: rows with their features, inputs in the product's layout, and their group
    scales."""
    return (
        np.empty((threads, _AT_ONCE, width), np.float32),
        np.empty((threads, _AT_ONCE, width * (4 if has_wide_registers() else 1)), np.int8),
        np.empty((threads, _AT_ONCE, -(-width // SMALLEST_GROUP) * WORDS_PER_GROUP), np.float32),
    )


class Norms:
    """Norm weights for compiled code, cached; no norm is an empty array."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Tensor | None, np.ndarray]] = {}

    def floats(self, norm: Tensor | None, dimensions: int = 1) -> np.ndarray:
        entry = self._arrays.get(id(norm))
        if entry is None:  # hold the tensor too, so that no other gets its id
            floats = np.empty((0,) * dimensions, np.float32) if norm is None else norm.float().numpy()
            entry = self._arrays[id(norm)] = norm, floats
        return entry[1]


class CpuShortlist:
    """A head for some tokens: in 8 bits, enough for drafts, or in the target's format if its sizes do not allow
    that."""

    def __init__(self, weight: Rows, tokens: np.ndarray, eps: float, kind: int, team: ThreadTeam) -> None:
        self._weight, self._eps, self._kind, self._team = weight, np.array([eps], np.float32), kind, team
        self._code = product_code(kind)
        self.tokens = tokens
        self._frequent = self.gather(tokens)
        assert isinstance(self._frequent.rows, np.ndarray)
        self.bytes = self._frequent.rows.nbytes
        self._norms, self._rows = Norms(), 0
        self._shape: tuple[list[ExtraRows], list[int]] = [], []
        self._touched: list[ExtraRows | None] = []  # by row: the extra tokens whose logits there are not minus infinity

    def gather(self, tokens: np.ndarray) -> ExtraRows:
        padded = np.append(tokens, np.repeat(tokens[-1:], -len(tokens) % LANES)).astype(np.int64)
        if not len(tokens):
            return ExtraRows(padded, np.empty(0, np.uint8))
        rows = self._weight[torch.from_numpy(padded)]
        return ExtraRows(padded, packed(rows, self._kind))  # padding repeats a token, which writes the same logit again

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[ExtraRows], counts: Sequence[int]) -> Tensor:
        self._team.run(run_draft_head, states.contiguous().numpy(), *self.arguments(len(states), norm, extras, counts))
        return torch.from_numpy(self._logits[: len(states)])

    def arguments(
        self, rows: int, norm: Tensor | None, extras: Sequence[ExtraRows], counts: Sequence[int]
    ) -> tuple[Any, ...]:
        """Arguments of `run_draft_head` after the states; the last are the logits, whose first `rows` rows are used."""
        self._make_room(rows)
        shape = [*extras], [*counts]
        if shape != self._shape:  # drafting repeats the same shape many times
            self._parts, self._tokens = self._arranged(rows, extras, counts)
            self._clear([extra for extra, count in zip(extras, counts, strict=True) for _ in range(count)])
            self._shape = shape  # set last: if Ctrl-C came earlier, the next call arranges again
        return (
            self._norms.floats(norm),
            self._eps,
            self._code,
            self._parts,
            self._tokens,
            self._normed,
            self._inputs,
            self._records,
            self._small,
            self._logits,
        )

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
        """Resets logits that a row still has from another request's extra tokens."""
        for row, extra in enumerate(extras):
            if self._touched[row] is not extra:
                if (before := self._touched[row]) is not None:
                    self._logits[row, before.tokens] = -np.inf
                self._touched[row] = extra

    def _make_room(self, rows: int) -> None:
        if rows <= self._rows:
            return
        self._shape = [], []  # first: Ctrl-C or a failed allocation may leave the rest half done
        rows = -(-max(rows, 2 * self._rows) // LANES) * LANES  # whole tiles
        threads, (vocabulary, hidden) = self._team.threads, self._weight.shape
        self._normed = np.empty((threads, rows, hidden), np.float32)
        self._inputs = np.empty((threads, rows, hidden * (4 if has_wide_registers() else 1)), np.int8)
        self._records = np.empty((threads, rows, -(-hidden // SMALLEST_GROUP) * WORDS_PER_GROUP), np.float32)
        self._small = np.empty((threads, rows, 32 * LANES), np.float32)
        self._logits = np.full((rows, vocabulary), -np.inf, np.float32)
        self._touched = [None] * rows
        self._rows = rows


def _address(extra: ExtraRows) -> tuple[int, int]:
    """The address of the rows, and their number of blocks of 16."""
    assert isinstance(extra.rows, np.ndarray)
    return extra.rows.ctypes.data, len(extra.tokens) // LANES
