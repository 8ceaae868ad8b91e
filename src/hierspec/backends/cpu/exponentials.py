"""Kernels for distributions: the largest of every 16 logits, and exponentials of logits."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from hierspec.backends.cpu.llvm import LANES, VectorWriter, i64, kernel, splat_f32, splat_i32

_FLOAT, _DOUBLE = 4, 8  # bytes
_HALF = LANES // 2
_DOUBLES = ir.VectorType(ir.DoubleType(), _HALF)
# Coefficients of exp(r) = sum of c[i] * r**i for |r| <= ln(2) / 2, to within 2e-9 and 2e-14 (Chebyshev interpolation).
_EXPONENTIAL_32 = (
    0.9999999999999998, 1.0000000377388714, 0.5000000047146338, 0.16666415414039956, 0.041666352770371874,
    0.008375134774721269, 0.0013941118941080835,
)  # fmt: skip
_EXPONENTIAL_64 = (
    1.0000000000000142, 1.0000000000000078, 0.49999999999420636, 0.16666666666535587, 0.041666667049363414,
    0.00833333339466241, 0.0013888800450065728, 0.000198411572507681, 2.48850380474713e-05, 2.7645878154944726e-06,
)  # fmt: skip


def reduce_lanes(w: VectorWriter, how: str, vector: Any) -> Any:
    """Reduces all lanes of a float32 or int32 vector to one number, with the LLVM reduction of this name."""
    number = vector.type.element
    name = f"llvm.vector.reduce.{how}.v{vector.type.count}{'i' if isinstance(number, ir.IntType) else 'f'}32"
    function = w.b.module.globals.get(name)
    if function is None:
        function = ir.Function(w.b.module, ir.FunctionType(number, [vector.type]), name)
    return w.b.call(function, [vector])


@kernel(3, types.float32)
def block_maxima(w: VectorWriter, values: Any, blocks: Any, out: Any) -> Any:
    """out[block] = the largest of its 16 values; returns the largest of all, NaN where one is NaN or +inf."""
    b = w.b

    def update(block: Any, carried: list[Any]) -> list[Any]:
        x = w.load(values, b.mul(block, i64(LANES)))
        w.store(reduce_lanes(w, "fmax", x), out, block)
        bits = b.bitcast(x, carried[1].type)
        names = ("maxnum.v16f32", "smax.v16i32", "umax.v16i32")
        return [
            w.call(f"llvm.{name}", value, largest)
            for name, value, largest in zip(names, (x, bits, bits), carried, strict=True)
        ]

    start = [splat_f32(float("-inf")), splat_i32(-(1 << 31)), splat_i32(0)]
    most, signed, unsigned = w.loop(blocks, start, update)
    # As integers, infinity and NaN are above all other floats of the same sign.
    infinity, minus_infinity = (ir.Constant(ir.IntType(32), bits) for bits in (0x7F800000, 0xFF800000))
    finite = b.and_(
        b.icmp_signed("<", reduce_lanes(w, "smax", signed), infinity),
        b.icmp_unsigned("<=", reduce_lanes(w, "umax", unsigned), minus_infinity),
    )
    return b.select(finite, reduce_lanes(w, "fmax", most), ir.Constant(ir.FloatType(), float("nan")))


def _exponential(w: VectorWriter, x: Any, coefficients: tuple[float, ...], mantissa: int, least: float) -> Any:
    """e**x for x <= 0, in float32 or float64 depending on the size of its mantissa; x is clamped to `least`.

    x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial in r, and n in the exponent's bits.
    """
    b, kind, size = w.b, x.type, 32 if mantissa == 23 else 64
    words = ir.VectorType(ir.IntType(size), kind.count)

    def splat(value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def call(name: str, *arguments: Any) -> Any:
        return w.call(f"llvm.{name}.v{kind.count}f{size}", *arguments)

    x = call("maxnum", x, splat(least))
    # Adding 1.5 * 2**mantissa leaves the nearest integer in the lowest bits; the shift also adds the exponent's bias.
    shift = splat(1.5 * 2.0**mantissa + (127 if size == 32 else 1023))
    shifted = call("fma", x, splat(1 / math.log(2)), shift)
    r = call("fma", b.fsub(shifted, shift), splat(-math.log(2)), x)
    value = splat(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = call("fma", value, r, splat(coefficient))
    power = b.shl(b.bitcast(shifted, words), ir.Constant(words, [mantissa] * kind.count))
    return b.fmul(value, b.bitcast(power, kind))


@kernel(2, types.float32)
def exp_block_sum(w: VectorWriter, values: Any, scale: Any) -> Any:
    """The sum of exp((values[0:16] - scale[0]) * scale[1]), in float32; scale as in `exp_block`."""
    b = w.b
    largest, factor = (
        w.splat(b.fptrunc(b.load(w.at(scale, i64(i), _DOUBLE), typ=ir.DoubleType(), align=_DOUBLE), ir.FloatType()))
        for i in range(2)
    )
    y = b.fmul(b.fsub(w.load(values, i64(0)), largest), factor)
    return w.fold(_exponential(w, y, _EXPONENTIAL_32, 23, -87.0), b.fadd)


@kernel(3, types.float64)
def exp_block(w: VectorWriter, values: Any, scale: Any, out: Any) -> Any:
    """out[0:16] = exp((values - scale[0]) * scale[1]), all in float64 but values; returns their sum."""
    b = w.b

    def setting(index: int) -> Any:
        value = b.load(w.at(scale, i64(index), _DOUBLE), typ=ir.DoubleType(), align=_DOUBLE)
        single = b.insert_element(ir.Constant(_DOUBLES, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), _HALF), [0] * _HALF)
        return b.shuffle_vector(single, ir.Constant(_DOUBLES, ir.Undefined), zeros)

    largest, factor = setting(0), setting(1)
    sums = []
    for first in (i64(0), i64(_HALF)):
        x = b.load(w.at(values, first), typ=ir.VectorType(ir.FloatType(), _HALF), align=_FLOAT)
        y = b.fmul(b.fsub(b.fpext(x, _DOUBLES), largest), factor)
        sums.append(_exponential(w, y, _EXPONENTIAL_64, 52, -708.0))
        b.store(sums[-1], w.at(out, first, _DOUBLE), align=_DOUBLE)
    total = b.fadd(*sums)
    width = _HALF
    while width > 1:  # pairwise by halves: always in the same order
        width //= 2
        low, high = (
            b.shuffle_vector(
                total,
                ir.Constant(total.type, ir.Undefined),
                ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(start, start + width))),
            )
            for start in (0, width)
        )
        total = b.fadd(low, high)
    return b.extract_element(total, ir.Constant(ir.IntType(32), 0))
