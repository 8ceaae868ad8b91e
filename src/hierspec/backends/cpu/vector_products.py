"""Products of quantised weights by vectors, for every form: one block of 16 outputs, or two, some rows at a time.

Each group's sum of products is an integer. Groups are added to float sums in order, by the same steps for any number of
rows, here and in `byte_tiles.py`: products have the same bits at every width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from hierspec.backends.cpu.features import dot_instruction, has_pair_products, has_wide_bytes, is_arm
from hierspec.backends.cpu.forms import FORMS, Form
from hierspec.backends.cpu.group_reader import MAGIC, GroupReader, initial_sum
from hierspec.backends.cpu.llvm import LANES, V16I32, VectorWriter, i64
from hierspec.backends.cpu.pair_products import add_by_pairs
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP
from hierspec.backends.cpu.routines import Routine, routine
from hierspec.backends.cpu.sdot_tiles import by_three
from hierspec.backends.cpu.short_sums import add_in_16_bits, four_inputs
from hierspec.backends.cpu.tiles import over_quantised_rows, over_quantised_rows_of_two

# Prefetch distance in bytes on x86 (0: no prefetching), as in `byte_tiles.py`. With few rows, products take less time
# than reading the weights, and the hardware's prefetching stops at a page boundary.
AHEAD = 32 << 10
_AHEAD_OF_TWO = {8: 32 << 10, 4: 16 << 10}  # the same for two blocks at once, by bits: 2% to 5% of a pass over 4 tokens
_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_V64I8 = ir.VectorType(_I8, 4 * LANES)
_INPUTS_PER_STEP = 4  # for 16 outputs: 64 bytes


def _dot(w: VectorWriter, total: Any, weights: Any, four: Any, lane: int) -> Any:
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
        return _dot_unsigned(w, total, weights, inputs)
    for i in range(4):  # every fourth byte, widened
        indices = ir.Constant(ir.VectorType(_I32, lanes), [4 * output + i for output in range(lanes)])
        undefined = ir.Constant(weights.type, ir.Undefined)
        weight = w.b.sext(w.b.shuffle_vector(weights, undefined, indices), total.type)
        value = w.b.sext(w.b.shuffle_vector(inputs, undefined, indices), total.type)
        total = w.b.add(total, w.b.mul(weight, value))
    return total


def _dot_unsigned(w: VectorWriter, total: Any, weights: Any, inputs: Any) -> Any:
    """`_dot` for unsigned weights, with inputs that every output has."""
    function = w.function("llvm.x86.avx512.vpdpbusd.512", V16I32, V16I32, _V64I8, _V64I8)
    return w.b.call(function, [total, weights, inputs])


def _add_by_fours(w: VectorWriter, totals: Sequence[Any], weights: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
    """Adds to each row's total[o] the sum of weights times inputs over all inputs of a group, for every output o."""
    results = [*totals]
    inputs: list[Any] = []
    for step, weight in enumerate(weights):
        if step % 4 == 0:
            inputs = [w.b.load(w.at(row, i64(4 * step), 1), typ=ir.VectorType(_I32, 4), align=1) for row in rows]
        results = [_dot(w, total, weight, four, step % 4) for total, four in zip(results, inputs, strict=True)]
    return results


def _add_blocks(w: VectorWriter, initial: list[Any], blocks: Sequence[Sequence[Any]], rows: list[Any]) -> list[Any]:
    """Each row's sums of a group for every block, by vpdpbusd: they start from `initial`. The blocks share each load of
    inputs."""
    totals = [[*initial] for _ in blocks]
    for step, weights in enumerate(zip(*blocks, strict=True)):
        for number, row in enumerate(rows):
            inputs = four_inputs(w, row, step, _V64I8)
            for its, weight in zip(totals, weights, strict=True):
                its[number] = _dot_unsigned(w, its[number], weight, inputs)
    return totals


def _multiply(form: Form, in_pairs: bool) -> Callable[..., list[Any]]:
    if in_pairs:
        return add_by_pairs
    return partial(add_in_16_bits, form=form) if dot_instruction() == "vpmaddubsw" else _add_by_fours


def _registers_are_few(rows: int) -> bool:
    """Whether the registers cannot hold the integer and float sums of all 16 outputs of this many rows."""
    if dot_instruction() == "vpmaddubsw":
        return rows > 2 and not has_wide_bytes()
    return dot_instruction() == "sdot" and rows > 4


def _apart(w: VectorWriter, address: Any) -> Any:
    """The same address, opaque to LLVM.

    Otherwise LLVM would compute each row's address from that of the row before, at every step, on a unit that also
    multiplies.
    """
    return w.b.asm(ir.FunctionType(address.type, [address.type]), "", "=r,0", [address], side_effect=False)


def vector_tile(rows: int, form: Form, by_pairs: bool | None = None) -> Routine:
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
        """out[row, 0:16] = the product of 8-bit rows with the weights of 16 outputs, one group after the other."""
        _Tile(w, rows, form, by_pairs, x, x_step, group_scales, scales_step).store(weights, groups, out, out_step)

    return tile


def vector_tile_of_two(rows: int, form: Form, prefetch: bool = True) -> Routine:
    @routine(12)
    def tile(  # type: ignore[no-untyped-def]
        w: VectorWriter, x, x_step, group_scales, scales_step, groups, out_step, weights, out, ahead, second_weights,
        second_out, second_ahead,
    ) -> None:  # fmt: skip
        """`vector_tile` for two blocks of 16 outputs, where one register holds 64 bytes of weights.

        The sums of one row and one block are one chain of dependent steps. Four rows of two blocks are enough chains
        for the multipliers, and their sums fit in registers. `ahead`: how many bytes further on to prefetch.
        """
        of = _Tile(w, rows, form, False, x, x_step, group_scales, scales_step)
        of.prefetched = [ahead, second_ahead] if prefetch else []
        of.store_blocks([(weights, out), (second_weights, second_out)], groups, out_step)

    return tile


class _Tile:
    """Emits the product of some rows with the weights of 16 outputs, or of several times 16."""

    def __init__(  # type: ignore[no-untyped-def]
        self, w: VectorWriter, rows: int, form: Form, by_pairs: bool | None, x, x_step, group_scales, scales_step
    ) -> None:
        self.w, self.rows, self.form = w, rows, form
        # All 16 outputs at once, although NEON's registers do not hold both kinds of sums for 4 rows: with two halves,
        # the first would read all weights from memory and the second none. With 8 rows too many sums would spill.
        self.lanes = LANES // 2 if _registers_are_few(rows) else LANES
        self.integers, self.floats = ir.VectorType(_I32, self.lanes), ir.VectorType(_F32, self.lanes)
        self.unsigned = dot_instruction() == "vpdpbusd"  # vpdpbusd takes unsigned weights
        self.multiply = _multiply(form, has_pair_products() and rows % 2 == 0 if by_pairs is None else by_pairs)
        self.start = initial_sum()
        self.prefetched = [i64(AHEAD)] if AHEAD and not is_arm() else []  # bytes ahead, in each block
        self.x_rows = [w.b.add(x, w.b.mul(x_step, i64(row))) for row in range(rows)]
        if dot_instruction() == "vpmaddubsw":
            self.x_rows = [_apart(w, row) for row in self.x_rows]
        self.scale_rows = [w.b.add(group_scales, w.b.mul(scales_step, i64(4 * row))) for row in range(rows)]
        if self.unsigned:  # pointers that the compiler advances, as in `kernels.py`
            self.x_rows, self.scale_rows = ([w.pointer(row) for row in of] for of in (self.x_rows, self.scale_rows))

    def store(self, weights: Any, groups: Any, out: Any, out_step: Any) -> None:
        for first in range(0, LANES, self.lanes):
            self.store_blocks([(weights, out)], groups, out_step, first)

    def store_blocks(self, blocks: Sequence[tuple[Any, Any]], groups: Any, out_step: Any, first: int = 0) -> None:
        """Blocks of 16 outputs, each (its weights, its sums): `lanes` of its outputs from `first` on."""
        w, form = self.w, self.form
        readers = [GroupReader(w, form, weights, groups, first, self.lanes) for weights, _ in blocks]

        def unit(number: Any, sums: list[Any]) -> list[Any]:
            shared = [reader.of_unit(number) if form.multiplied else None for reader in readers]
            first_group = w.times(number, form.groups)

            def group(g: Any, carried: list[Any]) -> list[Any]:
                index = w.b.add(first_group, g)
                steps = [self._steps(reader.integers(number, g), first) for reader in readers]
                for reader, ahead in zip(readers, self.prefetched, strict=False):
                    reader.prefetch(index, ahead)
                totals = self._totals(index, steps)
                results: list[Any] = []
                for reader, its, of_unit in zip(readers, totals, shared, strict=True):
                    # Read after the integers, as they are stored: the CPU then sees one stream.
                    numbers = reader.of_group(number, g, of_unit or reader.of_unit(number))
                    before = carried[len(results) : len(results) + self.rows]
                    results += self._scaled(before, its, index, *numbers)
                return results

            if form.groups == 1:
                return group(i64(0), sums)
            return w.loop(i64(form.groups), sums, group)

        zeros = [ir.Constant(self.floats, [0.0] * self.lanes)] * (self.rows * len(blocks))
        results = w.loop(w.b.sdiv(groups, i64(form.groups)), zeros, unit)
        for number, (_, out) in enumerate(blocks):
            for row, total in enumerate(results[number * self.rows : (number + 1) * self.rows]):
                w.store(total, out, w.b.add(w.b.mul(out_step, i64(row)), i64(first)))

    def _totals(self, number: Any, steps: list[list[Any]]) -> list[list[Any]]:
        """Each block's and row's integer sums for group `number`."""
        w = self.w
        word = w.times(number, WORDS_PER_GROUP)
        initial = [self._initial(scales, word) for scales in self.scale_rows]
        advance = w.at if self.unsigned else w.plus  # pointers, or integers
        inputs = [advance(row, number, self.form.group) for row in self.x_rows]
        if len(steps) == 1:
            return [self.multiply(w, initial, steps[0], inputs)]
        return _add_blocks(w, initial, steps, inputs)

    def _scaled(self, sums: list[Any], totals: list[Any], number: Any, scale: Any, offset: Any) -> list[Any]:
        """Adds one more group to the sums."""
        w = self.w
        word = w.times(number, WORDS_PER_GROUP)
        results = []
        for scales, total, result in zip(self.scale_rows, totals, sums, strict=True):
            factor = w.b.fmul(scale, self._splat(w.load_float(scales, word), self.floats))
            result = self._fma(self._as_floats(total), factor, result)
            if offset is not None:
                summed = self._splat(w.load_float(scales, w.plus(word, 1)), self.floats)
                result = self._fma(offset, summed, result)
            results.append(result)
        return results

    def _steps(self, start: Any, first: int) -> list[Any]:
        """The integers of a group, four inputs at a time."""
        w, form = self.w, self.form
        octets = ir.VectorType(_I8, 4 * self.lanes)
        count = form.group * form.bits // 8 // _INPUTS_PER_STEP
        pointers = [w.at(start, i64(4 * LANES * step + 4 * first), 1) for step in range(count)]
        loaded = [w.b.load(pointer, typ=octets, align=1) for pointer in pointers]
        if form.bits == 8:
            high_bits = ir.Constant(octets, [-128] * 4 * self.lanes)
            return [w.b.xor(step, high_bits) for step in loaded] if self.unsigned else loaded
        low = [w.b.and_(step, ir.Constant(octets, [15] * 4 * self.lanes)) for step in loaded]
        return low + [w.b.lshr(step, ir.Constant(octets, [4] * 4 * self.lanes)) for step in loaded]

    def _initial(self, scales: Any, word: Any) -> Any:
        """The start value of a group's integer sum: minus the zero point of the stored integers times the sum of
        inputs."""
        w = self.w
        above = 128 if self.form.bits == 8 and self.unsigned else self.form.zero
        if not above:
            return ir.Constant(self.integers, [self.start] * self.lanes)
        # The word is -128 times the sum of the inputs, and `above` a power of two.
        total = w.b.bitcast(w.load_float(scales, w.plus(word, 2)), _I32)
        total = w.b.ashr(total, ir.Constant(_I32, (128 // above).bit_length() - 1))
        return self._splat(w.b.add(total, ir.Constant(_I32, self.start)), self.integers)

    def _as_floats(self, total: Any) -> Any:
        if not self.start:
            return self.w.b.sitofp(total, self.floats)
        return self.w.b.fsub(
            self.w.b.bitcast(total, self.floats), ir.Constant(self.floats, [float(MAGIC)] * self.lanes)
        )

    def _splat(self, value: Any, kind: Any) -> Any:
        undefined = ir.Constant(kind, ir.Undefined)
        single = self.w.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.w.b.shuffle_vector(single, undefined, ir.Constant(self.integers, [0] * self.lanes))

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.w.call(f"llvm.fma.v{self.lanes}f32", a, b, c)


def two_blocks_at_once() -> bool:
    """Whether products by vectors take two blocks of 16 outputs at once."""
    return dot_instruction() == "vpdpbusd"


form_vectors = {
    form: over_quantised_rows(form.group, {rows: vector_tile(rows, form) for rows in (8, 4, 3, 2, 1)}, by_three(form))
    for form in FORMS
}
form_vectors_of_two = {
    form: over_quantised_rows_of_two(
        form.group,
        {rows: vector_tile_of_two(rows, form) for rows in (4, 3, 2, 1)},
        vector_tile_of_two(4, form, prefetch=False),
        _AHEAD_OF_TWO[form.bits],
    )
    for form in FORMS
}
