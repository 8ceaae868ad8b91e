"""The KV cache and states of all texts on a CPU, in the layout of the compiled pass: an arena of pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hierspec.backends.arena import reserve
from hierspec.backends.cpu.amx_attention_kernels import CHUNK
from hierspec.backends.cpu.amx_cache import key_bytes, value_bytes
from hierspec.backends.cpu.kernels import BYTES
from hierspec.backends.cpu.kv_pages import PAGE
from hierspec.backends.cpu.llvm import LANES
from hierspec.checkpoints.config import DecoderConfig

_FLOAT, _LINE = 4, 64  # bytes of a float, and of a cache line


class CpuMemory:
    """An arena whose pages hold keys, then values, for every layer and head.

    They are in float32 or float16 as in `kv_pages.py`, or in bfloat16 tiles as in `amx_cache.py`. All memory is
    reserved at once. The system provides a page when it is first written, so reserved memory that is not used costs
    nothing, and nothing ever moves.
    """

    page = PAGE

    def __init__(self, config: DecoderConfig, taps: tuple[int, ...], most_bytes: int, stored: str = "float32") -> None:
        self.taps, self.stored = taps, stored
        self._in_tiles = in_tiles = stored == "bfloat16"
        kv_heads, head_size = config.kv_heads, config.head_size
        of_keys = key_bytes(head_size) if in_tiles else BYTES[stored] * PAGE * head_size
        of_values = value_bytes(head_size) if in_tiles else BYTES[stored] * PAGE * head_size
        of_page = config.layers * kv_heads * (of_keys + of_values)
        self.bytes_per_page = of_page + _FLOAT * len(taps) * PAGE * config.hidden

        def arrays(pages: int) -> tuple[np.ndarray, np.ndarray]:
            numbers = np.zeros(pages * of_page + _LINE, np.int8)
            return numbers, np.zeros((len(taps), pages * PAGE, config.hidden), np.float32)

        self.pages, (numbers, states) = reserve(most_bytes // self.bytes_per_page, arrays)
        start = -numbers.ctypes.data % _LINE
        numbers = numbers[start : start + self.pages * of_page]
        self.address = numbers.ctypes.data
        by_head = numbers.reshape(self.pages, config.layers, kv_heads, of_keys + of_values)
        keys, values = by_head[..., :of_keys], by_head[..., of_keys:]
        # A word is a number of a key, or two bfloat16 of it; either way, the words of 16 keys are adjacent.
        number = np.int16 if stored == "float16" else np.int32
        word = np.dtype(number)
        self._keys = _as(keys, word, (PAGE // LANES, of_keys // (word.itemsize * PAGE), LANES))
        if in_tiles:
            shape = (PAGE // CHUNK, head_size // LANES, CHUNK // 2, LANES, 2)
            by_pair = _as(values, np.int16, shape)
            by_tile = by_pair.transpose(0, 1, 2, 3, 5, 7, 4, 6)  # [.., chunk, pair, half, tile, lane]
            self._values = by_tile
        else:
            self._values = _as(values, number, (head_size // LANES, PAGE, LANES))
        self.state_numbers = states  # the numpy array behind `states`
        self.states = torch.from_numpy(states)
        self._addresses: dict[tuple[int, int], np.ndarray] = {}

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        (to_page, to_slot), (page, slot) = (np.divmod(slots, PAGE) for slots in (to, source))
        (to_block, to_lane), (block, lane) = (np.divmod(slots, LANES) for slots in (to_slot, slot))
        self._keys[to_page, :, :, to_block, :, to_lane] = self._keys[page, :, :, block, :, lane]
        if self._in_tiles:
            at, source_at = _in_chunk(to_slot), _in_chunk(slot)
            self._values[to_page, :, :, *at] = self._values[page, :, :, *source_at]
        else:
            self._values[to_page, :, :, :, to_slot] = self._values[page, :, :, :, slot]
        self.state_numbers[:, to] = self.state_numbers[:, source]

    def tap_addresses(self, start: int, stop: int) -> np.ndarray:
        """[n, 2]: the taps after layers start..stop, and the address of the states of each."""
        addresses = self._addresses.get((start, stop))
        if addresses is None:
            passed = [(layer, tap) for tap, layer in enumerate(self.taps) if start < layer <= stop]
            rows = [(layer, self.state_numbers[tap].ctypes.data) for layer, tap in passed]
            addresses = self._addresses[start, stop] = np.array(rows, np.int64).reshape(-1, 2)
        return addresses


def _as(numbers: np.ndarray, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
    """A view of the last axis, which holds bytes, as numbers of this type and shape."""
    return numbers.view(dtype).reshape(*numbers.shape[:-1], *shape)


def _in_chunk(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chunk, pair and half of the values in these slots of a page."""
    return slots // CHUNK, slots % LANES, slots % CHUNK // LANES
