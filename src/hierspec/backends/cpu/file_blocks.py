"""Weights in the bits that a GGUF file stores, arranged for products: how they are laid out, and their kernels.

Integers of a file's blocks keep their values: those of up to 4 bits are stored in 4, others in 8. So do the float16
numbers and the small integers that scale them; a group's scale and offset, products of two of these, are exact in
float32. Inputs are quantised to 8 bits for each group, as in `quantised.py`, and products have the same bits at every
width for the same reason.

For each 16 outputs, unit after unit: a unit is as many inputs as share one `d`. It holds 16 times `d` and 16 times what
is added or scales the minimums, the multipliers of all groups and their minimums (16 bytes each), then all integers. So
memory is read from front to back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.features import dot_instruction
from hierspec.backends.cpu.llvm import LANES, VectorWriter, i64
from hierspec.backends.cpu.quantised import MAGIC, WORDS_PER_GROUP, dot, initial_sum, input_quantiser
from hierspec.backends.cpu.routines import Routine, routine
from hierspec.backends.cpu.tiles import over_quantised_rows
from hierspec.checkpoints.gguf_blocks import UnpackedBlocks

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_INPUTS_PER_STEP = 4
_LARGE = 1 << 23  # a float whose last digit counts ones
_LARGE_BITS = int(np.float32(_LARGE).view(np.int32))


@dataclass(frozen=True)
class Form:
    """How one kind of blocks is stored and multiplied."""

    name: str
    bits: int  # of a stored integer, 4 or 8
    group: int  # inputs that share a scale
    unit: int  # inputs that share one d
    offsets: bool = False  # something is added to a group
    zero: int = 0  # what the stored integers are too large by

    @property
    def groups(self) -> int:
        """Of a unit. Where there is one, its scale is d itself."""
        return self.unit // self.group

    @property
    def multiplied(self) -> bool:
        """A group's scale is d times an integer of its own."""
        return self.unit > self.group

    @property
    def small_start(self) -> int:
        """Where multipliers begin in a unit."""
        return 2 * LANES * (2 if self.offsets else 1)

    @property
    def integers_start(self) -> int:
        if not self.multiplied:
            return self.small_start
        small = self.groups * LANES * (2 if self.offsets else 1)
        return -(-(self.small_start + small) // 64) * 64  # a line of the cache

    @property
    def unit_bytes(self) -> int:
        """Of a unit, for 16 outputs."""
        return self.integers_start + self.unit * LANES * self.bits // 8


FORMS = (
    Form("q4_0", 4, 32, 32, zero=8),
    Form("q8_0", 8, 32, 32),
    Form("q5_1", 8, 32, 32, offsets=True),
    Form("q2_k", 4, 16, 256, offsets=True),
    Form("q3_k", 4, 16, 256, zero=4),
    Form("q4_k", 4, 32, 256, offsets=True),
    Form("q5_k", 8, 32, 256, offsets=True),
    Form("q6_k", 8, 16, 256),
)
FORM = {form.name: form for form in FORMS}
SMALLEST_GROUP = min(form.group for form in FORMS)
# The form that holds a quantisation's numbers; Q4_1 is what `quantised.py` calls int4.
FORM_OF = {
    **{form.name.upper(): form for form in FORMS},
    "Q5_0": FORM["q8_0"],
    "IQ4_NL": FORM["q8_0"],
}


def _tile(rows: int, form: Form) -> Routine:
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
        """out[row, 0:16] = the product of 8-bit rows with the weights of 16 outputs, group after group."""
        _Tile(w, rows, form, x, x_step, group_scales, scales_step).store(weights, groups, out, out_step)

    return tile


class _Tile:
    """Emits the product of some rows with the weights of 16 outputs."""

    def __init__(
        self, w: VectorWriter, rows: int, form: Form, x: Any, x_step: Any, group_scales: Any, scales_step: Any
    ) -> None:
        self.w, self.rows, self.form = w, rows, form
        # As in `quantised.py`: all 16 outputs at once, but for many rows where registers are short.
        self.lanes = LANES // 2 if dot_instruction() == "sdot" and rows > 4 else LANES
        self.integers, self.floats = ir.VectorType(_I32, self.lanes), ir.VectorType(_F32, self.lanes)
        self.unsigned = dot_instruction() == "vpdpbusd"  # weights are unsigned there
        self.start = initial_sum()
        self.x_rows = [w.b.add(x, w.b.mul(x_step, i64(row))) for row in range(rows)]
        self.scale_rows = [w.b.add(group_scales, w.b.mul(scales_step, i64(4 * row))) for row in range(rows)]

    def store(self, weights: Any, groups: Any, out: Any, out_step: Any) -> None:
        w, form = self.w, self.form
        units = w.b.sdiv(groups, i64(form.groups))
        for first in range(0, LANES, self.lanes):

            def unit(number: Any, sums: list[Any], first: int = first) -> list[Any]:
                start, first_group = w.plus(weights, number, form.unit_bytes), w.times(number, form.groups)
                d = self._halves(start, first)
                offset = self._halves(w.plus(start, 2 * LANES), first) if form.offsets else None
                if offset is not None and form.multiplied:  # minimums are subtracted
                    offset = w.b.fsub(self._all(-0.0), offset)

                def group(g: Any, carried: list[Any]) -> list[Any]:
                    return self._group(carried, start, g, w.b.add(first_group, g), d, offset, first)

                if form.groups == 1:
                    return group(i64(0), sums)
                return w.loop(i64(form.groups), sums, group)

            zeros = [self._all(0.0)] * self.rows
            for row, total in enumerate(w.loop(units, zeros, unit)):
                w.store(total, out, w.b.add(w.b.mul(out_step, i64(row)), i64(first)))

    def _group(self, sums: list[Any], unit: Any, g: Any, number: Any, d: Any, offset: Any, first: int) -> list[Any]:
        """The sums after one more group: `g` of its unit, `number` of its row of inputs."""
        w, form = self.w, self.form
        word = w.times(number, WORDS_PER_GROUP)
        totals = [self._initial(scales, word) for scales in self.scale_rows]
        inputs: list[Any] = []
        for step, weight in enumerate(self._steps(unit, g, first)):
            if step % 4 == 0:
                i = w.plus(w.times(number, form.group), 4 * step)
                inputs = [w.b.load(w.at(row, i, 1), typ=ir.VectorType(_I32, 4), align=1) for row in self.x_rows]
            totals = [dot(w, t, weight, four, step % 4) for t, four in zip(totals, inputs, strict=True)]
        scale = d
        if form.multiplied:
            small = w.plus(w.plus(unit, form.small_start), g, LANES)
            scale = w.b.fmul(d, self._small(small, first))
            if offset is not None:
                offset = w.b.fmul(offset, self._small(w.plus(small, form.groups * LANES), first))
        results = []
        for scales, total, result in zip(self.scale_rows, totals, sums, strict=True):
            factor = w.b.fmul(scale, self._splat(w.load_float(scales, word), self.floats))
            result = self._fma(self._as_floats(total), factor, result)
            if offset is not None:
                summed = self._splat(w.load_float(scales, w.plus(word, 1)), self.floats)
                result = self._fma(offset, summed, result)
            results.append(result)
        return results

    def _steps(self, unit: Any, g: Any, first: int) -> list[Any]:
        """The integers of a group, for 4 inputs each."""
        w, form = self.w, self.form
        octets = ir.VectorType(_I8, 4 * self.lanes)
        start = w.plus(w.plus(unit, form.integers_start), g, form.group * LANES * form.bits // 8)
        count = form.group * form.bits // 8 // _INPUTS_PER_STEP
        pointers = [w.at(start, i64(4 * LANES * step + 4 * first), 1) for step in range(count)]
        loaded = [w.b.load(pointer, typ=octets, align=1) for pointer in pointers]
        if form.bits == 8:
            high_bits = ir.Constant(octets, [-128] * 4 * self.lanes)
            return [w.b.xor(step, high_bits) for step in loaded] if self.unsigned else loaded
        low = [w.b.and_(step, ir.Constant(octets, [15] * 4 * self.lanes)) for step in loaded]
        return low + [w.b.lshr(step, ir.Constant(octets, [4] * 4 * self.lanes)) for step in loaded]

    def _initial(self, scales: Any, word: Any) -> Any:
        """Where the integer sum of a group begins: at minus what the stored integers are too large by, in all."""
        w = self.w
        above = 128 if self.form.bits == 8 and self.unsigned else self.form.zero
        if not above:
            return ir.Constant(self.integers, [self.start] * self.lanes)
        # The word is -128 times the sum of the inputs.
        total = w.b.bitcast(w.load_float(scales, w.plus(word, 2)), _I32)
        total = w.b.sdiv(total, ir.Constant(_I32, 128 // above))
        return self._splat(w.b.add(total, ir.Constant(_I32, self.start)), self.integers)

    def _halves(self, address: Any, first: int) -> Any:
        halves = ir.VectorType(ir.HalfType(), self.lanes)
        pointer = self.w.at(address, i64(first), 2)
        return self.w.b.fpext(self.w.b.load(pointer, typ=halves, align=2), self.floats)

    def _small(self, address: Any, first: int) -> Any:
        """Integers of 8 bits as floats."""
        b, octets = self.w.b, ir.VectorType(_I8, self.lanes)
        loaded = b.load(self.w.at(address, i64(first), 1), typ=octets, align=1)
        if not self.start:
            return b.sitofp(b.sext(loaded, self.integers), self.floats)
        # As in `initial_sum`: 128 more, as the last digits of a large float.
        above = b.zext(b.xor(loaded, ir.Constant(octets, [-128] * self.lanes)), self.integers)
        large = b.or_(above, ir.Constant(self.integers, [_LARGE_BITS] * self.lanes))
        return b.fsub(b.bitcast(large, self.floats), self._all(_LARGE + 128))

    def _as_floats(self, total: Any) -> Any:
        if not self.start:
            return self.w.b.sitofp(total, self.floats)
        return self.w.b.fsub(self.w.b.bitcast(total, self.floats), self._all(MAGIC))

    def _all(self, value: float) -> Any:
        """A number in all lanes."""
        return ir.Constant(self.floats, [float(value)] * self.lanes)

    def _splat(self, value: Any, kind: Any) -> Any:
        undefined = ir.Constant(kind, ir.Undefined)
        single = self.w.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.w.b.shuffle_vector(single, undefined, ir.Constant(self.integers, [0] * self.lanes))

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.w.call(f"llvm.fma.v{self.lanes}f32", a, b, c)


quantise_for = {group: input_quantiser(group) for group in sorted({form.group for form in FORMS})}
form_tiles = {form: over_quantised_rows(form.group, *(_tile(rows, form) for rows in (8, 4, 3, 2, 1))) for form in FORMS}


def form_bytes(outputs: int, inputs: int, form: Form) -> int:
    return outputs // LANES * (inputs // form.unit) * form.unit_bytes


def arrange(blocks: UnpackedBlocks, outputs: int, form: Form) -> np.ndarray:
    """Blocks of [outputs, inputs], row after row, as [outputs / 16, units, bytes of a unit]."""
    panels = outputs // LANES
    units = blocks.integers.size // (outputs * form.unit)
    arranged = np.zeros((panels, units, form.unit_bytes), np.uint8)
    for start, halves in ((0, blocks.d), (2 * LANES, blocks.offset)):
        if halves is not None:
            by_unit = np.ascontiguousarray(halves.reshape(panels, LANES, units).transpose(0, 2, 1))
            arranged[:, :, start : start + 2 * LANES] = by_unit.view(np.uint8)
    size = form.groups * LANES
    for start, small in ((0, blocks.multipliers), (size, blocks.minimums)):
        if small is not None:
            by_group = small.reshape(panels, LANES, units, form.groups).transpose(0, 2, 3, 1)
            start += form.small_start
            arranged[:, :, start : start + size] = by_group.reshape(panels, units, size).view(np.uint8)
    integers: np.ndarray = blocks.integers.view(np.uint8)
    if form.bits == 4:
        parts = (integers + np.uint8(form.zero) if form.zero else integers).reshape(-1, 2, form.group // 2)
        integers = parts[:, 0] | parts[:, 1] << 4
    words = integers.reshape(panels, LANES, units, -1).view(np.uint32)  # of 4 inputs each
    target = arranged[:, :, form.integers_start :].view(np.uint32).reshape(panels, units, -1, LANES)
    target[...] = words.transpose(0, 2, 3, 1)
    return arranged


def dequantise(arranged: np.ndarray, form: Form) -> np.ndarray:
    """The floats that arranged blocks represent, [outputs, inputs]."""
    panels, units, _ = arranged.shape

    def by_output(start: int, size: int, dtype: type) -> np.ndarray:
        """Numbers of 16 outputs as one row for each unit of an output."""
        numbers: np.ndarray = np.ascontiguousarray(arranged[:, :, start : start + size]).view(dtype)
        moved = np.moveaxis(numbers.reshape(panels, units, -1, LANES), -1, 1)
        return np.ascontiguousarray(moved).reshape(panels * LANES * units, -1)

    d = by_output(0, 2 * LANES, np.float16)[:, 0]
    offset = by_output(2 * LANES, 2 * LANES, np.float16)[:, 0] if form.offsets else None
    size, start = form.groups * LANES, form.small_start
    multipliers = by_output(start, size, np.int8) if form.multiplied else None
    minimums = by_output(start + size, size, np.int8) if form.multiplied and form.offsets else None
    words = arranged[:, :, form.integers_start :].reshape(panels, units, form.groups, -1, LANES, _INPUTS_PER_STEP)
    if form.bits == 4:
        words = np.concatenate((words & 15, words >> 4), axis=3)
    integers = words.view(np.int8).transpose(0, 4, 1, 2, 3, 5).reshape(panels * LANES * units, form.unit)
    blocks = UnpackedBlocks(integers - np.int8(form.zero), d, multipliers, offset, minimums)
    return blocks.values().reshape(panels * LANES, units * form.unit)
