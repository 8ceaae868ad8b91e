"""Attention of some rows to one segment by Intel AMX: scores, softmax, weighted sums.

Rows of a chain read keys and values in place. The last positions of a tree node are in other slots than those of a
token in a chain. So from the chunk in which its path begins, keys and values are gathered for the node: its sums are
then those of the same token in a chain.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from hierspec.backends.cpu.amx import TILE_BYTES, steps
from hierspec.backends.cpu.amx_attention_kernels import CHUNK, AttentionCode
from hierspec.backends.cpu.amx_cache import (
    clear_values,
    gather_keys,
    gather_values,
    key_column,
    keys_at,
    keys_size,
    value_pair,
)
from hierspec.backends.cpu.amx_softmax import LINE, MERGE_WORDS, SEGMENT
from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.kernels import copy_lanes, store_integer
from hierspec.backends.cpu.kv_pages import PAGE
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.routines import call_routine

ROW_TILES = 2  # tiles of rows that attend together: each loaded tile of keys or values serves both
CONFIGURATION = 960  # offset of the tile configuration, behind the lists of key and value addresses
_LISTS = CONFIGURATION + LINE  # bytes at the beginning of a room
_FLOAT = 4  # bytes
_SEGMENT_CHUNKS = SEGMENT // CHUNK
_VALUE_LIST = _SEGMENT_CHUNKS * 8
_BLOCK = LANES * LANES  # floats per tile of scores

# numba takes constants, not enumerations.
_ROUND, _SOFTMAX, _MERGE, _FINISH = (
    int(code) for code in (AttentionCode.ROUND, AttentionCode.SOFTMAX, AttentionCode.MERGE, AttentionCode.FINISH)
)
_SCORES, _SCORES_OF_TWO = int(AttentionCode.SCORES), int(AttentionCode.SCORES_OF_TWO)
_SUMS, _SUMS_OF_TWO = int(AttentionCode.WEIGHTED_SUMS), int(AttentionCode.WEIGHTED_SUMS_OF_TWO)


def part_floats(head_size: int) -> int:
    """Floats of a part: for each row tile the state that `merge` works on, then the rows' queries."""
    return ROW_TILES * (MERGE_WORDS + LANES * head_size + steps(head_size) * TILE_BYTES // _FLOAT)


def room_bytes(head_size: int) -> int:
    """Bytes of scratch memory per thread, see `rooms_of`."""
    depth, tiles = steps(head_size), head_size // LANES
    return _LISTS + (_SEGMENT_CHUNKS * (2 * depth + tiles) + 3 * tiles) * TILE_BYTES


@part
def rooms_of(room, head_size):
    """Addresses of gathered keys, gathered values, sums of common chunks, sums of gathered chunks, and zeros."""
    depth, tiles = (head_size + CHUNK - 1) // CHUNK, head_size // LANES
    keys = room + _LISTS
    values = keys + 2 * _SEGMENT_CHUNKS * depth * TILE_BYTES
    common = values + _SEGMENT_CHUNKS * tiles * TILE_BYTES
    return keys, values, common, common + tiles * TILE_BYTES, common + 2 * tiles * TILE_BYTES


@part
def tile_step(head_size):
    """Bytes from one row tile's state to the next."""
    return (MERGE_WORDS + LANES * head_size) * _FLOAT


@part
def queries_of(place, head_size):
    """Address of a part's queries."""
    return place + ROW_TILES * tile_step(head_size)


@part
def seen(first_row, last_row, window, positions, ends, path_starts):
    """The first position that any of the rows sees, and the end of the last."""
    lowest, end = positions[first_row], 0
    for row in range(first_row, last_row):
        end = max(end, ends[row] + path_starts[row + 1] - path_starts[row])
        lowest = min(lowest, max(0, positions[row] - window + 1) if window else 0)
    return lowest, end


@part
def load_queries(first_row, last_row, first_head, q_heads, shape, qkv, queries, code):
    """Rounds the queries into rows of tiles: one token after the other, each with its heads."""
    head_size, width = shape[2], qkv.shape[1]
    depth = (head_size + CHUNK - 1) // CHUNK
    for row in range(first_row, last_row):
        for head in range(q_heads):
            x = qkv.ctypes.data + (row * width + (first_head + head) * head_size) * _FLOAT
            number = (row - first_row) * q_heads + head
            target = queries + number // LANES * depth * TILE_BYTES + number % LANES * LINE
            call_routine(code[_ROUND], (x, head_size // LANES, target))


@part
def list_chunks(low, high, layer, head, shape, arena, table, key_list, value_list):
    """Lists the addresses of keys and values of these chunks of a text."""
    head_size = shape[2]
    for chunk in range(low, high):
        page, slot = table[chunk * CHUNK // PAGE], chunk * CHUNK % PAGE
        block = keys_at(arena, page, layer, head, shape)
        store_integer(key_list + 8 * (chunk - low), block + key_column(slot, head_size))
        store_integer(value_list + 8 * (chunk - low), block + keys_size(head_size) + value_pair(slot, head_size))


@part
def _hide(scores, row, first, last):
    """Masks positions first .. last of one row of a tile with minus infinity."""
    position = first
    while position < last:
        at = position // LANES * _BLOCK + row * LANES + position % LANES
        if position % LANES == 0 and position + LANES <= last:
            scores[at : at + LANES] = -np.inf
            position += LANES
        else:
            scores[at] = -np.inf
            position += 1


@part
def hide_unseen(first_row, first, last, q_heads, low, high, window, positions, ends, path_starts, scores):
    """Masks the positions of these chunks that rows first .. last of a group, which share a tile, do not see."""
    size = (high - low) * CHUNK
    for number in range(first, last):
        row = first_row + number // q_heads
        begin = (max(0, positions[row] - window + 1) if window else 0) - low * CHUNK
        stop = ends[row] + path_starts[row + 1] - path_starts[row] - low * CHUNK
        _hide(scores, number - first, np.int64(0), min(begin, size))
        _hide(scores, number - first, max(stop, 0), size)


@part
def attend_to_segment(
    segment, first_row, last_row, lowest, end, head, q_heads, layer, window, shape, positions, arena, table,
    ends, path_starts, paths, scale, scores, queries, room, result, code,
):  # fmt: skip
    """Attention of some rows to the positions of one segment that they see; `result` is a part that can be merged."""
    head_size, rows = shape[2], (last_row - first_row) * q_heads
    depth, tiles, stride = (head_size + CHUNK - 1) // CHUNK, head_size // LANES, head_size * _FLOAT
    keys, values, common_sums, own_sums, zeros = rooms_of(room, head_size)
    low = max(lowest // CHUNK, segment * _SEGMENT_CHUNKS)
    high = min((end + CHUNK - 1) // CHUNK, (segment + 1) * _SEGMENT_CHUNKS)
    # Chunks low .. common are read in place. Rows with paths have only the whole chunks before their paths in common.
    has_path = path_starts[first_row + 1] > path_starts[first_row]
    common = max(low, min(high, ends[first_row] // CHUNK if has_path else high))
    listed = room + _VALUE_LIST
    list_chunks(low, common, layer, head, shape, arena, table, room, listed)
    row_scores, own_scores = scores[0].ctypes.data, scores[1].ctypes.data
    if common > low:
        multiply = code[_SCORES_OF_TWO] if rows > LANES else code[_SCORES]
        call_routine(multiply, (queries, depth, room, common - low, row_scores))
    start, shared = common * CHUNK, ends[first_row]
    if has_path:
        for row in range(first_row, last_row):
            stop = min(ends[row] + path_starts[row + 1] - path_starts[row], high * CHUNK)
            if stop > start:
                own = (stop - start + CHUNK - 1) // CHUNK
                # The first row gathers what all rows of the group have in common.
                new = start if row == first_row else max(start, shared)
                gather_keys(
                    start, new, stop, row, layer, head, shape, arena, table, ends, path_starts, paths, keys, room, code
                )
                call_routine(code[_SCORES], (queries, depth, room, own, own_scores))
                to = row_scores + (common - low) * 2 * TILE_BYTES
                for number in range((row - first_row) * q_heads, (row - first_row + 1) * q_heads):
                    for block in range(2 * own):
                        at = block * TILE_BYTES + number * LINE
                        copy_lanes(own_scores + at, to + at)

    for first in range(0, rows, LANES):
        last = min(rows, first + LANES)
        hide_unseen(
            first_row, first, last, q_heads, low, high, window, positions, ends, path_starts, scores[first // LANES]
        )
    call_routine(code[_SOFTMAX], (row_scores, rows, high - low, scale, result, tile_step(head_size)))

    sums = result + MERGE_WORDS * _FLOAT
    if not has_path and end < high * CHUNK:
        # Slots behind the text's end may hold anything, even NaN: use zeros instead.
        begin = (high - 1) * CHUNK
        clear_values(1, head_size, values, listed + 8 * (high - 1 - low))
        gather_values(
            begin, begin, end, last_row - 1, layer, head, shape, arena, table, ends, path_starts, paths, values, code
        )
    if rows > LANES:
        call_routine(code[_SUMS_OF_TWO], (row_scores, listed, common - low, tiles, sums, tile_step(head_size), stride))
        return
    target = common_sums if has_path else sums
    call_routine(code[_SUMS], (row_scores, listed, common - low, tiles, zeros, target, stride))
    if has_path:
        clear_values(high - common, head_size, values, listed)
        for row in range(first_row, last_row):
            stop = min(ends[row] + path_starts[row + 1] - path_starts[row], high * CHUNK)
            source = common_sums
            if stop > start:
                own, new = (stop - start + CHUNK - 1) // CHUNK, start if row == first_row else max(start, shared)
                gather_values(
                    start, new, stop, row, layer, head, shape, arena, table, ends, path_starts, paths, values, code
                )
                rest = row_scores + (common - low) * 2 * TILE_BYTES
                call_routine(code[_SUMS], (rest, listed, own, tiles, common_sums, own_sums, stride))
                source = own_sums
            for line in range((row - first_row) * q_heads * tiles, (row - first_row + 1) * q_heads * tiles):
                copy_lanes(source + line * LINE, sums + line * LINE)


@part
def merge_parts(rows, head_size, state, more, scale, code):
    for tile in range((rows + LANES - 1) // LANES):
        at = tile * tile_step(head_size)
        call_routine(code[_MERGE], (state + at, more + at, scale, head_size // LANES))


@part
def finish_rows(first_row, first, last, first_head, q_heads, head_size, state, attended, code):
    """Attention outputs = sums / totals, for rows first .. last of a group, which share a tile."""
    for number in range(first, last):
        sums = state + (MERGE_WORDS + (number - first) * head_size) * _FLOAT
        total = state + (LANES + number - first) * _FLOAT
        row, head = first_row + number // q_heads, first_head + number % q_heads
        out = attended[row].ctypes.data + head * head_size * _FLOAT
        call_routine(code[_FINISH], (sums, total, head_size // LANES, out))


@part
def finish_group(first_row, last_row, first_head, q_heads, head_size, state, attended, code):
    """Attention outputs of all tiles of a group."""
    rows = (last_row - first_row) * q_heads
    for first in range(0, rows, LANES):
        of_tile = state + first // LANES * tile_step(head_size)
        finish_rows(first_row, first, min(rows, first + LANES), first_head, q_heads, head_size, of_tile, attended, code)


@part
def owner(item, threads):
    """The thread of an item, in the order 0 .. n-1, n-1 .. 0: later groups see more, so changing direction balances."""
    turn = item % (2 * threads)
    return turn if turn < threads else 2 * threads - 1 - turn


@part
def first_part(thread, threads, groups):
    """The first part of a thread that has whole groups: a spare part to compute in, then one for each group."""
    return thread * (groups // threads + 3)
