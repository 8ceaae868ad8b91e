"""Products of a layer whose matrices may be stored in different formats, each multiplied by the code of its kind.

`weights` and `kinds` [layers, 7] hold each matrix's address, and the row of `codes` [kinds, Code] to multiply it with.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.product import Code
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import take_blocks

QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN = range(7)  # the matrices of a layer
_BLOCK = LANES * 4  # bytes of the floats of 16 outputs
# numba takes constants, not enumerations.
_PREPARE, _PRODUCT, _ADD_PRODUCT = int(Code.PREPARE), int(Code.PRODUCT), int(Code.ADD_PRODUCT)
_GATED, _GATE = int(Code.GATED), int(Code.GATE)


@part
def project(
    layer, weights, kinds, codes, x, ready, record, rows, size, out, q_blocks, kv_blocks, first, last, prepared
):
    """Blocks first .. last of queries, keys and values, which are next to each other in `out`.

    `prepared`: the kind of weights for which the inputs have been prepared, -1 at first; returns what it is then.
    """
    width, begin = (q_blocks + 2 * kv_blocks) * LANES, 0
    for matrix in range(QUERY, VALUE + 1):
        blocks = q_blocks if matrix == QUERY else kv_blocks
        from_block, to_block = max(first - begin, 0), min(last - begin, blocks)
        if from_block < to_block:
            kind = kinds[layer, matrix]
            if kind != prepared:
                call_routine(codes[kind, _PREPARE], (x, rows, size, ready, record))
                prepared = kind
            one, y = weights[layer, matrix], out + begin * _BLOCK
            call_routine(codes[kind, _PRODUCT], (x, ready, record, rows, one, size, y, width, from_block, to_block))
        begin += blocks
    return prepared


@part
def add_product(
    sync, thread, threads, layer, matrix, weights, kinds, codes, x, ready, record, rows, inputs, scratch, outputs, sums
):
    """Adds x times a matrix to `sums`: the outputs that this thread takes."""
    kind, one = kinds[layer, matrix], weights[layer, matrix]
    call_routine(codes[kind, _PREPARE], (x, rows, inputs, ready, record))
    turn = np.int64(0)
    first, last, turn = take_blocks(sync, thread, threads, outputs // LANES, turn)
    while first < last:
        given = (x, ready, record, rows, one, inputs, scratch, outputs, first, last, sums)
        call_routine(codes[kind, _ADD_PRODUCT], given)
        first, last, turn = take_blocks(sync, thread, threads, outputs // LANES, turn)


@part
def gated_product(
    sync, thread, threads, layer, weights, kinds, codes, x, ready, record, rows, size, small, out, outputs
):
    """silu(x times gates) * (x times ups): the outputs that this thread takes. `small` [2, rows, 16] is scratch
    memory."""
    kind, other = kinds[layer, GATE], kinds[layer, UP]
    one, two = weights[layer, GATE], weights[layer, UP]
    call_routine(codes[kind, _PREPARE], (x, rows, size, ready, record))
    turn = np.int64(0)
    first, last, turn = take_blocks(sync, thread, threads, outputs // LANES, turn)
    while first < last:
        if kind == other:
            both = (x, ready, record, rows, one, two, size, small, out, outputs, first, last)
            call_routine(codes[kind, _GATED], both)
        else:  # all gates first: inputs are prepared for one kind at a time
            call_routine(codes[kind, _PRODUCT], (x, ready, record, rows, one, size, out, outputs, first, last))
            call_routine(codes[other, _PREPARE], (x, rows, size, ready, record))
            for block in range(first, last):
                before = small - block * _BLOCK
                given = (x, ready, record, rows, two, size, before, LANES, block, block + 1)
                call_routine(codes[other, _PRODUCT], given)
                call_routine(codes[other, _GATE], (out + block * _BLOCK, outputs, small, rows))
            call_routine(codes[kind, _PREPARE], (x, rows, size, ready, record))
        first, last, turn = take_blocks(sync, thread, threads, outputs // LANES, turn)
