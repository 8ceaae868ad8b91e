"""One pass of the decoder on a CPU as one compiled function, run by all threads together.

Between operators of a library lie microseconds of bookkeeping, thirty layers of them half a pass of a small model.
Here the threads enter once, split each product by its outputs and wait for each other at barriers. Rows never mix:
whatever else is in the pass, a row's bits are the same.

Numbers that meet one input stand in 16 lanes: weights [outputs / 16, inputs, 16], and likewise, for every page, layer
and head, keys [PAGE / 16, head_size, 16] and values [head_size / 16, PAGE, 16]. So scores and their weighted sums are
products too, and one `tile` does all the work.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
from numba import types

from hierspec.backends.cpu.compiled import (
    BOOLS,
    BYTES_2D,
    FLOATS,
    FLOATS_2D,
    FLOATS_3D,
    FLOATS_4D,
    INT,
    INTS,
    INTS_2D,
    compiled,
    kernel_version,
    part,
)
from hierspec.backends.cpu.kernels import (
    add_atomically,
    add_weighted_value,
    copy_lanes,
    query_dot_key,
    read_atomically,
    scatter,
    softmax_numerators,
    yield_core,
)
from hierspec.backends.cpu.layer_products import DOWN, OUTPUT, add_product, gated_product, project
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.product import Code
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.threads import ARRIVED, BROKEN, GENERATION

PAGE = 64  # slots of a page: a prefix of so many tokens can be shared; a multiple of 16
QUERIES = 16  # rows of one text that attend together: as many as keep their scores in the cache
_FLOAT = 4  # bytes
_PATIENCE = 20_000  # looks at a barrier before the core is offered to others

# numba takes constants, not enumerations.
_PREPARE, _PRODUCT = int(Code.PREPARE), int(Code.PRODUCT)
_BEGIN, _END, _NORMALISE = int(Code.BEGIN), int(Code.END), int(Code.NORMALISE)
_TILES, _TILES_ONTO = int(Code.TILES), int(Code.TILES_ONTO)


@part
def _barrier(sync, threads):
    """Wait until all threads are here, unless the barrier is broken. See `ThreadTeam`."""
    if threads == 1:
        return
    start = sync.ctypes.data
    count, generation, broken = start + 8 * ARRIVED, start + 8 * GENERATION, start + 8 * BROKEN
    mine = read_atomically(generation)
    if add_atomically(count, 1) + 1 == threads:
        add_atomically(count, -threads)
        add_atomically(generation, 1)
        return
    looks = 0
    while read_atomically(generation) == mine:
        looks += 1
        if looks > _PATIENCE:
            if read_atomically(broken):
                return
            yield_core(0)


@part
def _share(count, thread, threads):
    """First and last of this thread's part of `count` things."""
    return count * thread // threads, count * (thread + 1) // threads


@part
def _rotate(x, cos, sin):
    half = len(cos)
    for i in range(half):
        first, second = x[i], x[i + half]
        x[i] = first * cos[i] - second * sin[i]
        x[i + half] = second * cos[i] + first * sin[i]


@part
def _keys_at(arena, page, layer, head, shape):
    """Address of a page's keys for a layer and head; its values come right behind them."""
    _, kv_heads, head_size, _, layers = shape
    return arena + ((page * layers + layer) * kv_heads + head) * 2 * PAGE * head_size * _FLOAT


@part
def _place_heads(thread, threads, layer, qkv, cos, sin, shape, slots, arena, rotary, head_norms, eps, code):
    """Norm and rotate queries and keys, and write keys and values to their slots."""
    heads, kv_heads, head_size, _, _ = shape
    every = heads + 2 * kv_heads
    first, last = _share(len(qkv) * every, thread, threads)
    for item in range(first, last):
        row, head = item // every, item % every
        x = qkv[row, head * head_size : (head + 1) * head_size]
        is_value = head >= heads + kv_heads
        if not is_value:
            if head_norms.size:
                norm = head_norms[layer, 0 if head < heads else 1].ctypes.data
                call_routine(code[_NORMALISE], (x.ctypes.data, norm, head_size, eps.ctypes.data, x.ctypes.data))
            if rotary[layer]:
                _rotate(x, cos[row], sin[row])
        if head < heads:
            continue
        kv_head = (head - heads) % kv_heads
        start, slot = _keys_at(arena, slots[row] // PAGE, layer, kv_head, shape), slots[row] % PAGE
        if is_value:
            for chunk in range(head_size // LANES):
                value = start + (PAGE * head_size + (chunk * PAGE + slot) * LANES) * _FLOAT
                copy_lanes(x.ctypes.data + chunk * LANES * _FLOAT, value)
        else:
            key = start + (slot // LANES * LANES * head_size + slot % LANES) * _FLOAT
            scatter(x.ctypes.data, key, head_size)


@part
def _attend(
    thread, threads, sync, first_row, last_row, layer, window, shape, qkv, positions, arena, table,
    ends, path_starts, paths, scale, scores, totals, attended, code,
):  # fmt: skip
    """Attention for at most QUERIES rows of one text: scores, their exponentials, and the weighted sums.

    A row sees the text's tokens up to its end, then the slots of its path. Both stand in `scores` by position, so a
    node of a tree adds the same numbers in the same order as the same token in a chain. A tile of a product is made of
    rows, or, for one row alone, of its heads that share keys. `table` names the pages of the text's tokens.
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

    first, last = _share(kv_heads * (high - low), thread, threads)
    for item in range(first, last):
        head, block = item // (high - low), low + item % (high - low)
        page, slot = table[block * LANES // PAGE], block * LANES % PAGE
        key_block = _keys_at(arena, page, layer, head, shape) + slot * head_size * _FLOAT
        out = scores.ctypes.data + (head * group * QUERIES * length + block * LANES) * _FLOAT
        q = q_start + head * group * head_size * _FLOAT
        if rows == 1:
            call_routine(code[_TILES], (q, head_size, group, key_block, head_size, out, QUERIES * length))
        else:
            for number in range(group):
                mine, its = q + number * head_size * _FLOAT, out + number * QUERIES * length * _FLOAT
                call_routine(code[_TILES], (mine, width, rows, key_block, head_size, its, length))
    _barrier(sync, threads)

    first, last = _share(rows * heads, thread, threads)
    for item in range(first, last):
        row, q_head = first_row + item // heads, item % heads
        mine = scores[q_head, row - first_row]
        own_begin = max(0, positions[row] - window + 1) if window else 0
        stop = ends[row]
        for node in range(path_starts[row], path_starts[row + 1]):
            page, slot = paths[node] // PAGE, paths[node] % PAGE
            key = _keys_at(arena, page, layer, q_head // group, shape)
            key += (slot // LANES * LANES * head_size + slot % LANES) * _FLOAT
            mine[stop] = query_dot_key(qkv.ctypes.data + (row * width + q_head * head_size) * _FLOAT, key, head_size)
            stop += 1
        from_block, to_block = own_begin // LANES, (stop + LANES - 1) // LANES
        mine[from_block * LANES : own_begin] = -np.inf
        mine[stop : to_block * LANES] = -np.inf
        start = mine.ctypes.data + from_block * LANES * _FLOAT
        totals[row, q_head] = softmax_numerators(start, to_block - from_block, scale.ctypes.data)
        # Rows share one product with the values, and zero adds nothing: what a row does not see is zero.
        mine[low * LANES : own_begin] = 0
        if stop < end:
            mine[stop:end] = 0
    _barrier(sync, threads)

    chunks, common = head_size // LANES, end // LANES * LANES
    first, last = _share(kv_heads * chunks, thread, threads)
    for item in range(first, last):
        head, chunk = item // chunks, item % chunks
        # Values of a page's slot 0, as an offset from its keys.
        to_values = (PAGE * head_size + chunk * PAGE * LANES) * _FLOAT
        heads_scores = scores.ctypes.data + head * group * QUERIES * length * _FLOAT
        heads_out = o_start + (head * group * head_size + chunk * LANES) * _FLOAT
        first_seen = low * LANES
        # Page after page, each going on with the sums of the one before it.
        begin = first_seen
        while begin < common:
            page, slot = table[begin // PAGE], begin % PAGE
            count = min(common - begin, PAGE - slot)
            seen = _keys_at(arena, page, layer, head, shape) + to_values + slot * LANES * _FLOAT
            x = heads_scores + begin * _FLOAT
            multiply = code[_TILES] if begin == first_seen else code[_TILES_ONTO]
            if rows == 1:
                call_routine(multiply, (x, QUERIES * length, group, seen, count, heads_out, head_size))
            else:
                for number in range(group):
                    its, out = x + number * QUERIES * length * _FLOAT, heads_out + number * head_size * _FLOAT
                    call_routine(multiply, (its, length, rows, seen, count, out, heads * head_size))
            begin += count
        for q_head in range(head * group, (head + 1) * group):
            out = heads_out + (q_head - head * group) * head_size * _FLOAT
            for row in range(first_row, last_row):
                if common <= first_seen:
                    attended[row, q_head * head_size + chunk * LANES : q_head * head_size + (chunk + 1) * LANES] = 0
                out_row = out + (row - first_row) * heads * head_size * _FLOAT
                weights = scores[q_head, row - first_row].ctypes.data
                for position in range(max(common, first_seen), ends[row]):
                    value = _keys_at(arena, table[position // PAGE], layer, head, shape) + to_values
                    add_weighted_value(weights + position * _FLOAT, value + position % PAGE * LANES * _FLOAT, out_row)
                for node in range(path_starts[row], path_starts[row + 1]):
                    position, slot = ends[row] + node - path_starts[row], paths[node] % PAGE
                    value = _keys_at(arena, paths[node] // PAGE, layer, head, shape) + to_values
                    add_weighted_value(weights + position * _FLOAT, value + slot * LANES * _FLOAT, out_row)
                for i in range(q_head * head_size + chunk * LANES, q_head * head_size + (chunk + 1) * LANES):
                    attended[row, i] /= totals[row, q_head]
    _barrier(sync, threads)


@compiled(
    kernel_version,
    INT, INT, INTS, INT, INT,
    FLOATS_2D, FLOATS_2D, FLOATS_2D, INTS, INTS, INT, INTS_2D, INTS, INTS, INTS, INTS, INTS,
    INTS_2D, INTS_2D, INTS_2D, FLOATS_3D, FLOATS_3D, FLOATS_2D, INTS, BOOLS, types.UniTuple(INT, 5), FLOATS,
    FLOATS_3D, BYTES_2D, BYTES_2D, FLOATS_2D, FLOATS_2D, FLOATS_4D, FLOATS_2D, FLOATS_2D, FLOATS_3D, FLOATS_2D, FLOATS,
    INTS_2D,
    seconds=5,
)  # fmt: skip
def run_layers(
    thread, threads, sync, start, stop,
    hidden, cos, sin,  # [rows, hidden] changed in place; [rows, head_size / 2]
    positions, slots,  # [rows]: in its text, and where its keys and values go in the arena
    arena, tables,  # address of all keys and values; [texts, pages]: those of each text
    groups, group_texts,  # [groups + 1]: rows that attend together; [groups]: their text
    ends, path_starts, paths,  # a row sees tokens below ends[row], then paths[path_starts[row]:path_starts[row + 1]]
    weights, kinds, codes,  # of each matrix, see `layer_products.py`
    norms, head_norms, biases,  # [layers, 2, hidden]; [layers, 2, head_size] or empty; [layers, qkv] or empty
    windows, rotary, shape, eps,  # [layers]; [layers]; heads, kv_heads, head_size, intermediate, layers; [1]
    normed, inputs, records, qkv, attended, gates, gated, delta, scores, totals, scale,
    taps,  # [n, 2]: layers, and addresses of [slots, hidden] where the states after each go
    version=0,
):  # fmt: skip
    """Layers start..stop for all rows. Called once by each thread with its number."""
    rows, size = hidden.shape
    heads, kv_heads, head_size, intermediate, _ = shape
    width = (heads + 2 * kv_heads) * head_size
    x, small, tail = normed[thread].ctypes.data, gates[thread].ctypes.data, eps.ctypes.data
    ready, record, begun = inputs[thread].ctypes.data, records[thread].ctypes.data, hidden.ctypes.data
    scratch, row_bytes = delta.ctypes.data, size * _FLOAT
    code = codes[0]  # for what is the same for all kinds of weights
    call_routine(code[_BEGIN], (record,))
    for layer in range(start, stop):
        norm = norms[layer, 0].ctypes.data
        for row in range(rows):  # every thread for itself: cheaper than another barrier
            call_routine(code[_NORMALISE], (begun + row * row_bytes, norm, size, tail, x + row * row_bytes))
        first, last = _share(width // LANES, thread, threads)
        project(
            layer, weights, kinds, codes, x, ready, record, rows, size, qkv.ctypes.data,
            heads * head_size // LANES, kv_heads * head_size // LANES, first, last,
        )  # fmt: skip
        if biases.size:
            for row in range(rows):
                for i in range(first * LANES, last * LANES):
                    qkv[row, i] += biases[layer, i]
        _barrier(sync, threads)
        _place_heads(thread, threads, layer, qkv, cos, sin, shape, slots, arena, rotary, head_norms, eps, code)
        _barrier(sync, threads)
        for group in range(len(groups) - 1):
            _attend(
                thread, threads, sync, groups[group], groups[group + 1], layer, windows[layer], shape, qkv, positions,
                arena, tables[group_texts[group]], ends, path_starts, paths, scale, scores, totals, attended, code,
            )  # fmt: skip
        first, last = _share(size // LANES, thread, threads)
        inside, y = heads * head_size, attended.ctypes.data
        add_product(
            layer, OUTPUT, weights, kinds, codes, y, ready, record, rows, inside, scratch, size, first, last, begun
        )
        _barrier(sync, threads)

        norm = norms[layer, 1].ctypes.data
        for row in range(rows):
            call_routine(code[_NORMALISE], (begun + row * row_bytes, norm, size, tail, x + row * row_bytes))
        first, last = _share(intermediate // LANES, thread, threads)
        y = gated.ctypes.data
        gated_product(layer, weights, kinds, codes, x, ready, record, rows, size, small, y, intermediate, first, last)
        _barrier(sync, threads)
        first, last = _share(size // LANES, thread, threads)
        add_product(
            layer, DOWN, weights, kinds, codes, y, ready, record, rows, intermediate, scratch, size, first, last, begun
        )
        _barrier(sync, threads)
        for tap in range(len(taps)):
            if taps[tap, 0] == layer + 1:
                # States change next behind a barrier that a thread comes to when it has copied its rows.
                for row in range(thread, rows, threads):
                    target = taps[tap, 1] + slots[row] * size * _FLOAT
                    for i in range(0, size, LANES):
                        copy_lanes(hidden[row].ctypes.data + i * _FLOAT, target + i * _FLOAT)
    call_routine(code[_END], (record,))


@compiled(
    kernel_version,
    INT, INT, FLOATS_2D, FLOATS, FLOATS, INT, INTS, FLOATS_3D, BYTES_2D, BYTES_2D, FLOATS_2D,
    seconds=1,
)  # fmt: skip
def run_head(thread, threads, hidden, norm, eps, weights, code, normed, inputs, records, logits, version=0):
    """Logits [rows, vocabulary] of hidden states: the last norm and the head."""
    (rows, size), outputs = hidden.shape, logits.shape[1]
    x, out = normed[thread].ctypes.data, logits.ctypes.data
    ready, record = inputs[thread].ctypes.data, records[thread].ctypes.data
    start, weight, tail, row_bytes = hidden.ctypes.data, norm.ctypes.data, eps.ctypes.data, size * _FLOAT
    for row in range(rows):
        call_routine(code[_NORMALISE], (start + row * row_bytes, weight, size, tail, x + row * row_bytes))
    call_routine(code[_PREPARE], (x, rows, size, ready, record))
    first, last = _share(outputs // LANES, thread, threads)
    call_routine(code[_BEGIN], (record,))
    call_routine(code[_PRODUCT], (x, ready, record, rows, weights, size, out, outputs, first, last))
    call_routine(code[_END], (record,))


share = _share  # for other compiled functions
