"""Kernels of a round that drafts and verifies on the device: they do what the host does between two passes."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import options, wait_for_last

KEPT = 64  # positions whose numbers and tokens are on the device, in a ring: no two rounds in flight need more
_KEPT = tl.constexpr(KEPT)
_BLOCK = 1024


@triton.jit
def begin_kernel(
    position, ring, given, texts, tokens, SIZE, REREAD, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """given = the numbers of a round at this position; tokens = the last `REREAD` of the text, then zeros."""
    wait_for_last(OVERLAP)
    last = tl.load(position)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(ring + (last % _KEPT) * SIZE + at, mask=at < SIZE, other=0)
    tl.store(given + at, numbers, mask=at < SIZE)
    if tl.program_id(0) == 0:
        row = tl.arange(0, WIDTH)
        here = tl.load(texts + (last - REREAD + 1 + row) % _KEPT, mask=row < REREAD, other=0)
        tl.store(tokens + row, here)


@triton.jit
def draft_kernel(position, texts, picks, index, tokens, NODES, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """tokens = the last of the text, then the drafted ones, picks[index[node]]; no token counts as token 0."""
    wait_for_last(OVERLAP)
    row = tl.arange(0, WIDTH)
    inside = (row > 0) & (row <= NODES)
    place = tl.load(index + row - 1, mask=inside, other=0)
    drafted = tl.maximum(tl.load(picks + place, mask=inside, other=0), 0)
    root = tl.load(texts + tl.load(position) % _KEPT)
    tl.store(tokens + row, tl.where(row == 0, root, drafted.to(tl.int32)))


@triton.jit(do_not_specialize_on_alignment=["slots", "picks", "spare"])
def verify_kernel(
    position, texts, tokens, parents, picks, slots, moves, out, spare, NODES, DEPTH,
    PICKS: tl.constexpr, MOVES: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Accepts drafts that equal the picks before them, as `core.verify.coupled` does, and begins the next round.

    out = the position before, and how many were accepted. moves = where each accepted token belongs, then where it is.
    """
    wait_for_last(OVERLAP)
    last = tl.load(position)
    node = tl.arange(0, WIDTH)
    inside = node < NODES
    token = tl.load(tokens + 1 + node, mask=inside, other=-2)
    parent = tl.load(parents + node, mask=inside, other=-2)
    move = tl.arange(0, MOVES)
    to = tl.zeros((MOVES,), tl.int32) + spare
    source = tl.zeros((MOVES,), tl.int32) + spare
    here, accepted = -1, 0
    pick = tl.load(picks).to(tl.int32)
    for depth in range(DEPTH):
        child = tl.max(tl.where((parent == here) & (token == pick), node, -1))
        accepts = child >= 0
        tl.store(texts + (last + 1 + depth) % _KEPT, pick, mask=accepts)
        behind = tl.load(slots + 1 + depth, mask=accepts, other=0)
        placed = tl.load(slots + 1 + child, mask=accepts, other=0)
        to = tl.where((move == depth) & accepts, behind, to)
        source = tl.where((move == depth) & accepts, placed, source)
        pick = tl.where(accepts, tl.load(picks + (child + 1) * PICKS, mask=accepts, other=0).to(tl.int32), pick)
        accepted = tl.where(accepts, accepted + 1, accepted)
        here = tl.where(accepts, child, -3)
    tl.store(texts + (last + 1 + accepted) % _KEPT, pick)
    tl.store(moves + move, to)
    tl.store(moves + MOVES + move, source)
    tl.store(out, last.to(tl.int64))
    tl.store(out + 1, tl.cast(accepted, tl.int64))
    tl.store(position, last + 1 + accepted)


def launch_begin(position: Tensor, ring: Tensor, given: Tensor, texts: Tensor, tokens: Tensor, reread: int) -> None:
    """`ring` [KEPT, numbers of a round]; `texts` [KEPT]; `tokens` [a power of two]."""
    size = ring.shape[1]
    begin_kernel[(triton.cdiv(size, _BLOCK),)](
        position, ring, given, texts, tokens, size, reread, len(tokens), _BLOCK, **options(4, 1, 0)
    )


def launch_draft(position: Tensor, texts: Tensor, picks: Tensor, index: Tensor, tokens: Tensor) -> None:
    """`index` [nodes]; `tokens` [a power of two above that]."""
    draft_kernel[(1,)](position, texts, picks, index, tokens, len(index), len(tokens), **options(1, 1, 0))


def launch_verify(
    position: Tensor,
    texts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    picks: Tensor,
    columns: int,
    slots: Tensor,
    moves: Tensor,
    out: Tensor,
    spare: int,
    depth: int,
) -> None:
    """`picks` [rows, columns], the pick of each row first; `moves` [2 * a count of moves]."""
    verify_kernel[(1,)](
        position, texts, tokens, parents, picks, slots, moves, out, spare, len(parents), depth,
        columns, len(moves) // 2, len(tokens), **options(1, 1, 0),
    )  # fmt: skip
