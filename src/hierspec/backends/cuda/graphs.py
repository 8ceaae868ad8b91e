"""Sequences of kernels as CUDA graphs: launched kernel by kernel the first time, recorded the second, then replayed.

A graph contains addresses, so everything that its kernels read and write must stay in place. The numbers of a pass
arrive by one copy into a buffer that all graphs read. If a graph ends with picks, it contains that copy and the one
back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.cuda.launching import Compiling

_MOST = 512  # graphs to keep; beyond that all are dropped and recorded again when needed
_WAITING = 8  # copies that may be in flight at once


class Graphs:
    """Graphs by key."""

    preparing = 0.0  # seconds spent launching for the first time and recording, for all decoders, beside compiling

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: launched once, not recorded
        self._stream: torch.cuda.Stream | None = None  # stream for recording

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Runs `launch`, or replays its graph. Every call with the same key must launch the same work."""
        if self._device.type != "cuda":
            launch()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        began, compiled = time.perf_counter(), Compiling.seconds
        if key not in self._graphs:
            launch()  # compiles missing kernels, which must not happen during recording
            self._graphs[key] = None
        else:
            graph = self._recorded(launch)
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            self._graphs[key] = graph
            graph.replay()
        Graphs.preparing += time.perf_counter() - began - (Compiling.seconds - compiled)

    def _recorded(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Records a graph of what is launched.

        `torch.cuda.graph` would collect garbage first, which takes longer than many passes. Nothing is allocated here,
        so there is nothing to collect.
        """
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
    """Copies numbers to a buffer on the device that never moves.

    `put` does not wait for the copy, so its source must not change until the copy is done: a few sources take turns.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(size, dtype=dtype, device=device)
        self._turn = 0
        self._on_gpu = device.type == "cuda"
        count = _WAITING if self._on_gpu else 1
        self._sources = [torch.zeros(size, dtype=dtype, pin_memory=self._on_gpu) for _ in range(count)]
        self._arrays: list[np.ndarray] = [source.numpy() for source in self._sources]
        self._copied = [torch.cuda.Event() for _ in range(count)] if self._on_gpu else []
        self._index = device.index or 0  # an index is faster to look up than a device
        self._used = [False] * count

    def put(self, numbers: np.ndarray) -> None:
        """Copies these numbers to the beginning of the buffer."""
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
    """Numbers that a graph copies in at its start, and results that it copies out at its end.

    The host memory for both is fixed, so only one call may use it at a time: call `wait` or `free` before writing the
    numbers of the next one.
    """

    def __init__(self, given: int, answered: int, device: torch.device) -> None:
        """Room for `given` 32-bit numbers in and `answered` 64-bit numbers out."""
        on_gpu = device.type == "cuda"
        self.given = torch.zeros(given, dtype=torch.int32, device=device)
        self.answered = torch.zeros(answered, dtype=torch.int64, device=device)
        self._source = torch.zeros(given, dtype=torch.int32, pin_memory=on_gpu)
        self._target = torch.zeros(answered, dtype=torch.int64, pin_memory=on_gpu)
        self.numbers: np.ndarray = self._source.numpy()
        self._answers: np.ndarray = self._target.numpy()
        self._done = torch.cuda.Event() if on_gpu else None
        self._waiting = False  # whether somebody must still wait for the last call
        self._index = device.index or 0  # an index is faster to look up than a device

    def copy_in(self, size: int) -> None:
        """Part of a graph: copies the first `size` numbers to the device."""
        self.given[:size].copy_(self._source[:size], non_blocking=True)

    def copy_out(self, size: int) -> None:
        """Part of a graph: copies the first `size` answers to the host."""
        self._target[:size].copy_(self.answered[:size], non_blocking=True)

    def launched(self) -> None:
        """The graph is launched: `wait` waits for it, and not for what is launched after it."""
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._index))
            self._waiting = True

    def free(self) -> None:
        """Makes sure that the last call is over, though nobody wants its answers."""
        if self._done is not None and self._waiting:
            self._done.synchronize()
            self._waiting = False

    def wait(self, size: int) -> np.ndarray:
        """Waits for the first `size` answers and returns a copy of them."""
        self.free()
        return self._answers[:size].copy()


def rounded_up(size: int, least: int = 2048) -> int:
    """Rounds up to a power of two, so that few graphs cover all sizes."""
    return max(least, 1 << (size - 1).bit_length())


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A new tensor on the device with these numbers, without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
