"""The KV cache and states of all texts on a GPU: one arena of pages, and a spare page that belongs to no text."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.arena import reserve
from hierspec.backends.cuda.graphs import Graphs, Inbox
from hierspec.backends.cuda.moves import COUNTS, MOST_MOVES, move_rows
from hierspec.checkpoints.config import DecoderConfig

PAGE = 64  # slots per page


class CudaMemory:
    """Keys and values [layers, kv_heads, slots, head_size] in bfloat16, states [taps, slots, hidden] in float32.

    All memory is reserved at once and never moves, because graphs contain its addresses. Padding rows of a pass write
    to `spare`, a slot of a page that texts never get.
    """

    page = PAGE

    def __init__(self, config: DecoderConfig, device: torch.device, taps: tuple[int, ...], most_bytes: int) -> None:
        self.taps = taps
        of_slot = 2 * 2 * config.layers * config.kv_heads * config.head_size + 4 * len(taps) * config.hidden
        self.bytes_per_page = PAGE * of_slot
        if device.type == "cuda":
            most_bytes = min(most_bytes, torch.cuda.mem_get_info(device)[0] // 2)

        def arrays(pages: int) -> tuple[Tensor, Tensor, Tensor]:
            slots = (pages + 1) * PAGE
            shape = (config.layers, config.kv_heads, slots, config.head_size)
            keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
            return keys, values, torch.zeros((len(taps), slots, config.hidden), device=device)

        self.pages, (self.keys, self.values, self.all_states) = reserve(most_bytes // self.bytes_per_page, arrays)
        self.spare = self.pages * PAGE
        self.states = self.all_states[:, : self.spare]
        self._graphs, self._moves = Graphs(device), Inbox(2 * MOST_MOVES, torch.int32, device)

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        if len(to) > MOST_MOVES:
            self._copy_many(to, source)
            return
        count = next(each for each in COUNTS if each >= len(to))
        slots = np.full((2, count), self.spare, np.int32)
        slots[0, : len(to)], slots[1, : len(to)] = to, source
        self._moves.put(slots.ravel())
        self._graphs.run(count, lambda: self._launch_moves(count))

    def _launch_moves(self, count: int) -> None:
        for rows in (self.keys, self.values, self.all_states):
            move_rows(rows, self._moves.buffer, count)

    def _copy_many(self, to: np.ndarray, source: np.ndarray) -> None:
        pair = torch.from_numpy(np.stack((to, source))).to(self.keys.device, non_blocking=True)
        for numbers, slots in ((self.keys, 2), (self.values, 2), (self.all_states, 1)):
            numbers.index_copy_(slots, pair[0], numbers.index_select(slots, pair[1]))
