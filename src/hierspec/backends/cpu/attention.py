"""Attention in float32: stores keys and values in their pages, then computes scores, softmax and weighted sums.

Numbers that are multiplied with the same input are in 16 neighbouring lanes, as in packed weights: for every page,
layer and head, keys [PAGE / 16, head_size, 16] and values [head_size / 16, PAGE, 16]. So scores and weighted sums are
products too, and the same tile kernels compute them.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
from numba import types

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
from hierspec.backends.cpu.kernels import add_weighted_value, copy_lanes, query_dot_key, scatter, softmax_numerators
from hierspec.backends.cpu.llvm import LANES, UNROLLED
from hierspec.backends.cpu.product import Code
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import barrier, share

PAGE = 64  # slots per page, the unit in which texts share prefixes; a multiple of 32
QUERIES = 16  # rows of one text that attend together: their scores must stay in the cache
_FLOAT = 4  # bytes

# numba takes constants, not enumerations.
_TILES, _TILES_ONTO = int(Code.TILES), int(Code.TILES_ONTO)
_TILES_TWICE, _TILES_TWICE_ONTO = int(Code.TILES_TWICE), int(Code.TILES_TWICE_ONTO)


@part
def _keys_at(arena, page, layer, head, shape):
    """Address of a page's keys for a layer and head; its values follow directly."""
    _, kv_heads, head_size, _, layers = shape
    return arena + ((page * layers + layer) * kv_heads + head) * 2 * PAGE * head_size * _FLOAT


@part
def _key_block(arena, table, block, layer, head, shape):
    """Address of the keys of 16 tokens of a text."""
    page, slot = table[block * LANES // PAGE], block * LANES % PAGE
    return _keys_at(arena, page, layer, head, shape) + slot * shape[2] * _FLOAT


@part
def place(x, is_value, slot, layer, kv_head, shape, arena):
    """Stores a key or value in its slot."""
    head_size = shape[2]
    start, inside = _keys_at(arena, slot // PAGE, layer, kv_head, shape), slot % PAGE
    if is_value:
        for chunk in range(head_size // LANES):
            value = start + (PAGE * head_size + (chunk * PAGE + inside) * LANES) * _FLOAT
            copy_lanes(x.ctypes.data + chunk * LANES * _FLOAT, value)
    else:
        scatter(x.ctypes.data, start + (inside // LANES * LANES * head_size + inside % LANES) * _FLOAT, head_size)


@part
def _run(paths, node, past, within):
    """How many nodes from `node` on, before `past`, have consecutive slots that do not cross a multiple of `within`."""
    slot, run = paths[node], 1
    most = min(past - node, within - slot % within)
    while run < most and paths[node + run] == slot + run:
        run += 1
    return run


@part
def _add_values(weights, values, count, out, code):
    """out[0:16] += values [count, 16] times their weights, in order."""
    fours = count // UNROLLED * UNROLLED
    if fours:
        call_routine(code[_TILES_ONTO], (weights, 0, 1, values, fours, out, 0))
    for i in range(fours, count):
        add_weighted_value(weights + i * _FLOAT, values + i * LANES * _FLOAT, out)


@part
def _work(groups, group, ends):
    """How much work a group of rows is: its rows times the tokens that the last of them sees."""
    past = groups[group + 1]
    return (past - groups[group]) * (1 + ends[past - 1])


@compiled(
    kernel_version,
    INT, INT, INTS, INT, INT, types.UniTuple(INT, 5), FLOATS_2D, INTS, INT, INTS_2D, INTS, INTS,
    INTS, INTS, INTS, FLOATS, FLOATS_3D, FLOATS_2D, FLOATS_2D, INTS,
    seconds=5,
)  # fmt: skip
def run_attention(
    thread, threads, sync, layer, window, shape, qkv, positions, arena, tables, groups, group_texts,
    ends, path_starts, paths, scale, scores, totals, attended, code, version=0,
):  # fmt: skip
    """Attention for all groups of rows; a group is at most QUERIES rows of one text with the same tokens before their
    paths, or without paths."""
    sync, qkv, positions, tables, groups, group_texts = (
        borrowed(sync), borrowed(qkv), borrowed(positions), borrowed(tables), borrowed(groups), borrowed(group_texts)
    )  # fmt: skip
    ends, path_starts, paths, scale = borrowed(ends), borrowed(path_starts), borrowed(paths), borrowed(scale)
    scores, totals, attended, code = borrowed(scores), borrowed(totals), borrowed(attended), borrowed(code)
    kv_heads, count = shape[1], len(groups) - 1
    none, alone = np.int64(0), np.int64(1)  # numba would compile callees again for plain numbers
    most = 0
    for group in range(count):
        most += _work(groups, group, ends)
    most //= 2 * threads  # work of a group that one thread may do alone
    # All threads work together on a large group: a thread that took whole heads of it would keep the others waiting.
    for group in range(count):
        if _work(groups, group, ends) > most and groups[group + 1] - groups[group] < UNROLLED * threads:
            _attend(
                thread, threads, sync, none, kv_heads, none, groups[group], groups[group + 1], layer, window, shape,
                qkv, positions, arena, tables[group_texts[group]], ends, path_starts, paths, scale, scores, totals,
                attended, code,
            )  # fmt: skip
    # Of the others each thread takes whole KV heads of a group, and of a large one with many rows a part of the rows
    # too: no barriers inside, and the scores stay in the cache of the thread that made them.
    first_score, item = thread * (shape[0] // kv_heads), 0
    for group in range(count):
        first_row, rows = groups[group], groups[group + 1] - groups[group]
        parts = 1
        if _work(groups, group, ends) > most:
            if rows < UNROLLED * threads:
                continue
            parts = threads
        tiles = (rows + UNROLLED - 1) // UNROLLED
        for head in range(kv_heads):
            for number in range(parts):
                if item % threads == thread:
                    first, last = share(tiles, number, parts)
                    _attend(
                        none, alone, sync, head, head + 1, first_score, first_row + first * UNROLLED,
                        first_row + min(last * UNROLLED, rows), layer, window, shape, qkv, positions, arena,
                        tables[group_texts[group]], ends, path_starts, paths, scale, scores, totals, attended, code,
                    )  # fmt: skip
                item += 1
    if item:  # otherwise all threads have just met
        barrier(sync, threads)


@part
def _attend(
    thread, threads, sync, first_head, last_head, first_score, first_row, last_row, layer, window, shape, qkv,
    positions, arena, table, ends, path_starts, paths, scale, scores, totals, attended, code,
):  # fmt: skip
    """Attention for at most QUERIES rows of one text: scores, their exponentials, and the weighted sums.

    Handles KV heads first_head .. last_head, whose scores are in `scores` from `first_score` on.

    A row sees the text's tokens up to its end, then the slots of its path. `scores` has both by position, so a node of
    a tree adds the same numbers in the same order as the same token in a chain. The rows of a product's tile are rows
    of the batch or, for a single row, its heads that share a KV head. `table` lists the pages of the text's tokens.
    """
    heads, kv_heads, head_size, _, _ = shape
    group, width, rows = heads // kv_heads, qkv.shape[1], last_row - first_row
    q_start, o_start = (
        qkv.ctypes.data + first_row * width * _FLOAT,
        attended.ctypes.data + first_row * heads * head_size * _FLOAT,
    )
    length = scores.shape[2]
    end, begin = 0, length
    for row in range(first_row, last_row):
        end = max(end, ends[row])
        begin = min(begin, max(0, positions[row] - window + 1) if window else 0)
    low, high = min(begin, end) // LANES, (end + LANES - 1) // LANES

    q_heads, first_q_head = (last_head - first_head) * group, first_head * group
    first, last = share((last_head - first_head) * (high - low), thread, threads)
    item = first
    while item < last:  # two blocks of 16 keys at once where the next one is of the same head
        number, block = item // (high - low), low + item % (high - low)
        twice = item + 1 < last and block + 1 < high
        head = first_head + number
        key_block = _key_block(arena, table, block, layer, head, shape)
        offset = _key_block(arena, table, block + 1, layer, head, shape) - key_block if twice else 0
        out = scores.ctypes.data + ((first_score + number * group) * QUERIES * length + block * LANES) * _FLOAT
        q = q_start + head * group * head_size * _FLOAT
        # The rows of a tile are the query heads of a single row, or all rows for one query head after another.
        tiles, tile_rows, q_step, out_step = group, rows, width, length
        if rows == 1:
            tiles, tile_rows, q_step, out_step = 1, group, head_size, QUERIES * length
        for number in range(tiles):
            mine, its = q + number * head_size * _FLOAT, out + number * QUERIES * length * _FLOAT
            if twice:
                call_routine(
                    code[_TILES_TWICE],
                    (mine, q_step, tile_rows, key_block, offset, head_size, its, out_step, LANES * _FLOAT),
                )
            else:
                call_routine(code[_TILES], (mine, q_step, tile_rows, key_block, head_size, its, out_step))
        item += 2 if twice else 1
    barrier(sync, threads)

    sixteen = np.empty(LANES, np.float32)
    first, last = share(rows * q_heads, thread, threads)
    for item in range(first, last):
        row, q_head = first_row + item // q_heads, first_q_head + item % q_heads
        mine = scores[first_score + item % q_heads, row - first_row]
        own_begin = max(0, positions[row] - window + 1) if window else 0
        stop = ends[row]
        node, past = path_starts[row], path_starts[row + 1]
        while node < past:
            page, slot, run = paths[node] // PAGE, paths[node] % PAGE, _run(paths, node, past, LANES)
            key = _keys_at(arena, page, layer, q_head // group, shape) + slot // LANES * LANES * head_size * _FLOAT
            query = qkv.ctypes.data + (row * width + q_head * head_size) * _FLOAT
            if run == 1:
                mine[stop] = query_dot_key(query, key + slot % LANES * _FLOAT, head_size)
            else:  # all 16 lanes take as long as one
                call_routine(code[_TILES], (query, 0, 1, key, head_size, sixteen.ctypes.data, 0))
                for i in range(run):
                    mine[stop + i] = sixteen[slot % LANES + i]
            node += run
            stop += run
        from_block, to_block = own_begin // LANES, (stop + LANES - 1) // LANES
        mine[from_block * LANES : own_begin] = -np.inf
        mine[stop : to_block * LANES] = -np.inf
        start = mine.ctypes.data + from_block * LANES * _FLOAT
        totals[row, q_head] = softmax_numerators(start, to_block - from_block, scale.ctypes.data)
        # Rows share one product with the values. What a row does not see gets weight zero, which adds nothing.
        mine[low * LANES : own_begin] = 0
        if stop < end:
            mine[stop:end] = 0
    barrier(sync, threads)

    # One page after the other, each adding to the sums of the pages before.
    chunks, common, first_seen = head_size // LANES, end // LANES * LANES, low * LANES
    before = first_score - first_q_head  # from the number of a query head to its index in `scores`
    first, last = share((last_head - first_head) * chunks, thread, threads)
    begin = first_seen
    while begin < common:
        page, slot = table[begin // PAGE], begin % PAGE
        count = min(common - begin, PAGE - slot)
        tiles, tile_rows, x_step, out_step = group, rows, length, heads * head_size
        if rows == 1:
            tiles, tile_rows, x_step, out_step = 1, group, QUERIES * length, head_size
        item = first
        while item < last:  # two chunks of 16 numbers at once where the next one is of the same head
            head, chunk = first_head + item // chunks, item % chunks
            twice = item + 1 < last and chunk + 1 < chunks
            seen = _keys_at(arena, page, layer, head, shape)
            seen += (PAGE * head_size + (chunk * PAGE + slot) * LANES) * _FLOAT
            x = scores.ctypes.data + ((before + head * group) * QUERIES * length + begin) * _FLOAT
            out = o_start + (head * group * head_size + chunk * LANES) * _FLOAT
            for number in range(tiles):
                its, sums = x + number * QUERIES * length * _FLOAT, out + number * head_size * _FLOAT
                if twice:
                    call_routine(
                        code[_TILES_TWICE] if begin == first_seen else code[_TILES_TWICE_ONTO],
                        (
                            its, x_step, tile_rows, seen, PAGE * LANES * _FLOAT, count, sums, out_step, LANES * _FLOAT
                        ),
                    )  # fmt: skip
                else:
                    call_routine(
                        code[_TILES] if begin == first_seen else code[_TILES_ONTO],
                        (its, x_step, tile_rows, seen, count, sums, out_step),
                    )
            item += 2 if twice else 1
        begin += count
    for item in range(first, last):
        head, chunk = first_head + item // chunks, item % chunks
        # Values of a page's slot 0, as an offset from its keys.
        to_values = (PAGE * head_size + chunk * PAGE * LANES) * _FLOAT
        for q_head in range(head * group, (head + 1) * group):
            out = o_start + (q_head * head_size + chunk * LANES) * _FLOAT
            for row in range(first_row, last_row):
                if common <= first_seen:
                    attended[row, q_head * head_size + chunk * LANES : q_head * head_size + (chunk + 1) * LANES] = 0
                out_row = out + (row - first_row) * heads * head_size * _FLOAT
                weights = scores[before + q_head, row - first_row].ctypes.data
                position = max(common, first_seen)
                if position < ends[row]:  # fewer than 16, in one page
                    value = _keys_at(arena, table[position // PAGE], layer, head, shape) + to_values
                    value += position % PAGE * LANES * _FLOAT
                    _add_values(weights + position * _FLOAT, value, ends[row] - position, out_row, code)
                node, past, position = path_starts[row], path_starts[row + 1], ends[row]
                while node < past:
                    slot, run = paths[node] % PAGE, _run(paths, node, past, PAGE)
                    value = _keys_at(arena, paths[node] // PAGE, layer, head, shape) + to_values
                    _add_values(weights + position * _FLOAT, value + slot * LANES * _FLOAT, run, out_row, code)
                    node += run
                    position += run
                for i in range(q_head * head_size + chunk * LANES, q_head * head_size + (chunk + 1) * LANES):
                    attended[row, i] /= totals[row, q_head]
    barrier(sync, threads)
