"""Kernels of the forward pass, written as LLVM code and compiled by numba for this CPU.

Every kernel works on 16 lanes of float32, which LLVM maps to the CPU's registers (NEON, AVX2, AVX-512), and uses
explicit fused multiply-adds in a fixed order. No sum is ever regrouped, so a result depends only on its own inputs,
never on how many other rows are computed with it.

Arguments are addresses and sizes as int64. `product.py` calls routines; functions compiled by numba call kernels.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from hierspec.backends.cpu.features import has_wide_registers, is_arm
from hierspec.backends.cpu.llvm import (
    FLOAT_BYTES,
    I32,
    LANES,
    UNROLLED,
    V16F32,
    V16I32,
    VectorWriter,
    i64,
    kernel,
    splat_f32,
    splat_i32,
)
from hierspec.backends.cpu.routines import Routine, routine

_I16, _I64, _F32, _POINTER = ir.IntType(16), ir.IntType(64), ir.FloatType(), ir.PointerType()
_V16F16 = ir.VectorType(ir.HalfType(), LANES)
_LARGEST_HALF = 65504.0
BYTES = {"float32": FLOAT_BYTES, "bfloat16": 2, "float16": 2}  # of a stored number
# Prefetch distance, in rows of weights, for tiles with so much arithmetic that the CPU's own prefetching falls behind:
# saves 4% of a pass over 4 to 8 tokens on a Neoverse-N1. With one or two rows it makes no difference.
_PREFETCHED = 160


def load_stored(w: VectorWriter, address: Any, i: Any, stored: str) -> Any:
    """Numbers 16 * i .. 16 * i + 16, stored in one of `BYTES`: the weights of 16 outputs for input `i`, say."""
    place, align = w.at(address, i, BYTES[stored] * LANES), BYTES[stored]
    if stored == "bfloat16":  # a bfloat16 is the upper half of a float32
        raw = w.b.load(place, typ=ir.VectorType(_I16, LANES), align=align)
        return w.b.bitcast(w.b.shl(w.b.zext(raw, V16I32), splat_i32(16)), V16F32)
    if stored == "float16":
        return w.b.fpext(w.b.load(place, typ=_V16F16, align=align), V16F32)
    return w.b.load(place, typ=V16F32, align=align)


def as_stored(w: VectorWriter, values: Any, stored: str) -> Any:
    """Sixteen floats as they are stored in float32 or float16. What float16 cannot represent becomes its largest
    number: a value that is infinite would spoil rows that do not see it, as zero times infinity is no number."""
    if stored == "float32":
        return values
    for sign, bound in ((">", _LARGEST_HALF), ("<", -_LARGEST_HALF)):
        beyond = w.b.fcmp_ordered(sign, values, splat_f32(bound))
        values = w.b.select(beyond, splat_f32(bound), values)
    return w.b.fptrunc(values, _V16F16)


def _tile(rows: int, stored: str, onto: bool = False) -> Routine:
    @routine(6)
    def tile(w: VectorWriter, x: Any, x_step: Any, weights: Any, size: Any, out: Any, out_step: Any) -> None:
        """out[row, 0:16] = sum over i < size of x[row, i] * weights[i, 0:16], in the order of i, for each row.

        With `onto` the sums continue from `out`: a product in pieces has the same bits as a whole one.
        """
        _emit_tile(w, rows, stored, onto, x, x_step, size, out_step, [(weights, out)])

    return tile


def _double_tile(rows: int, stored: str, onto: bool, prefetch: bool) -> Routine:
    @routine(9)
    def tile(  # type: ignore[no-untyped-def]
        w: VectorWriter, x, x_step, weights, weights_offset, size, out, out_step, out_offset, ahead
    ) -> None:
        """`_tile` for two blocks of 16 outputs; the offsets, in bytes, lead to the second one.

        The sums of few rows are few chains of dependent steps. Two blocks have twice as many, and share the inputs.
        With `prefetch`, weights are prefetched that are `ahead` bytes further on.
        """
        second = w.b.add(weights, weights_offset), w.b.add(out, out_offset)
        blocks = [(weights, out), second]
        _emit_tile(w, rows, stored, onto, x, x_step, size, out_step, blocks, ahead if prefetch else None)

    return tile


def _emit_tile(  # type: ignore[no-untyped-def]
    w: VectorWriter, rows: int, stored: str, onto: bool, x, x_step, size, out_step, blocks: list[tuple[Any, Any]],
    ahead: Any = None,
) -> None:  # fmt: skip
    """Products of the same rows with several blocks: (address of its weights, address of its sums) each."""
    # Pointers that the compiler advances: sums of integers would be computed again for each load.
    starts = [w.pointer(w.plus(x, x_step, FLOAT_BYTES * row)) for row in range(rows)]
    weights = [w.pointer(address) for address, _ in blocks]
    line = BYTES[stored] * LANES
    if ahead is None and rows > 2 and not has_wide_registers():
        ahead = i64(_PREFETCHED * line)
    prefetched = [] if ahead is None else [w.pointer(w.b.add(address, ahead)) for address, _ in blocks]
    # NEON multiplies by one lane of a register at no cost, while a broadcasting load takes an arithmetic slot; on
    # x86 it is the other way round.
    by_lane = is_arm()

    def add(step: Any, sums: list[Any]) -> list[Any]:
        first = w.b.mul(step, i64(UNROLLED))
        unrolled = [w.load_unrolled(start, first) for start in starts]
        for k in range(UNROLLED):
            i = w.b.add(first, i64(k))
            inputs = [
                w.splat_lane(x, k) if by_lane else w.splat(w.load_float(start, i))
                for x, start in zip(unrolled, starts, strict=True)
            ]
            results = []
            for number, block in enumerate(weights):
                weight = load_stored(w, block, i, stored)
                for start in prefetched[number : number + 1]:
                    w.prefetch(start, i, line)
                totals = sums[number * rows : (number + 1) * rows]
                results += [w.fma(value, weight, total) for value, total in zip(inputs, totals, strict=True)]
            sums = results
        return sums

    targets = [(out, w.b.mul(out_step, i64(row))) for _, out in blocks for row in range(rows)]
    before = [w.load(*target) if onto else splat_f32(0.0) for target in targets]
    for target, total in zip(targets, w.loop(w.b.sdiv(size, i64(UNROLLED)), before, add), strict=True):
        w.store(total, *target)


def _transposed_tile(rows: int, stored: str) -> Routine:
    @routine(5)
    def tile(w: VectorWriter, x: Any, weights: Any, size: Any, out: Any, out_step: Any) -> None:
        """The same bits as `_tile`, for rows that `transpose` has interleaved: x[i, row]."""

        def add(i: Any, sums: list[Any]) -> list[Any]:
            weight = load_stored(w, weights, i, stored)
            first = w.b.mul(i, i64(rows))
            inputs = [w.splat(w.load_float(x, w.b.add(first, i64(row)))) for row in range(rows)]
            return [w.fma(value, weight, total) for value, total in zip(inputs, sums, strict=True)]

        for row, total in enumerate(w.loop(size, [splat_f32(0.0)] * rows, add)):
            w.store(total, out, w.b.mul(out_step, i64(row)))

    return tile


def _transpose(rows: int) -> Routine:
    @routine(3)
    def transpose(w: VectorWriter, x: Any, size: Any, out: Any) -> None:
        """out[i, row] = x[row, i] for i < size: a tile then reads from one stream, not from one per row."""

        def copy_column(i: Any, carried: list[Any]) -> list[Any]:
            for row in range(rows):
                value = w.load_float(x, w.b.add(w.b.mul(size, i64(row)), i))
                w.b.store(value, w.at(out, w.b.add(w.b.mul(i, i64(rows)), i64(row))), align=FLOAT_BYTES)
            return []

        w.loop(size, [], copy_column)

    return transpose


_ROWS = (8, 4, 3, 2, 1)
# By how weights are stored, whether sums continue, and rows; then also by whether they prefetch.
row_tiles = {
    stored: {onto: {rows: _tile(rows, stored, onto) for rows in _ROWS} for onto in (False, True)} for stored in BYTES
}
double_tiles = {
    stored: {
        onto: {
            prefetch: {rows: _double_tile(rows, stored, onto, prefetch) for rows in _ROWS} for prefetch in (True, False)
        }
        for onto in (False, True)
    }
    for stored in BYTES
}
transposed_row_tiles = {stored: {rows: _transposed_tile(rows, stored) for rows in (8, 16)} for stored in BYTES}
transpose_8, transpose_16 = (_transpose(rows) for rows in (8, 16))


@kernel(4, types.float32)
def add_segment(w: VectorWriter, values: Any, count: Any, scale: Any, state: Any) -> Any:
    """values[j] = exp(scale * (values[j] - largest)) in place, over 16 * count numbers; adds them to a softmax.

    `state` is the address of two floats, which are updated: the largest value so far and the sum of exponentials,
    -inf and 0 at first. Returns the factor by which sums of earlier values are to be scaled, as the state's was.
    `scale` is the address of two floats: the scale, and the scale times log2(e). The first and last 16 values may be
    padded with -inf.
    """
    b = w.b
    pairs, odd = b.sdiv(count, i64(2)), b.srem(count, i64(2))

    def block(pair: Any, which: int) -> Any:
        return b.mul(b.add(b.mul(pair, i64(2)), i64(which)), i64(LANES))

    def larger_of(pair: Any, carried: list[Any], blocks: int = 2) -> list[Any]:
        # Two independent chains: a single one would wait for its own results.
        both = [w.larger(w.load(values, block(pair, which)), carried[which]) for which in range(blocks)]
        return [*both, *carried[blocks:]]

    before = w.splat(w.load_float(state, i64(0)))
    maxima = w.loop_perhaps(pairs, [before, splat_f32(float("-inf"))], larger_of)
    maxima = w.loop_perhaps(odd, maxima, lambda _, carried: larger_of(pairs, carried, 1))
    highest = w.fold(w.larger(*maxima), w.larger)
    largest, factor = w.splat(highest), w.splat(w.load_float(scale, i64(1)))
    [change] = w.powers_of_two([b.fmul(b.fsub(before, largest), factor)])
    change = b.extract_element(change, ir.Constant(I32, 0))

    def add(pair: Any, sums: list[Any], blocks: int = 2) -> list[Any]:
        places = [block(pair, which) for which in range(blocks)]
        powers = w.powers_of_two([b.fmul(b.fsub(w.load(values, at), largest), factor) for at in places])
        for power, at in zip(powers, places, strict=True):
            w.store(power, values, at)
            sums = [b.fadd(sums[0], power)]
        return sums

    total = w.loop_perhaps(pairs, [splat_f32(0.0)], add)
    [total] = w.loop_perhaps(odd, total, lambda _, sums: add(pairs, sums, 1))
    scaled = b.fmul(w.load_float(state, i64(1)), change)
    b.store(highest, w.at(state, i64(0)), align=FLOAT_BYTES)
    b.store(b.fadd(scaled, w.fold(total, b.fadd)), w.at(state, i64(1)), align=FLOAT_BYTES)
    return change


def emit_gate(w: VectorWriter, gates: Any, ups: Any, out: Any) -> None:
    """out[0:16] = silu(gates[0:16]) * ups[0:16]."""
    g = w.load(gates, i64(0))
    silu = w.b.fdiv(g, w.b.fadd(splat_f32(1.0), w.exp(w.b.fsub(splat_f32(-0.0), g))))
    w.store(w.b.fmul(silu, w.load(ups, i64(0))), out, i64(0))


@routine(5)
def normalise(w: VectorWriter, x: Any, weight: Any, size: Any, eps: Any, out: Any) -> None:
    """Root-mean-square norm of one row; the sum of squares is always in the same eight parts. `eps`: its address."""
    eight = ir.VectorType(_F32, 8)

    def load(address: Any, step: Any) -> Any:
        return w.b.load(w.at(address, step, 8 * FLOAT_BYTES), typ=eight, align=FLOAT_BYTES)

    def add(step: Any, sums: list[Any]) -> list[Any]:
        values = load(x, step)
        return [w.b.fadd(sums[0], w.b.fmul(values, values))]

    steps = w.b.sdiv(size, i64(8))
    [squares] = w.loop(steps, [ir.Constant(eight, [0.0] * 8)], add)
    mean = w.b.fdiv(w.fold(squares, w.b.fadd), w.b.sitofp(size, _F32))
    root = w.call("llvm.sqrt.f32", w.b.fadd(mean, w.load_float(eps, i64(0))))
    factor = w.splat(w.b.fdiv(ir.Constant(_F32, 1.0), root))

    def scale(block: Any) -> None:
        first = w.times(block, LANES)
        w.store(w.b.fmul(w.b.fmul(w.load(x, first), factor), w.load(weight, first)), out, first)

    w.repeat(w.b.sdiv(size, i64(LANES)), scale)


@kernel(4)
def rotate(w: VectorWriter, x: Any, cos: Any, sin: Any, half: Any) -> None:
    """Rotates the pairs (x[i], x[i + half]) by angles with these cosines and sines, for i < half, a multiple of 8."""
    eight = ir.VectorType(_F32, 8)

    def eight_pairs(step: Any) -> None:
        first = w.times(step, 8)
        places = w.at(x, first), w.at(x, w.b.add(first, half))
        low, high, cosines, sines = (
            w.b.load(place, typ=eight, align=FLOAT_BYTES) for place in (*places, w.at(cos, first), w.at(sin, first))
        )
        turned = w.b.fsub(w.b.fmul(low, cosines), w.b.fmul(high, sines))
        other = w.b.fadd(w.b.fmul(high, cosines), w.b.fmul(low, sines))
        for value, place in zip((turned, other), places, strict=True):
            w.b.store(value, place, align=FLOAT_BYTES)

    w.repeat(w.b.sdiv(half, i64(8)), eight_pairs)


@kernel(2)
def copy_lanes(w: VectorWriter, source: Any, target: Any) -> None:
    """target[0:16] = source[0:16]."""
    w.store(w.load(source, i64(0)), target, i64(0))


@kernel(1)
def zero_lanes(w: VectorWriter, target: Any) -> None:
    """target[0:16] = 0."""
    w.store(splat_f32(0.0), target, i64(0))


@kernel(1)
def zero_nan(w: VectorWriter, target: Any) -> None:
    """Replaces what is not a number by 0 in target[0:16]."""
    values = w.load(target, i64(0))
    w.store(w.b.select(w.b.fcmp_ordered("ord", values, values), values, splat_f32(0.0)), target, i64(0))


@kernel(2)
def scale_lanes(w: VectorWriter, target: Any, factor: Any) -> None:
    """target[0:16] *= factor, the float at this address."""
    w.store(w.b.fmul(w.load(target, i64(0)), w.splat(w.load_float(factor, i64(0)))), target, i64(0))


@kernel(3)
def divide_lanes(w: VectorWriter, source: Any, divisor: Any, target: Any) -> None:
    """target[0:16] = source[0:16] / divisor, the float at this address."""
    w.store(w.b.fdiv(w.load(source, i64(0)), w.splat(w.load_float(divisor, i64(0)))), target, i64(0))


@kernel(2)
def store_integer(w: VectorWriter, target: Any, number: Any) -> None:
    w.b.store(number, w.at(target, i64(0)), align=8)


@kernel(2, types.int64)
def add_atomically(w: VectorWriter, counter: Any, amount: Any) -> Any:
    """Adds to a shared int64; returns its value before."""
    return w.b.atomic_rmw("add", w.b.inttoptr(counter, _POINTER), amount, "acq_rel")


@kernel(1, types.int64)
def read_atomically(w: VectorWriter, counter: Any) -> Any:
    return w.b.load_atomic(w.b.inttoptr(counter, _POINTER), "acquire", 8, typ=_I64)


@kernel(1, types.int64)
def yield_core(w: VectorWriter, unused: Any) -> Any:
    """Yields the core to another thread. The argument is unused: a kernel must have one."""
    function = w.b.module.globals.get("sched_yield")
    if function is None:
        function = ir.Function(w.b.module, ir.FunctionType(I32, []), "sched_yield")
    w.b.call(function, [])
    return unused
