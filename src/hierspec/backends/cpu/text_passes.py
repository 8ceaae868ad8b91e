"""Passes of a decoder for one text as one compiled function: layers, head and picks, token after token.

Between two passes lie some tenths of a millisecond of Python and of waking threads, which is much of a small model's
pass. So the threads enter once for several tokens, where nothing is drafted for them. Each step is made of the
functions that make it alone, so it has their bits.
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

# Arguments that belong together.
_ROTARY = types.UniTuple(FLOATS_2D, 2)  # cosines and sines
# Of the first pass: positions, slots and drafted; what each row sees up to, the starts of paths, and paths; rows that
# attend together, and their texts. As `run_layers` has them.
_BATCH = types.UniTuple(INTS, 8)
# [steps] each: positions, slots, and what a row sees up to; then [0, 1], and zeros.
_LATER = types.UniTuple(INTS, 5)
_MEMORY = types.Tuple((INT, INTS_2D, INTS_2D))  # its address, the pages of the text, and taps, as `run_layers` has them
_EMBEDDING = types.Tuple((FLOATS_2D, SHORTS_2D, BOOLS))  # as `EmbeddingTable` has it
_HEAD = types.Tuple((FLOATS, FLOATS, INT, INTS, FLOATS_2D))  # norm, eps, weights, routines; [rows, vocabulary] logits
# Temperature, filters and keys as `sample_rows` has them, and what it takes where there are no penalties and biases.
_SAMPLING = types.Tuple((DOUBLE, types.Tuple((INT, DOUBLE, DOUBLE)), INTS_2D, TRIPLE, INT32S, DOUBLES, DOUBLES_2D))
_ENDS = types.Tuple((INTS, DOUBLES, BOOLS_2D))  # stop tokens, bounds of the classes of leads, `Ask.ahead`
_OUT = types.Tuple((INTS_2D, DOUBLES, INTS))  # [rows + steps, candidates] picks; [rows + steps] leads; [1] rows done


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
    """Picks for the rows `hidden`, and after the only one of them for each of its own picks, while `ending` says so and
    the embedding of the pick is there. The first so many `layers` run.

    `addresses` are those of `run_layers`, of `run_head`, and of `greedy_rows`, or `sample_rows` where the temperature
    is not 0. Called once by each thread with its number.
    """
    (arena, tables, taps), (floats, halves, made), (cos, sin) = memory, embedding, rotary
    positions, slots, drafted, ends, path_starts, paths, groups, group_texts = batch
    later_positions, later_slots, later_ends, one, zeros = later
    normed, ready, records, qkv, attended, gates, gated, delta, scores, totals, rooms, scale, tiles, attention = scratch
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
                group_texts, ends, path_starts, paths, *weights, normed, ready, records, qkv[:count], attended[:count],
                gates, gated[:count], delta, scores, totals, rooms, scale, tiles, attention, taps,
            ),
        )  # fmt: skip
        _head(
            addresses[1],
            (thread, threads, x, norm, eps, head_weights, head_code, normed, ready, records, logits[:count]),
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
        # All threads decide the same. Where the barriers are broken, a pick may be anything.
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
                for i in range(size):  # one by one: what assigns an array takes seconds to compile
                    x[0, i] = floats[token, i]
            else:  # the upper half of a float32
                bits = x[0].view(np.int32)
                for i in range(size):
                    bits[i] = np.int32(halves[token, i]) << 16
        barrier(sync, threads)
        place = later_positions[step]
        cos, sin = rotary_table[0][place : place + 1], rotary_table[1][place : place + 1]
        positions, slots = later_positions[step : step + 1], later_slots[step : step + 1]
        ends, drafted, path_starts, paths = later_ends[step : step + 1], zeros[:0], zeros[:2], zeros[:0]
        groups, group_texts = one, zeros[:1]
