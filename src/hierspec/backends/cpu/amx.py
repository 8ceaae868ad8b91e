"""Products by Intel AMX: bfloat16 weights times bfloat16 inputs, sums in float32.

One instruction, tdpbf16ps, multiplies a tile of 16 rows x 32 inputs by a tile of 32 inputs x 16 outputs. Intel's manual
specifies its arithmetic step by step. For each row and output, the products of even inputs and those of odd inputs are
accumulated in two chains of fused multiply-adds, in order; the two sums are added together, then added to the
accumulator tile. Every step rounds to nearest even, denormals are zero, and no mode register is read. So a row's bits
depend only on its own inputs and on the order of the tiles, which is always the same. A pass over one row also uses a
whole tile: the tile's other rows hold stale numbers, and their results are never read.

Layout in memory, 1024 bytes per tile: inputs [rows / 16, inputs / 32, 16 rows, 32], weights [outputs / 16, inputs / 32,
16 pairs of inputs, 16 outputs, 2]. Inputs are padded to a multiple of 32 with zeros.

The code names the eight tile registers by number, in intrinsics that LLVM turns into one instruction each; LLVM itself
uses none of them. On CPUs without AMX, tiles are in memory and vector code does the same steps: far slower, for tests
and comparisons only.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import config

from hierspec.backends.cpu.llvm import LANES, V16F32, V16I32, VectorWriter, i64, splat_f32, splat_i32
from hierspec.backends.cpu.routines import Routine, routine

DEPTH = 32  # inputs per tile
TILE_BYTES = 2 * LANES * DEPTH
_FEATURES = ("amx-tile", "amx-bf16")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux requires a process to request AMX first

_I8, _I16, _I64 = (ir.IntType(bits) for bits in (8, 16, 64))
_POINTER, _ROW_BYTES = ir.PointerType(), 64  # bytes of one row of a tile
# Palette 1; from byte 16 the bytes per row, and from byte 48 the rows of each tile: 16 rows of 64 bytes for all.
_TILE_CONFIG = bytes([1]) + bytes(15) + _ROW_BYTES.to_bytes(2, "little") * 8 + bytes(16) + bytes([LANES] * 8) + bytes(8)


@cache
def why_unavailable() -> str:
    """Why AMX cannot be used; "" if it can. The first call requests permission from the system for this process."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only x86-64 Linux has AMX"
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):
        return "numba was told to compile for another CPU"
    features = binding.get_host_cpu_features()  # no AMX here if the system does not support it
    if not all(features.get(name, False) for name in _FEATURES):
        return "this CPU has no AMX for bfloat16"
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        return "the system does not permit its use"
    return ""


def available() -> bool:
    return not why_unavailable()


def emulated() -> bool:
    """Whether vector code emulates the tile registers."""
    return not available()


def steps(size: int) -> int:
    """Tiles along an input dimension of this size: the steps of a product."""
    return -(-size // DEPTH)


def to_bfloat16(w: VectorWriter, value: Any) -> Any:
    """16 floats, rounded to nearest even, as 16-bit integers."""
    bits = w.b.bitcast(value, V16I32)
    even = w.b.and_(w.b.lshr(bits, splat_i32(16)), splat_i32(1))
    rounded = w.b.add(w.b.add(bits, splat_i32(0x7FFF)), even)
    quiet = w.b.or_(bits, splat_i32(0x400000))  # NaN must not round to a number
    rounded = w.b.select(w.b.fcmp_unordered("uno", value, value), quiet, rounded)
    return w.b.trunc(w.b.lshr(rounded, splat_i32(16)), ir.VectorType(_I16, LANES))


@routine(3)
def round_row(w: VectorWriter, x: Any, groups: Any, out: Any) -> None:
    """Rounds 16 * groups floats to nearest even, and stores them as one row across consecutive tiles from `out` on."""

    def group(i: Any, carried: list[Any]) -> list[Any]:
        halves = to_bfloat16(w, w.load(x, w.b.mul(i, i64(LANES))))
        tile, half = w.b.mul(w.b.lshr(i, i64(1)), i64(TILE_BYTES)), w.b.mul(w.b.and_(i, i64(1)), i64(2 * LANES))
        w.b.store(halves, w.at(out, w.b.add(tile, half), 1), align=2)
        return []

    w.loop(groups, [], group)


def store_zeros(w: VectorWriter, target: Any) -> None:
    """Stores 16 zeros in bfloat16."""
    w.b.store(ir.Constant(ir.VectorType(_I16, LANES), [0] * LANES), w.at(target, i64(0)), align=2)


class TileRegisters:
    """Emits instructions on the thread's AMX tile registers."""

    def __init__(self, w: VectorWriter) -> None:
        self._w = w

    def _call(self, name: str, *arguments: Any) -> None:
        types = [argument.type for argument in arguments]
        self._w.b.call(self._w.function(f"llvm.x86.{name}", ir.VoidType(), *types), arguments)

    def _pointer(self, address: Any) -> Any:
        return self._w.b.inttoptr(address, _POINTER)

    def begin(self, scratch: Any) -> None:
        words = [int.from_bytes(_TILE_CONFIG[i : i + 4], "little") for i in range(0, len(_TILE_CONFIG), 4)]
        self._w.b.store(ir.Constant(V16I32, words), self._pointer(scratch), align=1)
        self._call("ldtilecfg", self._pointer(scratch))

    def end(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", _number(tile))

    def load(self, tile: int, address: Any, stride: Any = None) -> None:
        """Loads 16 rows that are `stride` bytes apart; the default of 64 is a contiguous tile of 1024 bytes."""
        self._call("tileloadd64", _number(tile), self._pointer(address), stride or i64(_ROW_BYTES))

    def multiply(self, total: int, inputs: int, weights: int) -> None:
        """total += inputs times weights."""
        self._call("tdpbf16ps", _number(total), _number(inputs), _number(weights))

    def store(self, tile: int, address: Any, stride: Any) -> None:
        """Stores 16 rows that are `stride` bytes apart."""
        self._call("tilestored64", _number(tile), self._pointer(address), stride)


class EmulatedTiles(TileRegisters):
    """The same interface on memory and vector code, each step as Intel defines it."""

    def begin(self, scratch: Any) -> None:
        pass

    def end(self) -> None:
        pass

    def _tile(self, tile: int) -> Any:
        """The address of the tile's memory, which is allocated in the function's entry block."""
        w = self._w
        if not hasattr(self, "_memory"):
            with w.b.goto_entry_block():
                memory = w.b.alloca(V16F32, 8 * LANES)
                self._memory = w.b.ptrtoint(memory, _I64)
        return w.b.add(self._memory, i64(tile * TILE_BYTES))

    def _rows(self, do: Any) -> None:
        def row(r: Any, carried: list[Any]) -> list[Any]:
            do(r)
            return []

        self._w.loop(i64(LANES), [], row)

    def zero(self, tile: int) -> None:
        w, memory = self._w, self._tile(tile)
        self._rows(lambda r: w.store(splat_f32(0.0), memory, w.b.mul(r, i64(LANES))))

    def load(self, tile: int, address: Any, stride: Any = None) -> None:
        w, memory, step = self._w, self._tile(tile), stride or i64(_ROW_BYTES)
        self._rows(lambda r: w.store(w.load(w.b.add(address, w.b.mul(r, step)), i64(0)), memory, _first(w, r)))

    def multiply(self, total: int, inputs: int, weights: int) -> None:
        w = self._w
        sums_tile, x, weight_tile = self._tile(total), self._tile(inputs), self._tile(weights)

        def row(r: Any) -> None:
            def add_pair(k: Any, sums: list[Any]) -> list[Any]:
                inputs = w.splat(w.load_float(x, w.b.add(_first(w, r), k)))
                bits = [w.b.bitcast(v, V16I32) for v in (inputs, w.load(weight_tile, _first(w, k)))]
                even = [w.b.shl(v, splat_i32(16)) for v in bits]
                odd = [w.b.and_(v, splat_i32(-65536)) for v in bits]
                floats = [[w.b.bitcast(v, V16F32) for v in pair] for pair in (even, odd)]
                return [w.fma(a, b, total) for (a, b), total in zip(floats, sums, strict=True)]

            even, odd = w.loop(i64(DEPTH // 2), [splat_f32(0.0)] * 2, add_pair)
            w.store(w.b.fadd(w.load(sums_tile, _first(w, r)), w.b.fadd(even, odd)), sums_tile, _first(w, r))

        self._rows(row)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        w, memory = self._w, self._tile(tile)
        self._rows(lambda r: w.store(w.load(memory, _first(w, r)), w.b.add(address, w.b.mul(r, stride)), i64(0)))


def _first(w: VectorWriter, row: Any) -> Any:
    """Index of the first of a row's 16 words."""
    return w.b.mul(row, i64(LANES))


def _number(tile: int) -> Any:
    return ir.Constant(_I8, tile)


def tile_registers(w: VectorWriter) -> TileRegisters:
    return EmulatedTiles(w) if emulated() else TileRegisters(w)


@routine(1)
def begin_tiles(w: VectorWriter, scratch: Any) -> None:
    """Configures the thread's tiles before its products. `scratch` has room for 64 bytes."""
    tile_registers(w).begin(scratch)


@routine(1)
def end_tiles(w: VectorWriter, unused: Any) -> None:
    """Releases the thread's tiles after its products, or the system would keep saving them on context switches."""
    tile_registers(w).end()


@dataclass(frozen=True)
class ProductArguments:
    """Addresses and sizes, as LLVM values.

    With two blocks of outputs, the second block's weights are at `second_weights` and its outputs `second_offset` bytes
    after those of the first.
    """

    x: Any
    weights: Any
    second_weights: Any
    steps: Any  # tiles along the inputs
    out: Any
    out_step: Any  # floats from one row of outputs to the next
    second_offset: Any


def emit_product(w: VectorWriter, tiles: TileRegisters, row_tiles: int, blocks: int, given: ProductArguments) -> None:
    """Emits a product; sums are in tiles 0 to 3 (row tile, block), inputs in 4 and 5, weights in 6 and 7.

    With two row tiles and two blocks, every loaded tile is used twice, and four independent chains of sums keep the
    matrix unit busy.
    """
    rows, columns = range(row_tiles), range(blocks)
    inputs = [w.b.add(given.x, w.b.mul(given.steps, i64(TILE_BYTES * r))) for r in rows]
    weights = [given.weights, given.second_weights][:blocks]
    for r in rows:
        for c in columns:
            tiles.zero(2 * r + c)

    def multiply(t: Any, carried: list[Any]) -> list[Any]:
        start = w.b.mul(t, i64(TILE_BYTES))
        for r in rows:
            tiles.load(4 + r, w.b.add(inputs[r], start))
        for c in columns:
            tiles.load(6 + c, w.b.add(weights[c], start))
            for r in rows:
                tiles.multiply(2 * r + c, 4 + r, 6 + c)
        return []

    w.loop(given.steps, [], multiply)
    stride = w.b.mul(given.out_step, i64(4))
    for r in rows:
        target = w.b.add(given.out, w.b.mul(stride, i64(LANES * r)))
        for c in columns:
            tiles.store(2 * r + c, w.b.add(target, given.second_offset) if c else target, stride)


def tile_product(row_tiles: int, blocks: int) -> Routine:
    """out = one or two tiles of rows times one or two blocks of 16 outputs. Arguments as in `ProductArguments`."""

    @routine(7, optimised=available)
    def product(w: VectorWriter, *arguments: Any) -> None:
        emit_product(w, tile_registers(w), row_tiles, blocks, ProductArguments(*arguments))

    return product
