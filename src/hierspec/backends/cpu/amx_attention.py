"""Attention by Intel AMX: which tiles are multiplied for which rows. The arithmetic is in `amx_attention_kernels.py`.

For every page, layer and head, in bfloat16: keys [PAGE / 16, head_size / 32, 16 pairs, 16 keys, 2], where head_size is
padded to a multiple of 32 with zeros, and values [PAGE / 32, head_size / 16, 16 pairs of slots, 16, 2].

Heads that share keys are rows of one tile, for as many tokens as it has room for. Tokens of a text see keys and values
where they stand. A node of a tree sees its last positions in other slots than a token of a chain, so from the chunk in
which its path begins, keys and values are gathered for it: then its sums are those of the same token in a chain.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from hierspec.backends.cpu.amx import TILE_BYTES, steps
from hierspec.backends.cpu.amx_attention_kernels import CHUNK, LINE, MERGE_WORDS, SEGMENT, AttentionCode
from hierspec.backends.cpu.attention import PAGE
from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.kernels import copy_lanes, store_integer, zero_lanes
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import barrier

ITEMS_PER_THREAD = 4  # with so many items a thread takes whole ones; with fewer, segments of an item
_FLOAT = 4  # bytes
_LISTS = 1024  # bytes at the beginning of a room: addresses of keys, of values, and room for a configuration
_SEGMENT_CHUNKS = SEGMENT // CHUNK
_VALUE_LIST = 2 * _SEGMENT_CHUNKS * 8

# numba takes constants, not enumerations.
_ROUND, _PLACE_KEY, _PLACE_VALUE = (
    int(code) for code in (AttentionCode.ROUND, AttentionCode.PLACE_KEY, AttentionCode.PLACE_VALUE)
)
_SCORES, _SOFTMAX, _SUMS, _MERGE = (
    int(code)
    for code in (AttentionCode.SCORES, AttentionCode.SOFTMAX, AttentionCode.WEIGHTED_SUMS, AttentionCode.MERGE)
)
_COPY_KEY, _COPY_VALUE = int(AttentionCode.COPY_KEY), int(AttentionCode.COPY_VALUE)
_BEGIN, _END = int(AttentionCode.BEGIN), int(AttentionCode.END)


def key_bytes(head_size: int) -> int:
    """Of the keys of one page, layer and head."""
    return PAGE // LANES * steps(head_size) * TILE_BYTES


def value_bytes(head_size: int) -> int:
    return PAGE // CHUNK * (head_size // LANES) * TILE_BYTES


def rows_of_block(group: int) -> int:
    """Tokens of one tile, where so many heads share keys."""
    return max(1, LANES // group)


def part_floats(head_size: int) -> int:
    """What is known of 16 rows after some segments: see `merge`."""
    return MERGE_WORDS + LANES * head_size


def most_parts(heads: int, kv_heads: int, groups: int, longest: int, threads: int) -> int:
    """How many of those a pass keeps at most: two a thread, and all segments of items that threads share."""
    items = groups * kv_heads * -(-heads // kv_heads // LANES)
    return 2 * threads + min(items, ITEMS_PER_THREAD * threads) * -(-longest // SEGMENT)


def room_bytes(head_size: int) -> int:
    """Scratch memory of a thread, see `_rooms`."""
    depth, tiles = steps(head_size), head_size // LANES
    chunks = _SEGMENT_CHUNKS * (1 + 2 * depth + tiles)
    return _LISTS + (depth + chunks + 3 * tiles) * TILE_BYTES


@part
def _rooms(room, head_size):
    """Addresses of queries, probabilities, gathered keys and values, and sums: common, gathered, and zeros."""
    depth, tiles = (head_size + CHUNK - 1) // CHUNK, head_size // LANES
    queries = room + _LISTS
    probabilities = queries + depth * TILE_BYTES
    keys = probabilities + _SEGMENT_CHUNKS * TILE_BYTES
    values = keys + 2 * _SEGMENT_CHUNKS * depth * TILE_BYTES
    common = values + _SEGMENT_CHUNKS * tiles * TILE_BYTES
    return queries, probabilities, keys, values, common, common + tiles * TILE_BYTES, common + 2 * tiles * TILE_BYTES


@part
def _keys_at(arena, page, layer, head, shape):
    """Address of a page's keys for a layer and head; its values come right behind them."""
    _, kv_heads, head_size, _, layers = shape
    size = _keys_size(head_size) + PAGE * head_size * 2
    return arena + ((page * layers + layer) * kv_heads + head) * size


@part
def _keys_size(head_size):
    return PAGE // LANES * ((head_size + CHUNK - 1) // CHUNK) * TILE_BYTES


@part
def _key_column(slot, head_size):
    """Offset of a key from the keys of its page."""
    depth = (head_size + CHUNK - 1) // CHUNK
    return slot // LANES * depth * TILE_BYTES + slot % LANES * 4


@part
def _value_pair(slot, head_size):
    """Offset of a pair of values from the values of its page."""
    return slot // CHUNK * (head_size // LANES) * TILE_BYTES + slot % CHUNK // 2 * LINE


@part
def place_rounded(x, is_value, slot, layer, kv_head, shape, arena, code):
    """A key or value to its slot."""
    head_size = shape[2]
    start, inside, groups = _keys_at(arena, slot // PAGE, layer, kv_head, shape), slot % PAGE, head_size // LANES
    if is_value:
        value = start + _keys_size(head_size) + _value_pair(inside, head_size) + inside % 2 * 2
        call_routine(code[_PLACE_VALUE], (x.ctypes.data, groups, value))
    else:
        call_routine(code[_PLACE_KEY], (x.ctypes.data, groups, start + _key_column(inside, head_size)))


@part
def _seen(first_row, last_row, window, positions, ends, path_starts):
    """The first position that one of the rows sees, and the one after the last."""
    lowest, end = positions[first_row], 0
    for row in range(first_row, last_row):
        end = max(end, ends[row] + path_starts[row + 1] - path_starts[row])
        lowest = min(lowest, max(0, positions[row] - window + 1) if window else 0)
    return lowest, end


@part
def _slot_at(position, row, table, ends, path_starts, paths):
    if position < ends[row]:
        return table[position // PAGE] * PAGE + position % PAGE
    return paths[path_starts[row] + position - ends[row]]


@part
def _gather_values(start, first, last, row, layer, head, shape, arena, table, ends, path_starts, paths, room, code):
    """Values of positions first .. last, as the row sees them, to where chunks from `start` on are gathered."""
    head_size = shape[2]
    _, _, _, values, _, _, _ = _rooms(room, head_size)
    for position in range(first, last):
        slot, to = _slot_at(position, row, table, ends, path_starts, paths), position - start
        source = _keys_at(arena, slot // PAGE, layer, head, shape) + _keys_size(head_size)
        source += _value_pair(slot % PAGE, head_size)
        target = values + _value_pair(to, head_size)
        call_routine(code[_COPY_VALUE], (source, slot % 2, target, to % 2, head_size // LANES))


@part
def _clear_values(chunks, head_size, room, listed):
    """Zeros where so many chunks will be gathered, since no number times zero is no number; addresses to `listed`."""
    _, _, _, values, _, _, _ = _rooms(room, head_size)
    size = head_size // LANES * TILE_BYTES
    for line in range(chunks * size // LINE):
        zero_lanes(values + line * LINE)
    for chunk in range(chunks):
        store_integer(listed + 8 * chunk, values + chunk * size)


@part
def _gather_keys(start, first, last, row, layer, head, shape, arena, table, ends, path_starts, paths, room, code):
    """The same of keys. What stands in the rest does not matter."""
    head_size = shape[2]
    depth = (head_size + CHUNK - 1) // CHUNK
    _, _, keys, _, _, _, _ = _rooms(room, head_size)
    for position in range(first, last):
        slot = _slot_at(position, row, table, ends, path_starts, paths)
        source = _keys_at(arena, slot // PAGE, layer, head, shape) + _key_column(slot % PAGE, head_size)
        call_routine(code[_COPY_KEY], (source, keys + _key_column(position - start, head_size), depth * LANES))
    for block in range((last - start + CHUNK - 1) // CHUNK * 2):
        store_integer(room + 8 * block, keys + block * depth * TILE_BYTES)


@part
def _load_queries(first_row, last_row, first_head, q_heads, shape, qkv, room, code):
    """Rows of a tile: token after token, each with its heads."""
    head_size, width = shape[2], qkv.shape[1]
    queries, _, _, _, _, _, _ = _rooms(room, head_size)
    for row in range(first_row, last_row):
        for number in range(q_heads):
            x = qkv.ctypes.data + (row * width + (first_head + number) * head_size) * _FLOAT
            target = queries + ((row - first_row) * q_heads + number) * LINE
            call_routine(code[_ROUND], (x, head_size // LANES, target))


@part
def _attend_to_segment(
    segment, first_row, last_row, head, q_heads, layer, window, shape, positions, arena, table,
    ends, path_starts, paths, scale, scores, room, result, code,
):  # fmt: skip
    """Attention of some rows to one segment, as far as they see it: `result` is a part that can be merged."""
    head_size = shape[2]
    depth, tiles, stride = (head_size + CHUNK - 1) // CHUNK, head_size // LANES, head_size * _FLOAT
    queries, probabilities, _, _, common_sums, own_sums, zeros = _rooms(room, head_size)
    lowest, end = _seen(first_row, last_row, window, positions, ends, path_starts)
    low = max(lowest // CHUNK, segment * _SEGMENT_CHUNKS)
    high = min((end + CHUNK - 1) // CHUNK, (segment + 1) * _SEGMENT_CHUNKS)
    # Rows with paths see whole chunks of the text together, others everything.
    has_path = path_starts[first_row + 1] > path_starts[first_row]
    common = max(low, min(high, ends[first_row] // CHUNK if has_path else high))
    for chunk in range(low, common):
        page, slot = table[chunk * CHUNK // PAGE], chunk * CHUNK % PAGE
        block = _keys_at(arena, page, layer, head, shape) + _key_column(slot, head_size)
        store_integer(room + 16 * (chunk - low), block)
        store_integer(room + 16 * (chunk - low) + 8, block + depth * TILE_BYTES)
    row_scores, step = scores[0].ctypes.data, scores.shape[1] * _FLOAT
    own_scores = scores[LANES].ctypes.data
    if common > low:
        call_routine(code[_SCORES], (queries, depth, room, common - low, row_scores, step))
    start, shared = common * CHUNK, ends[first_row]
    if has_path:
        for row in range(first_row, last_row):
            stop = min(ends[row] + path_starts[row + 1] - path_starts[row], high * CHUNK)
            if stop > start:
                own = (stop - start + CHUNK - 1) // CHUNK
                # What the rows of the group have in common is gathered with the first of them.
                new = start if row == first_row else max(start, shared)
                _gather_keys(
                    start, new, stop, row, layer, head, shape, arena, table, ends, path_starts, paths, room, code
                )
                call_routine(code[_SCORES], (queries, depth, room, own, own_scores, step))
                for number in range((row - first_row) * q_heads, (row - first_row + 1) * q_heads):
                    to = (common - low) * CHUNK
                    scores[number, to : to + own * CHUNK] = scores[LANES + number, : own * CHUNK]

    for row in range(first_row, last_row):
        begin = (max(0, positions[row] - window + 1) if window else 0) - low * CHUNK
        stop = ends[row] + path_starts[row + 1] - path_starts[row] - low * CHUNK
        size = (high - low) * CHUNK
        begin, stop = min(max(begin, 0), size), min(max(stop, 0), size)
        for number in range((row - first_row) * q_heads, (row - first_row + 1) * q_heads):
            if begin > 0:
                scores[number, :begin] = -np.inf
            if stop < size:
                scores[number, stop:size] = -np.inf
            call_routine(
                code[_SOFTMAX],
                (
                    row_scores + number * step,
                    high - low,
                    probabilities + number * LINE,
                    scale,
                    result + number * _FLOAT,
                    result + (LANES + number) * _FLOAT,
                ),
            )

    sums, listed = result + MERGE_WORDS * _FLOAT, room + _VALUE_LIST
    for chunk in range(low, common):
        page, slot = table[chunk * CHUNK // PAGE], chunk * CHUNK % PAGE
        block = _keys_at(arena, page, layer, head, shape) + _keys_size(head_size) + _value_pair(slot, head_size)
        store_integer(listed + 8 * (chunk - low), block)
    if not has_path and end < high * CHUNK:
        # Slots behind the text's end may hold anything, even what is no number: zeros instead.
        begin = (high - 1) * CHUNK
        _clear_values(1, head_size, room, listed + 8 * (high - 1 - low))
        _gather_values(
            begin, begin, end, last_row - 1, layer, head, shape, arena, table, ends, path_starts, paths, room, code
        )
    target = common_sums if has_path else sums
    call_routine(code[_SUMS], (probabilities, listed, common - low, tiles, zeros, target, stride))
    if has_path:
        _clear_values(high - common, head_size, room, listed)
        for row in range(first_row, last_row):
            stop = min(ends[row] + path_starts[row + 1] - path_starts[row], high * CHUNK)
            source = common_sums
            if stop > start:
                own, new = (stop - start + CHUNK - 1) // CHUNK, start if row == first_row else max(start, shared)
                _gather_values(
                    start, new, stop, row, layer, head, shape, arena, table, ends, path_starts, paths, room, code
                )
                rest = probabilities + (common - low) * TILE_BYTES
                call_routine(code[_SUMS], (rest, listed, own, tiles, common_sums, own_sums, stride))
                source = own_sums
            for line in range((row - first_row) * q_heads * tiles, (row - first_row + 1) * q_heads * tiles):
                copy_lanes(source + line * LINE, sums + line * LINE)


@part
def _finish(first_row, last_row, first_head, q_heads, head_size, state, attended):
    """Sums over totals: what the rows take from all that they see."""
    for row in range(first_row, last_row):
        for number in range(q_heads):
            mine = (row - first_row) * q_heads + number
            total, start = state[LANES + mine], MERGE_WORDS + mine * head_size
            for i in range(head_size):
                attended[row, (first_head + number) * head_size + i] = state[start + i] / total


@part
def attend_by_tiles(
    thread, threads, sync, layer, window, shape, qkv, positions, arena, tables, groups, group_texts,
    ends, path_starts, paths, scale, scores, parts, rooms, attended, code,
):  # fmt: skip
    """Attention for all groups of rows. A group's rows are of one text, and have paths behind the same tokens or none.

    An item is a group and as many heads as fill a tile. scores [threads, 32, SEGMENT]; parts [2 * threads + segments of
    all items, part_floats].
    """
    heads, kv_heads, head_size, _, _ = shape
    group, count = heads // kv_heads, len(groups) - 1
    shares = (group + LANES - 1) // LANES  # of the heads that share keys, where they are more than a tile's rows
    items, room, factor = count * kv_heads * shares, rooms[thread].ctypes.data, scale[1:].ctypes.data
    whole_items = threads == 1 or items >= ITEMS_PER_THREAD * threads
    call_routine(code[_BEGIN], (room,))
    unit = 2 * threads
    # Groups of a text are neighbours: a thread finds keys in its cache that it read for the one before.
    for item in range(items):
        number, kv_head, share = item % count, item // count // shares, item // count % shares
        first_row, last_row, table = groups[number], groups[number + 1], tables[group_texts[number]]
        first_head = kv_head * group + share * LANES
        q_heads = min(LANES, group - share * LANES)
        lowest, end = _seen(first_row, last_row, window, positions, ends, path_starts)
        first, last = lowest // SEGMENT, (end + SEGMENT - 1) // SEGMENT
        loaded = False
        for segment in range(first, last):
            place = unit
            if whole_items:
                place = 2 * thread + (segment > first)
            unit += 1
            if (item if whole_items else unit) % threads != thread:
                continue
            if not loaded:
                _load_queries(first_row, last_row, first_head, q_heads, shape, qkv, room, code)
                loaded = True
            _attend_to_segment(
                segment, first_row, last_row, kv_head, q_heads, layer, window, shape, positions, arena, table,
                ends, path_starts, paths, factor, scores[thread], room, parts[place].ctypes.data, code,
            )  # fmt: skip
            if whole_items and segment > first:
                state, more = parts[2 * thread].ctypes.data, parts[2 * thread + 1].ctypes.data
                call_routine(code[_MERGE], (state, more, factor, head_size // LANES))
        if whole_items and item % threads == thread:
            _finish(first_row, last_row, first_head, q_heads, head_size, parts[2 * thread], attended)
    call_routine(code[_END], (room,))
    barrier(sync, threads)
    if whole_items:
        return
    unit = 2 * threads
    for item in range(items):
        number, kv_head, share = item % count, item // count // shares, item // count % shares
        first_row, last_row = groups[number], groups[number + 1]
        lowest, end = _seen(first_row, last_row, window, positions, ends, path_starts)
        segments = (end + SEGMENT - 1) // SEGMENT - lowest // SEGMENT
        if item % threads == thread:
            for other in range(unit + 1, unit + segments):
                state, more = parts[unit].ctypes.data, parts[other].ctypes.data
                call_routine(code[_MERGE], (state, more, factor, head_size // LANES))
            first_head = kv_head * group + share * LANES
            q_heads = min(LANES, group - share * LANES)
            _finish(first_row, last_row, first_head, q_heads, head_size, parts[unit], attended)
        unit += segments
    barrier(sync, threads)
