"""Memory-mapped tensors cast to another dtype than the file's: on access, without caching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class CastRows:
    """A table of which few rows are used: only those are cast."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self._table, self.dtype, self.shape = table, dtype, table.shape

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self._table[rows].to(self.dtype)


class CastWeights(Mapping[str, Tensor]):
    """Weights of which at most one tensor is in memory twice: in the file's dtype and in the requested one."""

    def __init__(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._stored, self._dtype = stored, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def rows(self, name: str) -> Tensor | CastRows:
        """A matrix of which few rows are used at a time."""
        stored = self._stored[name]
        return stored if stored.dtype == self._dtype else CastRows(stored, self._dtype)
