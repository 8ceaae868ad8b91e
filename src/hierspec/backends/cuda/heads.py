"""What drafters need on a GPU beside layers: the head of a draft vocabulary, and the join of tokens and features."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import ExtraRows
from hierspec.backends.cuda.decoder import CudaDecoder
from hierspec.backends.cuda.graphs import on_device
from hierspec.backends.cuda.head_kernels import gathered_product, join_inputs, listed_product
from hierspec.backends.cuda.norms import norm as launch_norm
from hierspec.backends.cuda.products import Weight, parts_needed, product, weight
from hierspec.backends.cuda.tiling import HEAD, JOIN, Tiles
from hierspec.backends.cuda.work import MOST_ROWS

_EXTRA_COUNTS = (32, 256, 1024, 4096)  # sizes for extra tokens; beyond the last, the whole vocabulary


def room_for(extras: int, vocabulary: int) -> int:
    """The number of extra tokens that the kernel gets programs for."""
    return next((size for size in _EXTRA_COUNTS if size >= extras), vocabulary)


class CudaShortlist:
    """Some rows of a head as their own matrix; a request's extra tokens use the rows of the whole head in place."""

    def __init__(self, decoder: CudaDecoder, tokens: np.ndarray, format: str) -> None:
        self.tokens, self.device = tokens, decoder.device
        self.table = decoder.head_weight
        self.eps = decoder.config.norm_eps
        self.listed = torch.from_numpy(tokens.astype(np.int32)).to(self.device)
        rows = self.table[self.listed.long()]
        made = weight(HEAD, rows, format, self.device)
        self.weight = Weight(made.matrix, made.scales, _unsplit(made.tiles))
        self.bytes = self.weight.bytes
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}

    def gather(self, tokens: np.ndarray) -> ExtraRows:
        return ExtraRows(tokens, on_device(np.append(tokens, len(tokens)).astype(np.int32), self.device))

    def logits(self, states: Tensor, norm: Tensor | None, extras: Sequence[ExtraRows], counts: Sequence[int]) -> Tensor:
        rows, vocabulary = len(states), len(self.table)
        x = torch.empty((rows, self.table.shape[1]), dtype=torch.bfloat16, device=self.device)
        out = torch.full((rows, vocabulary), -math.inf, device=self.device)
        self.launch_norm(states.float().contiguous(), norm, x, rows)
        listed_product(x, self.weight, self.listed, out, rows)
        row = 0
        for extra, count in zip(extras, counts, strict=True):
            if len(extra.tokens):
                assert isinstance(extra.rows, Tensor)
                listed, size = extra.rows[:-1], extra.rows[-1:]
                most = room_for(len(extra.tokens), vocabulary)
                gathered_product(x[row : row + count], self.table, listed, size, out[row : row + count], count, most)
            row += count
        return out

    def launch_norm(self, states: Tensor, norm: Tensor | None, x: Tensor, rows: int) -> None:
        """Writes normed states to `x`, as the products read them."""
        if norm is None:
            x[:rows].copy_(states[:rows])
        else:
            launch_norm(states, self.floats(norm), x, rows, self.eps)

    def floats(self, norm: Tensor) -> Tensor:
        """A norm weight in float32, always at the same address."""
        known = self._norms.get(id(norm))
        if known is None:  # hold the tensor too, so that no other gets its id
            known = self._norms[id(norm)] = norm, norm.to(self.device, torch.float32).contiguous()
        return known[1]


def _unsplit(tiles: Tiles) -> Tiles:
    return Tiles(tiles.outputs, tiles.inputs, 1, tiles.stages, tiles.warps)


class CudaJoin:
    def __init__(self, decoder: CudaDecoder, matrix: Tensor, bias: Tensor | None, format: str) -> None:
        self._decoder, device = decoder, decoder.device
        self.weight = weight(JOIN, matrix, format, device)
        self._bias = None if bias is None else bias.to(device, torch.float32)
        self.bytes = self.weight.bytes
        self.embedding, self.eps = decoder.embedding, decoder.config.norm_eps
        self.x = torch.zeros((MOST_ROWS, matrix.shape[1]), dtype=torch.bfloat16, device=device)
        floats, counters = 1, 1
        for rows in (1, 32, MOST_ROWS):
            needed = parts_needed(len(matrix), self.weight.tiles, rows)
            floats, counters = max(floats, needed[0]), max(counters, needed[1])
        self._splitting = (
            torch.zeros(floats, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        self._norms: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self._taps: dict[tuple[int, ...], Tensor] = {}

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        given = on_device(np.stack((tokens.astype(np.int64), slots.astype(np.int64))).astype(np.int32), states.device)
        out = torch.empty((len(tokens), len(self.weight.matrix)), device=states.device)
        for first in range(0, len(tokens), MOST_ROWS):
            rows = min(MOST_ROWS, len(tokens) - first)
            here, slot = (numbers[first : first + rows] for numbers in given)
            self.launch(here, states, self.taps(tuple(taps)), slot, self.floats(norms), out[first:], rows)
        return out

    def launch(
        self,
        tokens: Tensor,
        states: Tensor,
        taps: Tensor,
        slots: Tensor,
        gains: Tensor | None,
        out: Tensor,
        rows: int,
        index: Tensor | None = None,
    ) -> None:
        """Launches the join; tokens and slots [rows], taps and norms are on the device.

        `index`: where each row's token is, if not in order.
        """
        join_inputs(tokens, self.embedding, states, taps, slots, gains, self.x, rows, self.eps, index)
        product(self.x, self.weight, out, rows, self._splitting, bias=self._bias)

    def taps(self, taps: tuple[int, ...]) -> Tensor:
        known = self._taps.get(taps)
        if known is None:
            known = self._taps[taps] = torch.tensor(taps, dtype=torch.int32, device=self._decoder.device)
        return known

    def floats(self, norms: Tensor | None) -> Tensor | None:
        """Norm weights in float32, always at the same address."""
        known = self._norms.get(id(norms))
        if known is None:
            floats = None if norms is None else norms.to(self._decoder.device, torch.float32).contiguous()
            known = self._norms[id(norms)] = norms, floats
        return known[1]
