"""Attention by vectors: which rows of a pass attend together, and which thread does what.

`attention_segments.py` computes it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
from numba import types

from hierspec.backends.cpu.attention_segments import SEGMENT, attend, score_step, seen
from hierspec.backends.cpu.compiled import (
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
from hierspec.backends.cpu.llvm import UNROLLED
from hierspec.backends.cpu.sharing import barrier, share, take

QUERIES = 64  # rows of one text that attend together: they share the keys and values that come from memory
_SHARED = 15  # so few rows of a long text are attended to by all threads: each then reads a part of keys and values
_ITEMS = 3  # for each thread, at least, where large groups are split by rows
_FLOAT = 4  # bytes


@part
def _work(groups, group, ends):
    """How much work a group of rows is: its rows times the tokens that the last of them sees."""
    past = groups[group + 1]
    return (past - groups[group]) * (1 + ends[past - 1])


@part
def _most_shared(threads, kv_heads):
    """More rows than this are split by heads and rows instead: there are enough of them for all threads."""
    return max(_SHARED, threads * UNROLLED // kv_heads)


@part
def _parts(groups, group, ends, all_work, threads, kv_heads):
    """Into how many parts the rows of a group are split, each for one thread; 0 if all threads work on it together.

    A thread that took whole heads of a large group with few rows would keep the others waiting.
    """
    rows, work = groups[group + 1] - groups[group], _work(groups, group, ends)
    if threads == 1:
        return 1
    if rows <= _most_shared(threads, kv_heads) and 2 * threads * work > all_work:
        return 0
    wanted = (_ITEMS * threads * work - 1) // (all_work * kv_heads) + 1
    return min(wanted, (rows + UNROLLED - 1) // UNROLLED)


def score_floats(heads: int, kv_heads: int, head_size: int, longest: int, threads: int) -> int:
    """Floats of scratch memory: scores of few rows for all positions; or for each thread a segment's for its rows, and
    keys or values of the segment."""
    step, together = score_step.py_func, heads * _most_shared.py_func(threads, kv_heads)
    own = heads // kv_heads * QUERIES * step(SEGMENT) + SEGMENT * head_size
    return int(max(together * step(longest), threads * own))


@compiled(
    kernel_version,
    INT, INT, INTS, INT, INT, types.UniTuple(INT, 6), FLOATS_3D, INTS, INT, INTS_2D, INTS, INTS,
    INTS, INTS, INTS, FLOATS, FLOATS_3D, FLOATS_2D, FLOATS_3D, FLOATS_2D, INTS,
    seconds=5,
)  # fmt: skip
def run_attention(
    thread, threads, sync, layer, window, shape, queries, positions, arena, tables, groups, group_texts,
    ends, path_starts, paths, scale, scores, totals, sums, attended, code, version=0,
):  # fmt: skip
    """Attention for all groups of rows; a group is at most QUERIES rows of one text with the same tokens before their
    paths, or without paths."""
    sync, queries, positions, tables, groups = (
        borrowed(sync), borrowed(queries), borrowed(positions), borrowed(tables), borrowed(groups)
    )  # fmt: skip
    group_texts, ends, path_starts, paths = (
        borrowed(group_texts), borrowed(ends), borrowed(path_starts), borrowed(paths)
    )  # fmt: skip
    scale, scores, totals = borrowed(scale), borrowed(scores), borrowed(totals)
    sums, attended, code = borrowed(sums), borrowed(attended), borrowed(code)
    heads, kv_heads, head_size, _, _, number_bytes = shape
    room, count = scores[0, 0], len(groups) - 1
    none, alone = np.int64(0), np.int64(1)  # numba would compile callees again for plain numbers
    all_work, items = np.int64(0), np.int64(0)
    for group in range(count):
        all_work += _work(groups, group, ends)
    for group in range(count):
        parts = _parts(groups, group, ends, all_work, threads, kv_heads)
        items += kv_heads * parts
        if not parts:
            first_row, last_row = groups[group], groups[group + 1]
            lowest, end = seen(first_row, last_row, window, positions, ends, path_starts)
            start = lowest // SEGMENT * SEGMENT
            attend(
                thread, threads, sync, none, kv_heads, lowest, start, end, end, first_row, last_row, layer, window,
                shape, queries, positions, arena, tables[group_texts[group]], ends, path_starts, paths, scale, room,
                none, totals, sums, attended, code,
            )  # fmt: skip
    if not items:
        return
    # An item is one KV head of a part of a group: no barriers inside, and one segment at a time, which stays in the
    # cache of its thread.
    floats, wide = heads // kv_heads * QUERIES * score_step(SEGMENT), none
    own_room, turn = room[thread * floats : (thread + 1) * floats], none
    if number_bytes < _FLOAT:
        wide = room[threads * floats + thread * SEGMENT * head_size :].ctypes.data
    taken, until, turn = take(sync, thread, threads, items, turn)
    while taken < until:
        before = np.int64(0)  # items of earlier groups
        for group in range(count):
            parts, rows = _parts(groups, group, ends, all_work, threads, kv_heads), groups[group + 1] - groups[group]
            for item in range(max(taken, before), min(until, before + kv_heads * parts)):
                head, tiles = (item - before) // parts, (rows + UNROLLED - 1) // UNROLLED
                first, last = share(tiles, (item - before) % parts, parts)
                first_row, last_row = groups[group] + first * UNROLLED, groups[group] + min(last * UNROLLED, rows)
                lowest, end = seen(first_row, last_row, window, positions, ends, path_starts)
                for start in range(lowest // SEGMENT * SEGMENT, end, SEGMENT):
                    attend(
                        none, alone, sync, head, head + 1, lowest, start, min(start + SEGMENT, end), end,
                        first_row, last_row, layer, window, shape, queries, positions, arena,
                        tables[group_texts[group]], ends, path_starts, paths, scale, own_room, wide, totals, sums,
                        attended, code,
                    )  # fmt: skip
            before += kv_heads * parts
        taken, until, turn = take(sync, thread, threads, items, turn)
    barrier(sync, threads)
