"""Products by AMX: against their definition, at every width, and the instructions that LLVM emits."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from x86_assembly import x86_assembly

from hierspec.backends.cpu import amx
from hierspec.backends.cpu.amx import (
    DEPTH,
    TILE_BYTES,
    ProductArguments,
    TileRegisters,
    begin_tiles,
    emit_product,
    end_tiles,
)
from hierspec.backends.cpu.llvm import VectorWriter, i64
from hierspec.backends.cpu.packing import to_tiles
from hierspec.backends.cpu.product import AMX_SCRATCH_BYTES, prepare_for_amx
from hierspec.backends.cpu.routines import routine
from hierspec.backends.cpu.tiles import amx_steps, amx_tiles

_shapes = ((1, 1), (1, 2), (2, 1), (2, 2))


@routine(9)
def _multiply(w, x, rows, size, prepared, scratch, weights, blocks, together, out):
    """`together` (1 or 2) blocks in one product, then the others. All in one routine: tiles belong to a thread."""
    step = w.times(amx_steps(w, size), TILE_BYTES)
    out_step = w.times(blocks, 16)
    prepare_for_amx(w, x, rows, size, prepared, scratch)
    begin_tiles(w, scratch)
    second = w.b.add(weights, step)
    amx_tiles(w, prepared, rows, weights, second, together, size, out, out_step, i64(64), scratch)

    def one(number):
        block = w.b.add(together, number)
        start, target = w.plus(weights, block, step), w.plus(out, block, 64)
        amx_tiles(w, prepared, rows, start, start, i64(1), size, target, out_step, i64(64), scratch)

    w.repeat(w.b.sub(blocks, together), one)
    end_tiles(w, scratch)


def product(x: np.ndarray, tiles: np.ndarray, together: int = 1) -> np.ndarray:
    rows, size = x.shape
    # Inputs of earlier passes that are still in memory must not matter.
    prepared = np.full((-(-rows // 16) * 16, -(-size // DEPTH) * DEPTH), 0x7FC0, np.uint16)
    out = np.full((rows, 16 * len(tiles)), np.nan, np.float32)
    scratch = np.zeros(AMX_SCRATCH_BYTES, np.int8)
    addresses = [array.ctypes.data for array in (prepared, scratch, tiles)]
    _multiply.from_python(x.ctypes.data, rows, size, *addresses, len(tiles), together, out.ctypes.data)
    return out


def in_tiles(weights: torch.Tensor) -> np.ndarray:
    return to_tiles(weights).view(torch.int16).numpy()


def as_defined(x: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
    """tdpbf16ps as Intel defines it. Two bfloat16 make an exact float32, so adding that is a fused step."""
    pad = (0, -x.shape[1] % DEPTH)
    a, b = (torch.nn.functional.pad(part, pad).bfloat16().float().numpy() for part in (x, weights))
    total = np.zeros((len(a), len(b)), np.float32)
    for tile in range(0, a.shape[1], DEPTH):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for i in range(DEPTH):
            sums[i % 2] += a[:, None, tile + i] * b[None, :, tile + i]
        total += sums[0] + sums[1]
    return total


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a.view(np.int32) == b.view(np.int32)).all())


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 50),
    groups=st.integers(1, 7),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
def test_products_are_as_defined_and_each_row_is_as_if_alone(rows, groups, blocks, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(rows, 16 * groups, generator=generator)
    weights = torch.randn(16 * blocks, 16 * groups, generator=generator)
    tiles = in_tiles(weights)
    result = product(x.numpy(), tiles)
    if not amx.available():
        assert same_bits(result, as_defined(x, weights))
    exact = x.bfloat16().double() @ weights.bfloat16().double().T
    assert np.allclose(result, exact.numpy(), rtol=1e-4, atol=1e-4 * scale)
    for row in range(rows):
        assert same_bits(product(x[row : row + 1].numpy(), tiles), result[row])
    if blocks > 1:
        assert same_bits(product(x.numpy(), tiles, together=2), result)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 17, 33, 64])
def test_amx_does_what_its_definition_says(rows):
    if not amx.available():
        pytest.skip(amx.why_unavailable())
    x, weights = torch.randn(rows, 1536), torch.randn(64, 1536)
    assert same_bits(product(x.numpy(), in_tiles(weights)), as_defined(x, weights))


def test_inputs_are_rounded_to_nearest_even():
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e38, 3.4e38, torch.inf])
    row = torch.cat([values, torch.tensor([torch.nan, -torch.inf, 0.0, -0.0, 1e-30, 7e-39, 65504.0, 1 / 3])])
    # A NaN whose upper half alone would be infinity.
    row[8] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)[0]
    prepared, scratch = np.full((16, DEPTH), 0x7FC0, np.uint16), np.zeros(AMX_SCRATCH_BYTES, np.int8)

    prepare_for_amx.from_python(row.data_ptr(), 1, len(row), prepared.ctypes.data, scratch.ctypes.data)
    rounded = torch.from_numpy(prepared[0].view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(rounded[:8], row[:8].bfloat16())
    assert torch.equal(rounded[9:16], row[9:].bfloat16())
    assert rounded[8].isnan()
    assert (prepared[0, 16:] == 0).all()  # padding


@pytest.mark.parametrize(("row_tiles", "blocks"), _shapes)
def test_llvm_emits_the_instructions(row_tiles, blocks):
    """For CPUs with AMX, whatever CPU this is."""
    number = ir.IntType(64)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [number] * 8), "products")
    writer = VectorWriter(ir.IRBuilder(function.append_basic_block("entry")))
    tiles = TileRegisters(writer)
    tiles.begin(function.args[7])
    emit_product(writer, tiles, row_tiles, blocks, ProductArguments(*function.args[:7]))
    tiles.end()
    writer.b.ret_void()
    text, code = x86_assembly(module)
    counts = [len(re.findall(rf"\b{name}\b", text)) for name in ("tdpbf16ps", "tilestored", "ldtilecfg", "tilerelease")]
    assert counts == [row_tiles * blocks, row_tiles * blocks, 1, 1]
    assert code.count(bytes.fromhex("c4e27849c0")) == 1  # tilerelease
    # tdpbf16ps of tiles 0, 4, 6, in the order of Intel's manual: sums, inputs, weights.
    assert code.count(bytes.fromhex("c4e24a5cc4")) == 1
