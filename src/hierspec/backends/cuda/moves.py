"""Moves rows of a memory to other slots: accepted drafts move behind the text that they follow.

torch takes 2 ms for this with an 8B shape, because it gathers into new memory first. Here a program holds all rows of
one head while it moves them, so that none is overwritten before it is read.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import options, wait_for_last

MOST_MOVES = 64
COUNTS = (4, 16, MOST_MOVES)  # few sizes, since each has its own graph
_BLOCK = 64  # numbers of a row per program


@triton.jit
def move_kernel(rows, slots, stride, WIDTH, MOVES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """rows[outer, to[i]] = rows[outer, source[i]] for all i at once; `slots` holds all of `to`, then all of
    `source`."""
    wait_for_last(OVERLAP)
    move, column = tl.arange(0, MOVES), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to, source = tl.load(slots + move).to(tl.int64), tl.load(slots + MOVES + move).to(tl.int64)
    start, inside = rows + tl.program_id(0).to(tl.int64) * stride + column[None, :], (column < WIDTH)[None, :]
    numbers = tl.load(start + source[:, None] * WIDTH, mask=inside, other=0.0)
    tl.debug_barrier()  # read all before writing any
    tl.store(start + to[:, None] * WIDTH, numbers, mask=inside)


def move_rows(rows: Tensor, slots: Tensor, moves: int) -> None:
    """Moves rows of [..., slots, width], the same slots at all outer indices.

    `slots`: `moves` targets, then as many sources; `moves` is one of `COUNTS`.
    """
    count, width = rows.shape[-2:]
    outer = rows.numel() // (count * width)
    grid = (outer, triton.cdiv(width, _BLOCK))
    move_kernel[grid](rows, slots, count * width, width, moves, _BLOCK, **options(4, 1, width))
