"""A writer of vector machine code: LLVM on 16 lanes of float32, and how compiled functions call what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
FLOAT_BYTES = 4
UNROLLED = 4  # inputs of a product that are taken in one round; sizes are multiples of 16
I32 = ir.IntType(32)
VECTOR, INTEGERS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
_I64, _F32, _POINTER = ir.IntType(64), ir.FloatType(), ir.PointerType()


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
        chosen = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
        return self.b.shuffle_vector(vector, nothing, chosen)

    def joined(self, parts: list[Any]) -> Any:
        """Vectors of one length, 2, 4, 8 … of them, end to end."""
        while len(parts) > 1:
            both = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            parts = [self.b.shuffle_vector(a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call("llvm.fma.v16f32", x, y, z)

    def at(self, address: Any, index: Any, size: int = FLOAT_BYTES) -> Any:
        """Pointer to item `index` of `size` bytes."""
        return self.b.inttoptr(self.b.add(address, self.b.mul(index, whole(size))), _POINTER)

    def load(self, address: Any, index: Any) -> Any:
        """16 floats from item `index` on."""
        return self.b.load(self.at(address, index), typ=VECTOR, align=FLOAT_BYTES)

    def prefetch(self, address: Any, index: Any, size: int) -> None:
        """Have item `index` of `size` bytes brought into the nearest cache, if it is there at all."""
        arguments = (_POINTER, I32, I32, I32)
        function = self.function("llvm.prefetch.p0", ir.VoidType(), *arguments)
        reading, nearest, data = 0, 3, 1
        self.b.call(function, [self.at(address, index, size), *(ir.Constant(I32, n) for n in (reading, nearest, data))])

    def load_one(self, address: Any, index: Any) -> Any:
        return self.b.load(self.at(address, index), typ=_F32, align=FLOAT_BYTES)

    def load_several(self, address: Any, index: Any) -> Any:
        """As many floats as one round of a product takes."""
        return self.b.load(self.at(address, index), typ=ir.VectorType(_F32, UNROLLED), align=FLOAT_BYTES)

    def spread_lane(self, several: Any, lane: int) -> Any:
        """One of `load_several`'s floats in all lanes."""
        nothing = ir.Constant(several.type, ir.Undefined)
        return self.b.shuffle_vector(several, nothing, ir.Constant(INTEGERS, [lane] * LANES))

    def store(self, value: Any, address: Any, index: Any) -> None:
        self.b.store(value, self.at(address, index), align=FLOAT_BYTES)

    def spread(self, value: Any) -> Any:
        """One float in all lanes."""
        single = self.b.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))

    def fold(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes into one float, halves onto halves: always the same tree."""
        width = LANES
        while width > 1:
            width //= 2
            nothing = ir.Constant(ir.VectorType(_F32, 2 * width), ir.Undefined)
            low, high = (
                self.b.shuffle_vector(
                    vector, nothing, ir.Constant(ir.VectorType(I32, width), list(range(start, start + width)))
                )
                for start in (0, width)
            )
            vector = combine(low, high)
        return self.b.extract_element(vector, ir.Constant(I32, 0))

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
        bits = b.bitcast(x, INTEGERS)
        # Taking away the bits of sqrt(1/2) makes the exponent roll over there instead of at 1.
        shifted = b.sub(bits, integers(0x3F3504F3))
        n = b.sitofp(b.ashr(shifted, integers(23)), VECTOR)
        m = b.bitcast(b.add(b.and_(shifted, integers(0x007FFFFF)), integers(0x3F3504F3)), VECTOR)
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
        power = b.shl(b.add(b.fptosi(n, INTEGERS), integers(127)), integers(23))
        value = b.fmul(value, b.bitcast(power, VECTOR))
        return b.select(b.fcmp_ordered("<", x, all_lanes(-87.0)), all_lanes(0.0), value)


def whole(value: int) -> Any:
    return ir.Constant(_I64, value)


def integers(value: int) -> Any:
    return ir.Constant(INTEGERS, [value] * LANES)


def all_lanes(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


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
