"""Paged attention for chains and trees, whose bits depend on a row's own text alone.

Keys are taken by position, in blocks of `KEYS` that start at multiples of KEYS. Position j is on a page of the text or,
beyond what the row sees of the text, on the row's path. So a token that is a tree node now and part of the text later
multiplies the same keys at the same places of the same blocks. Each block is one piece of work (`work.py`); the results
of blocks are merged in order. A block or step that a row does not see changes nothing, not even the last bit.

The query heads that share a KV head are rows of one tile, for several tokens if their keys are the same.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from hierspec.backends.cuda.launching import (
    NOT_SEEN,
    arrives_last,
    options,
    prefetch,
    release_next,
    wait_for_last,
)
from hierspec.backends.cuda.memory import PAGE

KEYS = 256  # per block
ROWS = 16  # per tile
# Rows per tile in a pass over many tokens after a long context, so that fewer tiles read the same keys. The sums of a
# row have the same order either way: an H200 gave the same bits for tiles of 16, 32 and 64 rows. 64 tokens after 2,048
# with the heads of an 8B model: 36 us with tiles of 16 rows, 25 with 64; after 128 tokens 7.6 and 10.1.
WIDE_ROWS = 64
WIDE_FROM = 1024  # position from which tiles are wide
_PARTS_AT_ONCE = 8  # blocks whose results are loaded together, in a tile of 16 rows; fewer in larger tiles
# Fields of a piece of work: first row, number of rows, block, whether it belongs to one row's path; then of its tile:
# first row, rows, first piece, first block, last block, pieces, number; then the pages of the block, and how many of
# its keys any of the rows sees. A program loads them all at once: each further wait for memory takes 0.7 us.
FIELDS = 16
_FIRST, _COUNT, _BLOCK, _OWN = (tl.constexpr(n) for n in range(4))
_TILE_FIRST, _TILE_COUNT, _TILE_PIECE, _TILE_BLOCK, _TILE_LAST, _TILE_PIECES, _TILE = (
    tl.constexpr(n) for n in range(4, 11)
)
_PAGES = tl.constexpr(11)
FIRST_PAGE = 11  # index of the first page among the fields
SEEN = 15  # index of the number of keys that are seen
_SEEN = tl.constexpr(SEEN)
_COLUMNS = tl.constexpr(16)  # the fewest that tensor cores take
LARGEST_GROUP = ROWS  # query heads per KV head


# Views of one buffer start at any alignment: compile one kernel for all of them, not one per alignment.
_VIEWS = ["work", "positions", "limits", "lengths", "path_starts", "own_pieces", "paths"]


@triton.jit(do_not_specialize_on_alignment=_VIEWS)
def attend_kernel(
    q, keys, values, work, positions, limits, lengths, path_starts, own_pieces, paths, partial, stats, counters, out,
    SLOTS, scale,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of keys for the rows of one piece of work and one KV head. `scale` includes log2(e), for exp2."""
    kv, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # The work list, and all of the KV cache but this pass's tokens, were written before the pass's first kernel.
    fields = work + piece * FIELDS
    count, first, block, own = load_four(fields, _COUNT, _FIRST, _BLOCK, _OWN)
    seen_keys, pieces, tile = tl.load(fields + _SEEN), tl.load(fields + _TILE_PIECES), tl.load(fields + _TILE)
    page, second, third, fourth = load_four(fields, _PAGES, _PAGES + 1, _PAGES + 2, _PAGES + 3)
    tile_first, tile_count, tile_piece, tile_block = load_four(
        fields, _TILE_FIRST, _TILE_COUNT, _TILE_PIECE, _TILE_BLOCK
    )
    last_block = tl.load(fields + _TILE_LAST)
    tl.static_assert(KEYS == 4 * PAGE)
    if OVERLAP:
        prefetch_block(keys, fields, count, kv * SLOTS, D, KEYS, PAGE)
        prefetch_block(values, fields, count, kv * SLOTS, D, KEYS, PAGE)
    wait_for_last(OVERLAP)
    if count > 0:
        r, d, step = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, STEP)
        row = first + r // G
        live = r // G < count
        position = tl.load(positions + row, mask=live, other=0)
        limit = tl.load(limits + row, mask=live, other=0)
        if TREE:
            limit = tl.where(live & (own != 0), position + 1, limit)
            length = tl.load(lengths + first)
            path = paths + tl.load(path_starts + first) - length
            path_from = tl.where(own != 0, length, 1 << 30)  # the first position on the path
        # Of the rows of the tile, for merging: loaded now, because what is loaded after the last piece is waited for.
        tile_row, tile_live = tile_first + r // G, r // G < tile_count
        last_seen = tl.load(positions + tile_row, mask=tile_live, other=-1)
        own_piece, own_block = last_seen, last_seen  # not used without a tree
        if TREE:
            own_piece = tl.load(own_pieces + tile_row, mask=tile_live, other=-1)
            own_block = tl.load(lengths + tile_row, mask=tile_live, other=0) // KEYS
        lines = q + ((row.to(tl.int64) * KH + kv) * G + r % G)[:, None] * D + d[None, :]
        queries = tl.load(lines, mask=live[:, None], other=0.0)
        best = tl.full((ROWS,), NOT_SEEN, tl.float32)
        # The denominator of the softmax, computed by tensor cores like the numerator, the same in every column: one
        # order of additions for any tile layout.
        ones = tl.full((STEP, _COLUMNS), 1.0, tl.float32).to(tl.bfloat16)
        totals = tl.zeros((ROWS, _COLUMNS), tl.float32)
        acc = tl.zeros((ROWS, D), tl.float32)
        for at in range(0, seen_keys, STEP):
            j = block * KEYS + at + step
            there = at + step < seen_keys
            # One of four numbers that are here already: a page number from memory would delay every load of keys.
            within = at + (step if STEP > PAGE else 0)
            near = tl.where(within < PAGE, page, second)
            far = tl.where(within < 3 * PAGE, third, fourth)
            slot = tl.where(within < 2 * PAGE, near, far).to(tl.int64) * PAGE + (at + step) % PAGE
            if TREE:
                on_path = there & (j >= path_from)
                slot = tl.where(on_path, tl.load(path + j, mask=on_path, other=0), slot)
            place = (kv * SLOTS + slot) * D
            k = tl.load(keys + place[None, :] + d[:, None], mask=there[None, :], other=0.0)
            v = tl.load(values + place[:, None] + d[None, :], mask=there[:, None], other=0.0)
            scores = tl.dot(queries, k) * scale
            seen = j[None, :] < limit[:, None]
            if WINDOW > 0:
                seen = seen & (position[:, None] - j[None, :] < WINDOW)
            scores = tl.where(seen, scores, NOT_SEEN)
            new = tl.maximum(best, tl.max(scores, 1))
            p = tl.where(seen, tl.exp2(scores - new[:, None]), 0.0).to(tl.bfloat16)
            fade = tl.exp2(best - new)
            totals = tl.dot(p, ones, totals * fade[:, None])
            acc = tl.dot(p, v, acc * fade[:, None])
            best = new
        release_next(OVERLAP)
        total = tl.max(totals, 1)
        if pieces == 1:  # nothing to merge: merging would multiply by one
            places = out + ((row.to(tl.int64) * KH + kv) * G + r % G)[:, None] * D + d[None, :]
            tl.store(places, (acc / total[:, None]).to(tl.bfloat16), mask=live[:, None])
        else:
            line = (piece.to(tl.int64) * KH + kv) * ROWS + r
            tl.store(partial + line[:, None] * D + d[None, :], acc, mask=live[:, None])
            tl.store(stats + line * 2, best, mask=live)
            tl.store(stats + line * 2 + 1, total, mask=live)
            if arrives_last(counters + tile * KH + kv, pieces):
                merge(
                    partial, stats, out, kv, tile_row, tile_live, last_seen, own_piece, own_block, tile_piece,
                    tile_block, last_block, KH, G, D, KEYS, ROWS, WINDOW, TREE, AT_ONCE,
                )  # fmt: skip


@triton.jit
def load_four(fields, a, b, c, d):
    return tl.load(fields + a), tl.load(fields + b), tl.load(fields + c), tl.load(fields + d)


@triton.jit
def prefetch_block(numbers, fields, count, head, D: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """Prefetches keys or values of a block, unless the piece of work is empty."""
    LINES: tl.constexpr = D // 64 if D >= 64 else 1
    place, line = tl.arange(0, PAGE), tl.arange(0, LINES) * 64
    if count > 0:
        for page in tl.static_range(KEYS // PAGE):
            slot = tl.load(fields + _PAGES + page).to(tl.int64) * PAGE + place
            prefetch(numbers + ((head + slot) * D)[:, None] + line[None, :])


@triton.jit
def merge(
    partial, stats, out, kv, row, live, position, own_piece, own_block, first_piece, first_block, last_block,
    KH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges the results of all blocks for the rows of a tile, in order; `AT_ONCE` of them are loaded together.

    A block that a row does not see changes nothing.
    """
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    best = tl.full((ROWS,), NOT_SEEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in range(first_block, last_block + 1, AT_ONCE):
        for block in tl.static_range(AT_ONCE):
            seen, at = places_of_blocks(
                start + block, last_block, r, live, position, own_piece, own_block, first_piece - first_block, kv,
                KH, G, KEYS, ROWS, WINDOW, TREE,
            )  # fmt: skip
            # Other multiprocessors wrote these: bypass this one's L1 cache.
            theirs = tl.load(stats + at * 2, mask=seen, other=NOT_SEEN, cache_modifier=".cg")
            count = tl.load(stats + at * 2 + 1, mask=seen, other=0.0, cache_modifier=".cg")
            lines = partial + at[:, None] * D + d[None, :]
            part = tl.load(lines, mask=seen[:, None], other=0.0, cache_modifier=".cg")
            new = tl.maximum(best, theirs)
            mine, weight = tl.exp2(best - new), tl.exp2(theirs - new)
            acc = acc * mine[:, None] + part * weight[:, None]
            total = total * mine + count * weight
            best = new
    lines = out + ((row.to(tl.int64) * KH + kv) * G + r % G)[:, None] * D + d[None, :]
    tl.store(lines, (acc / total[:, None]).to(tl.bfloat16), mask=live[:, None])


@triton.jit
def places_of_blocks(
    block, last_block, r, live, position, own_piece, own_block, piece_less_block, kv,
    KH: tl.constexpr, G: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    """Which rows of a tile see a block, and where their results are."""
    seen = live & (block <= last_block) & (block * KEYS <= position)
    if WINDOW > 0:
        seen = seen & (position - (block * KEYS + KEYS - 1) < WINDOW)
    piece, line = piece_less_block + block + 0 * r, r
    if TREE:
        alone = (own_piece >= 0) & (block >= own_block)
        piece = tl.where(alone, own_piece + block - own_block, piece)
        line = tl.where(alone, r % G, line)
    return seen, (piece.to(tl.int64) * KH + kv) * ROWS + line


@dataclass(frozen=True, eq=False)
class AttentionScratch:
    partial: Tensor  # [pieces, kv_heads, ROWS, head_size] float32
    stats: Tensor  # [pieces, kv_heads, ROWS, 2] float32
    counters: Tensor  # [tiles, kv_heads] int32, zeros


@dataclass(frozen=True, eq=False)
class Places:
    """The rows of a pass as int32 arrays on the device: views of one buffer."""

    positions: Tensor
    slots: Tensor
    drafted: Tensor
    limits: Tensor  # how much of the text a row sees in pieces that it shares with other rows
    lengths: Tensor
    path_starts: Tensor
    own_pieces: Tensor  # first piece of work of a row's path; -1 if it has none
    work: Tensor  # [pieces * FIELDS]
    paths: Tensor


def _keys_of_step(head_size: int) -> int:
    """Keys per multiplication; depends on the model alone, because it fixes the order of a row's sums.

    H200, us for one token after 2,047 with 64 and 128 keys: 7.5 and 6.4 with heads of 64, 10.6 and 9.9 with heads of
    128; but 64 tokens took 26 and 35 there.
    """
    return 2 * PAGE if head_size <= 64 else PAGE


def _stages(head_size: int, tree: bool) -> int:
    """How many steps of keys are loaded ahead, plus one.

    H200, ms of a pass over 1 / 16 / 64 tokens with 2 and with 3: 8B shape after 2,048 tokens 4.47 / 4.77 / 5.52 and
    4.40 / 4.82 / 5.53; default model after 512 tokens 0.603 / 0.660 / 0.993 and 0.597 / 0.648 / 0.985.
    """
    return 2 if tree and head_size > 64 else 3


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    places: Places,
    pieces: int,
    scratch: AttentionScratch,
    out: Tensor,
    heads: int,
    window: int,
    tree: bool,
    tile: int = ROWS,
) -> None:
    """out[row, head] for queries [row, head, head_size].

    `pieces`: pieces of work, some of them empty; `tile`: rows per tile.
    """
    kv_heads, slots, size = cache[0].shape
    step = _keys_of_step(size)
    scale = size**-0.5 * 1.4426950408889634  # log2(e)
    attend_kernel[(kv_heads, pieces)](
        q, *cache, places.work, places.positions, places.limits, places.lengths, places.path_starts,
        places.own_pieces, places.paths, scratch.partial, scratch.stats, scratch.counters, out, slots, scale,
        kv_heads, heads // kv_heads, size, KEYS, step, PAGE, tile, FIELDS, window, tree,
        _PARTS_AT_ONCE * ROWS // tile,
        **options(4, _stages(size, tree), heads * size),
    )  # fmt: skip
