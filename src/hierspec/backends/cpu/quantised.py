"""Weights in 8 or 4 bits: how they are stored, and the pieces of vector code that multiply with them.

A group of inputs of one output shares a scale: weight = scale * q + low, with q from -127 to 127 and low 0 for 64
inputs (int8), or q from 0 to 15 for 32 (int4, as in GGUF's blocks). A row of inputs is brought to 8 bits as well, group
by group, just before a product: then its sums of products are whole numbers, which no order of adding can change, and
only one multiplication by the scales a group is rounded. So these products, too, are the same bits at every width.

The 16 outputs that meet one group stand together: group x 16 whole numbers, then 16 scales, then (int4) 16 lows.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import binding, ir

from hierspec.backends.cpu.llvm import LANES, VectorWriter, integers, piece, whole

# Inputs that share a scale. What a group costs beside its products is a third of the work with 32 of them; 8 bits are
# enough for 64, 4 are not.
BYTE_GROUP, NIBBLE_GROUP = 64, 32
GROUPS = {8: BYTE_GROUP, 4: NIBBLE_GROUP}
BLOCK_BYTES = {8: BYTE_GROUP * LANES + 2 * LANES, 4: NIBBLE_GROUP * LANES // 2 + 4 * LANES}  # of 16 outputs, one group

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_BYTES, _WORDS, _FLOATS = ir.VectorType(_I8, 4 * LANES), ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_AT_ONCE = 4  # inputs of 16 outputs that one step takes: 64 bytes
RECORD = 4  # words about one group of a row: its scale, scale * sum of its bytes, -128 * sum as a whole number, 0


def _dot_instruction() -> str:
    """How this CPU adds four products of bytes at once: by sdot (ARM), vpdpbusd (AVX-512 VNNI), or not at all."""
    if binding.get_host_cpu_features().get("avx512vnni", False):
        return "vpdpbusd"
    if platform.machine() not in ("aarch64", "arm64"):
        return ""
    # LLVM does not list it among the features, but it uses it where it can: an instruction that the compiler does
    # not know for this CPU would end the process, so the compiler is asked.
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    return "sdot" if "sdot" in machine.emit_assembly(binding.parse_assembly(_SUM_OF_PRODUCTS)) else ""


_SUM_OF_PRODUCTS = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @sum(ptr %a, ptr %b) {
  %x = load <16 x i8>, ptr %a
  %y = load <16 x i8>, ptr %b
  %p = sext <16 x i8> %x to <16 x i32>
  %q = sext <16 x i8> %y to <16 x i32>
  %m = mul <16 x i32> %p, %q
  %r = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %m)
  ret i32 %r
}
"""
DOT = _dot_instruction()
# Where turning whole numbers into floats is slow (2 cycles on one of two units of a Neoverse-N1), sums begin at the
# bits of a float so large that its last digit counts ones: a sum of less than 2**22 then only has to be taken off it,
# and nothing is rounded.
_POWER = 3 << 22
_BEGIN = int(np.float32(_POWER).view(np.int32)) if DOT == "sdot" else 0


def _quantiser(size: int) -> Any:
    @piece(4, apart=True)
    def quantise(w: VectorWriter, x: Any, groups: Any, out: Any, scales: Any) -> None:
        """The floats of x as bytes in `out`, and a record of each group of them in `scales`."""

        def group(g: Any, nothing: list[Any]) -> list[Any]:
            first = w.b.mul(g, whole(size))
            parts = [w.load(x, w.b.add(first, whole(place))) for place in range(0, size, LANES)]
            larger, *sizes = [w.call("llvm.fabs.v16f32", part) for part in parts]
            for one in sizes:
                larger = w.call("llvm.maxnum.v16f32", larger, one)
            most = w.fold(larger, lambda a, b: w.b.select(w.b.fcmp_ordered(">", a, b), a, b))
            scale = w.b.fmul(most, ir.Constant(_F32, 1 / 127))
            nothing_there = w.b.fcmp_ordered("==", most, ir.Constant(_F32, 0.0))
            factor = w.b.select(nothing_there, ir.Constant(_F32, 0.0), w.b.fdiv(ir.Constant(_F32, 127.0), most))
            spread = w.spread(factor)
            total = integers(0)
            for number, part in enumerate(parts):
                rounded = w.b.fptosi(w.call("llvm.rint.v16f32", w.b.fmul(part, spread)), _WORDS)
                total = w.b.add(total, rounded)
                place = w.at(out, w.b.add(first, whole(number * LANES)), 1)
                w.b.store(w.b.trunc(rounded, ir.VectorType(_I8, LANES)), place, align=1)
            # A sum of at most 64 * 127 is exact as a float, whatever the order.
            summed = w.fold(w.b.sitofp(total, _FLOATS), w.b.fadd)
            words = [scale, w.b.fmul(scale, summed), w.b.fptosi(w.b.fmul(summed, ir.Constant(_F32, -128.0)), _I32)]
            for place, word in enumerate(words):
                w.b.store(word, w.at(scales, w.b.add(w.b.mul(g, whole(RECORD)), whole(place))), align=4)
            return []

        w.loop(groups, [], group)

    return quantise


quantise_for_bytes, quantise_for_nibbles = _quantiser(BYTE_GROUP), _quantiser(NIBBLE_GROUP)


def _dot(w: VectorWriter, total: Any, weights: Any, four: Any, lane: int) -> Any:
    """total[o] += sum over i < 4 of weights[4 * o + i] * (word `lane` of `four`)[i], for every output o."""
    lanes = total.type.count
    nothing = ir.Constant(four.type, ir.Undefined)
    if DOT == "sdot":
        narrow = ir.VectorType(_I32, 4)
        spread = w.b.shuffle_vector(four, nothing, ir.Constant(narrow, [lane] * 4))
        inputs = w.b.bitcast(spread, ir.VectorType(_I8, 16))
        function = w.function("llvm.aarch64.neon.sdot.v4i32.v16i8", narrow, narrow, inputs.type, inputs.type)
        parts = []
        for quarter in range(lanes // 4):
            own = w.part(weights, 16 * quarter, 16)
            parts.append(w.b.call(function, [w.part(total, 4 * quarter, 4), own, inputs]))
        return w.joined(parts)
    spread = w.b.shuffle_vector(four, nothing, ir.Constant(ir.VectorType(_I32, lanes), [lane] * lanes))
    inputs = w.b.bitcast(spread, weights.type)
    if DOT == "vpdpbusd":
        function = w.function("llvm.x86.avx512.vpdpbusd.512", _WORDS, _WORDS, _BYTES, _BYTES)
        return w.b.call(function, [total, weights, inputs])
    for i in range(4):  # every fourth byte, widened
        chosen = ir.Constant(ir.VectorType(_I32, lanes), [4 * output + i for output in range(lanes)])
        unknown = ir.Constant(weights.type, ir.Undefined)
        one = w.b.sext(w.b.shuffle_vector(weights, unknown, chosen), total.type)
        two = w.b.sext(w.b.shuffle_vector(inputs, unknown, chosen), total.type)
        total = w.b.add(total, w.b.mul(one, two))
    return total


def _low_tile(rows: int, bits: int) -> Any:
    # All 16 outputs at once, although the registers of NEON do not hold two sums of each for 4 rows: half of them at a
    # time would ask memory for everything in the first half and for nothing in the second. Of 8 rows they hold few.
    lanes = LANES // 2 if DOT == "sdot" and rows > 4 else LANES
    words, floats = ir.VectorType(_I32, lanes), ir.VectorType(_F32, lanes)
    octets, scales_type = ir.VectorType(_I8, 4 * lanes), ir.VectorType(ir.HalfType(), lanes)
    raised = bits == 8 and DOT == "vpdpbusd"  # it takes weights without a sign: 128 is added to them
    size = GROUPS[bits]

    @piece(8, apart=True)
    def tile(
        w: VectorWriter, x: Any, x_step: Any, records: Any, record_step: Any, weights: Any, groups: Any, out: Any,
        out_step: Any,
    ) -> None:  # fmt: skip
        """out[row, 0:16] = the product of 8-bit rows with one block of weights, group after group."""
        starts = [w.b.add(x, w.b.mul(x_step, whole(row))) for row in range(rows)]
        owns = [w.b.add(records, w.b.mul(record_step, whole(4 * row))) for row in range(rows)]

        def every(value: Any, kind: Any) -> Any:
            """One number in all lanes."""
            single = w.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
            chosen = ir.Constant(words, [0] * lanes)
            return w.b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), chosen)

        def fma(a: Any, b: Any, c: Any) -> Any:
            return w.call(f"llvm.fma.v{lanes}f32", a, b, c)

        def as_floats(total: Any) -> Any:
            if not _BEGIN:
                return w.b.sitofp(total, floats)
            return w.b.fsub(w.b.bitcast(total, floats), ir.Constant(floats, [float(_POWER)] * lanes))

        def outputs(first: int) -> None:
            def steps(block: Any) -> list[Any]:
                """The bytes of a group that meet 4 inputs each."""
                count = size * bits // 8 // _AT_ONCE
                places = [w.at(block, whole(4 * LANES * step + 4 * first), 1) for step in range(count)]
                loaded = [w.b.load(place, typ=octets, align=1) for place in places]
                if bits == 8:
                    return (
                        [w.b.xor(part, ir.Constant(octets, [-128] * 4 * lanes)) for part in loaded]
                        if raised
                        else loaded
                    )
                low = [w.b.and_(part, ir.Constant(octets, [15] * 4 * lanes)) for part in loaded]
                return low + [w.b.lshr(part, ir.Constant(octets, [4] * 4 * lanes)) for part in loaded]

            def halves(block: Any, offset: int) -> Any:
                place = w.at(block, whole(offset + 2 * first), 1)
                return w.b.fpext(w.b.load(place, typ=scales_type, align=2), floats)

            def group(g: Any, sums: list[Any]) -> list[Any]:
                block = w.b.add(weights, w.b.mul(g, whole(BLOCK_BYTES[bits])))
                record = w.b.mul(g, whole(RECORD))
                totals = [ir.Constant(words, [_BEGIN] * lanes)] * rows
                if raised:  # and 128 times the sum of the inputs taken off
                    place = w.b.add(record, whole(2))
                    totals = [every(w.b.bitcast(w.load_one(own, place), _I32), words) for own in owns]
                inputs: list[Any] = []
                for step, weight in enumerate(steps(block)):
                    if step % 4 == 0:
                        place = w.b.add(w.b.mul(g, whole(size)), whole(4 * step))
                        inputs = [w.b.load(w.at(s, place, 1), typ=ir.VectorType(_I32, 4), align=1) for s in starts]
                    totals = [_dot(w, t, weight, four, step % 4) for t, four in zip(totals, inputs, strict=True)]
                number_bytes = BLOCK_BYTES[bits] - (2 if bits == 8 else 4) * LANES
                scale = halves(block, number_bytes)
                low = halves(block, number_bytes + 2 * LANES) if bits == 4 else None
                results = []
                for own, total, held in zip(owns, totals, sums, strict=True):
                    factor = w.b.fmul(scale, every(w.load_one(own, record), floats))
                    held = fma(as_floats(total), factor, held)
                    if low is not None:
                        held = fma(low, every(w.load_one(own, w.b.add(record, whole(1))), floats), held)
                    results.append(held)
                return results

            for row, total in enumerate(w.loop(groups, [ir.Constant(floats, [0.0] * lanes)] * rows, group)):
                w.store(total, out, w.b.add(w.b.mul(out_step, whole(row)), whole(first)))

        for first in range(0, LANES, lanes):
            outputs(first)

    return tile


byte_tile_1, byte_tile_2, byte_tile_3, byte_tile_4 = (_low_tile(rows, 8) for rows in (1, 2, 3, 4))
byte_tile_8, nibble_tile_8 = (_low_tile(8, bits) for bits in (8, 4))
nibble_tile_1, nibble_tile_2, nibble_tile_3, nibble_tile_4 = (_low_tile(rows, 4) for rows in (1, 2, 3, 4))


def pack(weight: np.ndarray, bits: int) -> np.ndarray:
    """[outputs, inputs] floats as blocks [outputs / 16, groups of inputs, bytes of a block]."""
    (outputs, inputs), group = weight.shape, GROUPS[bits]
    steps = group // _AT_ONCE
    groups = np.ascontiguousarray(weight, np.float32).reshape(outputs * inputs // group, group)
    numbers, scales, lows = (_to_bytes if bits == 8 else _to_nibbles)(groups)
    packed = np.empty((outputs // LANES, inputs // group, BLOCK_BYTES[bits]), np.uint8)
    # [panel, output, group, step, 4] -> [panel, group, step, output, 4]
    by_step = numbers.reshape(outputs // LANES, LANES, inputs // group, steps, _AT_ONCE).transpose(0, 2, 3, 1, 4)
    by_step = np.ascontiguousarray(by_step).view(np.uint8).reshape(*packed.shape[:2], steps, _AT_ONCE * LANES)
    if bits == 4:
        by_step = by_step[:, :, : steps // 2] | by_step[:, :, steps // 2 :] << 4
    number_bytes = by_step.shape[2] * by_step.shape[3]
    packed[:, :, :number_bytes] = by_step.reshape(*packed.shape[:2], number_bytes)
    for place, values in enumerate((scales, lows)[: 1 if bits == 8 else 2]):
        own = np.ascontiguousarray(values.reshape(outputs // LANES, LANES, inputs // group).transpose(0, 2, 1))
        start = number_bytes + 2 * LANES * place
        packed[:, :, start : start + 2 * LANES] = own.view(np.uint8)
    return packed


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The floats that blocks stand for, [outputs, inputs]: what the model's weights now are."""
    panels, groups, size = packed.shape
    number_bytes = size - (2 if bits == 8 else 4) * LANES
    numbers = packed[:, :, :number_bytes].reshape(panels, groups, -1, LANES, _AT_ONCE)
    if bits == 4:
        numbers = np.concatenate((numbers & 15, numbers >> 4), axis=2)
    signed = numbers.view(np.int8).astype(np.float32).transpose(0, 3, 1, 2, 4).reshape(panels, LANES, groups, -1)

    def of_groups(start: int) -> np.ndarray:
        halves = np.ascontiguousarray(packed[:, :, start : start + 2 * LANES]).view(np.float16)
        return halves.astype(np.float32).transpose(0, 2, 1)[..., None]

    values = signed * of_groups(number_bytes)
    if bits == 4:
        values = values + of_groups(number_bytes + 2 * LANES)
    found: np.ndarray = values.reshape(panels * LANES, -1)
    return found


def _to_bytes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symmetric: the largest becomes 127. What came from such groups comes back exactly."""
    scales = (np.abs(groups).max(axis=1) / np.float32(127)).astype(np.float16)
    numbers = np.clip(np.rint(groups / _divisor(scales)), -127, 127).astype(np.int8)
    return numbers, scales, np.zeros_like(scales)


def _to_nibbles(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """16 levels from the least to the largest. What came from such blocks (GGUF Q4_0, Q4_1) comes back exactly:
    their values lie on a grid, perhaps one that does not use all 16 levels, and that grid is looked for."""
    lows = groups.min(axis=1).astype(np.float16)
    above = groups - lows.astype(np.float32)[:, None]
    most = above.max(axis=1)
    scales = (most / np.float32(15)).astype(np.float16)
    unfitting = np.flatnonzero(~_on_grid(above, scales))
    for levels in range(14, 0, -1):
        tried = (most[unfitting] / np.float32(levels)).astype(np.float16)
        fits = _on_grid(above[unfitting], tried)
        scales[unfitting[fits]] = tried[fits]
        unfitting = unfitting[~fits]
    return np.clip(np.rint(above / _divisor(scales)), 0, 15).astype(np.int8), scales, lows


def _on_grid(above: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Whether all numbers of a group are whole multiples of its scale."""
    divisor, fits = _divisor(scales), np.ones(len(above), bool)
    for part in (slice(0, 4), slice(4, None)):  # few numbers show that most groups do not fit
        steps = above[fits, part] / divisor[fits]
        fits[fits] = (np.abs(steps - np.rint(steps)) < 2e-4).all(axis=1)
    return fits


def _divisor(scales: np.ndarray) -> np.ndarray:
    wide = scales.astype(np.float32)[:, None]
    return np.where(wide > 0, wide, np.float32(1))
