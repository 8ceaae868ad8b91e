"""Kernels as LLVM code on vectors of 16 float32 lanes, callable from functions that numba compiles.

Importing a module of kernels emits nothing: numba requests a kernel's LLVM code when it compiles a caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hierspec.backends.cpu.features import is_arm

LANES = 16
FLOAT_BYTES = 4
UNROLLED = 4  # inputs of a product per iteration; sizes are multiples of 16
I32 = ir.IntType(32)
V16F32, V16I32 = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
_I64, _F32, _POINTER = ir.IntType(64), ir.FloatType(), ir.PointerType()


# Coefficients of 2**r = sum of c[i] * r**i for |r| <= 1/2, to within 2.1e-7 (Chebyshev interpolation).
_POWER_OF_TWO = (1.0, 0.6931471880293429, 0.24022348940946986, 0.05550357104252815, 0.009666373693208791,
                 0.0013390867351476664)  # fmt: skip


class VectorWriter:
    """An LLVM builder with the few operations that kernels need."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of LLVM or the C library whose arguments and result have the same type."""
        kind = arguments[0].type
        function = self.b.module.globals.get(name)
        if function is None:
            function = ir.Function(self.b.module, ir.FunctionType(kind, [kind] * len(arguments)), name)
        return self.b.call(function, arguments)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """A CPU-specific intrinsic, declared once per module."""
        declared = self.b.module.globals.get(name)
        return declared or ir.Function(self.b.module, ir.FunctionType(result, arguments), name)

    def lanes(self, vector: Any, start: int, count: int) -> Any:
        """Lanes start .. start + count."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        indices = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
        return self.b.shuffle_vector(vector, undefined, indices)

    def concatenate(self, vectors: list[Any]) -> Any:
        """Concatenates 2, 4, 8 … vectors of the same length."""
        while len(vectors) > 1:
            count = 2 * vectors[0].type.count
            indices = ir.Constant(ir.VectorType(I32, count), list(range(count)))
            vectors = [self.b.shuffle_vector(a, b, indices) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call("llvm.fma.v16f32", x, y, z)

    def larger(self, x: Any, y: Any) -> Any:
        """The larger one of each lane, or y where x is no number. y must be one: then it is a single instruction."""
        if is_arm():
            return self.call(f"llvm.maxnum.v{x.type.count}f32", x, y)
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def at(self, address: Any, index: Any, size: int = FLOAT_BYTES) -> Any:
        """Pointer to item `index`, where items have `size` bytes. The address is an integer or a pointer."""
        offset = self.b.mul(index, i64(size))
        if isinstance(address.type, ir.PointerType):
            return self.b.gep(address, [offset], source_etype=ir.IntType(8))
        return self.b.inttoptr(self.b.add(address, offset), _POINTER)

    def pointer(self, address: Any) -> Any:
        """The address as a pointer."""
        return self.b.inttoptr(address, _POINTER)

    def load(self, address: Any, index: Any) -> Any:
        """16 floats from item `index` on."""
        return self.b.load(self.at(address, index), typ=V16F32, align=FLOAT_BYTES)

    def prefetch(self, address: Any, index: Any, size: int, cache: int = 1) -> None:
        """Prefetches item `index` of `size` bytes into cache level 1, 2 or 3; an address out of bounds is harmless."""
        arguments = (_POINTER, I32, I32, I32)
        function = self.function("llvm.prefetch.p0", ir.VoidType(), *arguments)
        reading, locality, data = 0, 4 - cache, 1
        self.b.call(
            function, [self.at(address, index, size), *(ir.Constant(I32, n) for n in (reading, locality, data))]
        )

    def load_float(self, address: Any, index: Any) -> Any:
        return self.b.load(self.at(address, index), typ=_F32, align=FLOAT_BYTES)

    def load_unrolled(self, address: Any, index: Any) -> Any:
        """The floats that one iteration of a product reads."""
        return self.b.load(self.at(address, index), typ=ir.VectorType(_F32, UNROLLED), align=FLOAT_BYTES)

    def splat_lane(self, unrolled: Any, lane: int) -> Any:
        """Broadcasts one of the floats of `load_unrolled` to all lanes."""
        undefined = ir.Constant(unrolled.type, ir.Undefined)
        return self.b.shuffle_vector(unrolled, undefined, ir.Constant(V16I32, [lane] * LANES))

    def store(self, value: Any, address: Any, index: Any) -> None:
        self.b.store(value, self.at(address, index), align=FLOAT_BYTES)

    def splat(self, value: Any) -> Any:
        """Broadcasts one float to all lanes."""
        single = self.b.insert_element(ir.Constant(V16F32, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(single, ir.Constant(V16F32, ir.Undefined), ir.Constant(V16I32, [0] * LANES))

    def fold(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Reduces all lanes to one float, pairwise by halves, so the order is always the same."""
        width = vector.type.count
        while width > 1:
            width //= 2
            undefined = ir.Constant(ir.VectorType(_F32, 2 * width), ir.Undefined)
            low, high = (
                self.b.shuffle_vector(
                    vector, undefined, ir.Constant(ir.VectorType(I32, width), list(range(start, start + width)))
                )
                for start in (0, width)
            )
            vector = combine(low, high)
        return self.b.extract_element(vector, ir.Constant(I32, 0))

    def loop(self, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Runs body(index, carried) `count` times, at least once; returns `carried` after the last iteration."""
        before = self.b.block
        block, after = self.b.append_basic_block("round"), self.b.append_basic_block("after")
        self.b.branch(block)
        self.b.position_at_end(block)
        index = self.b.phi(_I64)
        index.add_incoming(i64(0), before)
        values = []
        for start in carried:
            values.append(self.b.phi(start.type))
            values[-1].add_incoming(start, before)
        results = body(index, values)
        following = self.b.add(index, i64(1))
        end = self.b.block  # the body may contain loops
        index.add_incoming(following, end)
        for value, result in zip(values, results, strict=True):
            value.add_incoming(result, end)
        self.b.cbranch(self.b.icmp_signed("<", following, count), block, after)
        self.b.position_at_end(after)
        return results

    def loop_perhaps(
        self, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """As `loop`, but `count` may be 0."""
        before = self.b.block
        with self.b.if_then(self.b.icmp_signed(">", count, i64(0))):
            results = self.loop(count, carried, body)
            inside = self.b.block
        values = []
        for start, result in zip(carried, results, strict=True):
            values.append(self.b.phi(start.type))
            values[-1].add_incoming(start, before)
            values[-1].add_incoming(result, inside)
        return values

    def repeat(self, count: Any, body: Callable[[Any], None]) -> None:
        """Runs body(index) for every index below `count`, which may be 0."""

        def once(index: Any, carried: list[Any]) -> list[Any]:
            body(index)
            return []

        with self.b.if_then(self.b.icmp_signed(">", count, i64(0))):
            self.loop(count, [], once)

    def when_equal(self, value: Any, cases: dict[int, Callable[[], None]]) -> None:
        """Runs the case that `value` equals, if there is one."""
        for number, body in cases.items():
            with self.b.if_then(self.b.icmp_signed("==", value, i64(number))):
                body()

    def plus(self, start: Any, *factors: Any) -> Any:
        """start + the product of all factors, which may be Python ints."""
        return self.b.add(start, self.times(*factors))

    def times(self, *factors: Any) -> Any:
        product, *others = [i64(factor) if isinstance(factor, int) else factor for factor in factors]
        for factor in others:
            product = self.b.mul(product, factor)
        return product

    def log(self, x: Any) -> Any:
        """The natural logarithm of positive normal numbers, to within three units in the last place.

        x = 2**n m with m from sqrt(1/2) to sqrt(2), and a polynomial in m - 1.
        """
        b = self.b
        bits = b.bitcast(x, V16I32)
        # Subtracting the bits of sqrt(1/2) makes the exponent roll over there instead of at 1.
        shifted = b.sub(bits, splat_i32(0x3F3504F3))
        n = b.sitofp(b.ashr(shifted, splat_i32(23)), V16F32)
        m = b.bitcast(b.add(b.and_(shifted, splat_i32(0x007FFFFF)), splat_i32(0x3F3504F3)), V16F32)
        f = b.fsub(m, splat_f32(1.0))
        value = splat_f32(7.0376836292e-2)
        for coefficient in (
            -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
            -2.4999993993e-1, 3.3333331174e-1,
        ):  # fmt: skip
            value = self.fma(value, f, splat_f32(coefficient))
        square = b.fmul(f, f)
        value = b.fmul(b.fmul(value, f), square)
        value = self.fma(n, splat_f32(-2.12194440e-4), value)
        value = self.fma(square, splat_f32(-0.5), value)
        return self.fma(n, splat_f32(0.693359375), b.fadd(f, value))

    def exp(self, x: Any) -> Any:
        """e**x to within two units in the last place; 0 below -87.

        x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial in r, and n in the exponent's bits.
        """
        b = self.b
        bounded = self.call("llvm.maxnum.v16f32", self.call("llvm.minnum.v16f32", x, splat_f32(88.0)), splat_f32(-87.0))
        n = self.call("llvm.floor.v16f32", self.fma(bounded, splat_f32(1.4426950408889634), splat_f32(0.5)))
        r = self.fma(n, splat_f32(-0.693359375), bounded)
        r = self.fma(n, splat_f32(2.12194440e-4), r)
        value = splat_f32(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = self.fma(value, r, splat_f32(coefficient))
        value = self.fma(self.fma(value, r, splat_f32(1.0)), r, splat_f32(1.0))
        # The line above is 1 + r (1 + r v): one rounding fewer than 1 + r + r r v.
        power = b.shl(b.add(b.fptosi(n, V16I32), splat_i32(127)), splat_i32(23))
        value = b.fmul(value, b.bitcast(power, V16F32))
        return b.select(b.fcmp_ordered("<", x, splat_f32(-87.0)), splat_f32(0.0), value)

    def powers_of_two(self, vectors: Sequence[Any]) -> list[Any]:
        """2**x for x <= 0, with a relative error below 3e-7; 2**0 is exactly 1, x <= -127 gives exactly 0.

        All vectors take each step together, because a CPU looks only so far ahead for independent instructions.
        """
        b = self.b
        bounded = [self.larger(x, splat_f32(-127.0)) for x in vectors]
        # Adding a float whose last bit counts ones rounds x; the last bits of the sum are the integer, which then goes
        # into the exponent.
        magic = splat_f32(float(3 << 22))
        shifted = [b.fadd(x, magic) for x in bounded]
        rests = [b.fsub(x, b.fsub(s, magic)) for x, s in zip(bounded, shifted, strict=True)]
        values = [splat_f32(_POWER_OF_TWO[-1])] * len(rests)
        for coefficient in _POWER_OF_TWO[-2::-1]:
            values = [self.fma(value, r, splat_f32(coefficient)) for value, r in zip(values, rests, strict=True)]
        exponents = [b.shl(b.bitcast(s, V16I32), splat_i32(23)) for s in shifted]
        sums = [b.add(b.bitcast(v, V16I32), e) for v, e in zip(values, exponents, strict=True)]
        return [b.bitcast(total, V16F32) for total in sums]


def i64(value: int) -> Any:
    """The LLVM constant of this value."""
    return ir.Constant(_I64, value)


def splat_i32(value: int) -> Any:
    """The LLVM constant with this integer in all lanes."""
    return ir.Constant(V16I32, [value] * LANES)


def splat_f32(value: float) -> Any:
    """The LLVM constant with this float in all lanes."""
    return ir.Constant(V16F32, [value] * LANES)


def kernel(arguments: int, result: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Makes emit(writer, *addresses and sizes) callable from compiled code by inlining its LLVM code in the caller.

    Use it for small kernels. A large one should be a `Routine`: inlined, it would be compiled again for every call.
    """

    def wrap(emit: Callable[..., Any]) -> Any:
        signature = result(*[types.int64] * arguments)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(VectorWriter(builder), *values)
            return context.get_dummy_value() if value is None else value

        # numba reads the number of parameters from the function, so there is one typing function for each number.
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
        callable_kernel = intrinsic(typing[arguments])
        callable_kernel.__doc__ = emit.__doc__
        return callable_kernel

    return wrap
