"""Routines of attention by vectors, for keys and values that are stored in float32 or float16."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from hierspec.backends.cpu.compiled import library
from hierspec.backends.cpu.kernels import BYTES, as_stored, load_stored
from hierspec.backends.cpu.llvm import LANES, VectorWriter, i64
from hierspec.backends.cpu.routines import Routine, RoutineLibrary, routine
from hierspec.backends.cpu.tiles import block_tiles, two_block_tiles

_F32 = ir.FloatType()


class VectorCode(IntEnum):
    """Indices of `vector_code`: addresses of routines."""

    PLACE_KEY = 0  # (x, groups of 16, target)
    PLACE_VALUE = 1  # (x, groups of 16, target, bytes from one group to the next)
    TILES = 2  # (x, x_step, rows, keys or values, size, out, out_step)
    TILES_ONTO = 3  # the same, added to `out`
    TILES_TWICE = 4  # TILES for two blocks: (x, x_step, rows, numbers, offset, size, out, out_step, offset, ahead)
    TILES_TWICE_ONTO = 5  # the same, added to `out`
    DOT = 6  # (query, key, size, out)
    ADD_VALUE = 7  # (address of a weight, value, out)
    WIDEN = 8  # (numbers, count of 16, out): to float32
    WIDE_TILES = 9  # TILES and the three after it, for numbers in float32
    WIDE_TILES_ONTO = 10
    WIDE_TILES_TWICE = 11
    WIDE_TILES_TWICE_ONTO = 12


def _place_key(stored: str) -> Routine:
    @routine(3)
    def place_key(w: VectorWriter, x: Any, groups: Any, target: Any) -> None:
        """Fills one lane of a block of 16 keys."""

        def group(number: Any) -> None:
            numbers, first = as_stored(w, w.load(x, w.times(number, LANES)), stored), w.times(number, LANES)
            for lane in range(LANES):
                value = w.b.extract_element(numbers, ir.Constant(ir.IntType(32), lane))
                w.b.store(value, w.at(target, w.plus(first, lane), LANES * BYTES[stored]), align=BYTES[stored])

        w.repeat(groups, group)

    return place_key


def _place_value(stored: str) -> Routine:
    @routine(4)
    def place_value(w: VectorWriter, x: Any, groups: Any, target: Any, step: Any) -> None:
        def group(number: Any) -> None:
            numbers = as_stored(w, w.load(x, w.times(number, LANES)), stored)
            w.b.store(numbers, w.at(w.plus(target, number, step), i64(0)), align=BYTES[stored])

        w.repeat(groups, group)

    return place_value


def _dot(stored: str) -> Routine:
    @routine(4)
    def dot(w: VectorWriter, query: Any, key: Any, size: Any, out: Any) -> None:
        """out[0] = query . key for the key in one lane of a block: the same bits as a tile gives for that lane."""
        number = _F32 if stored == "float32" else ir.HalfType()

        def add(i: Any, sums: list[Any]) -> list[Any]:
            value = w.b.load(w.at(key, i, LANES * BYTES[stored]), typ=number, align=BYTES[stored])
            if stored == "float16":
                value = w.b.fpext(value, _F32)
            return [w.call("llvm.fma.f32", w.load_float(query, i), value, sums[0])]

        [total] = w.loop(size, [ir.Constant(_F32, 0.0)], add)
        w.b.store(total, w.at(out, i64(0)), align=4)

    return dot


def _add_value(stored: str) -> Routine:
    @routine(3)
    def add_value(w: VectorWriter, weight: Any, value: Any, out: Any) -> None:
        """out[0:16] += weight * value[0:16]: one more step of a tile, to the bit."""
        factor = w.splat(w.load_float(weight, i64(0)))
        w.store(w.fma(factor, load_stored(w, value, i64(0), stored), w.load(out, i64(0))), out, i64(0))

    return add_value


def _widen(stored: str) -> Routine:
    @routine(3)
    def widen(w: VectorWriter, numbers: Any, count: Any, out: Any) -> None:
        w.repeat(count, lambda i: w.store(load_stored(w, numbers, i, stored), out, w.times(i, LANES)))

    return widen


@cache
def vector_library(stored: str) -> RoutineLibrary:
    routines = {
        VectorCode.PLACE_KEY: _place_key(stored),
        VectorCode.PLACE_VALUE: _place_value(stored),
        VectorCode.TILES: block_tiles[stored, False],
        VectorCode.TILES_ONTO: block_tiles[stored, True],
        VectorCode.TILES_TWICE: two_block_tiles[stored, False],
        VectorCode.TILES_TWICE_ONTO: two_block_tiles[stored, True],
        VectorCode.DOT: _dot(stored),
        VectorCode.ADD_VALUE: _add_value(stored),
        VectorCode.WIDEN: _widen(stored),
        VectorCode.WIDE_TILES: block_tiles["float32", False],
        VectorCode.WIDE_TILES_ONTO: block_tiles["float32", True],
        VectorCode.WIDE_TILES_TWICE: two_block_tiles["float32", False],
        VectorCode.WIDE_TILES_TWICE_ONTO: two_block_tiles["float32", True],
    }
    return library(f"attention_{stored}", {code.name.lower(): routines[code] for code in VectorCode})


def vector_code(stored: str) -> np.ndarray:
    """Addresses of the routines, by `VectorCode`; the first call on a machine compiles them."""
    return vector_library(stored).addresses()
