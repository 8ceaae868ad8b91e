"""Compiled functions for drafters, beside their layers: logits of some tokens, and joins of tokens with features."""

# mypy: allow-untyped-defs
from __future__ import annotations

from hierspec.backends.cpu.compiled import (
    BYTES_3D,
    FLOATS,
    FLOATS_2D,
    FLOATS_3D,
    INT,
    INTS,
    INTS_2D,
    compiled,
    kernel_version,
)
from hierspec.backends.cpu.kernels import copy_lanes, zero_lanes
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.product import Code
from hierspec.backends.cpu.routines import call_routine
from hierspec.backends.cpu.sharing import share

_FLOAT = 4  # bytes
_BLOCK = LANES * _FLOAT
# numba takes constants, not enumerations.
_PREPARE, _PRODUCT, _NORMALISE = int(Code.PREPARE), int(Code.PRODUCT), int(Code.NORMALISE)


@compiled(
    kernel_version,
    INT, INT, FLOATS_2D, FLOATS, FLOATS, INTS, INTS_2D, INTS, FLOATS_3D, BYTES_3D, FLOATS_3D, FLOATS_3D, FLOATS_2D,
    seconds=1,
)  # fmt: skip
def run_draft_head(
    thread, threads, hidden, norm, eps, code, parts, tokens, normed, inputs, records, small, logits, version=0
):
    """logits[row, token] for the tokens of each part; `norm` is empty if there is none.

    parts [n, 5]: first row, rows, address of the weights, blocks of 16 tokens, index of the first in `tokens`.
    """
    rows, size = hidden.shape
    scores = small[thread]
    x, ready, record = normed[thread].ctypes.data, inputs[thread].ctypes.data, records[thread].ctypes.data
    out, row_bytes = scores.ctypes.data, size * _FLOAT
    for row in range(rows):
        source, target = hidden.ctypes.data + row * row_bytes, x + row * row_bytes
        if len(norm):
            call_routine(code[_NORMALISE], (source, norm.ctypes.data, size, eps.ctypes.data, target))
        else:
            for start in range(0, row_bytes, _BLOCK):
                copy_lanes(source + start, target + start)
    for part in range(len(parts)):
        first_row, count, weights = parts[part, 0], parts[part, 1], parts[part, 2]
        blocks, first_token = parts[part, 3], parts[part, 4]
        begin = x + first_row * row_bytes
        call_routine(code[_PREPARE], (begin, count, size, ready, record))
        first, last = share(blocks, thread, threads)
        step = scores.shape[1]
        # Compute as many blocks at once as the thread's scratch memory holds.
        block = first
        while block < last:
            until = min(last, block + step // LANES)
            target = out - block * _BLOCK
            call_routine(code[_PRODUCT], (begin, ready, record, count, weights, size, target, step, block, until))
            for row in range(count):
                for i in range((until - block) * LANES):
                    logits[first_row + row, tokens[first_token + block * LANES + i]] = scores[row, i]
            block = until


@compiled(
    kernel_version,
    INT, INT, FLOATS_2D, FLOATS_3D, INTS, INTS, FLOATS_2D, FLOATS, INT, INTS, FLOATS_3D, BYTES_3D, FLOATS_3D, FLOATS_2D,
    seconds=1,
)  # fmt: skip
def run_join(
    thread,
    threads,
    embedded,
    states,
    taps,
    slots,
    norms,
    eps,
    weights,
    code,
    joined,
    inputs,
    records,
    out,
    version=0,
):
    """out = (embedded rows, concatenated with features) times packed weights.

    A row's features are states[tap, slot] for each of `taps`, each through its own norm if `norms` is not empty; zeros
    if the slot is negative. Processes as many rows at once as `joined` has room for.
    """
    rows, size = embedded.shape
    width, row_bytes, most = (1 + len(taps)) * size, size * _FLOAT, joined.shape[1]
    x, ready, record = joined[thread].ctypes.data, inputs[thread].ctypes.data, records[thread].ctypes.data
    first, last = share(size // LANES, thread, threads)
    start = 0
    while start < rows:
        count = min(most, rows - start)
        for row in range(count):
            target = x + row * width * _FLOAT
            source, slot = embedded.ctypes.data + (start + row) * row_bytes, slots[start + row]
            for number in range(-1, len(taps)):
                if number >= 0 and slot >= 0:
                    source = states.ctypes.data + (taps[number] * states.shape[1] + slot) * row_bytes
                if number >= 0 and slot < 0:
                    for i in range(0, row_bytes, _BLOCK):
                        zero_lanes(target + i)
                elif number >= 0 and len(norms):
                    weight = norms.ctypes.data + number * row_bytes
                    call_routine(code[_NORMALISE], (source, weight, size, eps.ctypes.data, target))
                else:
                    for i in range(0, row_bytes, _BLOCK):
                        copy_lanes(source + i, target + i)
                target += row_bytes
        call_routine(code[_PREPARE], (x, count, width, ready, record))
        to = out.ctypes.data + start * row_bytes
        call_routine(code[_PRODUCT], (x, ready, record, count, weights, width, to, size, first, last))
        start += count
