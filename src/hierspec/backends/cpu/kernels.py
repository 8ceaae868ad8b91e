"""Small pieces of vector machine code, written as LLVM and compiled by numba for whatever CPU this is.

Every piece works on 16 lanes of float32, which LLVM maps to the registers there are (NEON, AVX2, AVX-512), and uses
explicit fused multiply-adds in a fixed order. No sum is ever regrouped, so a result depends on its own inputs alone
and never on how many other rows were computed beside it.

Arguments are addresses and sizes as int64: the pieces are called from compiled code only, in `cpu_pass.py`.
"""

from __future__ import annotations

import platform
import zlib
from pathlib import Path
from typing import Any

from llvmlite import binding, ir
from numba import types

from hierspec.backends.cpu.llvm import (
    FLOAT_BYTES,
    I32,
    INTEGERS,
    LANES,
    UNROLLED,
    VECTOR,
    VectorWriter,
    all_lanes,
    integers,
    piece,
    whole,
)

# Compiled functions are kept on disk under their own source and signature. Those that use these pieces have this
# number as a default argument, so that a change in one of these files is a new signature. It is one number for all of
# them: numba's quick way into a function takes default arguments of one type for one and the same.
_FILES = (
    "llvm.py",
    "kernels.py",
    "quantised.py",
    "amx.py",
    "product.py",
    "layers.py",
    "memory.py",
    "threads.py",
)
CODE = zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in _FILES))

_I16, _I64, _F32, _POINTER = ir.IntType(16), ir.IntType(64), ir.FloatType(), ir.PointerType()
# Lines of weights to ask memory for in advance, where there is so much arithmetic that the CPU by itself looks less
# far ahead: 4% of a pass over 4 to 8 tokens on a Neoverse-N1. With one or two rows it makes no difference.
_AHEAD = 160
# NEON multiplies by one lane of a register for nothing, and a load that fills a register with one number costs an
# arithmetic slot; on x86 it is the other way round.
_BY_LANE = platform.machine() in ("aarch64", "arm64")


def _sixteen_weights(w: VectorWriter, weights: Any, i: Any, halves: bool) -> Any:
    """The weights of 16 outputs that meet input `i`."""
    if halves:  # bfloat16 is the upper half of a float32
        raw = w.b.load(w.at(weights, i, 2 * LANES), typ=ir.VectorType(_I16, LANES), align=2)
        return w.b.bitcast(w.b.shl(w.b.zext(raw, INTEGERS), integers(16)), VECTOR)
    return w.b.load(w.at(weights, i, FLOAT_BYTES * LANES), typ=VECTOR, align=FLOAT_BYTES)


def _tile(rows: int, halves: bool, onto: bool = False) -> Any:
    @piece(6, apart=True)
    def tile(w: VectorWriter, x: Any, x_step: Any, weights: Any, size: Any, out: Any, out_step: Any) -> None:
        """out[row, 0:16] = sum over i < size of x[row, i] * weights[i, 0:16], one i after the other, for each row.

        With `onto` the sums go on from what `out` holds: a product in pieces, to the bit the same as in one.
        """
        starts = [w.b.add(x, w.b.mul(x_step, whole(FLOAT_BYTES * row))) for row in range(rows)]

        def add(step: Any, sums: list[Any]) -> list[Any]:
            first = w.b.mul(step, whole(UNROLLED))
            several = [w.load_several(start, first) for start in starts]
            for k in range(UNROLLED):
                i = w.b.add(first, whole(k))
                weight = _sixteen_weights(w, weights, i, halves)
                if rows > 2:
                    w.prefetch(weights, w.b.add(i, whole(_AHEAD)), (2 if halves else FLOAT_BYTES) * LANES)
                sums = [
                    w.fma(w.spread_lane(x, k) if _BY_LANE else w.spread(w.load_one(start, i)), weight, total)
                    for x, start, total in zip(several, starts, sums, strict=True)
                ]
            return sums

        places = [w.b.mul(out_step, whole(row)) for row in range(rows)]
        begin = [w.load(out, place) if onto else all_lanes(0.0) for place in places]
        for place, total in zip(places, w.loop(w.b.sdiv(size, whole(UNROLLED)), begin, add), strict=True):
            w.store(total, out, place)

    return tile


def _turned_tile(rows: int, halves: bool) -> Any:
    @piece(5, apart=True)
    def tile(w: VectorWriter, x: Any, weights: Any, size: Any, out: Any, out_step: Any) -> None:
        """What `_tile` gives, to the bit, for rows that `turn` has put side by side: x[i, row]."""

        def add(i: Any, sums: list[Any]) -> list[Any]:
            weight = _sixteen_weights(w, weights, i, halves)
            first = w.b.mul(i, whole(rows))
            inputs = [w.spread(w.load_one(x, w.b.add(first, whole(row)))) for row in range(rows)]
            return [w.fma(one, weight, total) for one, total in zip(inputs, sums, strict=True)]

        for row, total in enumerate(w.loop(size, [all_lanes(0.0)] * rows, add)):
            w.store(total, out, w.b.mul(out_step, whole(row)))

    return tile


def _turn(rows: int) -> Any:
    @piece(3, apart=True)
    def turn(w: VectorWriter, x: Any, size: Any, out: Any) -> None:
        """out[i, row] = x[row, i] for i < size: a tile then finds its inputs in one place, not in as many as rows."""

        def one(i: Any, nothing: list[Any]) -> list[Any]:
            for row in range(rows):
                value = w.load_one(x, w.b.add(w.b.mul(size, whole(row)), i))
                w.b.store(value, w.at(out, w.b.add(w.b.mul(i, whole(rows)), whole(row))), align=FLOAT_BYTES)
            return []

        w.loop(size, [], one)

    return turn


# One row's sum is one chain of dependent steps. With vectors of 16 lanes it is one register, and a tile needs many
# rows before its chains fill the multipliers; where 16 lanes are four registers, four rows are enough.
WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
tile_1, tile_2, tile_3, tile_4 = (_tile(rows, halves=False) for rows in (1, 2, 3, 4))
onto_1, onto_2, onto_3, onto_4 = (_tile(rows, halves=False, onto=True) for rows in (1, 2, 3, 4))
turned_tile_8, turned_tile_16 = (_turned_tile(rows, halves=False) for rows in (8, 16))
half_tile_1, half_tile_2, half_tile_3, half_tile_4 = (_tile(rows, halves=True) for rows in (1, 2, 3, 4))
turned_half_tile_8, turned_half_tile_16 = (_turned_tile(rows, halves=True) for rows in (8, 16))
turn_8, turn_16 = (_turn(rows) for rows in (8, 16))


@piece(3, types.float32)
def score_one(w: VectorWriter, query: Any, key: Any, size: Any) -> Any:
    """query . key for one key that stands in one lane: what `tile` gives for that lane, to the bit."""

    def add(i: Any, sums: list[Any]) -> list[Any]:
        return [w.call("llvm.fma.f32", w.load_one(query, i), w.load_one(key, w.b.mul(i, whole(LANES))), sums[0])]

    [total] = w.loop(size, [ir.Constant(_F32, 0.0)], add)
    return total


@piece(3, types.float32)
def soften(w: VectorWriter, values: Any, count: Any, scale: Any) -> Any:
    """values[j] = exp(scale * (values[j] - largest)) in place, over 16 * count numbers; their sum is returned.

    `scale` is the address of a float. What fills up the last 16 is -inf.
    """

    def place(j: Any) -> Any:
        return w.b.mul(j, whole(LANES))

    def larger(x: Any, y: Any) -> Any:
        return w.b.select(w.b.fcmp_ordered(">", x, y), x, y)

    [most] = w.loop(count, [all_lanes(float("-inf"))], lambda j, held: [larger(w.load(values, place(j)), held[0])])
    largest, factor = w.spread(w.fold(most, larger)), w.spread(w.load_one(scale, whole(0)))

    def one(j: Any, sums: list[Any]) -> list[Any]:
        e = w.exp(w.b.fmul(w.b.fsub(w.load(values, place(j)), largest), factor))
        w.store(e, values, place(j))
        return [w.b.fadd(sums[0], e)]

    [total] = w.loop(count, [all_lanes(0.0)], one)
    return w.fold(total, w.b.fadd)


@piece(3)
def weigh_one(w: VectorWriter, weight: Any, value: Any, out: Any) -> None:
    """out[0:16] += weight * value[0:16]: one more step of `tile`, to the bit. `weight` is the address of a float."""
    factor = w.spread(w.load_one(weight, whole(0)))
    w.store(w.fma(factor, w.load(value, whole(0)), w.load(out, whole(0))), out, whole(0))


@piece(3)
def gate(w: VectorWriter, gates: Any, ups: Any, out: Any) -> None:
    """out[0:16] = silu(gates[0:16]) * ups[0:16]."""
    g = w.load(gates, whole(0))
    silu = w.b.fdiv(g, w.b.fadd(all_lanes(1.0), w.exp(w.b.fsub(all_lanes(-0.0), g))))
    w.store(w.b.fmul(silu, w.load(ups, whole(0))), out, whole(0))


@piece(2)
def copy_lanes(w: VectorWriter, source: Any, target: Any) -> None:
    """target[0:16] = source[0:16]."""
    w.store(w.load(source, whole(0)), target, whole(0))


@piece(3)
def scatter(w: VectorWriter, source: Any, target: Any, size: Any) -> None:
    """target[16 * i] = source[i] for i < size: one lane of a block."""

    def one(i: Any, nothing: list[Any]) -> list[Any]:
        w.store(w.load_one(source, i), target, w.b.mul(i, whole(LANES)))
        return []

    w.loop(size, [], one)


@piece(2, types.int64)
def add_atomically(w: VectorWriter, counter: Any, amount: Any) -> Any:
    """Add to a shared int64; what it was before."""
    return w.b.atomic_rmw("add", w.b.inttoptr(counter, _POINTER), amount, "acq_rel")


@piece(1, types.int64)
def read_atomically(w: VectorWriter, counter: Any) -> Any:
    return w.b.load_atomic(w.b.inttoptr(counter, _POINTER), "acquire", 8, typ=_I64)


@piece(1, types.int64)
def give_way(w: VectorWriter, nothing: Any) -> Any:
    """Let another thread have the core."""
    function = w.b.module.globals.get("sched_yield")
    if function is None:
        function = ir.Function(w.b.module, ir.FunctionType(I32, []), "sched_yield")
    w.b.call(function, [])
    return nothing
