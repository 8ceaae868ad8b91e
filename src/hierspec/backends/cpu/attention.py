"""Attention in float32: stores keys and values in their pages, then computes scores, softmax and weighted sums.

Numbers that are multiplied with the same input are in 16 neighbouring lanes, as in packed weights: for every page,
layer and head, keys [PAGE / 16, head_size, 16] and values [head_size / 16, PAGE, 16]. So scores and weighted sums are
products too, and the same tile kernels compute them.

Softmax takes the positions of a text in segments: what a row has summed so far is scaled to the largest score seen so
far, then the next segment is added. Segments are the same in every pass, so its bits are too.
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
from hierspec.backends.cpu.kernels import (
    add_segment,
    add_weighted_value,
    copy_lanes,
    query_dot_key,
    scale_lanes,
    scatter,
    zero_lanes,
)
from hierspec.backends.cpu.llvm import LANES, UNROLLED
from hierspec.backends.cpu.product import Code
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import barrier, share

PAGE = 64  # slots per page, the unit in which texts share prefixes; a multiple of 32
SEGMENT = 256  # positions, a multiple of PAGE: scores, keys and values of one stay in the cache until it is done
QUERIES = 64  # rows of one text that attend together: they share the keys and values that come from memory
_SHARED = 16  # fewer rows of a long text are attended to by all threads: each then reads a part of keys and values
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
def _values_at(arena, page, layer, head, chunk, slot, shape):
    """Address of a page's values from a slot on, for 16 numbers of a head."""
    return _keys_at(arena, page, layer, head, shape) + (PAGE * shape[2] + (chunk * PAGE + slot) * LANES) * _FLOAT


@part
def place(x, is_value, slot, layer, kv_head, shape, arena):
    """Stores a key or value in its slot."""
    head_size = shape[2]
    start, inside = _keys_at(arena, slot // PAGE, layer, kv_head, shape), slot % PAGE
    if is_value:
        for chunk in range(head_size // LANES):
            value = _values_at(arena, slot // PAGE, layer, kv_head, chunk, inside, shape)
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


@part
def _first_seen(row, window, positions):
    """The first position that a row sees."""
    return max(0, positions[row] - window + 1) if window else 0


@part
def _past_path(row, ends, path_starts):
    """The position after all that a row sees."""
    return ends[row] + path_starts[row + 1] - path_starts[row]


@part
def _segments_seen(first_row, last_row, window, positions, ends, path_starts):
    """Where the first segment begins that any of these rows sees, and where what they see ends."""
    begin, end = positions[first_row], np.int64(0)
    for row in range(first_row, last_row):
        begin = min(begin, _first_seen(row, window, positions))
        end = max(end, _past_path(row, ends, path_starts))
    return begin // SEGMENT * SEGMENT, end


@part
def _score_step(positions):
    """Floats from one row's scores to the next: so many positions, then a factor for each segment."""
    return (positions + (positions + SEGMENT - 1) // SEGMENT + 2 * LANES - 1) // LANES * LANES


def score_floats(heads: int, kv_heads: int, longest: int, threads: int) -> int:
    """Floats of scratch memory: scores of few rows for all positions, or a segment's for the rows of each thread."""
    step = _score_step.py_func
    together = heads * _SHARED * step(SEGMENT + longest)
    return int(max(together, threads * heads // kv_heads * QUERIES * step(SEGMENT)))


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
    heads, kv_heads, _, _, _ = shape
    room, count = scores[0, 0], len(groups) - 1
    none, alone = np.int64(0), np.int64(1)  # numba would compile callees again for plain numbers
    most = 0
    for group in range(count):
        most += _work(groups, group, ends)
    most //= 2 * threads  # work of a group that one thread may do alone
    # All threads work together on a large group: a thread that took whole heads of it would keep the others waiting.
    for group in range(count):
        if _work(groups, group, ends) > most and groups[group + 1] - groups[group] < _SHARED:
            first_row, last_row = groups[group], groups[group + 1]
            begin, end = _segments_seen(first_row, last_row, window, positions, ends, path_starts)
            _attend(
                thread, threads, sync, none, kv_heads, begin, begin, end, end, first_row, last_row, layer, window,
                shape, qkv, positions, arena, tables[group_texts[group]], ends, path_starts, paths, scale, room,
                totals, attended, code,
            )  # fmt: skip
    # Of the others each thread takes whole KV heads of a group, and of a large one with many rows a part of the rows
    # too: no barriers inside, and one segment at a time, which stays in the cache of its thread.
    floats = heads // kv_heads * QUERIES * _score_step(SEGMENT)
    own_room, item = room[thread * floats : (thread + 1) * floats], 0
    for group in range(count):
        rows, parts = groups[group + 1] - groups[group], 1
        tiles = (rows + UNROLLED - 1) // UNROLLED
        if _work(groups, group, ends) > most:
            if rows < _SHARED:
                continue
            parts = min(threads, tiles)
        for head in range(kv_heads):
            for number in range(parts):
                if item % threads == thread:
                    first, last = share(tiles, number, parts)
                    first_row = groups[group] + first * UNROLLED
                    last_row = groups[group] + min(last * UNROLLED, rows)
                    begin, end = _segments_seen(first_row, last_row, window, positions, ends, path_starts)
                    for start in range(begin, end, SEGMENT):
                        _attend(
                            none, alone, sync, head, head + 1, begin, start, min(start + SEGMENT, end), end,
                            first_row, last_row, layer, window, shape, qkv, positions, arena,
                            tables[group_texts[group]], ends, path_starts, paths, scale, own_room, totals, attended,
                            code,
                        )  # fmt: skip
                item += 1
    if item:  # otherwise all threads have just met
        barrier(sync, threads)


@part
def _attend(
    thread, threads, sync, first_head, last_head, begin, start, stop, end, first_row, last_row, layer, window, shape,
    qkv, positions, arena, table, ends, path_starts, paths, scale, scores, totals, attended, code,
):  # fmt: skip
    """Attention of at most QUERIES rows of one text, for KV heads first_head .. last_head, to the positions start ..
    stop. These are some segments of begin .. end, all that the rows see; calls for the earlier ones came before.

    `scores` has the scores of all rows for one query head after another, then their exponentials, and behind the last
    position of each row a factor for each segment. `totals` [rows, 2 * heads] has the largest score and the sum of
    exponentials of all segments so far, `attended` the weighted sums.

    A row sees the text's tokens up to its end, then the slots of its path. `scores` has both by position, so a node of
    a tree adds the same numbers in the same order as the same token in a chain. `table` lists the pages of the text's
    tokens.
    """
    common = np.int64(0)  # how many of the text's tokens the rows see
    for row in range(first_row, last_row):
        common = max(common, ends[row])
    low = start  # positions before it are seen by no row
    if start == begin:
        low = common
        for row in range(first_row, last_row):
            low = min(low, _first_seen(row, window, positions))
        low = max(low // LANES * LANES, begin)
    high = min(stop, common)
    _score(
        thread, threads, first_head, last_head, low, high, start, stop, first_row, last_row, layer, shape, qkv, arena,
        table, scores, code,
    )  # fmt: skip
    barrier(sync, threads)

    heads, kv_heads, _, _, _ = shape
    group = heads // kv_heads
    q_heads, step = (last_head - first_head) * group, _score_step(stop - start)
    first, last = share((last_row - first_row) * q_heads, thread, threads)
    for item in range(first, last):
        row, number = first_row + item // q_heads, item % q_heads
        q_head, place = first_head * group + number, (number * (last_row - first_row) + item // q_heads) * step
        mine, total = scores[place : place + step], totals[row, 2 * q_head : 2 * q_head + 2]
        _score_path(row, q_head, start, stop, layer, shape, qkv, arena, ends, path_starts, paths, mine, code)
        if start == begin:
            total[0], total[1] = -np.inf, 0
        own_begin, own_end = _first_seen(row, window, positions), _past_path(row, ends, path_starts)
        _exponentiate(own_begin, own_end, start, stop, scale, mine, total)
        # Rows share one product with the values. What a row does not see gets weight zero, which adds nothing.
        mine[low - start : max(low, min(own_begin, stop)) - start] = 0
        mine[max(low, min(own_end, high)) - start : max(low, high) - start] = 0
    barrier(sync, threads)

    chunks = shape[2] // LANES
    first, last = share((last_head - first_head) * chunks, thread, threads)
    for segment in range(start, stop, SEGMENT):
        _scale_sums(first, last, segment, begin, first_head, start, stop, first_row, last_row, shape, scores, attended)
        _add_common(
            first, last, max(segment, low), min(segment + SEGMENT, common // LANES * LANES), first_head, start, stop,
            first_row, last_row, layer, shape, arena, table, scores, attended, code,
        )  # fmt: skip
        _add_rest(
            first, last, segment, max(segment, low, common // LANES * LANES), first_head, start, stop, first_row,
            last_row, layer, shape, arena, table, ends, path_starts, paths, scores, attended, code,
        )  # fmt: skip
    if stop == end:
        for item in range(first, last):
            head, chunk = first_head + item // chunks, item % chunks
            for q_head in range(head * group, (head + 1) * group):
                first_number = (q_head * chunks + chunk) * LANES
                for row in range(first_row, last_row):
                    for i in range(first_number, first_number + LANES):
                        attended[row, i] /= totals[row, 2 * q_head + 1]
    barrier(sync, threads)


@part
def _score(
    thread, threads, first_head, last_head, low, high, start, stop, first_row, last_row, layer, shape, qkv, arena,
    table, scores, code,
):  # fmt: skip
    """Scores for the text's tokens low .. high.

    The rows of a product's tile are rows of the batch or, for a single row, its heads that share a KV head.
    """
    heads, kv_heads, head_size, _, _ = shape
    group, rows, step = heads // kv_heads, last_row - first_row, _score_step(stop - start)
    tiles, tile_rows, q_step, out_step = group, rows, qkv.shape[1], step
    if rows == 1:
        tiles, tile_rows, q_step, out_step = 1, group, head_size, rows * step
    blocks = max(0, (high - low + LANES - 1) // LANES)
    item, last = share((last_head - first_head) * blocks, thread, threads)
    while item < last:  # two blocks of 16 keys at once where the next one is of the same head
        number, block = item // blocks, low // LANES + item % blocks
        twice = item + 1 < last and item % blocks + 1 < blocks
        head = first_head + number
        keys = _key_block(arena, table, block, layer, head, shape)
        offset = _key_block(arena, table, block + 1, layer, head, shape) - keys if twice else 0
        ahead = _key_block(arena, table, block + 2, layer, head, shape) - keys if item % blocks + 2 < blocks else 0
        q = qkv[first_row].ctypes.data + head * group * head_size * _FLOAT
        out = scores.ctypes.data + (number * group * rows * step + block * LANES - start) * _FLOAT
        for _ in range(tiles):
            if twice:
                call_routine(
                    code[_TILES_TWICE],
                    (q, q_step, tile_rows, keys, offset, head_size, out, out_step, LANES * _FLOAT, ahead),
                )
            else:
                call_routine(code[_TILES], (q, q_step, tile_rows, keys, head_size, out, out_step))
            q += head_size * _FLOAT
            out += rows * step * _FLOAT
        item += 2 if twice else 1


@part
def _path_part(row, start, stop, ends, path_starts):
    """The nodes of a row's path at positions start .. stop, first and past the last, and the first one's position."""
    first = path_starts[row] + max(0, start - ends[row])
    past = min(path_starts[row + 1], path_starts[row] + stop - ends[row])
    return first, past, ends[row] + first - path_starts[row]


@part
def _score_path(row, q_head, start, stop, layer, shape, qkv, arena, ends, path_starts, paths, mine, code):
    """A row's scores for the nodes of its path."""
    heads, kv_heads, head_size, _, _ = shape
    query = qkv[row, q_head * head_size :].ctypes.data
    node, past, position = _path_part(row, start, stop, ends, path_starts)
    if node < past:
        sixteen = np.empty(LANES, np.float32)
    while node < past:
        page, slot, run = paths[node] // PAGE, paths[node] % PAGE, _run(paths, node, past, LANES)
        keys = _keys_at(arena, page, layer, q_head // (heads // kv_heads), shape)
        keys += slot // LANES * LANES * head_size * _FLOAT
        if run == 1:
            mine[position - start] = query_dot_key(query, keys + slot % LANES * _FLOAT, head_size)
        else:  # all 16 lanes take as long as one
            call_routine(code[_TILES], (query, 0, 1, keys, head_size, sixteen.ctypes.data, 0))
            for i in range(run):
                mine[position + i - start] = sixteen[slot % LANES + i]
        node += run
        position += run


@part
def _exponentiate(own_begin, own_end, start, stop, scale, mine, total):
    """Turns a row's scores into exponentials, with a factor for what was summed before each segment."""
    factors = _factors_at(start, stop)
    for segment in range(start, stop, SEGMENT):
        since, until, factor = max(segment, own_begin) - start, min(segment + SEGMENT, own_end) - start, np.float32(1)
        if since < until:
            first, last = since // LANES, (until + LANES - 1) // LANES
            mine[first * LANES : since] = -np.inf
            mine[until : last * LANES] = -np.inf
            factor = add_segment(
                mine.ctypes.data + first * LANES * _FLOAT, last - first, scale.ctypes.data, total.ctypes.data
            )
        mine[factors + (segment - start) // SEGMENT] = factor


@part
def _factors_at(start, stop):
    """Index of the first factor in a row of scores for positions start .. stop."""
    return _score_step(stop - start) - (stop - start + SEGMENT - 1) // SEGMENT


@part
def _sums_of(item, first_head, shape):
    """The first query head of an item, which is 16 numbers of one KV head, and its index in a row of sums."""
    heads, kv_heads, head_size, _, _ = shape
    chunks = head_size // LANES
    q_head = (first_head + item // chunks) * (heads // kv_heads)
    return q_head, q_head * head_size + item % chunks * LANES


@part
def _scale_sums(first, last, segment, begin, first_head, start, stop, first_row, last_row, shape, scores, attended):
    """Sets sums to zero for the first segment, and scales them to the largest score so far for another one."""
    heads, kv_heads, head_size, _, _ = shape
    rows, step = last_row - first_row, _score_step(stop - start)
    for item in range(first, last):
        q_head, lane = _sums_of(item, first_head, shape)
        factor = (q_head - first_head * (heads // kv_heads)) * rows * step
        factor += _factors_at(start, stop) + (segment - start) // SEGMENT
        for _ in range(heads // kv_heads):
            for row in range(first_row, last_row):
                sums = attended[row, lane:].ctypes.data
                if segment == begin:
                    zero_lanes(sums)
                elif scores[factor] != 1:
                    scale_lanes(sums, scores[factor:].ctypes.data)
                factor += step
            lane += head_size


@part
def _add_common(
    first, last, since, until, first_head, start, stop, first_row, last_row, layer, shape, arena, table, scores,
    attended, code,
):  # fmt: skip
    """Adds the values of the text's tokens since .. until, for all rows together, one page after the other."""
    heads, kv_heads, head_size, _, _ = shape
    group, chunks = heads // kv_heads, head_size // LANES
    rows, step, width = last_row - first_row, _score_step(stop - start), attended.shape[1]
    tiles, tile_rows, x_step, out_step = group, rows, step, width
    if rows == 1:
        tiles, tile_rows, x_step, out_step = 1, group, rows * step, head_size
    while since < until:
        page, slot = table[since // PAGE], since % PAGE
        count = min(until - since, PAGE - slot)
        item = first
        while item < last:  # two chunks of 16 numbers at once where the next one is of the same head
            head, chunk = first_head + item // chunks, item % chunks
            twice = item + 1 < last and chunk + 1 < chunks
            values = _values_at(arena, page, layer, head, chunk, slot, shape)
            following = page if since + count >= until else table[since // PAGE + 1]
            ahead = _values_at(arena, following, layer, head, chunk, 0, shape) - values
            _, lane = _sums_of(item, first_head, shape)
            out = attended[first_row, lane:].ctypes.data
            x = scores.ctypes.data + ((head - first_head) * group * rows * step + since - start) * _FLOAT
            for _ in range(tiles):
                if twice:
                    call_routine(
                        code[_TILES_TWICE_ONTO],
                        (
                            x, x_step, tile_rows, values, PAGE * LANES * _FLOAT, count, out, out_step, LANES * _FLOAT,
                            ahead,
                        ),
                    )  # fmt: skip
                else:
                    call_routine(code[_TILES_ONTO], (x, x_step, tile_rows, values, count, out, out_step))
                x += rows * step * _FLOAT
                out += head_size * _FLOAT
            item += 2 if twice else 1
        since += count


@part
def _add_rest(
    first, last, segment, since, first_head, start, stop, first_row, last_row, layer, shape, arena, table, ends,
    path_starts, paths, scores, attended, code,
):  # fmt: skip
    """Adds the values of a segment that rows do not share: the last few tokens of the text, and paths."""
    heads, kv_heads, head_size, _, _ = shape
    group, chunks, past = heads // kv_heads, head_size // LANES, min(segment + SEGMENT, stop)
    rows, step = last_row - first_row, _score_step(stop - start)
    for item in range(first, last):
        head, chunk = first_head + item // chunks, item % chunks
        q_head, lane = _sums_of(item, first_head, shape)
        weights = scores.ctypes.data + ((q_head - first_head * group) * rows * step - start) * _FLOAT
        for _ in range(group):
            for row in range(first_row, last_row):
                sums, count = attended[row, lane:].ctypes.data, min(ends[row], past) - since
                if count > 0:  # fewer than 16, in one page
                    values = _values_at(arena, table[since // PAGE], layer, head, chunk, since % PAGE, shape)
                    _add_values(weights + since * _FLOAT, values, count, sums, code)
                node, past_node, position = _path_part(row, segment, past, ends, path_starts)
                while node < past_node:
                    run = _run(paths, node, past_node, PAGE)
                    values = _values_at(arena, paths[node] // PAGE, layer, head, chunk, paths[node] % PAGE, shape)
                    _add_values(weights + position * _FLOAT, values, run, sums, code)
                    node += run
                    position += run
                weights += step * _FLOAT
            lane += head_size
