"""Small pieces of vector machine code, written as LLVM and compiled by numba for whatever CPU this is.

Every piece works on 16 lanes of float32, which LLVM maps to the registers there are (NEON, AVX2, AVX-512), and uses
explicit fused multiply-adds in a fixed order. No sum is ever regrouped, so a result depends on its own inputs alone
and never on how many other rows were computed beside it.

Arguments are addresses and sizes as int64: the pieces are called from compiled code only, in `cpu_pass.py`.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

LANES = 16
# Compiled functions are kept on disk under their own source and signature. Those that use these pieces have this
# number as a default argument, so that a change in one of these files is a new signature. It is one number for all of
# them: numba's quick way into a function takes default arguments of one type for one and the same.
_FILES = ("vector_code.py", "low_bits.py", "matrix_units.py", "cpu_product.py", "cpu_pass.py", "team.py")
CODE = zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in _FILES))

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _INTEGERS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_POINTER = ir.PointerType()
_FLOAT_BYTES = 4
# Lines of weights to ask memory for in advance, where there is so much arithmetic that the CPU by itself looks less
# far ahead: 4% of a pass over 4 to 8 tokens on a Neoverse-N1. With one or two rows it makes no difference.
_AHEAD = 160
_UNROLLED = 4  # inputs of a product that are taken in one round; sizes are multiples of 16
# NEON multiplies by one lane of a register for nothing, and a load that fills a register with one number costs an
# arithmetic slot; on x86 it is the other way round.
_BY_LANE = platform.machine() in ("aarch64", "arm64")


class VectorWriter:
    """An LLVM builder with the few operations that the pieces need."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def call(self, name: str, *arguments: Any) -> Any:
        """A function of LLVM's or the C library's on values of one type."""
        kind = arguments[0].type
        function = self.b.module.globals.get(name)
        if function is None:
            function = ir.Function(self.b.module, ir.FunctionType(kind, [kind] * len(arguments)), name)
        return self.b.call(function, arguments)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of the CPU's own, declared once."""
        found = self.b.module.globals.get(name)
        return found or ir.Function(self.b.module, ir.FunctionType(result, arguments), name)

    def part(self, vector: Any, start: int, count: int) -> Any:
        """Lanes start .. start + count."""
        nothing = ir.Constant(vector.type, ir.Undefined)
        chosen = ir.Constant(ir.VectorType(_I32, count), list(range(start, start + count)))
        return self.b.shuffle_vector(vector, nothing, chosen)

    def joined(self, parts: list[Any]) -> Any:
        """Vectors of one length, 2, 4, 8 … of them, end to end."""
        while len(parts) > 1:
            both = ir.Constant(ir.VectorType(_I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            parts = [self.b.shuffle_vector(a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call("llvm.fma.v16f32", x, y, z)

    def at(self, address: Any, index: Any, size: int = _FLOAT_BYTES) -> Any:
        """Pointer to item `index` of `size` bytes."""
        return self.b.inttoptr(self.b.add(address, self.b.mul(index, whole(size))), _POINTER)

    def load(self, address: Any, index: Any) -> Any:
        """16 floats from item `index` on."""
        return self.b.load(self.at(address, index), typ=_VECTOR, align=_FLOAT_BYTES)

    def prefetch(self, address: Any, index: Any, size: int) -> None:
        """Have item `index` of `size` bytes brought into the nearest cache, if it is there at all."""
        arguments = (_POINTER, _I32, _I32, _I32)
        function = self.function("llvm.prefetch.p0", ir.VoidType(), *arguments)
        reading, nearest, data = 0, 3, 1
        self.b.call(
            function, [self.at(address, index, size), *(ir.Constant(_I32, n) for n in (reading, nearest, data))]
        )

    def load_one(self, address: Any, index: Any) -> Any:
        return self.b.load(self.at(address, index), typ=_F32, align=_FLOAT_BYTES)

    def load_several(self, address: Any, index: Any) -> Any:
        """As many floats as one round of a product takes."""
        return self.b.load(self.at(address, index), typ=ir.VectorType(_F32, _UNROLLED), align=_FLOAT_BYTES)

    def spread_lane(self, several: Any, lane: int) -> Any:
        """One of `load_several`'s floats in all lanes."""
        nothing = ir.Constant(several.type, ir.Undefined)
        return self.b.shuffle_vector(several, nothing, ir.Constant(_INTEGERS, [lane] * LANES))

    def store(self, value: Any, address: Any, index: Any) -> None:
        self.b.store(value, self.at(address, index), align=_FLOAT_BYTES)

    def spread(self, value: Any) -> Any:
        """One float in all lanes."""
        single = self.b.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(single, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_INTEGERS, [0] * LANES))

    def fold(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes into one float, halves onto halves: always the same tree."""
        width = LANES
        while width > 1:
            width //= 2
            nothing = ir.Constant(ir.VectorType(_F32, 2 * width), ir.Undefined)
            low, high = (
                self.b.shuffle_vector(
                    vector, nothing, ir.Constant(ir.VectorType(_I32, width), list(range(start, start + width)))
                )
                for start in (0, width)
            )
            vector = combine(low, high)
        return self.b.extract_element(vector, ir.Constant(_I32, 0))

    def loop(self, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """`carried` after `count` rounds (at least one) of body(round, carried)."""
        before = self.b.block
        block, after = self.b.append_basic_block("round"), self.b.append_basic_block("after")
        self.b.branch(block)
        self.b.position_at_end(block)
        index = self.b.phi(_I64)
        index.add_incoming(whole(0), before)
        values = []
        for start in carried:
            values.append(self.b.phi(start.type))
            values[-1].add_incoming(start, before)
        results = body(index, values)
        following = self.b.add(index, whole(1))
        end = self.b.block  # the body may have loops of its own
        index.add_incoming(following, end)
        for value, result in zip(values, results, strict=True):
            value.add_incoming(result, end)
        self.b.cbranch(self.b.icmp_signed("<", following, count), block, after)
        self.b.position_at_end(after)
        return results

    def log(self, x: Any) -> Any:
        """The natural logarithm of positive normal numbers, to within three units in the last place.

        x = 2**n m with m from sqrt(1/2) to sqrt(2), and a polynomial in m - 1.
        """
        b = self.b
        bits = b.bitcast(x, _INTEGERS)
        # Taking away the bits of sqrt(1/2) makes the exponent roll over there instead of at 1.
        shifted = b.sub(bits, integers(0x3F3504F3))
        n = b.sitofp(b.ashr(shifted, integers(23)), _VECTOR)
        m = b.bitcast(b.add(b.and_(shifted, integers(0x007FFFFF)), integers(0x3F3504F3)), _VECTOR)
        f = b.fsub(m, all_lanes(1.0))
        value = all_lanes(7.0376836292e-2)
        for coefficient in (
            -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
            -2.4999993993e-1, 3.3333331174e-1,
        ):  # fmt: skip
            value = self.fma(value, f, all_lanes(coefficient))
        square = b.fmul(f, f)
        value = b.fmul(b.fmul(value, f), square)
        value = self.fma(n, all_lanes(-2.12194440e-4), value)
        value = self.fma(square, all_lanes(-0.5), value)
        return self.fma(n, all_lanes(0.693359375), b.fadd(f, value))

    def exp(self, x: Any) -> Any:
        """e**x to within two units in the last place; below -87 it is 0.

        x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, and n put into the exponent's bits.
        """
        b = self.b
        bounded = self.call("llvm.maxnum.v16f32", self.call("llvm.minnum.v16f32", x, all_lanes(88.0)), all_lanes(-87.0))
        n = self.call("llvm.floor.v16f32", self.fma(bounded, all_lanes(1.4426950408889634), all_lanes(0.5)))
        r = self.fma(n, all_lanes(-0.693359375), bounded)
        r = self.fma(n, all_lanes(2.12194440e-4), r)
        value = all_lanes(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = self.fma(value, r, all_lanes(coefficient))
        value = self.fma(self.fma(value, r, all_lanes(1.0)), r, all_lanes(1.0))
        # The line above is 1 + r (1 + r v): the same polynomial, one rounding less than 1 + r + r r v.
        power = b.shl(b.add(b.fptosi(n, _INTEGERS), integers(127)), integers(23))
        value = b.fmul(value, b.bitcast(power, _VECTOR))
        return b.select(b.fcmp_ordered("<", x, all_lanes(-87.0)), all_lanes(0.0), value)


def whole(value: int) -> Any:
    return ir.Constant(_I64, value)


def integers(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * LANES)


def all_lanes(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def piece(
    arguments: int, result: Any = types.void, apart: bool = False, plain: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Make write(writer, *addresses and sizes) callable from compiled code.

    `apart`: as a function of its own, which is not copied into its callers. Large pieces would else be compiled anew
    for every place that uses them, and compiling is what the first start on a machine waits for. `plain`, with it: not
    optimised, for what need not be fast.
    """

    def wrap(write: Callable[..., Any]) -> Any:
        signature = result(*[types.int64] * arguments)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            if apart:
                name = f"hierspec_{write.__name__}_{id(write)}"
                function = builder.module.globals.get(name)
                if function is None:
                    function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_I64] * arguments), name)
                    function.linkage = "internal"
                    function.attributes.add("noinline")
                    if plain:
                        function.attributes.add("optnone")
                    inner = ir.IRBuilder(function.append_basic_block("entry"))
                    write(VectorWriter(inner), *function.args)
                    inner.ret_void()
                builder.call(function, values)
                return context.get_dummy_value()
            found = write(VectorWriter(builder), *values)
            return context.get_dummy_value() if found is None else found

        # numba reads the number of parameters off the function, so there is one typing function for every number.
        typing: dict[int, Callable[..., Any]] = {
            1: lambda _, a: (signature, codegen),
            2: lambda _, a, b: (signature, codegen),
            3: lambda _, a, b, c: (signature, codegen),
            4: lambda _, a, b, c, d: (signature, codegen),
            5: lambda _, a, b, c, d, e: (signature, codegen),
            6: lambda _, a, b, c, d, e, f: (signature, codegen),
            7: lambda _, a, b, c, d, e, f, g: (signature, codegen),
            8: lambda _, a, b, c, d, e, f, g, h: (signature, codegen),
        }
        made = intrinsic(typing[arguments])
        made.__doc__ = write.__doc__
        return made

    return wrap


def _sixteen_weights(w: VectorWriter, weights: Any, i: Any, halves: bool) -> Any:
    """The weights of 16 outputs that meet input `i`."""
    if halves:  # bfloat16 is the upper half of a float32
        raw = w.b.load(w.at(weights, i, 2 * LANES), typ=ir.VectorType(_I16, LANES), align=2)
        return w.b.bitcast(w.b.shl(w.b.zext(raw, _INTEGERS), integers(16)), _VECTOR)
    return w.b.load(w.at(weights, i, _FLOAT_BYTES * LANES), typ=_VECTOR, align=_FLOAT_BYTES)


def _tile(rows: int, halves: bool) -> Any:
    @piece(6, apart=True)
    def tile(w: VectorWriter, x: Any, x_step: Any, weights: Any, size: Any, out: Any, out_step: Any) -> None:
        """out[row, 0:16] = sum over i < size of x[row, i] * weights[i, 0:16], one i after the other, for each row."""
        starts = [w.b.add(x, w.b.mul(x_step, whole(_FLOAT_BYTES * row))) for row in range(rows)]

        def add(step: Any, sums: list[Any]) -> list[Any]:
            first = w.b.mul(step, whole(_UNROLLED))
            several = [w.load_several(start, first) for start in starts]
            for k in range(_UNROLLED):
                i = w.b.add(first, whole(k))
                weight = _sixteen_weights(w, weights, i, halves)
                if rows > 2:
                    w.prefetch(weights, w.b.add(i, whole(_AHEAD)), (2 if halves else _FLOAT_BYTES) * LANES)
                sums = [
                    w.fma(w.spread_lane(x, k) if _BY_LANE else w.spread(w.load_one(start, i)), weight, total)
                    for x, start, total in zip(several, starts, sums, strict=True)
                ]
            return sums

        for row, total in enumerate(w.loop(w.b.sdiv(size, whole(_UNROLLED)), [all_lanes(0.0)] * rows, add)):
            w.store(total, out, w.b.mul(out_step, whole(row)))

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
                w.b.store(value, w.at(out, w.b.add(w.b.mul(i, whole(rows)), whole(row))), align=_FLOAT_BYTES)
            return []

        w.loop(size, [], one)

    return turn


# One row's sum is one chain of dependent steps. With vectors of 16 lanes it is one register, and a tile needs many
# rows before its chains fill the multipliers; where 16 lanes are four registers, four rows are enough.
WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
tile_1, tile_2, tile_3, tile_4 = (_tile(rows, halves=False) for rows in (1, 2, 3, 4))
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
        function = ir.Function(w.b.module, ir.FunctionType(_I32, []), "sched_yield")
    w.b.call(function, [])
    return nothing
