"""Kernels of attention by Intel AMX: keys, values, queries and probabilities in bfloat16, sums in float32.

Softmax is in `amx_softmax.py`.

A tile of scores is 16 rows x 16 keys. A tile of weighted sums is 16 rows x 16 elements of a head. A row is one head of
one token. Positions are processed in segments that start at multiples of SEGMENT, one chunk of 32 at a time. Each
segment has its own softmax; then the segments are merged in order. So every number is the same sum in the same order,
whatever other rows are in the tile: positions that a row does not see have probability zero, and adding zero changes
nothing.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.amx import DEPTH, TILE_BYTES, available, begin_tiles, end_tiles, round_row, to_bfloat16
from hierspec.backends.cpu.amx import tile_registers as registers
from hierspec.backends.cpu.amx_softmax import LINE, TILE_SCORES, finish, merge, softmax
from hierspec.backends.cpu.compiled import library
from hierspec.backends.cpu.llvm import I32, LANES, V16I32, VectorWriter, i64, splat_i32
from hierspec.backends.cpu.routines import RoutineLibrary, routine

CHUNK = DEPTH  # positions per tile of probabilities
_I64 = ir.IntType(64)
_AT_ONCE = 4  # tiles of sums: independent chains keep the unit busy


class AttentionCode(IntEnum):
    """Indices of `attention_code`: addresses of routines."""

    BEGIN = 0  # (scratch): configures the thread's tiles
    END = 1  # (scratch): releases them
    ROUND = 2  # (x, groups of 16, out): rounds a query to one row of tiles
    PLACE_KEY = 3  # (x, groups of 16, target)
    PLACE_VALUE = 4  # (x, groups of 16, target)
    SCORES = 5  # (queries, steps, addresses of chunks of keys, chunks, out)
    SCORES_OF_TWO = 6  # as SCORES, for two tiles of rows
    SOFTMAX = 7  # (scores, rows, chunks, address of a factor, result, bytes between results)
    WEIGHTED_SUMS = 8  # (probabilities, addresses of chunks of values, chunks, tiles, before, out, stride)
    WEIGHTED_SUMS_OF_TWO = 9  # (probabilities, addresses, chunks, tiles, out, bytes between results, stride)
    MERGE = 10  # (state, part, address of a factor, groups of 16)
    FINISH = 11  # (sums, total, groups of 16, out)
    COPY_KEY = 12  # (source, target, words)
    COPY_VALUE = 13  # (source, half, target, half, tiles)


@routine(3)
def place_key(w: VectorWriter, x: Any, groups: Any, target: Any) -> None:
    """Stores a rounded key as a column of its block: a word holds two numbers, and words are 64 bytes apart."""

    def group(i: Any) -> None:
        halves = to_bfloat16(w, w.load(x, w.times(i, LANES)))
        words = w.b.bitcast(halves, ir.VectorType(I32, LANES // 2))
        for k in range(LANES // 2):
            word = w.b.extract_element(words, ir.Constant(I32, k))
            w.b.store(word, w.at(target, w.plus(i64(k), i, LANES // 2), LINE), align=4)

    w.repeat(groups, group)


@routine(3)
def place_value(w: VectorWriter, x: Any, groups: Any, target: Any) -> None:
    """Stores a rounded value as one half of a row of words in each of its tiles.

    It stores two bytes at a time, because another thread may write the other halves.
    """

    def group(i: Any) -> None:
        halves = to_bfloat16(w, w.load(x, w.times(i, LANES)))
        start = w.plus(target, i, TILE_BYTES)
        for k in range(LANES):
            w.b.store(w.b.extract_element(halves, ir.Constant(I32, k)), w.at(start, i64(k), 4), align=2)

    w.repeat(groups, group)


@routine(3)
def copy_key(w: VectorWriter, source: Any, target: Any, words: Any) -> None:
    """Copies a column of a block of keys."""

    def copy(i: Any) -> None:
        w.b.store(w.b.load(w.at(source, i, LINE), typ=I32, align=4), w.at(target, i, LINE), align=4)

    w.repeat(words, copy)


@routine(5)
def copy_value(w: VectorWriter, source: Any, half: Any, target: Any, to_half: Any, tiles: Any) -> None:
    """Copies a value from one half of its words to either half of other words."""

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


@routine(5, optimised=available)
def scores(w: VectorWriter, queries: Any, steps: Any, keys: Any, chunks: Any, out: Any) -> None:
    """Scores = queries times keys, as tiles at `out`: one chunk if their number is odd, then two chunks at a time.

    `queries` [steps] tiles; `keys`: addresses of chunks [2 blocks of 16 keys, steps] tiles.
    """
    tiles = registers(w)

    def some(count: int, first: Any) -> None:
        blocks = [
            w.plus(_address(w, keys, w.b.add(first, i64(j // 2))), j % 2, steps, TILE_BYTES) for j in range(count)
        ]
        for j in range(count):
            tiles.zero(j)

        def step(t: Any) -> None:
            tiles.load(4, w.plus(queries, t, TILE_BYTES))
            for j, block in enumerate(blocks):
                tiles.load(5 + j % 3, w.plus(block, t, TILE_BYTES))
                tiles.multiply(j, 4, 5 + j % 3)

        w.repeat(steps, step)
        for j in range(count):
            tiles.store(j, w.plus(w.plus(out, first, 2 * TILE_BYTES), j, TILE_BYTES), i64(LINE))

    odd = w.b.and_(chunks, i64(1))
    w.when_equal(odd, {1: partial(some, 2, i64(0))})
    w.repeat(w.b.lshr(chunks, i64(1)), lambda number: some(_AT_ONCE, w.plus(odd, number, 2)))


@routine(5, optimised=available)
def scores_of_two(w: VectorWriter, queries: Any, steps: Any, keys: Any, chunks: Any, out: Any) -> None:
    """The same for two tiles of rows: each tile of keys is loaded once for both, so there is one load per product."""
    tiles = registers(w)

    def chunk(c: Any) -> None:
        start, to = _address(w, keys, c), w.plus(out, c, 2 * TILE_BYTES)
        blocks = [start, w.plus(start, steps, TILE_BYTES)]
        for j in range(_AT_ONCE):
            tiles.zero(j)

        def step(t: Any) -> None:
            for row in (0, 1):
                tiles.load(4 + row, w.plus(w.plus(queries, row, steps, TILE_BYTES), t, TILE_BYTES))
            for j, block in enumerate(blocks):
                tiles.load(6 + j, w.plus(block, t, TILE_BYTES))
                for row in (0, 1):
                    tiles.multiply(2 * row + j, 4 + row, 6 + j)

        w.repeat(steps, step)
        for row in (0, 1):
            for j in (0, 1):
                tiles.store(2 * row + j, w.b.add(to, i64(row * TILE_SCORES + j * TILE_BYTES)), i64(LINE))

    w.repeat(chunks, chunk)


@routine(7, optimised=available)
def weighted_sums(
    w: VectorWriter, probabilities: Any, values: Any, chunks: Any, count: Any, before: Any, out: Any, stride: Any
) -> None:
    """out[16, 16 * count] = before + probabilities times values, one chunk after the other.

    `probabilities` as `softmax` leaves them; `values`: addresses of chunks [count] tiles.
    """
    tiles = registers(w)

    def some(wide: int, first: Any) -> None:
        at = [w.times(w.b.add(first, i64(j)), LINE) for j in range(wide)]
        for j in range(wide):
            tiles.load(j, w.b.add(before, at[j]), stride)

        def step(c: Any) -> None:
            tiles.load(4, w.plus(probabilities, c, 2 * TILE_BYTES))
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


@routine(7, optimised=available)
def weighted_sums_of_two(
    w: VectorWriter, probabilities: Any, values: Any, chunks: Any, count: Any, out: Any, out_step: Any, stride: Any
) -> None:
    """The same for two tiles of rows, starting from zero; the second tile's sums are `out_step` bytes after the
    first's."""
    tiles = registers(w)

    def some(wide: int, first: Any) -> None:
        for j in range(2 * wide):
            tiles.zero(j)

        def step(c: Any) -> None:
            tile = w.plus(probabilities, c, 2 * TILE_BYTES)
            for row in (0, 1):
                tiles.load(4 + row, w.b.add(tile, i64(row * TILE_SCORES)))
            chunk = w.plus(_address(w, values, c), first, TILE_BYTES)
            for j in range(wide):
                tiles.load(6 + j, w.plus(chunk, j, TILE_BYTES))
                for row in (0, 1):
                    tiles.multiply(wide * row + j, 4 + row, 6 + j)

        w.repeat(chunks, step)
        for row in (0, 1):
            for j in range(wide):
                tiles.store(wide * row + j, w.plus(w.plus(out, w.b.add(first, i64(j)), LINE), row, out_step), stride)

    twos = w.b.lshr(count, i64(1))
    w.repeat(twos, lambda number: some(2, w.times(number, 2)))
    w.when_equal(w.b.and_(count, i64(1)), {1: partial(some, 1, w.times(twos, 2))})


@cache
def attention_library() -> RoutineLibrary:
    routines = {
        AttentionCode.BEGIN: begin_tiles,
        AttentionCode.END: end_tiles,
        AttentionCode.ROUND: round_row,
        AttentionCode.PLACE_KEY: place_key,
        AttentionCode.PLACE_VALUE: place_value,
        AttentionCode.SCORES: scores,
        AttentionCode.SCORES_OF_TWO: scores_of_two,
        AttentionCode.SOFTMAX: softmax,
        AttentionCode.WEIGHTED_SUMS: weighted_sums,
        AttentionCode.WEIGHTED_SUMS_OF_TWO: weighted_sums_of_two,
        AttentionCode.MERGE: merge,
        AttentionCode.FINISH: finish,
        AttentionCode.COPY_KEY: copy_key,
        AttentionCode.COPY_VALUE: copy_value,
    }
    return library("amx_attention", {code.name.lower(): routines[code] for code in AttentionCode})


def attention_code() -> np.ndarray:
    """Addresses of the routines, by `AttentionCode`; the first call on a machine compiles them."""
    return attention_library().addresses()
