"""The KV cache and states of all texts in torch tensors: an arena in the plain layout."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.arena import reserve
from hierspec.checkpoints.config import DecoderConfig

PAGE = 64  # slots per page


class TorchMemory:
    """Keys and values [layers, 2, kv_heads, slots, head_size], all reserved at once.

    On a CPU the system provides memory when it is first written; on a GPU at most half of the free memory is taken.
    """

    page = PAGE

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, taps: tuple[int, ...], most_bytes: int
    ) -> None:
        self.taps = taps
        of_slot = config.layers * 2 * config.kv_heads * config.head_size + len(taps) * config.hidden
        self.bytes_per_page = PAGE * of_slot * dtype.itemsize
        if device.type == "cuda":
            most_bytes = min(most_bytes, torch.cuda.mem_get_info(device)[0] // 2)

        def arrays(pages: int) -> tuple[Tensor, Tensor]:
            slots = pages * PAGE
            numbers = _zeros((config.layers, 2, config.kv_heads, slots, config.head_size), dtype, device)
            return numbers, _zeros((len(taps), slots, config.hidden), dtype, device)

        self.pages, (self.numbers, self.states) = reserve(most_bytes // self.bytes_per_page, arrays)

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        device = self.states.device
        new, old = (torch.as_tensor(slots, device=device) for slots in (to, source))
        self.numbers[:, :, :, new] = self.numbers[:, :, :, old]
        self.states[:, new] = self.states[:, old]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch writes its zeros; numpy gets zeroed memory from the system, page by page as it is used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def index_of(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """An index for these slots: a slice if they are consecutive, which copies nothing."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 == len(slots) and (len(slots) < 3 or (np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return torch.as_tensor(slots, device=device)
