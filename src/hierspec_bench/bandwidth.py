"""Measures this machine's memory bandwidth, which limits a pass over few tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

METHOD = "the best of five sums and five matrix-vector products over 256 MB, all threads"


@cache  # once per process: it takes a second, and both callers want the same number
def memory_bandwidth() -> float:
    """Bytes per second that all threads together read from memory: the best of a sum and a matrix-vector product."""
    numbers = torch.ones(8192, 8192)
    size = numbers.numel() * numbers.element_size()
    reads: tuple[Callable[[], Any], ...] = (lambda: float(numbers.sum()), lambda: numbers.mv(numbers[0]))
    return size / min(_seconds(read) for read in reads for _ in range(5))


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
