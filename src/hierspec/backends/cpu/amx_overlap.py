"""Attention to one head for keys as a pipeline of tiles: scores of one, softmax of the one before, sums of the one
before that, all in one routine (`amx_overlap_kernel.py`). Every number is made as in `amx_segments.py`, to the bit.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from hierspec.backends.cpu.amx import TILE_BYTES
from hierspec.backends.cpu.amx_attention_kernels import CHUNK, AttentionCode
from hierspec.backends.cpu.amx_cache import clear_values, gather_values
from hierspec.backends.cpu.amx_segments import (
    finish_rows,
    first_part,
    hide_unseen,
    list_chunks,
    owner,
    queries_of,
    rooms_of,
    seen,
    tile_step,
)
from hierspec.backends.cpu.amx_softmax import MERGE_WORDS, SEGMENT
from hierspec.backends.cpu.compiled import borrowed, part
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.routines import call_routine

_FLOAT = 4  # bytes
_SEGMENT_CHUNKS = SEGMENT // CHUNK
_STAGES = 3  # tiles in the pipeline
_LIST = 8 * _SEGMENT_CHUNKS  # bytes of a list of addresses: each stage has one of keys and one of values in the room
_BESIDE, _MERGE = int(AttentionCode.SOFTMAX_BESIDE_PRODUCTS), int(AttentionCode.MERGE)  # constants for numba
# What is known of a tile: rows, chunks, addresses of its part, of the state to merge that into (or 0), of its values;
# the group's first row and the tile's first, and whether this is its last segment.
_ROWS, _CHUNKS, _PART, _STATE, _VALUES, _FIRST_ROW, _FIRST, _LAST = range(8)


@part
def _advance(number, tiles, queries, keys, chunks, first_head, q_heads, head_size, scale, scores, attended, code):
    """Scores of a tile of this number, if it has chunks; softmax of the one before it; and the one before that ends."""
    now, before = tiles[(number + 2) % _STAGES], tiles[(number + 1) % _STAGES]
    other, mine = scores[(number + 1) % 2].ctypes.data, scores[number % 2].ctypes.data
    sums = before[_PART] + MERGE_WORDS * _FLOAT
    call_routine(
        code[_BESIDE],
        (
            other, now[_ROWS], now[_CHUNKS], scale, now[_PART],
            mine, before[_VALUES], before[_CHUNKS], sums,
            queries, keys, chunks, mine,
        ),
    )  # fmt: skip
    if before[_ROWS]:
        state = before[_PART]
        if before[_STATE]:
            state = before[_STATE]
            call_routine(code[_MERGE], (state, before[_PART], scale, head_size // LANES))
        if before[_LAST]:
            first, row = before[_FIRST], before[_FIRST_ROW]
            finish_rows(row, first, first + before[_ROWS], first_head, q_heads, head_size, state, attended, code)
        before[_ROWS], before[_CHUNKS] = 0, 0


@part
def attend_overlapped(
    thread, threads, item, least, most, kv_head, first_head, q_heads, layer, window, shape, positions, arena,
    tables, groups, group_texts, ends, path_starts, paths, scale, scores, parts, room, attended, code,
):  # fmt: skip
    """This thread's groups, whose queries are loaded, and segments least .. most of one head for keys. No row has a
    path."""
    head_size, count = shape[2], len(groups) - 1
    place, depth, size = first_part(thread, threads, count), head_size // CHUNK, head_size // LANES * TILE_BYTES
    _, gathered, _, _, _ = rooms_of(room, head_size)
    spare = parts[place].ctypes.data
    of_tiles = np.zeros((_STAGES, 8), np.int64)
    tiles = borrowed(of_tiles)
    done, unit = np.int64(0), np.int64(0)
    for segment in range(least, most):
        mine = 0
        for number in range(count):
            if owner(item + number, threads) != thread:
                continue
            mine += 1
            first_row, last_row, table = groups[number], groups[number + 1], tables[group_texts[number]]
            lowest, end = seen(first_row, last_row, window, positions, ends, path_starts)
            if segment < lowest // SEGMENT or segment * SEGMENT >= end:
                continue
            low = max(lowest // CHUNK, segment * _SEGMENT_CHUNKS)
            high = min((end + CHUNK - 1) // CHUNK, (segment + 1) * _SEGMENT_CHUNKS)
            stage = unit % _STAGES
            unit += 1
            keys = room + 2 * stage * _LIST
            list_chunks(low, high, layer, kv_head, shape, arena, table, keys, keys + _LIST)
            if end < high * CHUNK:  # see `attend_to_segment`
                begin, values = (high - 1) * CHUNK, gathered + stage * size
                clear_values(1, head_size, values, keys + _LIST + 8 * (high - 1 - low))
                gather_values(
                    begin, begin, end, last_row - 1, layer, kv_head, shape, arena, table, ends, path_starts, paths,
                    values, code,
                )  # fmt: skip
            state, rows = parts[place + mine].ctypes.data, (last_row - first_row) * q_heads
            for first in range(0, rows, LANES):
                at = first // LANES
                queries = np.int64(queries_of(state, head_size)) + at * depth * TILE_BYTES
                _advance(
                    done, tiles, queries, keys, high - low, first_head, q_heads, head_size, scale, scores, attended,
                    code,
                )  # fmt: skip
                tile, of_tile = tiles[done % _STAGES], state + at * tile_step(head_size)
                tile[_ROWS], tile[_CHUNKS], tile[_VALUES] = min(LANES, rows - first), high - low, keys + _LIST
                tile[_PART], tile[_STATE] = of_tile, 0
                if segment > lowest // SEGMENT:
                    tile[_PART], tile[_STATE] = spare + done % 2 * tile_step(head_size), of_tile
                tile[_FIRST_ROW], tile[_FIRST], tile[_LAST] = first_row, first, (segment + 1) * SEGMENT >= end
                last = first + tile[_ROWS]
                hide_unseen(
                    first_row, first, last, q_heads, low, high, window, positions, ends, path_starts, scores[done % 2]
                )
                done += 1
    for number in range(done, done + _STAGES - 1):
        _advance(
            number, tiles, room, room, np.int64(0), first_head, q_heads, head_size, scale, scores, attended, code
        )  # fmt: skip
    of_tiles[0, 0] = 0  # used once more, so that `tiles` has an owner until here
