"""Products of 8- and 4-bit weights by Intel AMX: tiles of 16 rows times 16 outputs, group after group of inputs.

One instruction, tdpbssd, adds the products of bytes in 16 x 16 sums of 32 bits. A group's sum is an integer, so the
matrix units give the bits of the vector code in `quantised.py`, as long as the scaled sums of the groups are added in
the same order by the same steps: narrow and wide passes may use either.

Integers leave a tile through memory. Reading right behind such a store would wait for it, so a group's sums are taken
up `_BEHIND` groups later.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from llvmlite import binding, ir

from hierspec.backends.cpu import amx
from hierspec.backends.cpu.llvm import LANES, V16F32, V16I32, VectorWriter, i64, splat_f32, splat_i32
from hierspec.backends.cpu.quantised import GROUPS, INTEGER_BYTES, SCALE_BYTES, WORDS_PER_GROUP
from hierspec.backends.cpu.routines import Routine, routine

# Rows from which on the matrix units are faster than vectors. A group of 4-bit weights is half a tile.
LEAST_ROWS = {8: 2, 4: 12}
_BEHIND = 3
_RING = 4  # groups whose sums are in memory
_AHEAD = 8 << 10  # bytes from weights that are read to those that are prefetched
_ROWS_STEP = 4  # rows of the last tile are a multiple
_SUMS_BYTES = 4 * LANES * LANES
_LINE = 64
_FLOAT = 4  # bytes

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_V64I8, _V16F16 = ir.VectorType(_I8, 4 * LANES), ir.VectorType(ir.HalfType(), LANES)
_POINTER = ir.PointerType()

_SUMS, _INPUTS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers, used in turn


@cache
def has_byte_tiles() -> bool:
    return amx.available() and bool(binding.get_host_cpu_features().get("amx-int8", False))


def configure(w: VectorWriter, rows: Any, bits: int) -> None:
    """The tiles of this thread, for a product of so many rows."""
    height, depth = w.b.trunc(tile_rows(w, rows), _I8), GROUPS[bits]
    with w.b.goto_entry_block():
        memory = _stack(w, i64(_LINE))
    w.b.store(splat_i32(0), w.at(memory, i64(0), 1), align=1)

    def put(offset: int, value: Any) -> None:
        w.b.store(value, w.at(memory, i64(offset), 1), align=1)

    put(0, ir.Constant(_I8, 1))  # the palette; then the bytes of a row and the rows of every tile
    for tile in range(8):
        put(16 + 2 * tile, ir.Constant(ir.IntType(16), depth if tile in _INPUTS else _LINE))
        put(48 + tile, ir.Constant(_I8, depth // 4) if tile in _WEIGHTS else height)
    w.b.call(w.function("llvm.x86.ldtilecfg", ir.VoidType(), _POINTER), [w.b.inttoptr(memory, _POINTER)])


def release(w: VectorWriter) -> None:
    """Otherwise the system would keep saving tiles that nobody needs."""
    w.b.call(w.function("llvm.x86.tilerelease", ir.VoidType()), [])


def tile_rows(w: VectorWriter, rows: Any) -> Any:
    """Rows of each tile, with those that only fill the last one up: 4, 8, 12 or 16."""
    fours = w.times(w.b.lshr(w.plus(rows, _ROWS_STEP - 1), i64(2)), _ROWS_STEP)
    return w.b.select(w.b.icmp_signed("<", fours, i64(LANES)), fours, i64(LANES))


def _stack(w: VectorWriter, size: Any) -> Any:
    """The address of memory until the routine returns, at the beginning of a cache line."""
    memory = w.b.alloca(_I8, size)
    memory.align = _LINE
    return w.b.ptrtoint(memory, _I64)


class _Tiles:
    """Sums of one group for some rows and 16 outputs: inputs times weights, to memory."""

    def __init__(self, w: VectorWriter, bits: int, rows: int) -> None:
        self._w, self._bits, self._rows = w, bits, rows

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
        call("tileloadd64", number(right), w.b.inttoptr(weights, _POINTER), i64(_LINE))
        call("tdpbssd", number(total), number(left), number(right))
        call("tilestored64", number(total), w.b.inttoptr(out, _POINTER), i64(_LINE))

    def kept(self, value: Any) -> Any:
        """The value, in a register before any tile that comes next: LLVM would rather spill all of them to memory."""
        return self._w.b.asm(ir.FunctionType(V16F32, [V16F32]), "", "=v,0", [value], side_effect=True)


class _EmulatedTiles(_Tiles):
    """The same by vectors: for tests where there are no matrix units."""

    def kept(self, value: Any) -> Any:
        return value

    def multiply(self, inputs: Any, stride: Any, weights: Any, out: Any, turn: int) -> None:
        w, undefined = self._w, ir.Constant(V16I32, ir.Undefined)

        def one_row(row: Any) -> None:
            start = w.plus(inputs, stride, row)

            def four_inputs(step: Any, totals: list[Any]) -> list[Any]:
                weight = w.b.load(w.at(weights, step, _LINE), typ=_V64I8, align=1)
                for i in range(4):
                    lanes = ir.Constant(V16I32, [4 * lane + i for lane in range(LANES)])
                    column = w.b.sext(w.b.shuffle_vector(weight, ir.Constant(_V64I8, ir.Undefined), lanes), V16I32)
                    octet = w.b.load(w.at(w.plus(start, step, 4), i64(i), 1), typ=_I8, align=1)
                    single = w.b.insert_element(undefined, w.b.sext(octet, _I32), ir.Constant(_I32, 0))
                    value = w.b.shuffle_vector(single, undefined, splat_i32(0))
                    totals = [w.b.add(totals[0], w.b.mul(column, value))]
                return totals

            [total] = w.loop(i64(GROUPS[self._bits] // 4), [splat_i32(0)], four_inputs)
            w.b.store(total, w.at(out, row, _LINE), align=4)

        w.repeat(i64(self._rows), one_row)


def _row_tile(bits: int, rows: int, emulated: bool, prefetched: bool) -> Routine:
    """16 outputs of so many rows."""
    depth, tile_bytes = GROUPS[bits], GROUPS[bits] * LANES

    @routine(9, optimised=lambda: not emulated)
    def row_tile(  # type: ignore[no-untyped-def]
        w: VectorWriter, x, size, records, weights, groups, scales, out, out_step, kept
    ) -> None:
        """x [rows, size] in 8 bits, `records` about its groups, weights as tiles, `scales` theirs. Of the rows only
        the first `kept` are wanted."""
        sums = _stack(w, i64(_RING * _SUMS_BYTES))
        tiles = (_EmulatedTiles if emulated else _Tiles)(w, bits, rows)
        words = w.times(groups, WORDS_PER_GROUP)
        records_of = [w.plus(records, words, row * _FLOAT) for row in range(rows)]

        def sums_of(group: Any) -> Any:
            return w.plus(sums, w.b.and_(group, i64(_RING - 1)), _SUMS_BYTES)

        def multiply(group: Any, turn: int) -> None:
            start = w.plus(weights, group, tile_bytes)
            tiles.multiply(w.plus(x, group, depth), size, start, sums_of(group), turn)
            if prefetched:
                for line in range(0, tile_bytes, _LINE):
                    w.prefetch(start, i64(_AHEAD + line), 1)

        def take(group: Any, totals: list[Any]) -> list[Any]:
            at, word = w.plus(scales, group, SCALE_BYTES[bits]), w.times(group, WORDS_PER_GROUP)
            halves = [
                w.b.load(w.at(at, i64(start), 1), typ=_V16F16, align=2) for start in range(0, SCALE_BYTES[bits], 32)
            ]
            scale, *offset = [w.b.fpext(each, V16F32) for each in halves]
            results = []
            for row, (record, total) in enumerate(zip(records_of, totals, strict=True)):
                integers = w.b.load(w.at(sums_of(group), i64(row * _LINE), 1), typ=V16I32, align=_LINE)
                factor = w.b.fmul(scale, w.splat(w.load_float(record, word)))
                result = w.fma(w.b.sitofp(integers, V16F32), factor, total)
                if offset:
                    result = w.fma(offset[0], w.splat(w.load_float(record, w.plus(word, 1))), result)
                results.append(tiles.kept(result))
            return results

        def both(number: Any, totals: list[Any], turn: int = 0) -> list[Any]:
            multiply(w.b.add(number, behind), turn)
            return take(number, totals)

        def in_turn(number: Any, totals: list[Any]) -> list[Any]:
            for turn in range(len(_SUMS)):  # so the next product need not wait for the store of the last
                totals = both(w.plus(w.times(number, len(_SUMS)), turn), totals, turn)
            return totals

        behind = w.b.select(w.b.icmp_signed("<", groups, i64(_BEHIND)), groups, i64(_BEHIND))
        rest = w.b.sub(groups, behind)
        rounds = w.b.sdiv(rest, i64(len(_SUMS)))
        done = w.times(rounds, len(_SUMS))
        w.repeat(behind, lambda group: multiply(group, 0))
        totals = w.loop_perhaps(rounds, [splat_f32(0.0)] * rows, in_turn)
        totals = w.loop_perhaps(w.b.sub(rest, done), totals, lambda number, totals: both(w.b.add(done, number), totals))
        totals = w.loop(behind, totals, lambda number, totals: take(w.b.add(rest, number), totals))
        for row, total in enumerate(totals):
            with w.b.if_then(w.b.icmp_signed(">", kept, i64(row))):
                w.store(total, out, w.times(out_step, row))

    return row_tile


def over_rows_by_tiles(bits: int, emulated: bool = False) -> Routine:
    """One block of 16 outputs for all rows: `int8_tiles` or `int4_tiles` by the matrix units, to the bit.

    Memory of inputs, and of records about them, has room for whole tiles of rows; `configure` was called.
    """
    heights = range(_ROWS_STEP, LANES + 1, _ROWS_STEP)
    first = {rows: _row_tile(bits, rows, emulated, prefetched=bits == 8) for rows in heights}
    other = _row_tile(bits, LANES, emulated, prefetched=False)

    @routine(7)
    def over(
        w: VectorWriter, x: Any, rows: Any, records: Any, weights: Any, size: Any, out: Any, out_step: Any
    ) -> None:
        groups = w.b.sdiv(size, i64(GROUPS[bits]))
        scales = w.plus(weights, groups, INTEGER_BYTES[bits])
        tiles = weights if bits == 8 else _unpacked(w, weights, groups)
        words = w.times(groups, WORDS_PER_GROUP)

        def tile(of: Routine, row: Any) -> None:
            inputs, mine = w.plus(x, row, size), w.plus(records, row, words, _FLOAT)
            target, kept = w.plus(out, row, out_step, _FLOAT), w.b.sub(rows, row)
            of(w, inputs, size, mine, tiles, groups, scales, target, out_step, kept)

        # The first tile prefetches for all.
        w.when_equal(tile_rows(w, rows), {count: partial(tile, of, i64(0)) for count, of in first.items()})
        others = w.b.sdiv(w.b.sub(rows, i64(1)), i64(LANES))
        w.repeat(others, lambda number: tile(other, w.times(w.plus(number, 1), LANES)))

    return over


def _unpacked(w: VectorWriter, weights: Any, groups: Any) -> Any:
    """Integers of 4 bits as bytes, in tiles: once for all rows."""
    packed_bytes = INTEGER_BYTES[4]
    memory = _stack(w, w.times(groups, 2 * packed_bytes))

    def unpack(group: Any) -> None:
        source, target = w.plus(weights, group, packed_bytes), w.plus(memory, group, 2 * packed_bytes)
        for line in range(0, packed_bytes, _LINE):
            octets = w.b.load(w.at(source, i64(line), 1), typ=_V64I8, align=1)
            w.prefetch(source, i64(_AHEAD + line), 1)
            low = w.b.and_(octets, ir.Constant(_V64I8, [15] * 4 * LANES))
            high = w.b.lshr(octets, ir.Constant(_V64I8, [4] * 4 * LANES))
            w.b.store(low, w.at(target, i64(line), 1), align=_LINE)
            w.b.store(high, w.at(target, i64(packed_bytes + line), 1), align=_LINE)

    w.repeat(groups, unpack)
    return memory
