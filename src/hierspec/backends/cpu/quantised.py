"""Weights in 8 or 4 bits: how they are stored, and the kernels that multiply with them.

A group of inputs of one output shares a scale: weight = scale * q + offset, with q from -127 to 127 and offset 0 for 64
inputs (int8), or q from 0 to 15 for 32 (int4, as in GGUF's blocks). A row of inputs is quantised to 8 bits as well,
group by group, just before a product: then its sums of products are integers, which no order of adding can change, and
only one multiplication by the scales per group is rounded. So these products, too, are the same bits at every width.

A block of 16 outputs holds the integers of all groups, [groups, inputs / 4, 16 outputs, 4 inputs] (int4: the second
half of a group in the upper four bits), then for every group 16 scales and (int4) 16 offsets. The integers of a
group of 64 are a tile of the matrix units (`byte_tiles.py`), each at the beginning of a cache line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.features import dot_instruction, has_pair_products
from hierspec.backends.cpu.llvm import LANES, V16F32, V16I32, VectorWriter, i64, splat_i32
from hierspec.backends.cpu.pair_products import add_by_pairs
from hierspec.backends.cpu.routines import Routine, routine

# Inputs that share a scale. What a group costs beside its products is a third of the work with 32 of them; 8 bits are
# enough for 64, 4 are not.
INT8_GROUP, INT4_GROUP = 64, 32
GROUPS = {8: INT8_GROUP, 4: INT4_GROUP}
INTEGER_BYTES = {8: INT8_GROUP * LANES, 4: INT4_GROUP * LANES // 2}  # of 16 outputs, one group
SCALE_BYTES = {8: 2 * LANES, 4: 4 * LANES}  # and offsets
GROUP_BYTES = {bits: INTEGER_BYTES[bits] + SCALE_BYTES[bits] for bits in GROUPS}
_LINE = 64  # bytes of a cache line
# Words about one group of a row of inputs: its scale, scale * sum of its integers, -128 * sum as an integer, 0.
WORDS_PER_GROUP = 4


def block_bytes(inputs: int, bits: int) -> int:
    """Of 16 outputs: whole cache lines."""
    return -(-inputs // GROUPS[bits] * GROUP_BYTES[bits] // _LINE) * _LINE


_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_V64I8 = ir.VectorType(_I8, 4 * LANES)
_INPUTS_PER_STEP = 4  # for 16 outputs: 64 bytes
MAGIC = 3 << 22


def initial_sum() -> int:
    """Where integer sums begin.

    Where converting integers to floats is slow (2 cycles on one of two units of a Neoverse-N1), they begin at the bits
    of a float so large that its last digit counts ones: a sum of less than 2**22 then only needs a subtraction, and
    nothing is rounded.
    """
    return int(np.float32(MAGIC).view(np.int32)) if dot_instruction() == "sdot" else 0


def input_quantiser(size: int) -> Routine:
    @routine(4)
    def quantise_inputs(w: VectorWriter, x: Any, groups: Any, out: Any, group_scales: Any) -> None:
        """The floats of x in 8 bits in `out`, and WORDS_PER_GROUP words about each group in `group_scales`."""

        def group(g: Any, carried: list[Any]) -> list[Any]:
            first = w.b.mul(g, i64(size))
            parts = [w.load(x, w.b.add(first, i64(start))) for start in range(0, size, LANES)]
            larger, *others = [w.call("llvm.fabs.v16f32", part) for part in parts]
            for other in others:
                larger = w.call("llvm.maxnum.v16f32", larger, other)
            largest = w.fold(larger, lambda a, b: w.b.select(w.b.fcmp_ordered(">", a, b), a, b))
            scale = w.b.fmul(largest, ir.Constant(_F32, 1 / 127))
            all_zero = w.b.fcmp_ordered("==", largest, ir.Constant(_F32, 0.0))
            factor = w.b.select(all_zero, ir.Constant(_F32, 0.0), w.b.fdiv(ir.Constant(_F32, 127.0), largest))
            factors = w.splat(factor)
            total = splat_i32(0)
            for number, part in enumerate(parts):
                rounded = w.b.fptosi(w.call("llvm.rint.v16f32", w.b.fmul(part, factors)), V16I32)
                total = w.b.add(total, rounded)
                target = w.at(out, w.b.add(first, i64(number * LANES)), 1)
                w.b.store(w.b.trunc(rounded, ir.VectorType(_I8, LANES)), target, align=1)
            # A sum of at most 64 * 127 is exact as a float, whatever the order.
            summed = w.fold(w.b.sitofp(total, V16F32), w.b.fadd)
            words = [scale, w.b.fmul(scale, summed), w.b.fptosi(w.b.fmul(summed, ir.Constant(_F32, -128.0)), _I32)]
            for index, word in enumerate(words):
                target = w.at(group_scales, w.b.add(w.b.mul(g, i64(WORDS_PER_GROUP)), i64(index)))
                w.b.store(word, target, align=4)
            return []

        w.loop(groups, [], group)

    return quantise_inputs


quantise_for_int8, quantise_for_int4 = input_quantiser(INT8_GROUP), input_quantiser(INT4_GROUP)


def dot(w: VectorWriter, total: Any, weights: Any, four: Any, lane: int) -> Any:
    """total[o] += sum over i < 4 of weights[4 * o + i] * (word `lane` of `four`)[i], for every output o."""
    lanes = total.type.count
    undefined = ir.Constant(four.type, ir.Undefined)
    if dot_instruction() == "sdot":
        narrow = ir.VectorType(_I32, 4)
        word = w.b.shuffle_vector(four, undefined, ir.Constant(narrow, [lane] * 4))
        inputs = w.b.bitcast(word, ir.VectorType(_I8, 16))
        function = w.function("llvm.aarch64.neon.sdot.v4i32.v16i8", narrow, narrow, inputs.type, inputs.type)
        parts = []
        for quarter in range(lanes // 4):
            weight = w.lanes(weights, 16 * quarter, 16)
            parts.append(w.b.call(function, [w.lanes(total, 4 * quarter, 4), weight, inputs]))
        return w.concatenate(parts)
    word = w.b.shuffle_vector(four, undefined, ir.Constant(ir.VectorType(_I32, lanes), [lane] * lanes))
    inputs = w.b.bitcast(word, weights.type)
    if dot_instruction() == "vpdpbusd":
        function = w.function("llvm.x86.avx512.vpdpbusd.512", V16I32, V16I32, _V64I8, _V64I8)
        return w.b.call(function, [total, weights, inputs])
    for i in range(4):  # every fourth byte, widened
        indices = ir.Constant(ir.VectorType(_I32, lanes), [4 * output + i for output in range(lanes)])
        undefined = ir.Constant(weights.type, ir.Undefined)
        weight = w.b.sext(w.b.shuffle_vector(weights, undefined, indices), total.type)
        value = w.b.sext(w.b.shuffle_vector(inputs, undefined, indices), total.type)
        total = w.b.add(total, w.b.mul(weight, value))
    return total


def _add_by_fours(w: VectorWriter, totals: Sequence[Any], weights: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
    """Each row's total[o] + the sum over all inputs of a group of weights times inputs, for every output o."""
    results = [*totals]
    inputs: list[Any] = []
    for step, weight in enumerate(weights):
        if step % 4 == 0:
            inputs = [w.b.load(w.at(row, i64(4 * step), 1), typ=ir.VectorType(_I32, 4), align=1) for row in rows]
        results = [dot(w, total, weight, four, step % 4) for total, four in zip(results, inputs, strict=True)]
    return results


def _quantised_tile(rows: int, bits: int, by_pairs: bool | None = None) -> Routine:
    size = GROUPS[bits]

    @routine(8)
    def tile(
        w: VectorWriter,
        x: Any,
        x_step: Any,
        group_scales: Any,
        scales_step: Any,
        weights: Any,
        groups: Any,
        out: Any,
        out_step: Any,
    ) -> None:
        """out[row, 0:16] = the product of 8-bit rows with one block of weights, group after group."""
        # All 16 outputs at once, although the registers of NEON do not hold two sums of each for 4 rows: half of them
        # at a time would read everything from memory in the first half and nothing in the second. Of 8 rows they hold
        # few.
        lanes = LANES // 2 if dot_instruction() == "sdot" and rows > 4 else LANES
        integers, floats = ir.VectorType(_I32, lanes), ir.VectorType(_F32, lanes)
        octets, halves = ir.VectorType(_I8, 4 * lanes), ir.VectorType(ir.HalfType(), lanes)
        unsigned = bits == 8 and dot_instruction() == "vpdpbusd"  # it takes unsigned weights: 128 is added to them
        start = initial_sum()
        in_pairs = has_pair_products() and rows % 2 == 0 if by_pairs is None else by_pairs
        x_rows = [w.b.add(x, w.b.mul(x_step, i64(row))) for row in range(rows)]
        scale_rows = [w.b.add(group_scales, w.b.mul(scales_step, i64(4 * row))) for row in range(rows)]

        def splat(value: Any, kind: Any) -> Any:
            single = w.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
            zeros = ir.Constant(integers, [0] * lanes)
            return w.b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), zeros)

        def fma(a: Any, b: Any, c: Any) -> Any:
            return w.call(f"llvm.fma.v{lanes}f32", a, b, c)

        def as_floats(total: Any) -> Any:
            if not start:
                return w.b.sitofp(total, floats)
            return w.b.fsub(w.b.bitcast(total, floats), ir.Constant(floats, [float(MAGIC)] * lanes))

        def outputs(first: int) -> None:
            def load_steps(block: Any) -> list[Any]:
                """The weights of a group, for 4 inputs each."""
                count = size * bits // 8 // _INPUTS_PER_STEP
                pointers = [w.at(block, i64(4 * LANES * step + 4 * first), 1) for step in range(count)]
                loaded = [w.b.load(pointer, typ=octets, align=1) for pointer in pointers]
                if bits == 8:
                    high_bits = ir.Constant(octets, [-128] * 4 * lanes)
                    return [w.b.xor(step, high_bits) for step in loaded] if unsigned else loaded
                low = [w.b.and_(step, ir.Constant(octets, [15] * 4 * lanes)) for step in loaded]
                return low + [w.b.lshr(step, ir.Constant(octets, [4] * 4 * lanes)) for step in loaded]

            def load_halves(block: Any, start: int) -> Any:
                pointer = w.at(block, i64(start + 2 * first), 1)
                return w.b.fpext(w.b.load(pointer, typ=halves, align=2), floats)

            def group(g: Any, sums: list[Any]) -> list[Any]:
                block = w.plus(weights, g, INTEGER_BYTES[bits])
                scales_at = w.plus(w.plus(weights, groups, INTEGER_BYTES[bits]), g, SCALE_BYTES[bits])
                word = w.b.mul(g, i64(WORDS_PER_GROUP))
                totals = [ir.Constant(integers, [start] * lanes)] * rows
                if unsigned:  # and 128 times the sum of the inputs is subtracted
                    negative_sum = w.b.add(word, i64(2))
                    totals = [
                        splat(w.b.bitcast(w.load_float(scales, negative_sum), _I32), integers) for scales in scale_rows
                    ]
                inputs = [w.plus(row, g, size) for row in x_rows]
                multiply = add_by_pairs if in_pairs else _add_by_fours
                totals = multiply(w, totals, load_steps(block), inputs)
                scale = load_halves(scales_at, 0)
                offset = load_halves(scales_at, 2 * LANES) if bits == 4 else None
                results = []
                for scales, total, result in zip(scale_rows, totals, sums, strict=True):
                    factor = w.b.fmul(scale, splat(w.load_float(scales, word), floats))
                    result = fma(as_floats(total), factor, result)
                    if offset is not None:
                        result = fma(offset, splat(w.load_float(scales, w.b.add(word, i64(1))), floats), result)
                    results.append(result)
                return results

            for row, total in enumerate(w.loop(groups, [ir.Constant(floats, [0.0] * lanes)] * rows, group)):
                w.store(total, out, w.b.add(w.b.mul(out_step, i64(row)), i64(first)))

        for first in range(0, LANES, lanes):
            outputs(first)

    return tile


int8_tile_1, int8_tile_2, int8_tile_3, int8_tile_4 = (_quantised_tile(rows, 8) for rows in (1, 2, 3, 4))
int8_tile_8, int4_tile_8 = (_quantised_tile(8, bits) for bits in (8, 4))
int4_tile_1, int4_tile_2, int4_tile_3, int4_tile_4 = (_quantised_tile(rows, 4) for rows in (1, 2, 3, 4))


def quantise_weights(weight: np.ndarray, bits: int) -> np.ndarray:
    """[outputs, inputs] floats as blocks [outputs / 16, bytes of a block]."""
    (outputs, inputs), group = weight.shape, GROUPS[bits]
    groups = np.ascontiguousarray(weight, np.float32).reshape(outputs * inputs // group, group)
    return arrange_groups(*(_to_int8 if bits == 8 else _to_int4)(groups), outputs, bits)


def arrange_groups(
    integers: np.ndarray, scales: np.ndarray, offsets: np.ndarray, outputs: int, bits: int
) -> np.ndarray:
    """Groups [outputs * groups of inputs, size], with a float16 scale and offset each, as such blocks."""
    group = GROUPS[bits]
    inputs = integers.size // outputs
    panels, count, steps = outputs // LANES, inputs // group, group // _INPUTS_PER_STEP
    by_step = integers.reshape(panels, LANES, count, steps, _INPUTS_PER_STEP).transpose(0, 2, 3, 1, 4)
    octets: np.ndarray = np.ascontiguousarray(by_step).view(np.uint8).reshape(panels, count, steps, -1)
    if bits == 4:
        octets = octets[:, :, : steps // 2] | octets[:, :, steps // 2 :] << 4
    blocks = np.zeros((panels, block_bytes(inputs, bits)), np.uint8)
    of_integers, of_scales = _parts(blocks, count, bits)
    of_integers[:] = octets.reshape(of_integers.shape)
    for index, values in enumerate((scales, offsets)[: of_scales.shape[2]]):
        of_scales[:, :, index] = values.reshape(panels, LANES, count).transpose(0, 2, 1)
    return blocks


def dequantise_weights(blocks: np.ndarray, inputs: int, bits: int) -> np.ndarray:
    """The floats that blocks represent, [outputs, inputs]: what the model's weights now are."""
    panels, count = len(blocks), inputs // GROUPS[bits]
    of_integers, of_scales = _parts(blocks, count, bits)
    integers = of_integers.reshape(panels, count, -1, LANES, _INPUTS_PER_STEP)
    if bits == 4:
        integers = np.concatenate((integers & 15, integers >> 4), axis=2)
    signed = integers.view(np.int8).astype(np.float32).transpose(0, 3, 1, 2, 4).reshape(panels, LANES, count, -1)
    by_output = of_scales.astype(np.float32).transpose(2, 0, 3, 1)[..., None]
    values = signed * by_output[0]
    if bits == 4:
        values = values + by_output[1]
    weights: np.ndarray = values.reshape(panels * LANES, -1)
    return weights


def _parts(blocks: np.ndarray, count: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers [panels, groups, bytes], and scales and perhaps offsets [panels, groups, 1 or 2, 16]: views."""
    end = count * INTEGER_BYTES[bits]
    integers = blocks[:, :end].reshape(len(blocks), count, INTEGER_BYTES[bits])
    scales = blocks[:, end : end + count * SCALE_BYTES[bits]].view(np.float16)
    return integers, scales.reshape(len(blocks), count, -1, LANES)


def _to_int8(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symmetric: the largest becomes 127. Weights that came from such groups come back exactly."""
    scales = (np.abs(groups).max(axis=1) / np.float32(127)).astype(np.float16)
    integers = np.clip(np.rint(groups / _divisor(scales)), -127, 127).astype(np.int8)
    return integers, scales, np.zeros_like(scales)


def _to_int4(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """16 levels from the smallest to the largest. Weights that came from such blocks (GGUF Q4_0, Q4_1) come back
    exactly: their values lie on a grid, perhaps one that does not use all 16 levels, and we search for that grid."""
    offsets = groups.min(axis=1).astype(np.float16)
    above = groups - offsets.astype(np.float32)[:, None]
    largest = above.max(axis=1)
    scales = (largest / np.float32(15)).astype(np.float16)
    unfitting = np.flatnonzero(~_on_grid(above, scales))
    for levels in range(14, 0, -1):
        candidates = (largest[unfitting] / np.float32(levels)).astype(np.float16)
        fits = _on_grid(above[unfitting], candidates)
        scales[unfitting[fits]] = candidates[fits]
        unfitting = unfitting[~fits]
    return np.clip(np.rint(above / _divisor(scales)), 0, 15).astype(np.int8), scales, offsets


def _on_grid(above: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Whether all numbers of a group are integer multiples of its scale."""
    divisor, fits = _divisor(scales), np.ones(len(above), bool)
    for part in (slice(0, 4), slice(4, None)):  # few numbers show that most groups do not fit
        steps = above[fits, part] / divisor[fits]
        fits[fits] = (np.abs(steps - np.rint(steps)) < 2e-4).all(axis=1)
    return fits


def _divisor(scales: np.ndarray) -> np.ndarray:
    column = scales.astype(np.float32)[:, None]
    return np.where(column > 0, column, np.float32(1))
