"""One forward pass of the decoder on a CPU as one compiled function that all threads run together.

A library spends microseconds of bookkeeping per operator; over thirty layers that is half a small model's pass. Here
the threads enter once, split each product by its outputs, and meet at barriers. Rows never mix, so a row's bits do not
depend on what else is in the pass.

Numbers that are multiplied with the same input are in 16 neighbouring lanes: weights [outputs / 16, inputs, 16], and
likewise keys and values (`attention.py`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
from numba import types

from hierspec.backends.cpu.amx_attention import run_tile_attention
from hierspec.backends.cpu.amx_cache import place_rounded
from hierspec.backends.cpu.attention import run_attention
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
    calls,
    compiled,
    kernel_version,
    part,
)
from hierspec.backends.cpu.kernels import copy_lanes, rotate, zero_nan
from hierspec.backends.cpu.kv_pages import place
from hierspec.backends.cpu.layer_products import DOWN, OUTPUT, add_product, gated_product, project
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.product import Code
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import barrier, share, take, take_blocks

_FLOAT = 4  # bytes

# numba takes constants, not enumerations.
_PREPARE, _PRODUCT = int(Code.PREPARE), int(Code.PRODUCT)
_BEGIN, _END, _NORMALISE = int(Code.BEGIN), int(Code.END), int(Code.NORMALISE)


_attend, _attend_by_tiles = calls(run_attention), calls(run_tile_attention)


@part
def _place_heads(
    first, last, first_row, rows, layer, qkv, cos, sin, shape, slots, drafted, arena, queries, rotary, head_norms, eps,
    code, attention_code,
):  # fmt: skip
    """Norms and rotates queries and keys, and stores keys and values in their slots.

    Handles items first .. last; an item is one head of one row. A head's rows follow each other: their keys share
    cache lines, which should not move between cores. Attention by vectors wants the queries of heads that share
    a KV head next to each other, in `queries`.
    """
    heads, kv_heads, head_size, _, _, _ = shape
    every, group, size = heads + 2 * kv_heads, heads // kv_heads, head_size * _FLOAT
    # Addresses, not slices: numba counts references to those, and each count waits for all stores before it.
    every_head, cosines, sines = qkv.ctypes.data, cos.ctypes.data, sin.ctypes.data
    row, head = first_row + first % rows, first // rows  # divided once, then counted up: divisions take long
    kv_head, number = head // group, head % group
    for _ in range(first, last):
        x, angle = every_head + (row * every + head) * size, row * size // 2
        is_query, is_value = head < heads, head >= heads + kv_heads
        if not is_value:
            if head_norms.size:
                norm = head_norms.ctypes.data + (2 * layer + (0 if is_query else 1)) * size
                call_routine(code[_NORMALISE], (x, norm, head_size, eps.ctypes.data, x))
            if rotary[layer]:
                rotate(x, cosines + angle, sines + angle, head_size // 2)
        if is_query and len(queries):
            of_row = kv_head * queries.shape[1] + row
            target = queries.ctypes.data + (of_row * group + number) * size
            for start in range(0, size, LANES * _FLOAT):
                copy_lanes(x + start, target + start)
        if not is_query:
            if len(drafted) and drafted[row]:
                # Positions that a row must not see get weight zero, and zero times NaN is NaN: a NaN draft would spoil
                # other rows. Its own row still ends as NaN, because the layers add to its NaN state.
                for start in range(0, size, LANES * _FLOAT):
                    zero_nan(x + start)
            to_head = head - heads - (kv_heads if is_value else 0)
            if len(queries):
                place(x, is_value, slots[row], layer, to_head, shape, arena, attention_code)
            else:
                place_rounded(x, is_value, slots[row], layer, to_head, shape, arena, attention_code)
        row += 1
        if row == first_row + rows:
            row, head, number = first_row, head + 1, number + 1
            if number == group:
                kv_head, number = kv_head + 1, 0


# Arguments of `run_layers`: its weights, and its scratch memory with what follows up to the taps.
WEIGHTS = types.Tuple(
    (
        INTS_2D, INTS_2D, INTS_2D, FLOATS_3D, FLOATS_3D, FLOATS_2D, INTS, BOOLS, types.UniTuple(INT, 6), FLOATS,
        types.UniTuple(INT, 2),
    )
)  # fmt: skip
SCRATCH = types.Tuple((
    FLOATS_3D, BYTES_2D, BYTES_2D, FLOATS_2D, FLOATS_3D, FLOATS_3D, FLOATS_2D, FLOATS_4D, FLOATS_2D, FLOATS_2D,
    FLOATS_3D, FLOATS_2D, BYTES_2D, FLOATS, INTS, INT,
))  # fmt: skip


@compiled(
    kernel_version,
    INT, INT, INTS, INT, INT,
    FLOATS_2D, FLOATS_2D, FLOATS_2D, INTS, INTS, INTS, INT, INTS_2D, INTS, INTS, INTS, INTS, INTS,
    *WEIGHTS.types, *SCRATCH.types, INTS_2D,
    seconds=4,
)  # fmt: skip
def run_layers(
    thread, threads, sync, start, stop,
    hidden, cos, sin,  # [rows, hidden], updated in place; [rows, head_size / 2]
    positions, slots,  # [rows]: position in its text, and slot of its keys and values
    drafted,  # [rows]: 1 for proposed tokens, or empty
    arena, tables,  # address of the KV cache; [texts, pages]: pages of each text
    groups, group_texts,  # [groups + 1]: rows that attend together; [groups]: their text
    ends, path_starts, paths,  # a row sees tokens below ends[row], then paths[path_starts[row]:path_starts[row + 1]]
    weights, kinds, codes,  # address, kind and routines of each matrix, see `layer_products.py`
    norms, head_norms, biases,  # [layers, 2, hidden]; [layers, 2, head_size] or empty; [layers, qkv] or empty
    windows, rotary, shape, eps,  # [layers]; [layers]; heads, kv_heads, head_size, intermediate, layers, KV bytes; [1]
    row_split,  # rows per thread from which on threads split the rows, and what they split them into multiples of
    normed, inputs, records, qkv, queries, sums, attended, gates, gated, delta, scores, totals, rooms, scale,
    attention_code,  # routines of attention: `AttentionCode`, or `VectorCode` where `queries` and `sums` have room
    attention,  # address of `run_tile_attention` or `run_attention`: only the one in use is compiled
    taps,  # [n, 2]: layer, and address of [slots, hidden] that receives the states after it
    version=0,
):  # fmt: skip
    """Runs layers start..stop for all rows. Every thread calls this once with its number.

    Threads take outputs of each product as they come and meet at a barrier after it. In a wide pass they split the
    rows instead: then nothing is computed twice, and only attention needs rows of other threads.
    """
    size, (heads, kv_heads, head_size, intermediate, _, _) = hidden.shape[1], shape
    width, inside, every = (heads + 2 * kv_heads) * head_size, heads * head_size, heads + 2 * kv_heads
    least_rows, multiple = row_split
    by_rows = threads > 1 and len(hidden) >= least_rows * threads
    first_row, last_row = 0, len(hidden)
    if by_rows:
        first_row, last_row = share((len(hidden) + multiple - 1) // multiple, thread, threads)
        first_row, last_row = first_row * multiple, min(last_row * multiple, len(hidden))
    rows, part_number, parts = last_row - first_row, 0 if by_rows else thread, 1 if by_rows else threads
    x, small, tail = normed[thread].ctypes.data, gates[thread].ctypes.data, eps.ctypes.data
    ready, record, row_bytes = inputs[thread].ctypes.data, records[thread].ctypes.data, size * _FLOAT
    begun, scratch = hidden.ctypes.data + first_row * row_bytes, delta.ctypes.data + first_row * row_bytes
    qkv_rows, gated_rows = qkv.ctypes.data + first_row * width * _FLOAT, gated[first_row:].ctypes.data
    attended_rows = attended.ctypes.data + first_row * inside * _FLOAT
    code = codes[0]  # for routines that are the same for all kinds of weights
    call_routine(code[_BEGIN], (record,))
    for layer in range(start, stop):
        norm = norms[layer, 0].ctypes.data
        for row in range(rows):  # repeated in every thread: cheaper than another barrier
            call_routine(code[_NORMALISE], (begun + row * row_bytes, norm, size, tail, x + row * row_bytes))
        turn, prepared = np.int64(0), np.int64(-1)
        first, last, turn = take_blocks(sync, part_number, parts, width // LANES, turn)
        while first < last:
            prepared = project(
                layer, weights, kinds, codes, x, ready, record, rows, size, qkv_rows,
                inside // LANES, kv_heads * head_size // LANES, first, last, prepared,
            )  # fmt: skip
            if biases.size:
                for row in range(first_row, last_row):
                    for i in range(first * LANES, last * LANES):
                        qkv[row, i] += biases[layer, i]
            first, last, turn = take_blocks(sync, part_number, parts, width // LANES, turn)
        barrier(sync, parts)
        turn = np.int64(0)
        first, last, turn = take(sync, part_number, parts, rows * every, turn)
        while first < last:
            _place_heads(
                first, last, first_row, rows, layer, qkv, cos, sin, shape, slots, drafted, arena, queries, rotary,
                head_norms, eps, code, attention_code,
            )  # fmt: skip
            first, last, turn = take(sync, part_number, parts, rows * every, turn)
        barrier(sync, threads)
        if len(queries):
            _attend(
                attention,
                (
                    thread, threads, sync, layer, windows[layer], shape, queries, positions, arena, tables, groups,
                    group_texts, ends, path_starts, paths, scale, scores, totals, sums, attended, attention_code,
                ),
            )  # fmt: skip
        else:
            _attend_by_tiles(
                attention,
                (
                    thread, threads, sync, layer, windows[layer], shape, qkv, positions, arena, tables, groups,
                    group_texts, ends, path_starts, paths, scale, scores, totals, rooms, attended, attention_code,
                ),
            )  # fmt: skip
            call_routine(code[_BEGIN], (record,))  # attention released the tiles
        add_product(
            sync, part_number, parts, layer, OUTPUT, weights, kinds, codes, attended_rows, ready, record, rows,
            inside, scratch, size, begun,
        )  # fmt: skip
        barrier(sync, parts)

        norm = norms[layer, 1].ctypes.data
        for row in range(rows):
            call_routine(code[_NORMALISE], (begun + row * row_bytes, norm, size, tail, x + row * row_bytes))
        gated_product(
            sync, part_number, parts, layer, weights, kinds, codes, x, ready, record, rows, size, small, gated_rows,
            intermediate,
        )  # fmt: skip
        barrier(sync, parts)
        add_product(
            sync, part_number, parts, layer, DOWN, weights, kinds, codes, gated_rows, ready, record, rows,
            intermediate, scratch, size, begun,
        )  # fmt: skip
        barrier(sync, parts)
        for tap in range(len(taps)):
            if taps[tap, 0] == layer + 1:
                # No race: threads change `hidden` next after a barrier behind this copy, or they split rows and own
                # them.
                for row in range(first_row + part_number, last_row, parts):
                    target = taps[tap, 1] + slots[row] * size * _FLOAT
                    for i in range(0, size, LANES):
                        copy_lanes(hidden[row].ctypes.data + i * _FLOAT, target + i * _FLOAT)
    if by_rows:  # what comes next in the same call, such as the head, reads the rows of all threads
        barrier(sync, threads)
    call_routine(code[_END], (record,))


@compiled(
    kernel_version,
    INT, INT, INTS, FLOATS_2D, FLOATS, FLOATS, INT, INTS, FLOATS_3D, BYTES_2D, BYTES_2D, FLOATS_2D,
    seconds=1,
)  # fmt: skip
def run_head(thread, threads, sync, hidden, norm, eps, weights, code, normed, inputs, records, logits, version=0):
    """Logits [rows, vocabulary] of hidden states, through a norm and the head."""
    (rows, size), outputs = hidden.shape, logits.shape[1]
    x, out = normed[thread].ctypes.data, logits.ctypes.data
    ready, record = inputs[thread].ctypes.data, records[thread].ctypes.data
    start, weight, tail, row_bytes = hidden.ctypes.data, norm.ctypes.data, eps.ctypes.data, size * _FLOAT
    for row in range(rows):
        call_routine(code[_NORMALISE], (start + row * row_bytes, weight, size, tail, x + row * row_bytes))
    call_routine(code[_PREPARE], (x, rows, size, ready, record))
    call_routine(code[_BEGIN], (record,))
    turn = np.int64(0)
    first, last, turn = take_blocks(sync, thread, threads, outputs // LANES, turn)
    while first < last:
        call_routine(code[_PRODUCT], (x, ready, record, rows, weights, size, out, outputs, first, last))
        first, last, turn = take_blocks(sync, thread, threads, outputs // LANES, turn)
    call_routine(code[_END], (record,))


place_heads = _place_heads  # for other compiled functions
