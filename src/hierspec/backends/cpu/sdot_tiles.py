"""Products of many rows with weights in 4 bits by sdot: the same bits as the tiles of `quantised.py`, with less work.

What all rows have in common is made once for them: integers as bytes, scales and offsets as float32. Of six rows and
eight outputs the registers of NEON just hold a group's integer sums beside the float sums that they are added to; with
more, each group would store and load them, and a store takes a slot of the multipliers too.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hierspec.backends.cpu.llvm import I32, LANES, VectorWriter, i64
from hierspec.backends.cpu.quantised import (
    INT4_GROUP,
    INTEGER_BYTES,
    MAGIC,
    SCALE_BYTES,
    WORDS_PER_GROUP,
    initial_sum,
)
from hierspec.backends.cpu.routines import routine

ROWS = 6  # of a tile
_OUTPUTS = 8
_GROUPS = 32  # whose weights are in the nearest cache together: 16 KB
_FLOAT, _HALF, _REGISTER = 4, 2, 16  # bytes
_STEP = 4 * LANES  # bytes of weights for 4 inputs
_NUMBERS = 2 * LANES  # scales and offsets of a group
_F32 = ir.FloatType()
_INTEGERS, _FLOATS = ir.VectorType(I32, 4), ir.VectorType(_F32, 4)
_OCTETS, _HALVES = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.HalfType(), 8)


def _load(w: VectorWriter, address: Any, kind: Any, align: int = 1) -> Any:
    return w.b.load(w.at(address, i64(0), 1), typ=kind, align=align)


def _store(w: VectorWriter, value: Any, address: Any, align: int = 1) -> None:
    w.b.store(value, w.at(address, i64(0), 1), align=align)


def _splat(w: VectorWriter, vector: Any, lane: int) -> Any:
    return w.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(_INTEGERS, [lane] * 4))


@routine(3)
def _as_bytes(w: VectorWriter, packed: Any, groups: Any, out: Any) -> None:
    """Integers of 4 bits as bytes, [group, inputs / 4, 16 outputs, 4 inputs]."""
    half = INTEGER_BYTES[4]

    def group(g: Any) -> None:
        source, target = w.plus(packed, g, half), w.plus(out, g, 2 * half)
        for start in range(0, half, _REGISTER):
            both = _load(w, w.plus(source, start), _OCTETS)
            _store(w, w.b.and_(both, ir.Constant(_OCTETS, [15] * 16)), w.plus(target, start))
            _store(w, w.b.lshr(both, ir.Constant(_OCTETS, [4] * 16)), w.plus(target, start + half))

    w.repeat(groups, group)


@routine(3)
def _as_floats(w: VectorWriter, halves: Any, groups: Any, out: Any) -> None:
    """Scales and offsets as float32."""

    def group(g: Any) -> None:
        for start in range(0, _NUMBERS, 8):
            source = w.plus(w.plus(halves, g, SCALE_BYTES[4]), start * _HALF)
            target = w.plus(w.plus(out, g, _NUMBERS * _FLOAT), start * _FLOAT)
            _store(w, w.b.fpext(_load(w, source, _HALVES, 2), ir.VectorType(_F32, 8)), target, 4)

    w.repeat(groups, group)


@routine(11)
def _tile(
    w: VectorWriter,
    x: Any,
    x_step: Any,
    records: Any,
    records_step: Any,
    integers: Any,
    scales: Any,
    groups: Any,
    sixteens: Any,
    initial: Any,
    out: Any,
    out_step: Any,
) -> None:
    """Onto out[row, 0:8], group after group: the product of six 8-bit rows with half a block of weights.

    `sixteens` is how often a group has 16 inputs. Were it known when this is compiled, LLVM would unroll the loop, and
    compute output after output with all weights of a group on the stack.
    """
    b, quarters = w.b, _OUTPUTS // 4
    sdot = w.function("llvm.aarch64.neon.sdot.v4i32.v16i8", _INTEGERS, _INTEGERS, _OCTETS, _OCTETS)
    registers = [(row, quarter) for row in range(ROWS) for quarter in range(quarters)]
    x_rows = [w.plus(x, x_step, row) for row in range(ROWS)]
    record_rows = [w.plus(records, records_step, row * _FLOAT) for row in range(ROWS)]

    def multiply(g: Any) -> list[Any]:
        def sixteen(number: Any, totals: list[Any]) -> list[Any]:
            start = w.plus(number, g, sixteens)
            block = w.plus(integers, start, 4 * _STEP)
            inputs = [_load(w, w.plus(x_row, start, 16), _INTEGERS) for x_row in x_rows]
            totals = [*totals]
            for step in range(4):
                weights = [_load(w, w.plus(block, step * _STEP + q * _REGISTER), _OCTETS) for q in range(quarters)]
                for index, (row, quarter) in enumerate(registers):
                    four = b.bitcast(_splat(w, inputs[row], step), _OCTETS)
                    totals[index] = b.call(sdot, [totals[index], weights[quarter], four])
            return totals

        # From memory: a load costs no slot of the multipliers, a copy of a register does.
        begin = [_load(w, w.plus(initial, n * _REGISTER), _INTEGERS, 16) for n in range(len(registers))]
        return w.loop(sixteens, begin, sixteen)

    def group(g: Any, sums: list[Any]) -> list[Any]:
        totals = multiply(g)
        numbers = w.plus(scales, g, _NUMBERS * _FLOAT)
        scale, offset = (
            [_load(w, w.plus(numbers, start * _FLOAT + q * _REGISTER), _FLOATS, 4) for q in range(quarters)]
            for start in (0, LANES)
        )
        words = [_load(w, w.plus(record, g, WORDS_PER_GROUP * _FLOAT), _FLOATS, 4) for record in record_rows]
        results = []
        for (row, quarter), total, result in zip(registers, totals, sums, strict=True):
            factor = b.fmul(scale[quarter], _splat(w, words[row], 0))
            exact = b.fsub(b.bitcast(total, _FLOATS), ir.Constant(_FLOATS, [float(MAGIC)] * 4))
            result = w.call("llvm.fma.v4f32", exact, factor, result)
            results.append(w.call("llvm.fma.v4f32", offset[quarter], _splat(w, words[row], 1), result))
        return results

    places = [w.plus(w.plus(out, out_step, row * _FLOAT), quarter * _REGISTER) for row, quarter in registers]
    before = [_load(w, place, _FLOATS, 4) for place in places]
    for place, total in zip(places, w.loop(groups, before, group), strict=True):
        _store(w, total, place, 4)


@routine(7)
def int4_tiles_by_six(
    w: VectorWriter, x: Any, rows: Any, records: Any, weights: Any, size: Any, out: Any, out_step: Any
) -> None:
    """One block of 16 outputs for all rows, a multiple of six; arguments as for `tiles.int4_tiles`."""
    b = w.b

    def memory(count: int, kind: Any) -> Any:
        place = b.alloca(ir.ArrayType(kind, count))
        place.align = 64
        return b.ptrtoint(place, ir.IntType(64))

    initial, scales = memory(ROWS * _OUTPUTS, I32), memory(_GROUPS * _NUMBERS, _F32)
    integers = memory(_GROUPS * INT4_GROUP * LANES, ir.IntType(8))
    all_groups = b.sdiv(size, i64(INT4_GROUP))
    sixteens = b.sdiv(b.sdiv(size, i64(16)), all_groups)
    records_step = w.times(all_groups, WORDS_PER_GROUP)
    halves = w.plus(weights, all_groups, INTEGER_BYTES[4])
    for index in range(ROWS * _OUTPUTS // 4):
        _store(w, ir.Constant(_INTEGERS, [initial_sum()] * 4), w.plus(initial, index * _REGISTER), 16)

    def zero(row: Any) -> None:
        w.store(ir.Constant(ir.VectorType(_F32, LANES), [0.0] * LANES), out, b.mul(row, out_step))

    def some_groups(number: Any) -> None:
        first = w.times(number, _GROUPS)
        left = b.sub(all_groups, first)
        groups = b.select(b.icmp_signed("<", left, i64(_GROUPS)), left, i64(_GROUPS))
        _as_bytes(w, w.plus(weights, first, INTEGER_BYTES[4]), groups, integers)
        _as_floats(w, w.plus(halves, first, SCALE_BYTES[4]), groups, scales)

        def six_rows(number: Any) -> None:
            row = w.times(number, ROWS)
            inputs = w.plus(w.plus(x, row, size), first, INT4_GROUP)
            ours = w.plus(w.plus(records, row, records_step, _FLOAT), first, WORDS_PER_GROUP * _FLOAT)
            target = w.plus(out, row, out_step, _FLOAT)
            for output in range(0, LANES, _OUTPUTS):
                block, numbers = w.plus(integers, 4 * output), w.plus(scales, output * _FLOAT)
                place = w.plus(target, output * _FLOAT)
                _tile(w, inputs, size, ours, records_step, block, numbers, groups, sixteens, initial, place, out_step)

        w.repeat(b.sdiv(rows, i64(ROWS)), six_rows)

    w.repeat(rows, zero)
    w.repeat(b.sdiv(w.plus(all_groups, _GROUPS - 1), i64(_GROUPS)), some_groups)
