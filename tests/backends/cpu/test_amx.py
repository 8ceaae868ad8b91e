"""Products with matrix units: against their definition, at every width, and the instructions that LLVM writes."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding, ir
from numba import njit

from hierspec.backends.cpu import amx as matrix_units
from hierspec.backends.cpu.amx import DEPTH, TileUnits, begin_tiles, end_tiles, pack, write_product
from hierspec.backends.cpu.llvm import VectorWriter
from hierspec.backends.cpu.product import MATRICES, TILE_ROOM, make_ready, row_tiles

_shapes = ((1, 1), (1, 2), (2, 1), (2, 2))


@njit
def _multiply(x, ready, scratch, weights, together, out):
    """The first `together` blocks (1 or 2) in one product, the others one by one."""
    rows, size = x.shape
    place, room = ready.ctypes.data, scratch.ctypes.data
    make_ready(x.ctypes.data, rows, size, MATRICES, place, room)
    begin_tiles(room)
    block = 0
    while block < len(weights):
        own, to = weights[block].ctypes.data, out.ctypes.data + block * 64
        second = weights[min(block + 1, len(weights) - 1)].ctypes.data
        row_tiles(place, rows, own, second, together, size, to, out.shape[1], 64, room)
        block += together
        together = 1
    end_tiles(room)


def product(x: np.ndarray, tiles: np.ndarray, together: int = 1) -> np.ndarray:
    rows, size = x.shape
    # What inputs of earlier passes left behind must not matter.
    ready = np.full((-(-rows // 16) * 16, -(-size // DEPTH) * DEPTH), 0x7FC0, np.uint16)
    out = np.full((rows, 16 * len(tiles)), np.nan, np.float32)
    _multiply(x, ready, np.zeros(TILE_ROOM, np.int8), tiles, together, out)
    return out


def in_tiles(weights: torch.Tensor) -> np.ndarray:
    return pack(weights).view(torch.int16).numpy()


def as_defined(x: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
    """tdpbf16ps as Intel writes it down. Two bfloat16 make an exact float32, so adding that is a fused step."""
    pad = (0, -x.shape[1] % DEPTH)
    a, b = (torch.nn.functional.pad(part, pad).bfloat16().float().numpy() for part in (x, weights))
    total = np.zeros((len(a), len(b)), np.float32)
    for tile in range(0, a.shape[1], DEPTH):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for i in range(DEPTH):
            sums[i % 2] += a[:, None, tile + i] * b[None, :, tile + i]
        total += sums[0] + sums[1]
    return total


def same_bits(one: np.ndarray, two: np.ndarray) -> bool:
    return bool((one.view(np.int32) == two.view(np.int32)).all())


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 50), groups=st.integers(1, 7), blocks=st.integers(1, 5), seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)  # fmt: skip
def test_products_are_as_defined_and_rows_are_rows_alone(rows, groups, blocks, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(rows, 16 * groups, generator=generator)
    weights = torch.randn(16 * blocks, 16 * groups, generator=generator)
    tiles = in_tiles(weights)
    found = product(x.numpy(), tiles)
    if not matrix_units.AVAILABLE:
        assert same_bits(found, as_defined(x, weights))
    exact = x.bfloat16().double() @ weights.bfloat16().double().T
    assert np.allclose(found, exact.numpy(), rtol=1e-4, atol=1e-4 * scale)
    for row in range(rows):
        assert same_bits(product(x[row : row + 1].numpy(), tiles), found[row])
    if blocks > 1:
        assert same_bits(product(x.numpy(), tiles, together=2), found)


@pytest.mark.skipif(not matrix_units.AVAILABLE, reason=matrix_units.REASON or "there are matrix units")
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 17, 33, 64])
def test_the_units_do_what_their_definition_says(rows):
    x, weights = torch.randn(rows, 1536), torch.randn(64, 1536)
    assert same_bits(product(x.numpy(), in_tiles(weights)), as_defined(x, weights))


def test_inputs_are_rounded_to_nearest_even():
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e38, 3.4e38, torch.inf])
    row = torch.cat([values, torch.tensor([torch.nan, -torch.inf, 0.0, -0.0, 1e-30, 7e-39, 65504.0, 1 / 3])])
    # Not a number whose upper half alone would be infinite.
    row[8] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)[0]
    ready, records = np.full((16, DEPTH), 0x7FC0, np.uint16), np.zeros(TILE_ROOM, np.int8)

    @njit
    def make(x, ready, records):
        make_ready(x.ctypes.data, 1, x.shape[1], MATRICES, ready.ctypes.data, records.ctypes.data)

    make(row[None].numpy(), ready, records)
    found = torch.from_numpy(ready[0].view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(found[:8], row[:8].bfloat16())
    assert torch.equal(found[9:16], row[9:].bfloat16())
    assert found[8].isnan()
    assert (ready[0, 16:] == 0).all()  # filled up


@pytest.mark.parametrize(("tall", "blocks"), _shapes)
def test_llvm_writes_the_instructions(tall, blocks):
    """For the CPUs that have such units, whatever CPU this is."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM cannot write for x86-64")
    number = ir.IntType(64)
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [number] * 8), "products")
    writer = VectorWriter(ir.IRBuilder(function.append_basic_block("entry")))
    units = TileUnits(writer)
    units.begin(function.args[7])
    write_product(writer, units, tall, blocks, *function.args[:7])
    units.end()
    writer.b.ret_void()
    machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
    text = machine.emit_assembly(binding.parse_assembly(str(module)))
    counts = [len(re.findall(rf"\b{name}\b", text)) for name in ("tdpbf16ps", "tilestored", "ldtilecfg", "tilerelease")]
    assert counts == [tall * blocks, tall * blocks, 1, 1]
    code = machine.emit_object(binding.parse_assembly(str(module)))
    assert code.count(bytes.fromhex("c4e27849c0")) == 1  # tilerelease
    # tdpbf16ps of tiles 0, 4, 6, in the order of Intel's manual: sums, inputs, weights.
    assert code.count(bytes.fromhex("c4e24a5cc4")) == 1
