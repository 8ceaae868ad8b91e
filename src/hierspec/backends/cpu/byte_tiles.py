"""Products of quantised weights by Intel AMX: tiles of up to 16 rows times 16 outputs, one group of inputs at a time.

One instruction, tdpbssd, accumulates products of bytes in 16 x 16 sums of 32 bits. A group's sum is an integer, so AMX
gives the same bits as the vector code in `vector_products.py`, as long as the scaled sums of the groups are added in
the same order by the same steps. So narrow and wide passes may use either.

Integer sums leave a tile through memory, and a load right after the store would stall. So a few groups are multiplied
first, and then their sums are scaled and added. For the same reason integers of 4 bits are unpacked to bytes in memory
before these groups are multiplied: into a ring that stays in the L1 cache, or into memory for the whole block if
further row tiles use them again. Two blocks of 16 outputs are multiplied together, so a tile of inputs is loaded once
for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from llvmlite import binding, ir

from hierspec.backends.cpu import amx
from hierspec.backends.cpu.forms import LINE, Form
from hierspec.backends.cpu.group_reader import GroupReader
from hierspec.backends.cpu.llvm import FLOAT_BYTES, LANES, V16F32, V16I32, VectorWriter, i64, splat_f32, splat_i32
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP
from hierspec.backends.cpu.routines import Routine, routine

# Number of rows from which AMX is faster than vectors, by bits and group size.
LEAST_ROWS = {(8, 64): 5, (8, 32): 10, (8, 16): 12, (4, 32): 12, (4, 16): 12}
AHEAD = 32 << 10  # prefetch distance in bytes
# Groups that are multiplied before their sums are added, by group size. On an x86 CPU with AMX, a sketch of the
# products of the default model's layers took for 3, 6 and 12 groups of 64 115, 108 and 120 ms (992 rows), for 4, 9 and
# 18 groups of 32 4.3, 5.5 and 6.3 ms (16 rows).
AT_ONCE = {64: 6, 32: 4, 16: 4}
_RING = 8  # groups in a ring of unpacked ones, at least as many as are multiplied at once
HEIGHTS = (2, 4, 8, 12, 16)  # possible rows of a tile
_SUMS_BYTES = 4 * LANES * LANES

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_V64I8 = ir.VectorType(_I8, 4 * LANES)
_POINTER = ir.PointerType()

_SUMS, _INPUTS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers


@cache
def has_byte_tiles() -> bool:
    return amx.available() and bool(binding.get_host_cpu_features().get("amx-int8", False))


def least_rows(form: Form) -> int:
    return LEAST_ROWS[form.bits, form.group]


def configure(w: VectorWriter, rows: Any, form: Form) -> None:
    """Configures this thread's tiles for a product of this many rows."""
    height, depth = w.b.trunc(tile_rows(w, rows), _I8), form.group
    with w.b.goto_entry_block():
        memory = _stack(w, i64(LINE))
    w.b.store(splat_i32(0), w.at(memory, i64(0), 1), align=1)

    def put(offset: int, value: Any) -> None:
        w.b.store(value, w.at(memory, i64(offset), 1), align=1)

    put(0, ir.Constant(_I8, 1))  # the palette; below, bytes per row and rows of every tile
    for tile in range(8):
        put(16 + 2 * tile, ir.Constant(ir.IntType(16), depth if tile in _INPUTS else LINE))
        put(48 + tile, ir.Constant(_I8, depth // 4) if tile in _WEIGHTS else height)
    w.b.call(w.function("llvm.x86.ldtilecfg", ir.VoidType(), _POINTER), [w.b.inttoptr(memory, _POINTER)])


def release(w: VectorWriter) -> None:
    """Releases the tiles, or the system would keep saving them on context switches."""
    w.b.call(w.function("llvm.x86.tilerelease", ir.VoidType()), [])


def tile_rows(w: VectorWriter, rows: Any) -> Any:
    """Rows per tile, including padding rows of the last tile."""
    height = i64(HEIGHTS[-1])
    for smaller in reversed(HEIGHTS[:-1]):
        height = w.b.select(w.b.icmp_signed("<=", rows, i64(smaller)), i64(smaller), height)
    return height


def _stack(w: VectorWriter, size: Any) -> Any:
    """The address of cache-line aligned memory that lasts until the routine returns."""
    memory = w.b.alloca(_I8, size)
    memory.align = LINE
    return w.b.ptrtoint(memory, _I64)


class _Tiles:
    """Multiplies one group of some rows by one or two blocks of 16 outputs, and stores the integer sums in memory."""

    def __init__(self, w: VectorWriter, depth: int, rows: int) -> None:
        self._w, self._depth, self._rows = w, depth, rows

    def multiply(self, inputs: Any, stride: Any, weights: Sequence[Any], sums: Sequence[Any], turn: int) -> None:
        """`turn`, 0 or 1: registers take turns, so that a product need not wait for the stores of the one before."""
        w, left, count = self._w, _INPUTS[turn], len(weights)
        totals = _SUMS[turn * count : (turn + 1) * count]
        rights = _WEIGHTS if count > 1 else _WEIGHTS[turn:]

        def call(name: str, *arguments: Any) -> None:
            kinds = [argument.type for argument in arguments]
            w.b.call(w.function(f"llvm.x86.{name}", ir.VoidType(), *kinds), arguments)

        def number(tile: int) -> Any:
            return ir.Constant(_I8, tile)

        for total in totals:
            call("tilezero", number(total))
        call("tileloadd64", number(left), w.b.inttoptr(inputs, _POINTER), stride)
        for right, block in zip(rights, weights, strict=False):
            call("tileloadd64", number(right), w.b.inttoptr(block, _POINTER), i64(LINE))
        for total, right in zip(totals, rights, strict=False):
            call("tdpbssd", number(total), number(left), number(right))
        for total, target in zip(totals, sums, strict=True):
            call("tilestored64", number(total), w.b.inttoptr(target, _POINTER), i64(LINE))


class _EmulatedTiles(_Tiles):
    """The same with vectors, for tests on CPUs without AMX."""

    def multiply(self, inputs: Any, stride: Any, weights: Sequence[Any], sums: Sequence[Any], turn: int) -> None:
        for block, target in zip(weights, sums, strict=True):
            self._multiply_block(inputs, stride, block, target)

    def _multiply_block(self, inputs: Any, stride: Any, weights: Any, sums: Any) -> None:
        w, undefined = self._w, ir.Constant(V16I32, ir.Undefined)

        def one_row(row: Any) -> None:
            start = w.plus(inputs, stride, row)

            def four_inputs(step: Any, totals: list[Any]) -> list[Any]:
                weight = w.b.load(w.at(weights, step, LINE), typ=_V64I8, align=1)
                for i in range(4):
                    lanes = ir.Constant(V16I32, [4 * lane + i for lane in range(LANES)])
                    column = w.b.sext(w.b.shuffle_vector(weight, ir.Constant(_V64I8, ir.Undefined), lanes), V16I32)
                    octet = w.b.load(w.at(w.plus(start, step, 4), i64(i), 1), typ=_I8, align=1)
                    single = w.b.insert_element(undefined, w.b.sext(octet, _I32), ir.Constant(_I32, 0))
                    value = w.b.shuffle_vector(single, undefined, splat_i32(0))
                    totals = [w.b.add(totals[0], w.b.mul(column, value))]
                return totals

            [total] = w.loop(i64(self._depth // 4), [splat_i32(0)], four_inputs)
            w.b.store(total, w.at(sums, row, LINE), align=4)

        w.repeat(i64(self._rows), one_row)


class _RowTile:
    """Emits products of `rows` rows with one or two blocks of 16 outputs; `first`: they are the first row tile of the
    pass, which unpacks and prefetches."""

    def __init__(  # type: ignore[no-untyped-def]
        self, w: VectorWriter, form: Form, tiles: _Tiles, rows: int, first: bool, x, size, records,
        blocks: Sequence[Any], groups, unpacked: Sequence[Any], mask,
    ) -> None:  # fmt: skip
        """`unpacked`: memory for each block's unpacked groups; `mask`: for their index there."""
        self._w, self._form, self._tiles, self._first, self._rows = w, form, tiles, first, rows
        self._x, self._size, self._groups, self._unpacked, self._mask = x, size, groups, unpacked, mask
        self._readers = [GroupReader(w, form, block, groups) for block in blocks]
        self._at_once = AT_ONCE[form.group]
        self._sums = _stack(w, i64(len(blocks) * self._at_once * _SUMS_BYTES))
        words = w.times(groups, WORDS_PER_GROUP)
        self._records = [w.plus(records, words, row * FLOAT_BYTES) for row in range(rows)]

    def write(self, outs: Sequence[Any], out_step: Any, kept: Any) -> None:
        """Writes the totals of `kept` rows. In between they are where they are written to; if some rows only fill the
        tile, they are in memory with room for all."""
        w, rows = self._w, self._rows
        some = w.b.icmp_signed("<", kept, i64(rows))
        room = _stack(w, i64(len(outs) * _SUMS_BYTES))
        rooms = [w.plus(room, number * _SUMS_BYTES) for number in range(len(outs))]
        step = w.b.select(some, i64(LANES), out_step)
        places = [w.b.select(some, room, out) for room, out in zip(rooms, outs, strict=True)]

        def some_groups(number: Any) -> None:
            start = w.times(number, self._at_once)
            count = _smaller(w, w.b.sub(self._groups, start), self._at_once)
            self._multiply_groups(start, count)
            is_first = w.b.icmp_signed("==", number, i64(0))
            for block, place in enumerate(places):
                before = [w.load(place, w.times(step, row)) for row in range(rows)]
                before = [w.b.select(is_first, splat_f32(0.0), total) for total in before]
                take = partial(self._take, block, start)
                for row, total in enumerate(w.loop(count, before, take)):
                    w.store(total, place, w.times(step, row))

        w.repeat(w.b.sdiv(w.plus(self._groups, self._at_once - 1), i64(self._at_once)), some_groups)
        with w.b.if_then(some):

            def copy_row(row: Any) -> None:
                for room, out in zip(rooms, outs, strict=True):
                    w.store(w.load(room, w.times(row, LANES)), out, w.times(row, out_step))

            w.repeat(kept, copy_row)

    def _multiply_groups(self, start: Any, count: Any) -> None:
        w = self._w
        if self._form.bits == 4 and self._first:
            w.repeat(count, lambda number: self._unpack(w.b.add(start, number)))

        def two_groups(pair: Any) -> None:
            for turn in (0, 1):
                self._multiply(start, w.plus(w.times(pair, 2), turn), turn)

        w.repeat(w.b.sdiv(count, i64(2)), two_groups)
        with w.b.if_then(w.b.trunc(count, ir.IntType(1))):
            self._multiply(start, w.b.sub(count, i64(1)), 0)

    def _sums_of(self, block: int, number: Any) -> Any:
        """Sums of a group; `number` counts from the first group that is multiplied at once with it."""
        return self._w.plus(self._sums, self._w.plus(number, block * self._at_once), _SUMS_BYTES)

    def _unpacked_at(self, block: int, group: Any) -> Any:
        w = self._w
        return w.plus(self._unpacked[block], w.b.and_(group, self._mask), self._form.group * LANES)

    def _in_unit(self, group: Any) -> tuple[Any, Any]:
        """The unit that a group belongs to, and its index there."""
        count = self._form.groups
        return self._w.b.lshr(group, i64(count.bit_length() - 1)), self._w.b.and_(group, i64(count - 1))

    def _multiply(self, start: Any, number: Any, turn: int) -> None:
        w, form, group = self._w, self._form, self._w.b.add(start, number)
        if form.bits == 4:
            weights = [self._unpacked_at(block, group) for block in range(len(self._readers))]
        else:
            weights = [reader.integers(*self._in_unit(group)) for reader in self._readers]
        sums = [self._sums_of(block, number) for block in range(len(self._readers))]
        self._tiles.multiply(w.plus(self._x, group, form.group), self._size, weights, sums, turn)
        if self._first and AHEAD:  # once for all row tiles
            for reader in self._readers:
                reader.prefetch(group, i64(AHEAD))

    def _unpack(self, group: Any) -> None:
        """Unpacks integers of 4 bits to bytes, as a tile."""
        w, form = self._w, self._form
        for block, reader in enumerate(self._readers):
            source, target = reader.integers(*self._in_unit(group)), self._unpacked_at(block, group)
            for line in range(0, form.integer_bytes, LINE):
                octets = w.b.load(w.at(source, i64(line), 1), typ=_V64I8, align=1)
                low, high = w.b.and_(octets, _bytes(15)), w.b.lshr(octets, _bytes(4))
                for start, integers in ((line, low), (form.integer_bytes + line, high)):
                    if form.zero:
                        integers = w.b.sub(integers, _bytes(form.zero))
                    w.b.store(integers, w.at(target, i64(start), 1), align=LINE)

    def _take(self, block: int, start: Any, number: Any, totals: list[Any]) -> list[Any]:
        """Adds the scaled sums of one more group to a block's totals."""
        w, reader, group = self._w, self._readers[block], self._w.b.add(start, number)
        unit, in_unit = self._in_unit(group)
        scale, offset = reader.of_group(unit, in_unit, reader.of_unit(unit))
        sums, word = self._sums_of(block, number), w.times(group, WORDS_PER_GROUP)
        results = []
        for row, (record, total) in enumerate(zip(self._records, totals, strict=True)):
            integers = w.b.load(w.at(sums, i64(row * LINE), 1), typ=V16I32, align=LINE)
            factor = w.b.fmul(scale, w.splat(w.load_float(record, word)))
            result = w.fma(w.b.sitofp(integers, V16F32), factor, total)
            if offset is not None:
                result = w.fma(offset, w.splat(w.load_float(record, w.plus(word, 1))), result)
            results.append(result)
        return results


def _bytes(value: int) -> Any:
    return ir.Constant(_V64I8, [value] * 4 * LANES)


def _smaller(w: VectorWriter, number: Any, other: int) -> Any:
    return w.b.select(w.b.icmp_signed("<", number, i64(other)), number, i64(other))


def _row_tile(form: Form, rows: int, blocks: int, first: bool, emulated: bool) -> Routine:
    @routine(7 + 3 * blocks, optimised=lambda: not emulated)
    def row_tile(w: VectorWriter, *arguments: Any) -> None:
        """One tile of rows times one or two blocks of 16 outputs.

        Arguments: x [rows, size] in 8 bits, size, `records` about its groups, number of groups, index mask for unpacked
        groups, out_step, how many rows to write; then for each block its weights, its output, and memory for its
        unpacked groups.
        """
        x, size, records, groups, mask, out_step, kept, *of_blocks = arguments
        weights, outs, unpacked = (of_blocks[part::3] for part in range(3))
        tiles = (_EmulatedTiles if emulated else _Tiles)(w, form.group, rows)
        tile = _RowTile(w, form, tiles, rows, first, x, size, records, weights, groups, unpacked, mask)
        tile.write(outs, out_step, kept)

    return row_tile


def over_rows_by_tiles(form: Form, blocks: int = 1, emulated: bool = False) -> Routine:
    """One or two blocks of 16 outputs for all rows, by AMX, with the bits of `form_vectors`.

    The memory of inputs and of their records has room for whole tiles of rows; `configure` has been called.
    """
    first = {rows: _row_tile(form, rows, blocks, True, emulated) for rows in HEIGHTS}
    other = _row_tile(form, LANES, blocks, False, emulated)

    @routine(5 + 2 * blocks)
    def over(w: VectorWriter, x: Any, rows: Any, records: Any, size: Any, out_step: Any, *of_blocks: Any) -> None:
        """`of_blocks`: the weights and the output of each block."""
        groups = w.b.sdiv(size, i64(form.group))
        words = w.times(groups, WORDS_PER_GROUP)
        unpacked, mask = [i64(0)] * blocks, i64(-1)
        if form.bits == 4:
            again = w.b.icmp_signed(">", rows, i64(LANES))
            size_of_one = w.times(w.b.select(again, groups, i64(_RING)), form.group * LANES)
            unpacked = [_stack(w, size_of_one) for _ in range(blocks)]
            mask = w.b.select(again, i64(-1), i64(_RING - 1))

        def tile(of: Routine, row: Any) -> None:
            inputs, mine = w.plus(x, row, size), w.plus(records, row, words, FLOAT_BYTES)
            shared = inputs, size, mine, groups, mask, out_step, w.b.sub(rows, row)
            rest: list[Any] = []
            for weights, out, memory in zip(of_blocks[0::2], of_blocks[1::2], unpacked, strict=True):
                rest += weights, w.plus(out, row, out_step, FLOAT_BYTES), memory
            of(w, *shared, *rest)

        w.when_equal(tile_rows(w, rows), {count: partial(tile, of, i64(0)) for count, of in first.items()})
        others = w.b.sdiv(w.b.sub(rows, i64(1)), i64(LANES))
        w.repeat(others, lambda number: tile(other, w.times(w.plus(number, 1), LANES)))

    return over
