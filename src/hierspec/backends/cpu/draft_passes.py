"""A drafter's next tokens as one compiled function: join, layers, head and pick, one token after the other.

A step of a small drafter is so short that waking threads, preparing arrays and returning results would take as long.
So the threads enter once for several tokens. Each step calls the functions of a separate pass, so it has their bits.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
from numba import types

from hierspec.backends.cpu.compiled import (
    BOOLS,
    BOOLS_2D,
    BYTES_2D,
    BYTES_3D,
    DOUBLES,
    FLOATS,
    FLOATS_2D,
    FLOATS_3D,
    INT,
    INTS,
    INTS_2D,
    SHORTS_2D,
    calls,
    compiled,
    filter_version,
    kernel_version,
)
from hierspec.backends.cpu.head_passes import run_draft_head, run_join
from hierspec.backends.cpu.layer_products import project
from hierspec.backends.cpu.layers import SCRATCH, WEIGHTS, place_heads, run_layers
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.pick import greedy_row
from hierspec.backends.cpu.product import Code
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import barrier, share

_FLOAT = 4  # bytes
# numba takes constants, not enumerations.
_NORMALISE, _BEGIN, _END = (int(code) for code in (Code.NORMALISE, Code.BEGIN, Code.END))


@compiled(
    kernel_version,
    INT, INT, INTS, INT, FLOATS_2D, FLOATS_2D, FLOATS_2D, INTS, INT,
    INTS_2D, INTS_2D, INTS_2D, FLOATS_3D, FLOATS_3D, FLOATS_2D, BOOLS, types.UniTuple(INT, 6), FLOATS,
    FLOATS_3D, BYTES_2D, BYTES_2D, FLOATS_2D, FLOATS_3D, INTS,
    seconds=3,
)  # fmt: skip
def run_keys(
    thread, threads, sync, layer, hidden, cos, sin, slots, arena, weights, kinds, codes, norms, head_norms, biases,
    rotary, shape, eps, normed, inputs, records, qkv, queries, attention_code, version=0,
):  # fmt: skip
    """Stores the keys and values of one layer for all rows, and computes nothing else. Arguments as in `run_layers`."""
    rows, size = hidden.shape
    heads, kv_heads, head_size, _, _, _ = shape
    width, row_bytes = (heads + 2 * kv_heads) * head_size, size * _FLOAT
    x, ready, record = normed[thread].ctypes.data, inputs[thread].ctypes.data, records[thread].ctypes.data
    code = codes[0]  # for routines that are the same for all kinds of weights
    call_routine(code[_BEGIN], (record,))
    begun, norm = hidden.ctypes.data, norms[layer, 0].ctypes.data
    for row in range(rows):
        call_routine(code[_NORMALISE], (begun + row * row_bytes, norm, size, eps.ctypes.data, x + row * row_bytes))
    q_blocks = heads * head_size // LANES
    first, last = share(width // LANES - q_blocks, thread, threads)
    first, last = first + q_blocks, last + q_blocks
    project(
        layer, weights, kinds, codes, x, ready, record, rows, size, qkv.ctypes.data,
        q_blocks, kv_heads * head_size // LANES, first, last, np.int64(-1),
    )  # fmt: skip
    if biases.size:
        for row in range(rows):
            for i in range(first * LANES, last * LANES):
                qkv[row, i] += biases[layer, i]
    barrier(sync, threads)
    # The query columns hold stale numbers; nothing reads the results.
    first, last = share(rows * (heads + 2 * kv_heads), thread, threads)
    place_heads(
        first, last, 0, rows, layer, qkv, cos, sin, shape, slots, slots[:0], arena, queries, rotary, head_norms, eps,
        code, attention_code,
    )  # fmt: skip
    call_routine(code[_END], (record,))
    barrier(sync, threads)


PARTS = run_join, run_layers, run_keys, run_draft_head  # called by `run_draft` at their addresses
_join, _layers, _keys, _head = (calls(function) for function in PARTS)

# Groups of arguments.
_EMBEDDING = types.Tuple((FLOATS_2D, SHORTS_2D))  # [vocabulary, hidden] in float32, or in bfloat16; the other is empty
# Positions, lengths and slots, [rows + most - 1] each; slots of the first rows' features; zeros [rows + 1]; attention
# groups of the first step, then of later ones: 0, rows, 0, 1.
_PLACES = types.UniTuple(INTS, 6)
_MEMORY = types.Tuple((INT, INTS_2D, INTS_2D))  # its address, the text's pages, and taps as in `run_layers`
# States and taps of features, then the arguments of `run_join`, then a bias or an empty array.
_JOIN = types.Tuple((FLOATS_3D, INTS, FLOATS_2D, FLOATS, INT, INTS, FLOATS_3D, BYTES_3D, FLOATS_3D, FLOATS))
_ROTARY = types.UniTuple(FLOATS_2D, 2)  # cosines and sines by position
# Arguments of `run_draft_head` after the states.
_HEAD = types.Tuple((FLOATS, FLOATS, INTS, INTS_2D, INTS, FLOATS_3D, BYTES_3D, FLOATS_3D, FLOATS_3D, FLOATS_2D))
# Scratch: embeddings [threads, rows, hidden], states [rows, hidden], maxima of blocks [blocks], scores [candidates].
_OWN_SCRATCH = types.Tuple((FLOATS_3D, FLOATS_2D, FLOATS, DOUBLES))
_ENDS = types.Tuple((INTS, DOUBLES, BOOLS_2D))  # stop tokens, bounds of the classes of leads, `Ask.ahead`
_OUT = types.Tuple((INTS_2D, DOUBLES, INTS))  # picks [most, candidates]; leads [most]; [1] number of steps


@compiled(
    filter_version,
    INT, INT, INTS, INTS, INTS, _PLACES, _MEMORY, _EMBEDDING, _JOIN, _JOIN, _ROTARY, WEIGHTS, SCRATCH, _HEAD,
    _OWN_SCRATCH, _ENDS, _OUT,
    seconds=6,
)  # fmt: skip
def run_draft(
    thread, threads, sync, addresses, tokens, places, memory, embedding, first, then, rotary, weights, scratch, head,
    own, ending, out, version=0,
):  # fmt: skip
    """Picks the best tokens after `tokens`, the last of a text, and after each of its own picks while `ending` allows.

    `first` joins the tokens with their features, `then` joins a pick with the drafter's own state before it. The last
    step's logits stay where the head writes them. With no room for picks there is one step, which picks nothing.
    `addresses` are those of `PARTS`. Every thread calls this once with its number.
    """
    positions, ends, slots, features, zeros, groups = places
    (arena, table, taps), (cosines, sines), (floats, halves) = memory, rotary, embedding
    normed, ready, group_records, qkv, queries, sums, attended, gates = scratch[:8]
    gated, delta, scores, totals, rooms, scale, tiles, attention = scratch[8:]
    embedded, hidden, maxima, best = own
    (stops, bounds, ahead), (picks, leads, written) = ending, out
    logits, size, least = head[9][0], hidden.shape[1], len(bounds)
    begin, end, group, join = 0, len(tokens), groups[:2], first  # the rows of this step
    for step in range(len(ahead) + 1):
        count = end - begin
        mine, x = embedded[thread, :count], hidden[:count]
        for row in range(count):
            if len(floats):
                for i in range(size):  # element by element: array assignment takes numba seconds to compile
                    mine[row, i] = floats[tokens[row], i]
            else:  # a bfloat16 is the upper half of a float32
                bits, half = mine[row].view(np.int32), halves[tokens[row]]
                for i in range(size):
                    bits[i] = np.int32(half[i]) << 16
        states, kept, norms, eps, matrix, code, joined, inputs, records, bias = join
        _join(
            addresses[0],
            (thread, threads, mine, states, kept, features, norms, eps, matrix, code, joined, inputs, records, x),
        )
        if len(bias):
            low, high = share(size // LANES, thread, threads)
            for row in range(count):
                for i in range(low * LANES, high * LANES):
                    x[row, i] += bias[i]
        barrier(sync, threads)
        place = positions[begin]
        # The last layer computes only the last row; of the other rows it needs keys and values.
        layer, start = weights[8][4] - 1, 0
        for stop in (layer if count > 1 else layer + 1, layer + 1):
            if stop > layer and count > 1:
                rest = end - 1
                _keys(
                    addresses[2],
                    (
                        thread, threads, sync, layer, x[: count - 1], cosines[place : place + count - 1],
                        sines[place : place + count - 1], slots[begin:rest], arena, *weights[:6],
                        *weights[7:10], normed, ready, group_records,
                        qkv[: count - 1], queries, tiles,
                    ),
                )  # fmt: skip
                x, place, begin, group = x[count - 1 :], place + count - 1, rest, groups[2:]
                count = 1
            _layers(
                addresses[1],
                (
                    thread, threads, sync, start, stop, x, cosines[place : place + count],
                    sines[place : place + count], positions[begin:end], slots[begin:end],
                    zeros[:0], arena, table, group,
                    zeros[:1], ends[begin:end], zeros[: count + 1], zeros[:0], *weights, normed, ready, group_records,
                    qkv[:count], queries, sums, attended[:count], gates, gated[:count], delta, scores, totals, rooms,
                    scale, tiles, attention, taps,
                ),
            )  # fmt: skip
            start = stop
        _head(addresses[3], (thread, threads, x, *head))
        barrier(sync, threads)
        if not len(best):
            return
        if thread == 0:
            leads[step] = greedy_row(logits, len(logits), maxima, best, picks[step])
            written[0] = step + 1
        barrier(sync, threads)
        # All threads decide the same. After a broken barrier a pick may be garbage, hence the range check.
        token = picks[step, 0]
        if step == len(ahead) or token < 0 or token >= len(logits):
            return
        for stop in stops:
            if token == stop:
                return
        sure = 0
        while sure < len(bounds) and leads[step] >= bounds[sure]:
            sure += 1
        least = min(least, sure)
        if not ahead[step, least]:
            return
        tokens, features, group, join = picks[step][:1], slots[end - 1 : end], groups[2:], then
        begin, end = end, end + 1
