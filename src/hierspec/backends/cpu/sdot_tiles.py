"""Products of many rows with quantised weights by sdot: the bits of `vector_products.py`, with less work.

Work that all rows share is done once: unpacking 4-bit integers to bytes, and converting scales and offsets to float32.
NEON's registers just hold a group's integer sums and float sums for three rows and 16 outputs. With more rows, each
group would spill them, and a store also takes a slot of the multipliers. Weights have ARM's layout: each group's scales
follow its integers (`scales_apart` in `forms.py`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from hierspec.backends.cpu.forms import Form
from hierspec.backends.cpu.group_reader import MAGIC, initial_sum
from hierspec.backends.cpu.llvm import I32, LANES, VectorWriter, i64, splat_f32
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP
from hierspec.backends.cpu.routines import Routine, routine

ROWS = 3  # per tile
_INPUTS = 1536  # inputs per pass over the rows: their weights, 24 KB, stay in the L1 cache
_FLOAT, _HALF, _REGISTER = 4, 2, 16  # bytes
_STEP = 4 * LANES  # bytes of weights for 4 inputs
_QUARTERS = LANES // 4  # registers per 16 floats
_REGISTERS = [(row, quarter) for row in range(ROWS) for quarter in range(_QUARTERS)]  # of a tile's sums
_F32 = ir.FloatType()
_INTEGERS, _FLOATS = ir.VectorType(I32, 4), ir.VectorType(_F32, 4)
_OCTETS, _HALVES = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.HalfType(), 8)


def _numbers(form: Form) -> int:
    """Numbers per output and group: a scale, and perhaps an offset."""
    return form.half_bytes // (LANES * _HALF)


def _load(w: VectorWriter, address: Any, kind: Any, align: int = 1) -> Any:
    return w.b.load(w.at(address, i64(0), 1), typ=kind, align=align)


def _store(w: VectorWriter, value: Any, address: Any, align: int = 1) -> None:
    w.b.store(value, w.at(address, i64(0), 1), align=align)


def _splat(w: VectorWriter, vector: Any, lane: int) -> Any:
    return w.b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(_INTEGERS, [lane] * 4))


def _load_splat(w: VectorWriter, address: Any) -> Any:
    """Broadcasts one float to four lanes."""
    single = w.b.insert_element(ir.Constant(_FLOATS, ir.Undefined), _load(w, address, _F32, 4), ir.Constant(I32, 0))
    return _splat(w, single, 0)


def _as_bytes(form: Form) -> Routine:
    half = form.integer_bytes

    @routine(3)
    def as_bytes(w: VectorWriter, packed: Any, groups: Any, out: Any) -> None:
        """Unpacks integers of 4 bits to bytes, [group, inputs / 4, 16 outputs, 4 inputs]."""

        def group(g: Any) -> None:
            source, target = w.plus(packed, g, form.unit_bytes), w.plus(out, g, 2 * half)
            for start in range(0, half, _REGISTER):
                both = _load(w, w.plus(source, start), _OCTETS)
                _store(w, w.b.and_(both, ir.Constant(_OCTETS, [15] * 16)), w.plus(target, start))
                _store(w, w.b.lshr(both, ir.Constant(_OCTETS, [4] * 16)), w.plus(target, start + half))

        w.repeat(groups, group)

    return as_bytes


def _as_floats(form: Form) -> Routine:
    count = _numbers(form) * LANES

    @routine(3)
    def as_floats(w: VectorWriter, block: Any, groups: Any, out: Any) -> None:
        """Converts the scales of groups, and their offsets, to float32."""

        def group(g: Any) -> None:
            halves = w.plus(w.plus(block, form.integer_bytes), g, form.unit_bytes)
            for start in range(0, count, 8):
                source, target = w.plus(halves, start * _HALF), w.plus(w.plus(out, g, count * _FLOAT), start * _FLOAT)
                _store(w, w.b.fpext(_load(w, source, _HALVES, 2), ir.VectorType(_F32, 8)), target, 4)

        w.repeat(groups, group)

    return as_floats


def _tile(form: Form) -> Routine:
    numbers = _numbers(form)
    step_of_group = form.unit_bytes if form.bits == 8 else form.group * LANES  # 4 bits were unpacked to bytes

    @routine(13)
    def tile(
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
        before: Any,
        before_step: Any,
        out: Any,
        out_step: Any,
    ) -> None:
        """out[row, 0:16] = before[row, 0:16] + the product of three 8-bit rows with one block of weights.

        `sixteens` is the number of 16 inputs per group. If it were a compile-time constant, LLVM would unroll the loop
        and compute one output after the other with all weights of a group on the stack.
        """
        b = w.b
        sdot = w.function("llvm.aarch64.neon.sdot.v4i32.v16i8", _INTEGERS, _INTEGERS, _OCTETS, _OCTETS)
        x_rows = [w.plus(x, x_step, row) for row in range(ROWS)]
        record_rows = [w.plus(records, records_step, row * _FLOAT) for row in range(ROWS)]

        def multiply(g: Any) -> list[Any]:
            def sixteen(number: Any, totals: list[Any]) -> list[Any]:
                start, weights_start = w.plus(number, g, sixteens), w.plus(integers, g, step_of_group)
                inputs = [_load(w, w.plus(x_row, start, 16), _INTEGERS) for x_row in x_rows]
                totals = [*totals]
                for step in range(4):
                    block = w.plus(w.plus(weights_start, number, 4 * _STEP), step * _STEP)
                    for quarter in range(_QUARTERS):
                        weights = _load(w, w.plus(block, quarter * _REGISTER), _OCTETS)
                        for row in range(ROWS):
                            four, index = _splat(w, inputs[row], step), row * _QUARTERS + quarter
                            totals[index] = b.call(sdot, [totals[index], weights, b.bitcast(four, _OCTETS)])
                return totals

            # Load from memory: a load takes no slot of the multipliers, a register copy does.
            begin = [_load(w, w.plus(initial, n * _REGISTER), _INTEGERS, 16) for n in range(len(_REGISTERS))]
            return w.loop(sixteens, begin, sixteen)

        def group(g: Any, sums: list[Any]) -> list[Any]:
            totals, results = multiply(g), []
            block = w.plus(scales, g, numbers * LANES * _FLOAT)
            for (row, quarter), total, result in zip(_REGISTERS, totals, sums, strict=True):
                at, words = w.plus(block, quarter * _REGISTER), w.plus(record_rows[row], g, WORDS_PER_GROUP * _FLOAT)
                factor = b.fmul(_load(w, at, _FLOATS, 4), _load_splat(w, words))
                exact = b.fsub(b.bitcast(total, _FLOATS), ir.Constant(_FLOATS, [float(MAGIC)] * 4))
                result = w.call("llvm.fma.v4f32", exact, factor, result)
                if numbers == 2:
                    offset, summed = w.plus(at, LANES * _FLOAT), w.plus(words, _FLOAT)
                    result = w.call("llvm.fma.v4f32", _load(w, offset, _FLOATS, 4), _load_splat(w, summed), result)
                results.append(result)
            return results

        def place(start: Any, step: Any, register: tuple[int, int]) -> Any:
            row, quarter = register
            return w.plus(w.plus(start, step, row * _FLOAT), quarter * _REGISTER)

        sums = [_load(w, place(before, before_step, register), _FLOATS, 4) for register in _REGISTERS]
        for register, total in zip(_REGISTERS, w.loop(groups, sums, group), strict=True):
            _store(w, total, place(out, out_step, register), 4)

    return tile


def by_three(form: Form) -> Routine | None:
    """One block of 16 outputs for all rows, whose number is a multiple of three; arguments as in `over_quantised_rows`.

    None for forms whose scales are products, or whose integers have a zero point.
    """
    if form.multiplied or form.zero:
        return None
    size, most = form.group, _INPUTS // form.group  # groups at a time
    tile, as_bytes, as_floats, numbers = _tile(form), _as_bytes(form), _as_floats(form), _numbers(form)

    @routine(7)
    def over(w: VectorWriter, x: Any, rows: Any, records: Any, weights: Any, inputs: Any, out: Any, out_step: Any):  # type: ignore[no-untyped-def]
        b = w.b

        def memory(count: int, kind: Any) -> Any:
            place = b.alloca(ir.ArrayType(kind, count))
            place.align = 64
            return b.ptrtoint(place, ir.IntType(64))

        initial, zeros, scales = memory(ROWS * LANES, I32), memory(LANES, _F32), memory(most * numbers * LANES, _F32)
        unpacked = memory(_INPUTS * LANES, ir.IntType(8)) if form.bits == 4 else None
        all_groups = b.sdiv(inputs, i64(size))
        sixteens = b.sdiv(b.sdiv(inputs, i64(16)), all_groups)
        records_step = w.times(all_groups, WORDS_PER_GROUP)
        for index in range(len(_REGISTERS)):
            _store(w, ir.Constant(_INTEGERS, [initial_sum()] * 4), w.plus(initial, index * _REGISTER), 16)

        w.store(splat_f32(0.0), zeros, i64(0))

        def some_groups(number: Any) -> None:
            first, begun = w.times(number, most), b.icmp_signed(">", number, i64(0))
            left = b.sub(all_groups, first)
            groups = b.select(b.icmp_signed("<", left, i64(most)), left, i64(most))
            integers = w.plus(weights, first, form.unit_bytes)
            as_floats(w, integers, groups, scales)
            if unpacked is not None:
                as_bytes(w, integers, groups, unpacked)
                integers = unpacked

            def three_rows(number: Any) -> None:
                row = w.times(number, ROWS)
                start = w.plus(w.plus(x, row, inputs), first, size)
                ours = w.plus(w.plus(records, row, records_step, _FLOAT), first, WORDS_PER_GROUP * _FLOAT)
                target = w.plus(out, row, out_step, _FLOAT)
                before, step = b.select(begun, target, zeros), b.select(begun, out_step, i64(0))
                given = start, inputs, ours, records_step, integers, scales, groups, sixteens, initial, before, step
                tile(w, *given, target, out_step)

            w.repeat(b.sdiv(rows, i64(ROWS)), three_rows)

        w.repeat(b.sdiv(w.plus(all_groups, most - 1), i64(most)), some_groups)

    return over
