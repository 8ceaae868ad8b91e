"""An embedding table in the form that compiled functions read."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Rows


class EmbeddingTable:
    """A table in float32 or in bfloat16; the other array is empty.

    If rows are computed on demand, only those that were added exist; the others take no memory.
    """

    def __init__(self, table: Rows) -> None:
        vocabulary, hidden = table.shape
        self.floats, self.halves = np.empty((0, hidden), np.float32), np.empty((0, hidden), np.int16)
        self.made = np.ones(vocabulary, bool)  # rows that exist
        self._source: Rows | None = None
        if not isinstance(table, Tensor):
            self._source = table
            self.made[:] = False
            self.floats = _sparse(vocabulary, hidden)
        elif table.dtype == torch.bfloat16:
            self.halves = table.view(torch.int16).numpy()
        else:
            self.floats = table.numpy()

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """A copy of these rows in float32; those that are missing are computed."""
        self.add((tokens,))
        if len(self.floats):
            rows: np.ndarray = self.floats[tokens]
            return rows
        return (self.halves[tokens].astype(np.int32) << 16).view(np.float32)

    def add(self, tokens: Iterable[np.ndarray]) -> None:
        """Computes the rows of these tokens, if they are missing."""
        if self._source is None:
            return
        for some in tokens:
            missing = some[~self.made[some]]
            if len(missing):
                self.floats[missing] = self._source[torch.from_numpy(missing.astype(np.int64))].float().numpy()
                self.made[missing] = True


def _sparse(rows: int, size: int) -> np.ndarray:
    """[rows, size] of which only what is written takes memory.

    In small pages: the first row in a huge page takes 0.4 ms, and 2 MB.
    """
    memory = mmap.mmap(-1, 4 * rows * size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # on Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(rows, size)
