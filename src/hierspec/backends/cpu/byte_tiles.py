"""Products of quantised weights by Intel AMX: tiles of up to 16 rows times 16 outputs, one group of inputs at a time.

One instruction, tdpbssd, accumulates products of bytes in 16 x 16 sums of 32 bits. A group's sum is an integer, so AMX
gives the same bits as the vector code in `vector_products.py`, as long as the scaled sums of the groups are added in
the same order by the same steps. So narrow and wide passes may use either.

Integer sums leave a tile through memory. A load right after the store would stall, so a group's sums are loaded some
groups later. For the same reason integers of 4 bits are unpacked to bytes in memory some groups before they are loaded
as a tile: into a ring that stays in the L1 cache, or into memory for the whole block if further row tiles use them
again.
"""

from __future__ import annotations

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
# Groups that are multiplied before the sums of the first are loaded; smaller groups take less time each.
BEHIND = {64: 3, 32: 4, 16: 6}
_RING = 8  # groups whose sums are in memory
UNPACKED_AHEAD = 4  # how many groups ahead of the multiplication groups are unpacked
_UNPACKED = 8  # groups in a ring of unpacked ones
HEIGHTS = (2, 4, 8, 12, 16)  # possible rows of a tile
_SUMS_BYTES = 4 * LANES * LANES

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_V64I8 = ir.VectorType(_I8, 4 * LANES)
_POINTER = ir.PointerType()

_SUMS, _INPUTS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers, used round-robin


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
    """Multiplies one group for some rows and 16 outputs, and stores the integer sums in memory."""

    def __init__(self, w: VectorWriter, depth: int, rows: int) -> None:
        self._w, self._depth, self._rows = w, depth, rows

    def multiply(self, inputs: Any, stride: Any, weights: Any, out: Any, turn: int) -> None:
        w = self._w
        total, left, right = (of[turn % len(of)] for of in (_SUMS, _INPUTS, _WEIGHTS))

        def call(name: str, *arguments: Any) -> None:
            kinds = [argument.type for argument in arguments]
            w.b.call(w.function(f"llvm.x86.{name}", ir.VoidType(), *kinds), arguments)

        def number(tile: int) -> Any:
            return ir.Constant(_I8, tile)

        call("tilezero", number(total))
        call("tileloadd64", number(left), w.b.inttoptr(inputs, _POINTER), stride)
        call("tileloadd64", number(right), w.b.inttoptr(weights, _POINTER), i64(LINE))
        call("tdpbssd", number(total), number(left), number(right))
        call("tilestored64", number(total), w.b.inttoptr(out, _POINTER), i64(LINE))

    def kept(self, value: Any) -> Any:
        """Pins the value in a register before the next tile instruction; LLVM would otherwise spill all of them."""
        return self._w.b.asm(ir.FunctionType(V16F32, [V16F32]), "", "=v,0", [value], side_effect=True)


class _EmulatedTiles(_Tiles):
    """The same with vectors, for tests on CPUs without AMX."""

    def kept(self, value: Any) -> Any:
        return value

    def multiply(self, inputs: Any, stride: Any, weights: Any, out: Any, turn: int) -> None:
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
            w.b.store(total, w.at(out, row, LINE), align=4)

        w.repeat(i64(self._rows), one_row)


class _RowTile:
    """Emits 16 outputs of `rows` rows; `first`: they are the first row tile of the pass, which unpacks and
    prefetches."""

    def __init__(  # type: ignore[no-untyped-def]
        self, w: VectorWriter, form: Form, tiles: _Tiles, rows: int, first: bool, x, size, records, block, groups,
        unpacked, mask,
    ) -> None:  # fmt: skip
        self._w, self._form, self._tiles, self._first, self._rows = w, form, tiles, first, rows
        self._x, self._size, self._groups, self._unpacked, self._mask = x, size, groups, unpacked, mask
        self._reader = GroupReader(w, form, block, groups)
        self._sums = _stack(w, i64(_RING * _SUMS_BYTES))
        words = w.times(groups, WORDS_PER_GROUP)
        self._records = [w.plus(records, words, row * FLOAT_BYTES) for row in range(rows)]

    def totals(self) -> list[Any]:
        """The sums of all groups, for each row."""
        w, groups, turns = self._w, self._groups, len(_SUMS)
        most_behind = BEHIND[self._form.group]
        behind = _smaller(w, groups, most_behind)
        if self._unpacks:
            w.repeat(_smaller(w, groups, UNPACKED_AHEAD), self._unpack)
        for group in range(most_behind):
            with w.b.if_then(w.b.icmp_signed("<", i64(group), groups)):
                self._multiply(i64(group), group % turns)

        def both(number: Any, totals: list[Any], turn: int) -> list[Any]:
            self._multiply(w.b.add(number, behind), (most_behind + turn) % turns)
            return self._take(number, totals)

        def in_turn(number: Any, totals: list[Any]) -> list[Any]:
            for turn in range(turns):  # round-robin registers: the next product need not wait for the last store
                totals = both(w.plus(w.times(number, turns), turn), totals, turn)
            return totals

        def last(turn: int, number: Any, totals: list[Any]) -> list[Any]:
            return both(w.plus(done, turn), totals, turn)

        rest = w.b.sub(groups, behind)
        rounds = w.b.sdiv(rest, i64(turns))
        totals = w.loop_perhaps(rounds, [splat_f32(0.0)] * self._rows, in_turn)
        done = w.times(rounds, turns)
        for turn in range(turns - 1):
            once = w.b.zext(w.b.icmp_signed("<", w.plus(done, turn), rest), _I64)
            totals = w.loop_perhaps(once, totals, partial(last, turn))
        return w.loop(behind, totals, lambda number, totals: self._take(w.b.add(rest, number), totals))

    @property
    def _unpacks(self) -> bool:
        return self._first and self._form.bits == 4

    def _sums_of(self, group: Any) -> Any:
        return self._w.plus(self._sums, self._w.b.and_(group, i64(_RING - 1)), _SUMS_BYTES)

    def _unpacked_at(self, group: Any) -> Any:
        return self._w.plus(self._unpacked, self._w.b.and_(group, self._mask), self._form.group * LANES)

    def _in_unit(self, group: Any) -> tuple[Any, Any]:
        """The unit that a group belongs to, and its index there."""
        count = self._form.groups
        return self._w.b.lshr(group, i64(count.bit_length() - 1)), self._w.b.and_(group, i64(count - 1))

    def _multiply(self, group: Any, turn: int) -> None:
        w, form = self._w, self._form
        if self._unpacks:
            later = w.plus(group, UNPACKED_AHEAD)
            with w.b.if_then(w.b.icmp_signed("<", later, self._groups)):
                self._unpack(later)
        weights = self._unpacked_at(group) if form.bits == 4 else self._reader.integers(*self._in_unit(group))
        self._tiles.multiply(w.plus(self._x, group, form.group), self._size, weights, self._sums_of(group), turn)
        if self._first and AHEAD:  # once for all row tiles
            self._reader.prefetch(group, AHEAD)

    def _unpack(self, group: Any) -> None:
        """Unpacks integers of 4 bits to bytes, as a tile."""
        w, form = self._w, self._form
        source, target = self._reader.integers(*self._in_unit(group)), self._unpacked_at(group)
        for line in range(0, form.integer_bytes, LINE):
            octets = w.b.load(w.at(source, i64(line), 1), typ=_V64I8, align=1)
            low, high = w.b.and_(octets, _bytes(15)), w.b.lshr(octets, _bytes(4))
            for start, integers in ((line, low), (form.integer_bytes + line, high)):
                if form.zero:
                    integers = w.b.sub(integers, _bytes(form.zero))
                w.b.store(integers, w.at(target, i64(start), 1), align=LINE)

    def _take(self, group: Any, totals: list[Any]) -> list[Any]:
        """Adds the scaled sums of one more group to the totals."""
        w, (unit, in_unit) = self._w, self._in_unit(group)
        scale, offset = self._reader.of_group(unit, in_unit, self._reader.of_unit(unit))
        sums, word = self._sums_of(group), w.times(group, WORDS_PER_GROUP)
        results = []
        for row, (record, total) in enumerate(zip(self._records, totals, strict=True)):
            integers = w.b.load(w.at(sums, i64(row * LINE), 1), typ=V16I32, align=LINE)
            factor = w.b.fmul(scale, w.splat(w.load_float(record, word)))
            result = w.fma(w.b.sitofp(integers, V16F32), factor, total)
            if offset is not None:
                result = w.fma(offset, w.splat(w.load_float(record, w.plus(word, 1))), result)
            results.append(self._tiles.kept(result))
        return results


def _bytes(value: int) -> Any:
    return ir.Constant(_V64I8, [value] * 4 * LANES)


def _smaller(w: VectorWriter, number: Any, other: int) -> Any:
    return w.b.select(w.b.icmp_signed("<", number, i64(other)), number, i64(other))


def _row_tile(form: Form, rows: int, first: bool, emulated: bool) -> Routine:
    @routine(10, optimised=lambda: not emulated)
    def row_tile(w: VectorWriter, *arguments: Any) -> None:
        """One tile of rows times one block of 16 outputs.

        Arguments: x [rows, size] in 8 bits, size, `records` about its groups, the block of weights, number of groups,
        memory for unpacked groups and an index mask for it, out, out_step, and how many rows to store.
        """
        *inputs, out, out_step, kept = arguments
        tiles = (_EmulatedTiles if emulated else _Tiles)(w, form.group, rows)
        for row, total in enumerate(_RowTile(w, form, tiles, rows, first, *inputs).totals()):
            with w.b.if_then(w.b.icmp_signed(">", kept, i64(row))):
                w.store(total, out, w.times(out_step, row))

    return row_tile


def over_rows_by_tiles(form: Form, emulated: bool = False) -> Routine:
    """One block of 16 outputs for all rows, by AMX, with the bits of `form_vectors`.

    The memory of inputs and of their records has room for whole tiles of rows; `configure` has been called.
    """
    first = {rows: _row_tile(form, rows, True, emulated) for rows in HEIGHTS}
    other = _row_tile(form, LANES, False, emulated)

    @routine(7)
    def over(
        w: VectorWriter, x: Any, rows: Any, records: Any, weights: Any, size: Any, out: Any, out_step: Any
    ) -> None:
        groups = w.b.sdiv(size, i64(form.group))
        words = w.times(groups, WORDS_PER_GROUP)
        unpacked, mask = i64(0), i64(0)
        if form.bits == 4:
            again = w.b.icmp_signed(">", rows, i64(LANES))
            unpacked = _stack(w, w.times(w.b.select(again, groups, i64(_UNPACKED)), form.group * LANES))
            mask = w.b.select(again, i64(-1), i64(_UNPACKED - 1))

        def tile(of: Routine, row: Any) -> None:
            inputs, mine = w.plus(x, row, size), w.plus(records, row, words, FLOAT_BYTES)
            target, kept = w.plus(out, row, out_step, FLOAT_BYTES), w.b.sub(rows, row)
            of(w, inputs, size, mine, weights, groups, unpacked, mask, target, out_step, kept)

        w.when_equal(tile_rows(w, rows), {count: partial(tile, of, i64(0)) for count, of in first.items()})
        others = w.b.sdiv(w.b.sub(rows, i64(1)), i64(LANES))
        w.repeat(others, lambda number: tile(other, w.times(w.plus(number, 1), LANES)))

    return over
