"""Allocation that may fail: take as much memory as there is, or say plainly that there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from hierspec.core.errors import OutOfMemory

_Arrays = TypeVar("_Arrays")
# Messages of the RuntimeErrors that torch's CPU allocator and the GPU libraries raise when an allocation fails.
_REFUSALS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "ALLOC_FAILED",
    "bad_alloc",
    "bad allocation",
)


def is_refused(error: Exception) -> bool:
    """Whether the error says that an allocation failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSALS)


def reserve(pages: int, allocate: Callable[[int], _Arrays]) -> tuple[int, _Arrays]:
    """Allocates arrays for `pages` pages, halving the number until it fits; returns the number and the arrays."""
    while True:
        try:
            return pages, allocate(pages)
        except Exception as error:
            if not is_refused(error):
                raise
            pages //= 2
            if not pages:
                raise OutOfMemory(
                    "There is no memory left for keys and values; close other programs, or lower --kv-memory."
                ) from error
