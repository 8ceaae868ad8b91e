"""Attention by Intel AMX: which rows attend together, and which thread does what.

`amx_segments.py` handles one segment, `amx_attention_kernels.py` the arithmetic. Query heads that share a KV head are
rows of a tile. A group takes as many tokens of a chain as fit in two tiles; nodes of trees take one tile.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
from numba import types

from hierspec.backends.cpu.amx_attention_kernels import AttentionCode
from hierspec.backends.cpu.amx_segments import (
    CONFIGURATION,
    ROW_TILES,
    attend_to_segment,
    finish_group,
    first_part,
    load_queries,
    merge_parts,
    owner,
    queries_of,
    seen,
)
from hierspec.backends.cpu.amx_softmax import SEGMENT
from hierspec.backends.cpu.compiled import (
    BYTES_2D,
    FLOATS,
    FLOATS_2D,
    FLOATS_3D,
    INT,
    INTS,
    INTS_2D,
    borrowed,
    compiled,
    kernel_version,
    part,
)
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import barrier

ITEMS_PER_THREAD = 4  # with fewer items per thread, threads share the segments of each item

# numba takes constants, not enumerations.
_BEGIN, _END = int(AttentionCode.BEGIN), int(AttentionCode.END)


def rows_of_block(group: int, tiles: int = ROW_TILES) -> int:
    """Tokens that fit in this many tiles, if `group` query heads share a KV head."""
    return max(1, tiles * LANES // group)


def most_parts(heads: int, kv_heads: int, groups: int, longest: int, threads: int) -> int:
    """The most parts (attention states of a group of rows, see `part_floats`) that a pass keeps.

    A thread with whole items has a part for each of its groups of one head (at most two more than its share, see
    `owner`) and a spare one. Threads that share items have a part for every segment of every item.
    """
    items = groups * kv_heads * -(-heads // kv_heads // LANES)
    return threads * (groups // threads + 3) + min(items, ITEMS_PER_THREAD * threads) * -(-longest // SEGMENT)


@part
def _attend_to_head(
    thread, threads, item, kv_head, first_head, q_heads, layer, window, shape, qkv, positions, arena, tables,
    groups, group_texts, ends, path_starts, paths, scale, scores, parts, room, attended, code,
):  # fmt: skip
    """Attention of this thread's groups to one KV head, one segment at a time for all groups.

    So the segment's keys and values stay in the cache until all groups have used them. `item`: number of the first
    item.
    """
    head_size, count = shape[2], len(groups) - 1
    place = first_part(thread, threads, count)
    spare = parts[place].ctypes.data
    least, most, mine = ends.max() // SEGMENT + 1, np.int64(0), 0  # a plain 0 would be compiled separately
    for number in range(count):
        if owner(item + number, threads) == thread:
            first_row, last_row = groups[number], groups[number + 1]
            lowest, end = seen(first_row, last_row, window, positions, ends, path_starts)
            least, most = min(least, lowest // SEGMENT), max(most, (end + SEGMENT - 1) // SEGMENT)
            mine += 1
            queries = queries_of(parts[place + mine].ctypes.data, head_size)
            load_queries(first_row, last_row, first_head, q_heads, shape, qkv, queries, code)
    for segment in range(least, most):
        mine = 0
        for number in range(count):
            if owner(item + number, threads) != thread:
                continue
            mine += 1
            first_row, last_row, table = groups[number], groups[number + 1], tables[group_texts[number]]
            lowest, end = seen(first_row, last_row, window, positions, ends, path_starts)
            first, last = lowest // SEGMENT, (end + SEGMENT - 1) // SEGMENT
            if segment < first or segment >= last:
                continue
            state = parts[place + mine].ctypes.data
            attend_to_segment(
                segment, first_row, last_row, lowest, end, kv_head, q_heads, layer, window, shape, positions, arena,
                table, ends, path_starts, paths, scale, scores, queries_of(state, head_size), room,
                spare if segment > first else state, code,
            )  # fmt: skip
            if segment > first:
                merge_parts((last_row - first_row) * q_heads, head_size, state, spare, scale, code)
            if segment == last - 1:
                finish_group(first_row, last_row, first_head, q_heads, head_size, state, attended, code)


@part
def _attend_in_pieces(
    thread, threads, sync, shares, layer, window, shape, qkv, positions, arena, tables, groups, group_texts,
    ends, path_starts, paths, scale, scores, parts, room, attended, code,
):  # fmt: skip
    """Attention with few items: threads share the segments of each item, then one thread merges them."""
    heads, kv_heads, head_size, _, _, _ = shape
    group, count = heads // kv_heads, len(groups) - 1
    for merging in (False, True):
        unit = 0
        for item in range(count * kv_heads * shares):
            number, kv_head, share = item % count, item // count // shares, item // count % shares
            first_row, last_row, table = groups[number], groups[number + 1], tables[group_texts[number]]
            first_head, q_heads = kv_head * group + share * LANES, min(LANES, group - share * LANES)
            lowest, end = seen(first_row, last_row, window, positions, ends, path_starts)
            first, last = lowest // SEGMENT, (end + SEGMENT - 1) // SEGMENT
            state = parts[unit].ctypes.data
            if merging and item % threads == thread:
                for other in range(unit + 1, unit + last - first):
                    more = parts[other].ctypes.data
                    merge_parts((last_row - first_row) * q_heads, head_size, state, more, scale, code)
                finish_group(first_row, last_row, first_head, q_heads, head_size, state, attended, code)
            for segment in range(first, last):
                if not merging and unit % threads == thread:
                    result = parts[unit].ctypes.data
                    queries = queries_of(result, head_size)
                    load_queries(first_row, last_row, first_head, q_heads, shape, qkv, queries, code)
                    attend_to_segment(
                        segment, first_row, last_row, lowest, end, kv_head, q_heads, layer, window, shape, positions,
                        arena, table, ends, path_starts, paths, scale, scores, queries, room, result, code,
                    )  # fmt: skip
                unit += 1
        barrier(sync, threads)


@compiled(
    kernel_version,
    INT, INT, INTS, INT, INT, types.UniTuple(INT, 6), FLOATS_2D, INTS, INT, INTS_2D, INTS, INTS,
    INTS, INTS, INTS, FLOATS, FLOATS_3D, FLOATS_2D, BYTES_2D, FLOATS_2D, INTS,
    seconds=9,
)  # fmt: skip
def run_tile_attention(
    thread, threads, sync, layer, window, shape, qkv, positions, arena, tables, groups, group_texts,
    ends, path_starts, paths, scale, scores, parts, rooms, attended, code, version=0,
):  # fmt: skip
    """Attention for all groups of rows; the rows of a group belong to one text and share the tokens before their paths.

    An item is a group of rows with as many heads as fill a tile. scores [threads, 2, SEGMENT * 16]; parts [most_parts,
    part_floats].
    """
    qkv, positions, tables, groups, group_texts = (
        borrowed(qkv), borrowed(positions), borrowed(tables), borrowed(groups), borrowed(group_texts)
    )  # fmt: skip
    ends, path_starts, paths = borrowed(ends), borrowed(path_starts), borrowed(paths)
    scores, parts, rooms, attended, code = (
        borrowed(scores), borrowed(parts), borrowed(rooms), borrowed(attended), borrowed(code)
    )  # fmt: skip
    heads, kv_heads, _, _, _, _ = shape
    group, count = heads // kv_heads, len(groups) - 1
    shares = (group + LANES - 1) // LANES  # tiles needed for the query heads of one KV head
    items, room, factor = (
        count * kv_heads * shares,
        np.int64(rooms[thread].ctypes.data),
        np.int64(scale[1:].ctypes.data),
    )
    call_routine(code[_BEGIN], (room + CONFIGURATION,))
    if threads > 1 and items < ITEMS_PER_THREAD * threads:
        _attend_in_pieces(
            thread, threads, sync, shares, layer, window, shape, qkv, positions, arena, tables, groups, group_texts,
            ends, path_starts, paths, factor, scores[thread], parts, room, attended, code,
        )  # fmt: skip
        call_routine(code[_END], (room,))
        return
    for share in range(kv_heads * shares):
        kv_head, first = share // shares, share % shares * LANES
        _attend_to_head(
            thread, threads, share * count, kv_head, kv_head * group + first, min(LANES, group - first), layer, window,
            shape, qkv, positions, arena, tables, groups, group_texts, ends, path_starts, paths, factor,
            scores[thread], parts, room, attended, code,
        )  # fmt: skip
    call_routine(code[_END], (room,))
    barrier(sync, threads)
