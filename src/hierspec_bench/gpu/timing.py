"""Timing on a device that works asynchronously, and deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_BEFORE, _ROUNDS = 3, 3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(action: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of one call, after warm-up calls that compile and record; the median of a few rounds."""
    for _ in range(_BEFORE):
        action()
    rounds = []
    for _ in range(_ROUNDS):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            action()
        synchronize(device)
        rounds.append((time.perf_counter() - began) / times)
    return sorted(rounds)[_ROUNDS // 2]


class Deadline:
    """A time after which nothing new is started."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()

    @property
    def over(self) -> bool:
        return self.left <= 0

    def until(self, most: float) -> Deadline:
        """An earlier deadline: at most `most` seconds from now."""
        return Deadline(min(self.left, most), self._clock)
