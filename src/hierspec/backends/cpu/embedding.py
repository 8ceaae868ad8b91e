"""An embedding table in the form that compiled functions read."""

from __future__ import annotations

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
            self.floats = np.empty((vocabulary, hidden), np.float32)  # unwritten pages take no memory
        elif table.dtype == torch.bfloat16:
            self.halves = table.view(torch.int16).numpy()
        else:
            self.floats = table.numpy()

    def add(self, tokens: Iterable[np.ndarray]) -> None:
        """Computes the rows of these tokens, if they are missing."""
        if self._source is None:
            return
        for some in tokens:
            missing = some[~self.made[some]]
            if len(missing):
                self.floats[missing] = self._source[torch.from_numpy(missing.astype(np.int64))].float().numpy()
                self.made[missing] = True
