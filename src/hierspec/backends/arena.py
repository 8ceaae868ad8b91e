"""Memory that may be refused: as much of it as there is, and a plain answer where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from hierspec.core.errors import OutOfMemory

_Arrays = TypeVar("_Arrays")
# What torch says in a plain RuntimeError: its allocator on a CPU, and the libraries that it calls on a GPU.
_REFUSALS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "ALLOC_FAILED",
    "bad_alloc",
    "bad allocation",
)


def is_refused(error: Exception) -> bool:
    """Whether memory was asked for in vain."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSALS)


def reserve(pages: int, allocate: Callable[[int], _Arrays]) -> tuple[int, _Arrays]:
    """Arrays for so many pages, or for as many as the machine has memory for, and how many those are."""
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
