"""Sequences of kernels as CUDA graphs: launched one by one the first time, recorded the second, replayed ever after.

A graph has addresses in it: everything that its kernels read and write stays where it is. Numbers of a pass come in by
one copy into a buffer that all graphs read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

_MOST = 512  # graphs that are kept; then all are dropped and recorded again as they are needed
_WAITING = 8  # copies that may be on their way at once


class Graphs:
    """Graphs by what they do."""

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
        elif key not in self._graphs:
            launch()  # compiles what was not compiled yet, which must not happen while a graph is recorded
            self._graphs[key] = None
        else:
            graph = self._recorded(launch)
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            self._graphs[key] = graph
            graph.replay()

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
        self._used = [False] * count

    def put(self, numbers: np.ndarray) -> None:
        """The first entries of the buffer become these numbers."""
        turn, size = self._turn, len(numbers)
        if self._on_gpu and self._used[turn]:
            self._copied[turn].synchronize()
        self._arrays[turn][:size] = numbers
        self.buffer[:size].copy_(self._sources[turn][:size], non_blocking=True)
        if self._on_gpu:
            self._copied[turn].record()
            self._used[turn] = True
            self._turn = (turn + 1) % len(self._sources)


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor of its own on the device, without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
