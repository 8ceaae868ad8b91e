"""Softmax of attention by tiles: exponentials of scores, and merging of segments.

All paths use these routines, so a probability has the same bits in a decoding step, in a tree and in prefill.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.amx import TILE_BYTES
from hierspec.backends.cpu.llvm import LANES, V16F32, V16I32, VectorWriter, i64, splat_f32, splat_i32
from hierspec.backends.cpu.routines import routine

SEGMENT = 256  # positions; the scores of two tiles of rows fit in the L1 cache
LINE = 64  # bytes per row of a tile
MERGE_WORDS = 2 * LANES  # floats before the sums of a part: the largest score and the total of each row
TILE_SCORES = SEGMENT * LANES * 4  # bytes of the scores of one tile of rows: [block of 16 positions, row, 16]
_MANTISSA = 1 << 23  # one unit of the exponent, in the bits of a float32
# Coefficients (minimax fit): 2**f = sum of _POWER[i] * (1 + f)**i for f in 0 .. 1, with a relative error below 8e-5,
# a fiftieth of the largest rounding error of bfloat16.
_POWER = (0.45213418, 0.47777194, -0.00800502, 0.07802403)
_HALF_A_STEP = 2.0**-8  # half a bfloat16 step between 1 and 2: added first, truncation rounds to nearest


def _power_of_two(w: VectorWriter, x: Any) -> Any:
    """2**x for x up to a little above 0, to within 5e-5, far less than a step of bfloat16.

    2**0 is exactly 1; x <= -127 gives exactly 0.
    """
    b = w.b
    bounded = w.call("llvm.maxnum.v16f32", x, splat_f32(-127.0))
    # Adding a float whose last bit counts ones rounds x; the last bits of the sum are the integer.
    shifted = b.fadd(bounded, splat_f32(float(3 << 22)))
    r = b.fsub(bounded, b.fsub(shifted, splat_f32(float(3 << 22))))
    value = splat_f32(float(np.float32(math.log(2) ** 4 / 24)))
    for coefficient in (math.log(2) ** 3 / 6, math.log(2) ** 2 / 2, math.log(2), 1.0):
        value = w.fma(value, r, splat_f32(float(np.float32(coefficient))))
    power = b.shl(b.bitcast(shifted, V16I32), splat_i32(23))
    return b.bitcast(b.add(b.bitcast(value, V16I32), power), V16F32)


def _or_zero(w: VectorWriter, largest: Any) -> Any:
    """Zero instead of minus infinity, the maximum over no positions: subtracting minus infinity would give NaN."""
    nothing = splat_f32(float("-inf")) if isinstance(largest.type, ir.VectorType) else ir.FloatType()(float("-inf"))
    zero = splat_f32(0.0) if isinstance(largest.type, ir.VectorType) else ir.FloatType()(0.0)
    return w.b.select(w.b.fcmp_ordered("==", largest, nothing), zero, largest)


def _rounded_powers(w: VectorWriter, vectors: list[Any]) -> list[Any]:
    """Bits of 2**(x / 2**23), whose upper 16 bits are its bfloat16; x may be a little above 0 at most.

    2**0 is exactly 1; x / 2**23 <= -127 gives exactly 0. Converted to an integer, x has the exponent in its upper bits
    and the fraction in the mantissa's bits, which the polynomial corrects: half the instructions of `_power_of_two`.
    All vectors take each step together, because a CPU looks only so far ahead for independent instructions.
    """
    b = w.b
    bounded = [w.call("llvm.maxnum.v16f32", x, splat_f32(-127.0 * _MANTISSA)) for x in vectors]
    whole = [b.fptosi(x, V16I32) for x in bounded]
    mantissas = [b.or_(b.and_(x, splat_i32(_MANTISSA - 1)), splat_i32(0x3F800000)) for x in whole]
    m = [b.bitcast(x, V16F32) for x in mantissas]
    exponents = [b.and_(x, splat_i32(-_MANTISSA)) for x in whole]
    constant, *others = (float(np.float32(coefficient)) for coefficient in (_POWER[0] + _HALF_A_STEP, *_POWER[1:]))
    values = [splat_f32(others[-1])] * len(m)
    for coefficient in (*others[-2::-1], constant):
        values = [w.fma(value, x, splat_f32(coefficient)) for value, x in zip(values, m, strict=True)]
    return [b.add(b.bitcast(value, V16I32), power) for value, power in zip(values, exponents, strict=True)]


class SoftmaxRow:
    """Emits the softmax numerators of a row, in place: 2**(factor * (score - largest)), rounded to bfloat16.

    A tile of probabilities overwrites the first of its two tiles of scores. It has position i of the chunk beside
    i + 16, so a shift and an `or` make a row of it.
    """

    def __init__(self, w: VectorWriter, chunks: Any, factor: Any) -> None:
        self._w, self._chunks = w, chunks
        self._scale = w.b.fmul(w.load_float(factor, i64(0)), ir.FloatType()(float(_MANTISSA)))
        self._factors = w.splat(self._scale)

    def emit(self, start: Any, out: Any) -> None:
        """`start`: the row in the first tile of scores; `out`: the row's entry in the maxima of a part."""
        w, b = self._w, self._w.b

        def larger(x: Any, y: Any) -> Any:
            return b.select(b.fcmp_ordered(">", x, y), x, y)

        def block(chunk: Any, half: int) -> Any:
            return w.load(w.plus(start, chunk, 2 * TILE_BYTES), i64(half * TILE_BYTES // 4))

        def larger_of_two(chunk: Any, carried: list[Any]) -> list[Any]:
            return [larger(block(chunk, half), maxima) for half, maxima in enumerate(carried)]

        # Two independent chains: a single one would wait for its own results.
        maxima = w.loop(self._chunks, [splat_f32(float("-inf"))] * 2, larger_of_two)
        largest = w.fold(larger(*maxima), larger)
        offset = w.splat(b.fsub(ir.FloatType()(-0.0), b.fmul(_or_zero(w, largest), self._scale)))

        def add(chunk: Any, sums: list[Any]) -> list[Any]:
            first, second = _rounded_powers(w, [w.fma(block(chunk, half), self._factors, offset) for half in (0, 1)])
            upper = [b.and_(bits, splat_i32(-65536)) for bits in (first, second)]
            pairs = b.or_(b.lshr(first, splat_i32(16)), upper[1])
            b.store(pairs, w.at(w.plus(start, chunk, 2 * TILE_BYTES), i64(0)), align=LINE)
            return [b.fadd(total, b.bitcast(bits, V16F32)) for total, bits in zip(sums, upper, strict=True)]

        totals = w.loop(self._chunks, [splat_f32(0.0)] * 2, add)
        w.store(largest, out, i64(0))
        w.store(w.fold(b.fadd(*totals), b.fadd), out, i64(LANES))


@routine(6)
def softmax(w: VectorWriter, scores: Any, rows: Any, chunks: Any, factor: Any, result: Any, result_step: Any) -> None:
    """Probabilities of all rows, before division, and their sums; masked scores (minus infinity) become zero.

    `result`: one part per tile of rows, `result_step` bytes apart.
    """
    softmax_row = SoftmaxRow(w, chunks, factor)

    def of_row(row: Any) -> None:
        tile, inside = w.b.lshr(row, i64(4)), w.b.and_(row, i64(LANES - 1))
        start = w.plus(w.plus(scores, tile, TILE_SCORES), inside, LINE)
        softmax_row.emit(start, w.plus(w.plus(result, tile, result_step), inside, 4))

    w.repeat(rows, of_row)


@routine(4)
def merge(w: VectorWriter, state: Any, part: Any, factor: Any, groups: Any) -> None:
    """Merges one more segment into `state`: [16] largest scores, [16] totals, [16, 16 * groups] sums.

    If a row sees nothing of the segment, its state keeps its bits.
    """
    b, lanes = w.b, i64(LANES)
    ours, theirs = w.load(state, i64(0)), w.load(part, i64(0))
    largest = b.select(b.fcmp_ordered(">", theirs, ours), theirs, ours)
    base, scale = _or_zero(w, largest), w.splat(w.load_float(factor, i64(0)))
    one, two = (_power_of_two(w, b.fmul(b.fsub(x, base), scale)) for x in (ours, theirs))
    totals = w.fma(w.load(part, lanes), two, b.fmul(w.load(state, lanes), one))
    w.store(largest, state, i64(0))
    w.store(totals, state, lanes)
    undefined = ir.Constant(V16F32, ir.Undefined)
    for row in range(LANES):
        in_all = ir.Constant(V16I32, [row] * LANES)
        x, y = (b.shuffle_vector(factors, undefined, in_all) for factors in (one, two))

        def add(group: Any, row: int = row, x: Any = x, y: Any = y) -> None:
            at = w.times(w.b.add(w.plus(i64(2), row, groups), group), LANES)
            w.store(w.fma(w.load(part, at), y, b.fmul(w.load(state, at), x)), state, at)

        w.repeat(groups, add)


@routine(4)
def finish(w: VectorWriter, sums: Any, total: Any, groups: Any, out: Any) -> None:
    """out[16 * groups] = sums / total: the attention output of a row."""
    inverse = w.splat(w.b.fdiv(ir.FloatType()(1.0), w.load_float(total, i64(0))))

    def scale(group: Any) -> None:
        at = w.times(group, LANES)
        w.store(w.b.fmul(w.load(sums, at), inverse), out, at)

    w.repeat(groups, scale)
