"""Kernels of attention by Intel AMX: keys, values, queries and probabilities in bfloat16, sums in float32.

A tile of scores is 16 rows x 16 keys, a tile of weighted sums 16 rows x 16 numbers of a head, where a row is one head
of one token. Positions are taken in segments that begin at multiples of SEGMENT, 32 of a chunk at a time, each segment
with a softmax of its own; then segments are merged in order. So every number is the same sum, made in the same order,
whatever rows are beside it: what a row does not see has probability zero, and adding zero changes nothing.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.amx import DEPTH, TILE_BYTES, available, begin_tiles, end_tiles, round_row, to_bfloat16
from hierspec.backends.cpu.amx import tile_registers as registers
from hierspec.backends.cpu.compiled import library
from hierspec.backends.cpu.llvm import I32, LANES, V16F32, V16I32, VectorWriter, i64, splat_f32, splat_i32
from hierspec.backends.cpu.routines import RoutineLibrary, routine

CHUNK = DEPTH  # positions of one tile of probabilities
SEGMENT = 256  # positions whose scores, for 16 rows, stay in the nearest cache
LINE = 64  # bytes of a row of a tile
MERGE_WORDS = 2 * LANES  # floats before the sums of a part: the largest score and the total of each row
_I16, _I64 = ir.IntType(16), ir.IntType(64)
_AT_ONCE = 4  # tiles of sums: several chains keep the unit busy


class AttentionCode(IntEnum):
    """Indices of `attention_code`: addresses of routines."""

    BEGIN = 0  # (scratch): before the tiles of a thread
    END = 1  # (scratch): after them
    ROUND = 2  # (x, groups of 16, out): a query as one row of tiles
    PLACE_KEY = 3  # (x, groups of 16, target)
    PLACE_VALUE = 4  # (x, groups of 16, target)
    SCORES = 5  # (queries, steps, addresses of blocks of keys, pairs of blocks, out, stride)
    SOFTMAX = 6  # (scores, chunks, probabilities, address of a factor, largest, total)
    WEIGHTED_SUMS = 7  # (probabilities, addresses of chunks of values, chunks, tiles, before, out, stride)
    MERGE = 8  # (state, part, address of a factor, groups of 16)
    COPY_KEY = 9  # (source, target, words)
    COPY_VALUE = 10  # (source, half, target, half, tiles)


@routine(3)
def place_key(w: VectorWriter, x: Any, groups: Any, target: Any) -> None:
    """A key, rounded, as a column of its block: a word is two numbers, and words are 64 bytes apart."""

    def group(i: Any) -> None:
        halves = to_bfloat16(w, w.load(x, w.times(i, LANES)))
        words = w.b.bitcast(halves, ir.VectorType(I32, LANES // 2))
        for k in range(LANES // 2):
            word = w.b.extract_element(words, ir.Constant(I32, k))
            w.b.store(word, w.at(target, w.plus(i64(k), i, LANES // 2), LINE), align=4)

    w.repeat(groups, group)


@routine(3)
def place_value(w: VectorWriter, x: Any, groups: Any, target: Any) -> None:
    """A value, rounded, as one half of a row of words in each of its tiles.

    Two bytes at a time: another thread may write the other halves.
    """

    def group(i: Any) -> None:
        halves = to_bfloat16(w, w.load(x, w.times(i, LANES)))
        start = w.plus(target, i, TILE_BYTES)
        for k in range(LANES):
            w.b.store(w.b.extract_element(halves, ir.Constant(I32, k)), w.at(start, i64(k), 4), align=2)

    w.repeat(groups, group)


@routine(3)
def copy_key(w: VectorWriter, source: Any, target: Any, words: Any) -> None:
    """A column of a block of keys."""

    def copy(i: Any) -> None:
        w.b.store(w.b.load(w.at(source, i, LINE), typ=I32, align=4), w.at(target, i, LINE), align=4)

    w.repeat(words, copy)


@routine(5)
def copy_value(w: VectorWriter, source: Any, half: Any, target: Any, to_half: Any, tiles: Any) -> None:
    """A value from one half of its words to either half of others."""

    def in_all(number: Any) -> Any:
        narrow = w.b.trunc(w.times(number, 16), I32)
        single = w.b.insert_element(ir.Constant(V16I32, ir.Undefined), narrow, ir.Constant(I32, 0))
        return w.b.shuffle_vector(single, ir.Constant(V16I32, ir.Undefined), ir.Constant(V16I32, [0] * LANES))

    out_of, into = in_all(half), in_all(to_half)
    kept = w.b.not_(w.b.shl(splat_i32(0xFFFF), into))

    def copy(i: Any) -> None:
        given = w.b.load(w.at(source, i, TILE_BYTES), typ=V16I32, align=4)
        numbers = w.b.and_(w.b.lshr(given, out_of), splat_i32(0xFFFF))
        there = w.b.load(w.at(target, i, TILE_BYTES), typ=V16I32, align=4)
        w.b.store(w.b.or_(w.b.and_(there, kept), w.b.shl(numbers, into)), w.at(target, i, TILE_BYTES), align=4)

    w.repeat(tiles, copy)


def _address(w: VectorWriter, addresses: Any, index: Any) -> Any:
    return w.b.load(w.at(addresses, index, 8), typ=_I64, align=8)


@routine(6, optimised=available)
def scores(w: VectorWriter, queries: Any, steps: Any, keys: Any, pairs: Any, out: Any, stride: Any) -> None:
    """out[16, 16 * block ..] = queries times keys, for two blocks of 16 keys at `keys`, then for all others by four.

    `queries` [steps] tiles; `keys`: addresses of blocks [steps] tiles.
    """
    tiles = registers(w)

    def some(count: int, first: Any) -> None:
        blocks = [_address(w, keys, w.b.add(first, i64(j))) for j in range(count)]
        for j in range(count):
            tiles.zero(j)

        def step(t: Any) -> None:
            tiles.load(4, w.plus(queries, t, TILE_BYTES))
            for j, block in enumerate(blocks):
                tiles.load(5 + j % 3, w.plus(block, t, TILE_BYTES))
                tiles.multiply(j, 4, 5 + j % 3)

        w.repeat(steps, step)
        for j in range(count):
            tiles.store(j, w.plus(out, w.b.add(first, i64(j)), LINE), stride)

    odd = w.b.and_(pairs, i64(1))
    w.when_equal(odd, {1: partial(some, 2, i64(0))})
    w.repeat(w.b.lshr(pairs, i64(1)), lambda number: some(_AT_ONCE, w.plus(w.times(odd, 2), number, _AT_ONCE)))


def _power_of_two(w: VectorWriter, x: Any) -> Any:
    """2**x for x up to a little above 0, to within 5e-5, which is far less than a step of bfloat16.

    2**0 is 1 exactly, and what is at most -127 becomes 0 exactly.
    """
    b = w.b
    bounded = w.call("llvm.maxnum.v16f32", x, splat_f32(-127.0))
    # A float so large that its last digit counts ones: adding it rounds, and the last bits of the sum are the integer.
    shifted = b.fadd(bounded, splat_f32(float(3 << 22)))
    r = b.fsub(bounded, b.fsub(shifted, splat_f32(float(3 << 22))))
    value = splat_f32(float(np.float32(math.log(2) ** 4 / 24)))
    for coefficient in (math.log(2) ** 3 / 6, math.log(2) ** 2 / 2, math.log(2), 1.0):
        value = w.fma(value, r, splat_f32(float(np.float32(coefficient))))
    power = b.shl(b.bitcast(shifted, V16I32), splat_i32(23))
    return b.bitcast(b.add(b.bitcast(value, V16I32), power), V16F32)


def _or_zero(w: VectorWriter, largest: Any) -> Any:
    """Zero instead of minus infinity, the largest of no numbers, from which nothing can be subtracted."""
    nothing = splat_f32(float("-inf")) if isinstance(largest.type, ir.VectorType) else ir.FloatType()(float("-inf"))
    zero = splat_f32(0.0) if isinstance(largest.type, ir.VectorType) else ir.FloatType()(0.0)
    return w.b.select(w.b.fcmp_ordered("==", largest, nothing), zero, largest)


@routine(6)
def softmax(
    w: VectorWriter, row: Any, chunks: Any, probabilities: Any, factor: Any, largest_out: Any, total_out: Any
) -> None:
    """2**(factor * (score - largest)) of one row, rounded to bfloat16, into its row of tiles; and their sum.

    What the row does not see is minus infinity, and becomes zero.
    """
    b = w.b

    def larger(x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def block(j: Any) -> Any:
        return w.load(row, w.times(j, LANES))

    def larger_of_two(chunk: Any, carried: list[Any]) -> list[Any]:
        return [larger(block(w.plus(i64(half), chunk, 2)), maxima) for half, maxima in enumerate(carried)]

    maxima = w.loop(chunks, [splat_f32(float("-inf"))] * 2, larger_of_two)  # two chains: one would wait for itself
    largest, scale = w.fold(larger(*maxima), larger), w.load_float(factor, i64(0))
    factors, offset = w.splat(scale), w.splat(b.fsub(ir.FloatType()(-0.0), b.fmul(_or_zero(w, largest), scale)))

    def add(j: Any, sums: list[Any]) -> list[Any]:
        exact = _power_of_two(w, w.fma(block(j), factors, offset))
        # No probability is negative or no number, so this rounds to nearest.
        bits = b.add(b.bitcast(exact, V16I32), splat_i32(0x8000))
        halves = b.trunc(b.lshr(bits, splat_i32(16)), ir.VectorType(_I16, LANES))
        tile = w.plus(w.times(b.lshr(j, i64(1)), TILE_BYTES), b.and_(j, i64(1)), 2 * LANES)
        b.store(halves, w.at(probabilities, tile, 1), align=2)
        return [b.fadd(sums[0], b.bitcast(b.and_(bits, splat_i32(-65536)), V16F32))]

    [total] = w.loop(w.times(chunks, 2), [splat_f32(0.0)], add)
    w.store(largest, largest_out, i64(0))
    w.store(w.fold(total, b.fadd), total_out, i64(0))


@routine(7, optimised=available)
def weighted_sums(
    w: VectorWriter, probabilities: Any, values: Any, chunks: Any, count: Any, before: Any, out: Any, stride: Any
) -> None:
    """out[16, 16 * count] = before + probabilities times values, chunk after chunk.

    `values`: addresses of chunks [count] tiles.
    """
    tiles = registers(w)

    def some(wide: int, first: Any) -> None:
        at = [w.times(w.b.add(first, i64(j)), LINE) for j in range(wide)]
        for j in range(wide):
            tiles.load(j, w.b.add(before, at[j]), stride)

        def step(c: Any) -> None:
            tiles.load(4, w.plus(probabilities, c, TILE_BYTES))
            chunk = w.plus(_address(w, values, c), first, TILE_BYTES)
            for j in range(wide):
                tiles.load(5 + j % 3, w.plus(chunk, j, TILE_BYTES))
                tiles.multiply(j, 4, 5 + j % 3)

        w.repeat(chunks, step)
        for j in range(wide):
            tiles.store(j, w.b.add(out, at[j]), stride)

    fours = w.b.sdiv(count, i64(_AT_ONCE))
    w.repeat(fours, lambda number: some(_AT_ONCE, w.times(number, _AT_ONCE)))
    row = w.times(fours, _AT_ONCE)
    w.when_equal(w.b.sub(count, row), {rest: partial(some, rest, row) for rest in range(1, _AT_ONCE)})


@routine(4)
def merge(w: VectorWriter, state: Any, part: Any, factor: Any, groups: Any) -> None:
    """`state` of some segments becomes that of one more: [16] largest scores, [16] totals, [16, 16 * groups] sums.

    Where a row sees nothing of a segment, its state stays as it is, to the bit.
    """
    b, lanes = w.b, i64(LANES)
    ours, theirs = w.load(state, i64(0)), w.load(part, i64(0))
    largest = b.select(b.fcmp_ordered(">", theirs, ours), theirs, ours)
    base, scale = _or_zero(w, largest), w.splat(w.load_float(factor, i64(0)))
    one, two = (_power_of_two(w, b.fmul(b.fsub(x, base), scale)) for x in (ours, theirs))
    totals = w.fma(w.load(part, lanes), two, b.fmul(w.load(state, lanes), one))
    w.store(largest, state, i64(0))
    w.store(totals, state, lanes)
    undefined = ir.Constant(V16F32, ir.Undefined)
    for row in range(LANES):
        in_all = ir.Constant(V16I32, [row] * LANES)
        x, y = (b.shuffle_vector(factors, undefined, in_all) for factors in (one, two))

        def add(group: Any, row: int = row, x: Any = x, y: Any = y) -> None:
            at = w.times(w.b.add(w.plus(i64(2), row, groups), group), LANES)
            w.store(w.fma(w.load(part, at), y, b.fmul(w.load(state, at), x)), state, at)

        w.repeat(groups, add)


@cache
def attention_library() -> RoutineLibrary:
    routines = {
        AttentionCode.BEGIN: begin_tiles,
        AttentionCode.END: end_tiles,
        AttentionCode.ROUND: round_row,
        AttentionCode.PLACE_KEY: place_key,
        AttentionCode.PLACE_VALUE: place_value,
        AttentionCode.SCORES: scores,
        AttentionCode.SOFTMAX: softmax,
        AttentionCode.WEIGHTED_SUMS: weighted_sums,
        AttentionCode.MERGE: merge,
        AttentionCode.COPY_KEY: copy_key,
        AttentionCode.COPY_VALUE: copy_value,
    }
    return library("amx_attention", {code.name.lower(): routines[code] for code in AttentionCode})


def attention_code() -> np.ndarray:
    """Addresses of those routines, by `AttentionCode`; compiled at the first call on a machine."""
    return attention_library().addresses()
