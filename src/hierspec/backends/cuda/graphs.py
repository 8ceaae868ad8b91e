"""Sequences of kernels as CUDA graphs: launched one by one the first time, recorded the second, replayed ever after.

A graph has addresses in it: everything that its kernels read and write stays where it is. Numbers of a pass come in by
one copy into a buffer that all graphs read. Where a graph ends with picks, that copy and the one back are part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

_MOST = 512  # graphs that are kept; then all are dropped and recorded again as they are needed
_WAITING = 8  # copies that may be on their way at once


class Graphs:
    """Graphs by what they do."""

    preparing = 0.0  # seconds in which kernels were compiled and graphs recorded, of all decoders

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: was launched once
        self._stream: torch.cuda.Stream | None = None  # on which graphs are recorded

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Do what `launch` does. It must do the same for every call with this key."""
        if self._device.type != "cuda":
            launch()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        began = time.perf_counter()
        if key not in self._graphs:
            launch()  # compiles what was not compiled yet, which must not happen while a graph is recorded
            self._graphs[key] = None
        else:
            graph = self._recorded(launch)
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            self._graphs[key] = graph
            graph.replay()
        Graphs.preparing += time.perf_counter() - began

    def _recorded(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what is launched. `torch.cuda.graph` would collect garbage first, which takes longer than many
        passes; nothing is allocated here, so there is nothing to collect."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        here.wait_stream(self._stream)
        return graph

    def clear(self) -> None:
        self._graphs.clear()


class Inbox:
    """Numbers on their way to the device: one copy into a buffer that stays where it is.

    The copy is not waited for, so what is copied from must not change until it is done: a few buffers take turns.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(size, dtype=dtype, device=device)
        self._turn = 0
        self._on_gpu = device.type == "cuda"
        count = _WAITING if self._on_gpu else 1
        self._sources = [torch.zeros(size, dtype=dtype, pin_memory=self._on_gpu) for _ in range(count)]
        self._arrays: list[np.ndarray] = [source.numpy() for source in self._sources]
        self._copied = [torch.cuda.Event() for _ in range(count)] if self._on_gpu else []
        self._index = device.index or 0  # a number is looked up faster
        self._used = [False] * count

    def put(self, numbers: np.ndarray) -> None:
        """The first entries of the buffer become these numbers."""
        turn, size = self._turn, len(numbers)
        if self._on_gpu and self._used[turn]:
            self._copied[turn].synchronize()
        self._arrays[turn][:size] = numbers
        self.buffer[:size].copy_(self._sources[turn][:size], non_blocking=True)
        if self._on_gpu:
            self._copied[turn].record(torch.cuda.current_stream(self._index))
            self._used[turn] = True
            self._turn = (turn + 1) % len(self._sources)


class Exchange:
    """Numbers that a graph copies in when it begins, and those that it copies out when it ends.

    The host's memory for both stays where it is, so one call at a time: `wait` comes before the next numbers.
    """

    def __init__(self, given: int, answered: int, device: torch.device) -> None:
        """Room for so many numbers of 32 bits in, and of 64 bits out."""
        on_gpu = device.type == "cuda"
        self.given = torch.zeros(given, dtype=torch.int32, device=device)
        self.answered = torch.zeros(answered, dtype=torch.int64, device=device)
        self._source = torch.zeros(given, dtype=torch.int32, pin_memory=on_gpu)
        self._target = torch.zeros(answered, dtype=torch.int64, pin_memory=on_gpu)
        self.numbers: np.ndarray = self._source.numpy()
        self._answers: np.ndarray = self._target.numpy()
        self._index = (device.index or 0) if on_gpu else None  # a number is looked up faster

    def copy_in(self, size: int) -> None:
        """Part of a graph: the first so many numbers of the host come to the device."""
        self.given[:size].copy_(self._source[:size], non_blocking=True)

    def copy_out(self, size: int) -> None:
        """Part of a graph: the first so many answers go to the host."""
        self._target[:size].copy_(self.answered[:size], non_blocking=True)

    def wait(self, size: int) -> np.ndarray:
        """The first so many answers, when they are there; a copy."""
        if self._index is not None:
            torch.cuda.current_stream(self._index).synchronize()
        return self._answers[:size].copy()


def rounded_up(size: int, least: int = 2048) -> int:
    """To a power of two, so that few graphs copy numbers of all sizes."""
    return max(least, 1 << (size - 1).bit_length())


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor of its own on the device, without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
