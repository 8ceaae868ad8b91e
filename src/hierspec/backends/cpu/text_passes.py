"""Forward passes for one text as one compiled function: layers, head and picks, one token after the other.

Between two passes, Python and waking threads take some tenths of a millisecond, much of a small model's pass. So the
threads enter once for several tokens, as long as nothing is drafted for them. Each step calls the functions of a
separate pass, so it has their bits.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
from numba import types

from hierspec.backends.cpu.compiled import (
    BOOLS,
    BOOLS_2D,
    DOUBLE,
    DOUBLES,
    DOUBLES_2D,
    FLOATS,
    FLOATS_2D,
    INT,
    INT32S,
    INTS,
    INTS_2D,
    SHORTS_2D,
    TRIPLE,
    calls,
    compiled,
    filter_version,
)
from hierspec.backends.cpu.layers import SCRATCH, WEIGHTS, run_head, run_layers
from hierspec.backends.cpu.pick import greedy_rows, sample_rows
from hierspec.backends.cpu.sharing import barrier

_layers, _head, _greedy, _sample = (calls(function) for function in (run_layers, run_head, greedy_rows, sample_rows))

# Groups of arguments.
_ROTARY = types.UniTuple(FLOATS_2D, 2)  # cosines and sines
# The first pass: positions, slots, drafted, lengths, starts of paths, paths, attention groups, and their texts, as in
# `run_layers`.
_BATCH = types.UniTuple(INTS, 8)
# Later passes: positions, slots and lengths, [steps] each; then [0, 1], and zeros.
_LATER = types.UniTuple(INTS, 5)
_MEMORY = types.Tuple((INT, INTS_2D, INTS_2D))  # its address, the text's pages, and taps as in `run_layers`
_EMBEDDING = types.Tuple((FLOATS_2D, SHORTS_2D, BOOLS))  # as in `EmbeddingTable`
_HEAD = types.Tuple((FLOATS, FLOATS, INT, INTS, FLOATS_2D))  # norm, eps, weights, routines; [rows, vocabulary] logits
# Temperature, filters and keys as in `sample_rows`, and its arguments for no penalties and no biases.
_SAMPLING = types.Tuple((DOUBLE, types.Tuple((INT, DOUBLE, DOUBLE)), INTS_2D, TRIPLE, INT32S, DOUBLES, DOUBLES_2D))
_ENDS = types.Tuple((INTS, DOUBLES, BOOLS_2D))  # stop tokens, bounds of the classes of leads, `Ask.ahead`
_OUT = types.Tuple((INTS_2D, DOUBLES, INTS))  # picks [rows + steps, candidates]; leads [rows + steps]; [1] rows done


@compiled(
    filter_version,
    INT, INT, INTS, INTS, INT, FLOATS_2D, _ROTARY, _ROTARY, _BATCH, _LATER, _MEMORY, _EMBEDDING, WEIGHTS, SCRATCH,
    _HEAD, _SAMPLING, _ENDS, _OUT,
    seconds=3,
)  # fmt: skip
def run_text(
    thread, threads, sync, addresses, layers, hidden, rotary, rotary_table, batch, later, memory, embedding, weights,
    scratch, head, sampling, ending, out, version=0,
):  # fmt: skip
    """Picks for the rows `hidden`; if there is one row, also for each of its own picks, while `ending` allows it.

    It stops at a pick whose embedding is missing. Runs the first `layers` layers. `addresses` are those of
    `run_layers`, `run_head`, and `greedy_rows`, or `sample_rows` if the temperature is not 0. Every thread calls this
    once with its number.
    """
    (arena, tables, taps), (floats, halves, made), (cos, sin) = memory, embedding, rotary
    positions, slots, drafted, ends, path_starts, paths, groups, group_texts = batch
    later_positions, later_slots, later_ends, one, zeros = later
    normed, ready, records, qkv, queries, sums, attended, gates = scratch[:8]
    gated, delta, scores, totals, rooms, scale, tiles, attention = scratch[8:]
    norm, eps, head_weights, head_code, logits = head
    temperature, filters, keys, penalties, no_tokens, no_values, no_distributions = sampling
    (stops, bounds, ahead), (picks, leads, written) = ending, out
    x, begin, least, (vocabulary, size) = hidden, 0, len(bounds), (logits.shape[1], hidden.shape[1])
    for step in range(len(ahead) + 1):
        count = len(x)
        done = begin + count
        _layers(
            addresses[0],
            (
                thread, threads, sync, 0, layers, x, cos, sin, positions, slots, drafted, arena, tables, groups,
                group_texts, ends, path_starts, paths, *weights, normed, ready, records, qkv[:count], queries, sums,
                attended[:count], gates, gated[:count], delta, scores, totals, rooms, scale, tiles, attention, taps,
            ),
        )  # fmt: skip
        _head(
            addresses[1],
            (thread, threads, sync, x, norm, eps, head_weights, head_code, normed, ready, records, logits[:count]),
        )
        barrier(sync, threads)
        if temperature == 0:
            _greedy(
                addresses[2],
                (
                    thread, threads, logits[:count], vocabulary, picks[begin:done], leads[begin:done], no_distributions
                ),
            )  # fmt: skip
        else:
            _sample(
                addresses[2],
                (
                    thread, threads, logits[:count], temperature, filters, penalties, no_tokens, 0, no_tokens,
                    no_tokens, no_tokens, no_values, keys[begin:done], picks[begin:done], leads[begin:done],
                    no_distributions,
                ),
            )  # fmt: skip
        barrier(sync, threads)
        if thread == 0:
            written[0] = done
        # All threads decide the same. After a broken barrier a pick may be garbage, hence the range check.
        token = picks[done - 1, 0]
        if step == len(ahead) or token < 0 or token >= vocabulary or not made[token]:
            return
        for stop in stops:
            if token == stop:
                return
        sure = 0
        while sure < len(bounds) and leads[done - 1] >= bounds[sure]:
            sure += 1
        least = min(least, sure)
        if not ahead[step, least]:
            return
        x, begin = hidden[:1], done
        if thread == 0:
            if len(floats):
                for i in range(size):  # element by element: array assignment takes numba seconds to compile
                    x[0, i] = floats[token, i]
            else:  # a bfloat16 is the upper half of a float32
                bits = x[0].view(np.int32)
                for i in range(size):
                    bits[i] = np.int32(halves[token, i]) << 16
        barrier(sync, threads)
        place = later_positions[step]
        cos, sin = rotary_table[0][place : place + 1], rotary_table[1][place : place + 1]
        positions, slots = later_positions[step : step + 1], later_slots[step : step + 1]
        ends, drafted, path_starts, paths = later_ends[step : step + 1], zeros[:0], zeros[:2], zeros[:0]
        groups, group_texts = one, zeros[:1]
