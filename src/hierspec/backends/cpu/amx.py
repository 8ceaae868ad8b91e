"""Products by matrix units (Intel AMX): bfloat16 weights times bfloat16 inputs, sums in float32.

One instruction, tdpbf16ps, takes a tile of 16 rows x 32 inputs and one of 32 inputs x 16 outputs. Intel's manual gives
its arithmetic step by step: for each row and output alone, products of even and of odd inputs are added by two chains
of fused multiply-adds, in order; then the two sums are added, and that to what the tile held. Every step is rounded to
nearest even, denormals are zero, and no mode register is looked at. So a row's bits depend on its own inputs and on the
order of the tiles alone, which is always the same. A pass over one row uses a whole tile as well: the other rows of the
tile hold what was there, and nobody looks at what becomes of them.

Tiles as memory has them, 1024 bytes each: inputs [rows / 16, inputs / 32, 16 rows, 32], weights [outputs / 16,
inputs / 32, 16 pairs of inputs, 16 outputs, 2]. Inputs are filled up to a multiple of 32 with zeros.

The eight tile registers are named by number here, in calls that LLVM turns into one instruction each; of its own accord
it uses none. On CPUs without such units tiles lie in memory and vector code does the same steps: far slower, for tests
and comparisons only.
"""

from __future__ import annotations

import ctypes
import platform
import zlib
from typing import Any

import torch
from llvmlite import binding, ir
from numba import config
from torch import Tensor

from hierspec.backends.cpu import kernels as vector_code
from hierspec.backends.cpu.llvm import LANES, VectorWriter, all_lanes, integers, piece, whole

DEPTH = 32  # inputs that one tile holds
TILE_BYTES = 2 * LANES * DEPTH
_FEATURES = ("amx-tile", "amx-bf16")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux hands tiles out to those who ask

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_LANES_OF_INTEGERS, _LANES_OF_FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)
_POINTER, _LINE = ir.PointerType(), 64  # bytes of one row of a tile
# Every tile has 16 rows of 64 bytes: palette 1, then from byte 16 the bytes of a row and from byte 48 the rows of each.
_SETTING = bytes([1]) + bytes(15) + _LINE.to_bytes(2, "little") * 8 + bytes(16) + bytes([LANES] * 8) + bytes(8)


def why_not() -> str:
    """Why there are no matrix units to use; nothing where there are. Asks the system for them, for this process."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only x86-64 Linux has AMX"
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):
        return "numba was told to compile for another CPU"
    features = binding.get_host_cpu_features()  # what is compiled for; none without the system's support
    if not all(features.get(name, False) for name in _FEATURES):
        return "this CPU has no AMX for bfloat16"
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        return "the system does not permit their use"
    return ""


REASON = why_not()
AVAILABLE = not REASON
# As vector_code.CODE, for compiled functions that use these pieces: they differ with what there is here.
CODE = zlib.crc32(b"tiles" if AVAILABLE else b"vectors", vector_code.CODE)


def pack(weight: Tensor) -> Tensor:
    """[outputs, inputs] as tiles [outputs / 16, inputs / 32, 16 pairs, 16 outputs, 2], in bfloat16."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, -inputs % DEPTH))
    parts = padded.view(outputs // LANES, LANES, -1, DEPTH // 2, 2)
    return parts.permute(0, 2, 3, 1, 4).contiguous()


def steps(size: int) -> int:
    """Tiles that inputs of this size fill."""
    return -(-size // DEPTH)


@piece(3, apart=True)
def round_row(w: VectorWriter, x: Any, groups: Any, out: Any) -> None:
    """16 * groups floats, rounded to nearest even, as one row of each of the tiles that begin at `out`."""

    def group(i: Any, nothing: list[Any]) -> list[Any]:
        value = w.load(x, w.b.mul(i, whole(LANES)))
        bits = w.b.bitcast(value, _LANES_OF_INTEGERS)
        even = w.b.and_(w.b.lshr(bits, integers(16)), integers(1))
        rounded = w.b.add(w.b.add(bits, integers(0x7FFF)), even)
        quiet = w.b.or_(bits, integers(0x400000))  # what is not a number must not round to one
        rounded = w.b.select(w.b.fcmp_unordered("uno", value, value), quiet, rounded)
        halves = w.b.trunc(w.b.lshr(rounded, integers(16)), ir.VectorType(_I16, LANES))
        tile, half = w.b.mul(w.b.lshr(i, whole(1)), whole(TILE_BYTES)), w.b.mul(w.b.and_(i, whole(1)), whole(2 * LANES))
        w.b.store(halves, w.at(out, w.b.add(tile, half), 1), align=2)
        return []

    w.loop(groups, [], group)


@piece(1)
def fill_up(w: VectorWriter, place: Any) -> None:
    """16 zeros in bfloat16."""
    w.b.store(ir.Constant(ir.VectorType(_I16, LANES), [0] * LANES), w.at(place, whole(0)), align=2)


class TileUnits:
    """The tile registers of this thread."""

    def __init__(self, w: VectorWriter) -> None:
        self._w = w

    def _call(self, name: str, *arguments: Any) -> None:
        types = [argument.type for argument in arguments]
        self._w.b.call(self._w.function(f"llvm.x86.{name}", ir.VoidType(), *types), arguments)

    def _pointer(self, address: Any) -> Any:
        return self._w.b.inttoptr(address, _POINTER)

    def begin(self, scratch: Any) -> None:
        words = [int.from_bytes(_SETTING[i : i + 4], "little") for i in range(0, len(_SETTING), 4)]
        self._w.b.store(ir.Constant(_LANES_OF_INTEGERS, words), self._pointer(scratch), align=1)
        self._call("ldtilecfg", self._pointer(scratch))

    def end(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", _number(tile))

    def load(self, tile: int, address: Any) -> None:
        """A tile from 1024 bytes."""
        self._call("tileloadd64", _number(tile), self._pointer(address), whole(_LINE))

    def multiply(self, total: int, inputs: int, weights: int) -> None:
        """total += inputs times weights."""
        self._call("tdpbf16ps", _number(total), _number(inputs), _number(weights))

    def store(self, tile: int, address: Any, stride: Any) -> None:
        """16 rows, each `stride` bytes after the one before."""
        self._call("tilestored64", _number(tile), self._pointer(address), stride)


class TileVectors(TileUnits):
    """The same in memory and vector code, each step as Intel defines it."""

    def begin(self, scratch: Any) -> None:
        pass

    def end(self) -> None:
        pass

    def _tile(self, tile: int) -> Any:
        """The address of its memory, which is made in the function's first block."""
        w = self._w
        if not hasattr(self, "_memory"):
            with w.b.goto_entry_block():
                memory = w.b.alloca(_LANES_OF_FLOATS, 8 * LANES)
                self._memory = w.b.ptrtoint(memory, _I64)
        return w.b.add(self._memory, whole(tile * TILE_BYTES))

    def _rows(self, do: Any) -> None:
        def row(r: Any, nothing: list[Any]) -> list[Any]:
            do(r)
            return []

        self._w.loop(whole(LANES), [], row)

    def zero(self, tile: int) -> None:
        w, place = self._w, self._tile(tile)
        self._rows(lambda r: w.store(all_lanes(0.0), place, w.b.mul(r, whole(LANES))))

    def load(self, tile: int, address: Any) -> None:
        w, place = self._w, self._tile(tile)
        self._rows(lambda r: w.store(w.load(address, _first(w, r)), place, _first(w, r)))

    def multiply(self, total: int, inputs: int, weights: int) -> None:
        w = self._w
        to, x, weight_tile = self._tile(total), self._tile(inputs), self._tile(weights)

        def row(r: Any) -> None:
            def pair(k: Any, sums: list[Any]) -> list[Any]:
                one = w.spread(w.load_one(x, w.b.add(_first(w, r), k)))
                bits = [w.b.bitcast(v, _LANES_OF_INTEGERS) for v in (one, w.load(weight_tile, _first(w, k)))]
                even = [w.b.shl(v, integers(16)) for v in bits]
                odd = [w.b.and_(v, integers(-65536)) for v in bits]
                floats = [[w.b.bitcast(v, _LANES_OF_FLOATS) for v in both] for both in (even, odd)]
                return [w.fma(a, b, held) for (a, b), held in zip(floats, sums, strict=True)]

            even, odd = w.loop(whole(DEPTH // 2), [all_lanes(0.0)] * 2, pair)
            w.store(w.b.fadd(w.load(to, _first(w, r)), w.b.fadd(even, odd)), to, _first(w, r))

        self._rows(row)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        w, place = self._w, self._tile(tile)
        self._rows(lambda r: w.store(w.load(place, _first(w, r)), w.b.add(address, w.b.mul(r, stride)), whole(0)))


def _first(w: VectorWriter, row: Any) -> Any:
    """The first of the 16 words of a row."""
    return w.b.mul(row, whole(LANES))


def _number(tile: int) -> Any:
    return ir.Constant(_I8, tile)


@piece(1)
def begin_tiles(w: VectorWriter, scratch: Any) -> None:
    """Before products of a thread: sets its tiles up. `scratch` has room for 64 bytes."""
    UNITS(w).begin(scratch)


@piece(1)
def end_tiles(w: VectorWriter, nothing: Any) -> None:
    """After products of a thread: else the system would keep saving tiles that nobody needs."""
    UNITS(w).end()


UNITS = TileUnits if AVAILABLE else TileVectors


def write_product(
    w: VectorWriter, units: TileUnits, row_tiles: int, blocks: int, x: Any, one: Any, two: Any, steps: Any, out: Any,
    step: Any, apart: Any,
) -> None:  # fmt: skip
    """Sums are tiles 0 to 3 (row tile, block), inputs 4 and 5, weights 6 and 7.

    With two of each, every tile that was loaded is used twice, and four chains of sums keep the unit busy.
    """
    rows, columns = range(row_tiles), range(blocks)
    inputs = [w.b.add(x, w.b.mul(steps, whole(TILE_BYTES * r))) for r in rows]
    weights = [one, two][:blocks]
    for r in rows:
        for c in columns:
            units.zero(2 * r + c)

    def tile(t: Any, nothing: list[Any]) -> list[Any]:
        start = w.b.mul(t, whole(TILE_BYTES))
        for r in rows:
            units.load(4 + r, w.b.add(inputs[r], start))
        for c in columns:
            units.load(6 + c, w.b.add(weights[c], start))
            for r in rows:
                units.multiply(2 * r + c, 4 + r, 6 + c)
        return []

    w.loop(steps, [], tile)
    stride = w.b.mul(step, whole(4))
    for r in rows:
        place = w.b.add(out, w.b.mul(stride, whole(LANES * r)))
        for c in columns:
            units.store(2 * r + c, w.b.add(place, apart) if c else place, stride)


def tile_product(row_tiles: int, blocks: int, units: type[TileUnits] = UNITS) -> Any:
    """out = rows of one or two tiles times one or two blocks of 16 outputs.

    Of two blocks the second has its weights at `two` and its outputs `apart` bytes further; `step` counts floats.
    """

    @piece(7, apart=True, plain=units is TileVectors)
    def product(w: VectorWriter, x: Any, one: Any, two: Any, steps: Any, out: Any, step: Any, apart: Any) -> None:
        write_product(w, units(w), row_tiles, blocks, x, one, two, steps, out, step, apart)

    return product
