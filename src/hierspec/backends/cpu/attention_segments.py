"""Attention by vectors of some rows of one text to some segments of it: scores, softmax, weighted sums of values.

Keys and values are laid out like packed weights (`kv_pages.py`), so scores and weighted sums are products, and the same
tile kernels compute them. The rows of such a product are all query heads that share a KV head, for all rows of the
group: `queries` and `sums` [kv_heads, rows, heads / kv_heads * head_size] have them next to each other.

Softmax takes the positions of a text in segments: what a row has summed so far is scaled to the largest score seen so
far, then the next segment is added. Segments are the same in every pass, so its bits are too.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from hierspec.backends.cpu.attention_kernels import VectorCode
from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.kernels import add_segment, divide_lanes, scale_lanes, zero_lanes
from hierspec.backends.cpu.kv_pages import PAGE, key_at, key_block, run_of_slots, values_at
from hierspec.backends.cpu.llvm import LANES, UNROLLED
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import barrier, take

SEGMENT = 256  # positions, a multiple of PAGE: scores, keys and values of one stay in the cache until it is done
_FLOAT = 4  # bytes

# numba takes constants, not enumerations.
_TILES, _TILES_ONTO = int(VectorCode.TILES), int(VectorCode.TILES_ONTO)
_TILES_TWICE, _TILES_TWICE_ONTO = int(VectorCode.TILES_TWICE), int(VectorCode.TILES_TWICE_ONTO)
_DOT, _ADD_VALUE, _WIDEN = int(VectorCode.DOT), int(VectorCode.ADD_VALUE), int(VectorCode.WIDEN)
_TO_WIDE = int(VectorCode.WIDE_TILES) - _TILES  # from routines for stored numbers to those for float32


@part
def _first_seen(row, window, positions):
    """The first position that a row sees."""
    return max(0, positions[row] - window + 1) if window else 0


@part
def _past_path(row, ends, path_starts):
    """The position after all that a row sees."""
    return ends[row] + path_starts[row + 1] - path_starts[row]


@part
def seen(first_row, last_row, window, positions, ends, path_starts):
    """The first position that any of these rows sees, and where what they see ends."""
    lowest, end = positions[first_row], np.int64(0)
    for row in range(first_row, last_row):
        lowest = min(lowest, _first_seen(row, window, positions))
        end = max(end, _past_path(row, ends, path_starts))
    return lowest, end


@part
def score_step(positions):
    """Floats from one row's scores to the next: so many positions, then a factor for each segment."""
    return (positions + (positions + SEGMENT - 1) // SEGMENT + 2 * LANES - 1) // LANES * LANES


@part
def attend(
    thread, threads, sync, first_head, last_head, lowest, start, stop, end, first_row, last_row, layer, window, shape,
    queries, positions, arena, table, ends, path_starts, paths, scale, scores, wide, totals, sums, attended, code,
):  # fmt: skip
    """Attention of some rows of one text, for KV heads first_head .. last_head, to the positions start .. stop.

    These are some segments of what the rows see, which is lowest .. end; calls for the earlier ones came before.
    `wide` is 0, or the address of scratch memory for the keys or values of one head and segment in float32: many rows
    then share one conversion.

    `scores` has for each KV head, row and query head the scores of all positions, then their exponentials, and behind
    the last position a factor for each segment. `totals` [rows, 2 * heads] has the largest score and the sum of
    exponentials of all segments so far, `sums` the weighted sums.

    A row sees the text's tokens up to its end, then the slots of its path. `scores` has both by position, so a node of
    a tree adds the same numbers in the same order as the same token in a chain. `table` lists the pages of the text's
    tokens.
    """
    common = np.int64(0)  # how many of the text's tokens the rows see
    for row in range(first_row, last_row):
        common = max(common, ends[row])
    begin = lowest // SEGMENT * SEGMENT
    low, high = max(min(lowest, common) // LANES * LANES, start), min(stop, common)
    if wide:
        for block in range(low // LANES, (high + LANES - 1) // LANES):
            target = wide + (block * LANES - low) * shape[2] * _FLOAT
            call_routine(code[_WIDEN], (key_block(arena, table, block, layer, first_head, shape), shape[2], target))
    _score(
        thread, threads, sync, first_head, last_head, low, high, start, stop, first_row, last_row, layer, shape,
        queries, arena, table, scores, wide, code,
    )  # fmt: skip
    barrier(sync, threads)

    _exponentiate_rows(
        thread, threads, sync, first_head, last_head, begin, low, high, start, stop, first_row, last_row, layer, window,
        shape, queries, positions, arena, ends, path_starts, paths, scale, scores, totals, code,
    )  # fmt: skip
    barrier(sync, threads)

    step, rows = score_step(stop - start), (last_row - first_row) * (shape[0] // shape[1])
    if wide:
        _widen_values(
            low, min(stop, common // LANES * LANES), start, layer, first_head, shape, arena, table, wide, code
        )
    pairs, turn = (shape[2] // LANES + 1) // 2, np.int64(0)
    first, last, turn = take(sync, thread, threads, (last_head - first_head) * pairs, turn)
    while first < last:
        for item in range(first, last):
            number, chunk = item // pairs, item % pairs * 2
            _add_values(
                first_head + number, chunk, min(2, shape[2] // LANES - chunk), begin, low, start, stop, end, common,
                first_row, last_row, layer, shape, arena, table, ends, path_starts, paths,
                scores[number * rows * step : (number + 1) * rows * step], wide, totals, sums, attended, code,
            )  # fmt: skip
        first, last, turn = take(sync, thread, threads, (last_head - first_head) * pairs, turn)
    barrier(sync, threads)


@part
def _score(
    thread, threads, sync, first_head, last_head, low, high, start, stop, first_row, last_row, layer, shape, queries,
    arena, table, scores, wide, code,
):  # fmt: skip
    """Scores for the text's tokens low .. high, two blocks of 16 keys at once where there are two."""
    heads, kv_heads, head_size, _, _, _ = shape
    rows, step = (last_row - first_row) * (heads // kv_heads), score_step(stop - start)
    blocks, to_wide = max(np.int64(0), (high - low + LANES - 1) // LANES), _TO_WIDE if wide else 0
    pairs, turn = (blocks + 1) // 2, np.int64(0)
    first, last, turn = take(sync, thread, threads, (last_head - first_head) * pairs, turn)
    while first < last:
        number, done = first // pairs, first % pairs * 2
        for _ in range(first, last):
            head, block = first_head + number, low // LANES + done
            keys, offset, ahead = wide + done * LANES * head_size * _FLOAT, LANES * head_size * _FLOAT, np.int64(0)
            if not wide:
                keys = key_block(arena, table, block, layer, head, shape)
                if done + 1 < blocks:
                    offset = key_block(arena, table, block + 1, layer, head, shape) - keys
                if done + 2 < blocks:
                    ahead = key_block(arena, table, block + 2, layer, head, shape) - keys
            q = queries[head, first_row].ctypes.data
            out = scores.ctypes.data + (number * rows * step + block * LANES - start) * _FLOAT
            if done + 1 < blocks:
                given = (q, head_size, rows, keys, offset, head_size, out, step, LANES * _FLOAT, ahead)
                call_routine(code[_TILES_TWICE + to_wide], given)
            else:
                call_routine(code[_TILES + to_wide], (q, head_size, rows, keys, head_size, out, step))
            done += 2
            if done >= blocks:
                number, done = number + 1, 0
        first, last, turn = take(sync, thread, threads, (last_head - first_head) * pairs, turn)


@part
def _exponentiate_rows(
    thread, threads, sync, first_head, last_head, begin, low, high, start, stop, first_row, last_row, layer, window,
    shape, queries, positions, arena, ends, path_starts, paths, scale, scores, totals, code,
):  # fmt: skip
    """Completes the scores of each row and query head with those of its path, and turns them into exponentials."""
    group, step = shape[0] // shape[1], score_step(stop - start)
    rows, turn = (last_row - first_row) * group, np.int64(0)
    first, last, turn = take(sync, thread, threads, (last_head - first_head) * rows, turn)
    while first < last:
        # Divided once, then counted up: 64-bit divisions are slow.
        head, row, number = first_head + first // rows, first_row + first % rows // group, first % group
        for item in range(first, last):
            first_score, at = item * step, 2 * (head * group + number)
            if path_starts[row] < path_starts[row + 1]:
                query = queries[head, row, number * shape[2] :].ctypes.data
                _score_path(
                    row, head, query, start, stop, layer, shape, arena, ends, path_starts, paths, scores, first_score,
                    code,
                )  # fmt: skip
            if start == begin:
                totals[row, at], totals[row, at + 1] = -np.inf, 0
            own_begin, own_end = _first_seen(row, window, positions), _past_path(row, ends, path_starts)
            total = totals.ctypes.data + (row * totals.shape[1] + at) * _FLOAT
            _exponentiate(own_begin, own_end, start, stop, scale.ctypes.data, scores, first_score, total)
            # Rows share one product with the values. What a row does not see gets weight zero, which adds nothing.
            zero = first_score - start  # where position 0 would be
            _fill(scores, zero + low, zero + min(own_begin, stop), 0)
            _fill(scores, zero + max(low, own_end), zero + high, 0)
            number += 1
            if number == group:
                number, row = 0, row + 1
                if row == last_row:
                    row, head = first_row, head + 1
        first, last, turn = take(sync, thread, threads, (last_head - first_head) * rows, turn)


@part
def _add_some(weights, values, count, out, line, code):
    """out[0:16] += values [count, 16] times their weights, in order; `line`: bytes of 16 values."""
    fours = count // UNROLLED * UNROLLED
    if fours:
        call_routine(code[_TILES_ONTO], (weights, 0, 1, values, fours, out, 0))
    for i in range(fours, count):
        call_routine(code[_ADD_VALUE], (weights + i * _FLOAT, values + i * line, out))


@part
def _path_part(row, start, stop, ends, path_starts):
    """The nodes of a row's path at positions start .. stop, first and past the last, and the first one's position."""
    first = path_starts[row] + max(0, start - ends[row])
    past = min(path_starts[row + 1], path_starts[row] + stop - ends[row])
    return first, past, ends[row] + first - path_starts[row]


@part
def _score_path(
    row, head, query, start, stop, layer, shape, arena, ends, path_starts, paths, scores, first_score, code
):  # fmt: skip
    """A row's scores for the nodes of its path, with the query at this address."""
    head_size = shape[2]
    node, past, position = _path_part(row, start, stop, ends, path_starts)
    sixteen = np.empty(LANES, np.float32)
    while node < past:
        page, slot, run = paths[node] // PAGE, paths[node] % PAGE, run_of_slots(paths, node, past, LANES)
        index = first_score + position - start
        if run == 1:
            key = key_at(arena, page, layer, head, slot, shape)
            call_routine(code[_DOT], (query, key, head_size, scores.ctypes.data + index * _FLOAT))
        else:  # all 16 lanes take as long as one
            keys = key_at(arena, page, layer, head, slot // LANES * LANES, shape)
            call_routine(code[_TILES], (query, 0, 1, keys, head_size, sixteen.ctypes.data, 0))
            for i in range(run):
                scores[index + i] = sixteen[slot % LANES + i]
        node += run
        position += run


@part
def _fill(numbers, first, last, value):
    """numbers[first:last] = value, faster where that is little or nothing."""
    for i in range(first, last):
        numbers[i] = value


@part
def _exponentiate(own_begin, own_end, start, stop, scale, scores, first_score, total):
    """Turns a row's scores into exponentials, with a factor for what was summed before each segment."""
    at, factors = first_score - start, first_score + _factors_at(start, stop)
    for number in range((stop - start + SEGMENT - 1) // SEGMENT):
        segment = start + number * SEGMENT
        since, until, factor = max(segment, own_begin), min(segment + SEGMENT, own_end), np.float32(1)
        if since < until:
            first, last = since // LANES * LANES, (until + LANES - 1) // LANES * LANES
            _fill(scores, at + first, at + since, -np.inf)
            _fill(scores, at + until, at + last, -np.inf)
            factor = add_segment(scores.ctypes.data + (at + first) * _FLOAT, (last - first) // LANES, scale, total)
        scores[factors + number] = factor


@part
def _factors_at(start, stop):
    """Index of the first factor in a row of scores for positions start .. stop."""
    return score_step(stop - start) - (stop - start + SEGMENT - 1) // SEGMENT


@part
def _add_values(
    head, chunk, chunks, begin, low, start, stop, end, common, first_row, last_row, layer, shape, arena, table, ends,
    path_starts, paths, scores, wide, totals, sums, attended, code,
):  # fmt: skip
    """Adds the values of positions start .. stop to the sums of a KV head: one or two chunks of 16 numbers, all rows.

    After the last segment the sums, divided by their totals, are what the rows attended to.
    """
    group, head_size, step = shape[0] // shape[1], shape[2], score_step(stop - start)
    rows, row_bytes = (last_row - first_row) * group, head_size * _FLOAT
    out = sums[head, first_row, chunk * LANES :].ctypes.data
    together = common // LANES * LANES  # rows share the products with values before it
    for segment in range(start, stop, SEGMENT):
        past, factor = min(segment + SEGMENT, stop), _factors_at(start, stop) + (segment - start) // SEGMENT
        for number in range(rows):
            of_row = out + number * row_bytes
            for target in range(of_row, of_row + chunks * LANES * _FLOAT, LANES * _FLOAT):
                if segment == begin:
                    zero_lanes(target)
                elif scores[number * step + factor] != 1:
                    scale_lanes(target, scores[number * step + factor :].ctypes.data)
        _add_common(
            head, chunk, chunks, max(segment, low), min(past, together), start, rows, step, layer, shape, arena, table,
            scores, wide, out, code,
        )  # fmt: skip
        _add_rest(
            head, chunk, chunks, segment, max(segment, low, together), past, start, first_row, last_row, step, layer,
            shape, arena, table, ends, path_starts, paths, scores, out, code,
        )  # fmt: skip
    if stop == end:
        for row in range(first_row, last_row):
            for q_head in range(head * group, (head + 1) * group):
                total = totals[row, 2 * q_head + 1 :].ctypes.data
                target = attended[row, q_head * head_size + chunk * LANES :].ctypes.data
                for line in range(0, chunks * LANES * _FLOAT, LANES * _FLOAT):
                    divide_lanes(out + line, total, target + line)
                out += row_bytes


@part
def _widen_values(since, until, start, layer, head, shape, arena, table, wide, code):
    """The values of the text's tokens since .. until in float32: [head_size / 16, SEGMENT, 16]."""
    while since < until:
        page, slot = table[since // PAGE], since % PAGE
        count = min(until - since, PAGE - slot)
        for chunk in range(shape[2] // LANES):
            target = wide + (chunk * SEGMENT + since - start) * LANES * _FLOAT
            call_routine(code[_WIDEN], (values_at(arena, page, layer, head, chunk, slot, shape), count, target))
        since += count


@part
def _add_common(
    head, chunk, chunks, since, until, start, rows, step, layer, shape, arena, table, scores, wide, out, code
):  # fmt: skip
    """Adds the values of the text's tokens since .. until, for all rows together: one page after the other, or all of
    them at once where they were widened."""
    head_size, to_wide = shape[2], _TO_WIDE if wide else 0
    while since < until:
        count, x = until - since, scores[since - start :].ctypes.data
        values, offset = wide + (chunk * SEGMENT + since - start) * LANES * _FLOAT, SEGMENT * LANES * _FLOAT
        ahead = np.int64(0)
        if not wide:
            page, slot = table[since // PAGE], since % PAGE
            count, offset = min(count, PAGE - slot), PAGE * LANES * shape[5]
            values = values_at(arena, page, layer, head, chunk, slot, shape)
            following = page if since + count >= until else table[since // PAGE + 1]
            ahead = values_at(arena, following, layer, head, chunk, 0, shape) - values
        if chunks == 2:
            given = (x, step, rows, values, offset, count, out, head_size, LANES * _FLOAT, ahead)
            call_routine(code[_TILES_TWICE_ONTO + to_wide], given)
        else:
            call_routine(code[_TILES_ONTO + to_wide], (x, step, rows, values, count, out, head_size))
        since += count


@part
def _add_rest(
    head, chunk, chunks, segment, since, past, start, first_row, last_row, step, layer, shape, arena, table, ends,
    path_starts, paths, scores, out, code,
):  # fmt: skip
    """Adds the values of a segment that rows do not share: the last few tokens of the text, and paths."""
    group, row_bytes = shape[0] // shape[1], shape[2] * _FLOAT
    for row in range(first_row, last_row):
        count = min(ends[row], past) - since  # fewer than 16, in one page
        first_node, past_node, first_position = _path_part(row, segment, past, ends, path_starts)
        if count <= 0 and first_node >= past_node:
            continue
        for number in range((row - first_row) * group, (row - first_row + 1) * group):
            weights = scores[number * step :].ctypes.data - start * _FLOAT
            for which in range(chunks):
                target = out + number * row_bytes + which * LANES * _FLOAT
                if count > 0:
                    page, slot = table[since // PAGE], since % PAGE
                    values = values_at(arena, page, layer, head, chunk + which, slot, shape)
                    _add_some(weights + since * _FLOAT, values, count, target, LANES * shape[5], code)
                node, position = first_node, first_position
                while node < past_node:
                    run = run_of_slots(paths, node, past_node, PAGE)
                    page, slot = paths[node] // PAGE, paths[node] % PAGE
                    values = values_at(arena, page, layer, head, chunk + which, slot, shape)
                    _add_some(weights + position * _FLOAT, values, run, target, LANES * shape[5], code)
                    node += run
                    position += run
