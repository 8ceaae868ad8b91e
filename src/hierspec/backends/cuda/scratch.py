"""Memory between the kernels of a pass. All passes of a decoder share it, because they run one at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hierspec.backends.cuda.attention import FIELDS, WIDE_ROWS, AttentionScratch, Places
from hierspec.backends.cuda.graphs import Inbox
from hierspec.backends.cuda.norms import Entering, groups_of
from hierspec.backends.cuda.products import Weight, parts_needed
from hierspec.backends.cuda.work import MOST_NUMBERS, MOST_PIECES, MOST_ROWS, ROW_ARRAYS
from hierspec.checkpoints.config import DecoderConfig


class Scratch:
    def __init__(
        self, config: DecoderConfig, weights: Iterable[tuple[Weight, int]], parts: int, device: torch.device
    ) -> None:
        """`weights`: each with the number of its tiles that a program multiplies at once. `parts`: most splits of a
        product whose parts are added apart."""
        queries, pieces = config.heads * config.head_size, MOST_PIECES

        def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.hidden = room(MOST_ROWS, config.hidden, dtype=torch.float32)
        self.entering = Entering(
            room(MOST_ROWS, config.hidden), room(MOST_ROWS, groups_of(config.hidden), dtype=torch.float32)
        )
        # Partial sums of a product whose parts are added apart.
        self.parts = room(parts, MOST_ROWS, config.hidden, dtype=torch.float32)
        self.queries, self.attended = room(MOST_ROWS, queries), room(MOST_ROWS, queries)
        self.gated = room(MOST_ROWS, config.intermediate)
        self.attention = AttentionScratch(
            room(pieces, config.kv_heads, WIDE_ROWS, config.head_size, dtype=torch.float32),
            room(pieces, config.kv_heads, WIDE_ROWS, 2, dtype=torch.float32),
            room(pieces, config.kv_heads, dtype=torch.int32),
        )
        floats, counters = 1, 1
        for weight, halves in weights:
            for rows in (1, 32, MOST_ROWS):
                needed = parts_needed(weight.matrix.shape[0], weight.tiles, rows, halves)
                floats, counters = max(floats, needed[0]), max(counters, needed[1])
        self.splitting = room(floats, dtype=torch.float32), room(counters, dtype=torch.int32)
        self.inbox = Inbox(MOST_NUMBERS, torch.int32, device)

    def places(self, width: int, pieces: int) -> Places:
        """The numbers of a pass with this width and number of pieces, as views of the inbox."""
        return places_at(self.inbox.buffer, 0, width, pieces)[0]


def places_at(numbers: torch.Tensor, at: int, width: int, pieces: int) -> tuple[Places, int]:
    """The numbers of a pass that start at `at`, and where they end, paths not counted."""
    middle = at + ROW_ARRAYS * width
    end = middle + pieces * FIELDS
    positions, slots, drafted, limits, lengths, path_starts, own_pieces = numbers[at:middle].view(ROW_ARRAYS, width)
    rows = positions, slots, drafted, limits, lengths, path_starts, own_pieces
    return Places(*rows, numbers[middle:end], numbers[end:]), end
