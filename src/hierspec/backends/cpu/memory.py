"""Keys, values and states of all texts on a CPU, as the compiled pass reads them: an arena of pages."""

from __future__ import annotations

import numpy as np
import torch

from hierspec.backends.arena import reserve
from hierspec.backends.cpu.layers import PAGE
from hierspec.backends.cpu.llvm import LANES
from hierspec.checkpoints.config import DecoderConfig

_FLOAT = 4  # bytes


class CpuMemory:
    """A page holds, for every layer and head, keys [PAGE / 16, head_size, 16] and values [head_size / 16, PAGE, 16].

    All of it is reserved at once. The system hands out memory as it is first written to, so what is reserved and not
    used costs nothing, and nothing ever moves.
    """

    page = PAGE

    def __init__(self, config: DecoderConfig, taps: tuple[int, ...], most_bytes: int) -> None:
        self.taps = taps
        kv_heads, head_size = config.kv_heads, config.head_size
        of_page = config.layers * kv_heads * 2 * PAGE * head_size
        self.bytes_per_page = _FLOAT * (of_page + len(taps) * PAGE * config.hidden)

        def arrays(pages: int) -> tuple[np.ndarray, np.ndarray]:
            numbers = np.zeros((pages, config.layers, kv_heads, 2, PAGE * head_size), np.float32)
            return numbers, np.zeros((len(taps), pages * PAGE, config.hidden), np.float32)

        self.pages, (numbers, states) = reserve(most_bytes // self.bytes_per_page, arrays)
        self.address = numbers.ctypes.data
        before = (self.pages, config.layers, kv_heads)
        self._keys = numbers[:, :, :, 0].reshape(*before, PAGE // LANES, head_size, LANES)
        self._values = numbers[:, :, :, 1].reshape(*before, head_size // LANES, PAGE, LANES)
        self.state_numbers = states  # as an array
        self.states = torch.from_numpy(states)
        self._addresses: dict[tuple[int, int], np.ndarray] = {}

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        (to_page, to_slot), (page, slot) = (np.divmod(slots, PAGE) for slots in (to, source))
        (to_block, to_lane), (block, lane) = (np.divmod(slots, LANES) for slots in (to_slot, slot))
        self._keys[to_page, :, :, to_block, :, to_lane] = self._keys[page, :, :, block, :, lane]
        self._values[to_page, :, :, :, to_slot] = self._values[page, :, :, :, slot]
        self.state_numbers[:, to] = self.state_numbers[:, source]

    def tap_addresses(self, start: int, stop: int) -> np.ndarray:
        """[n, 2]: the taps that layers start..stop come past, and where the states after each begin."""
        addresses = self._addresses.get((start, stop))
        if addresses is None:
            passed = [(layer, tap) for tap, layer in enumerate(self.taps) if start < layer <= stop]
            rows = [(layer, self.state_numbers[tap].ctypes.data) for layer, tap in passed]
            addresses = self._addresses[start, stop] = np.array(rows, np.int64).reshape(-1, 2)
        return addresses
