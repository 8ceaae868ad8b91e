"""Products by matrix units, or by what emulates them here, have the bits of products by vectors."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from x86_assembly import x86_assembly

from hierspec.backends.cpu.byte_tiles import _row_tile, configure, has_byte_tiles, over_rows_by_tiles, release
from hierspec.backends.cpu.forms import FORMS, INT4, INT8, Form, arrange
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP, quantise_for, quantise_weights
from hierspec.backends.cpu.routines import routine
from hierspec.backends.cpu.vector_products import form_vectors
from hierspec.checkpoints.gguf_blocks import UnpackedBlocks

TILE = 16


@cache
def by_tiles(form: Form, blocks: int):
    over = over_rows_by_tiles(form, blocks, emulated=not has_byte_tiles())

    @routine(5 + 2 * blocks)
    def product(w, x, rows, *rest):
        if has_byte_tiles():
            configure(w, rows, form)
        over(w, x, rows, *rest)
        if has_byte_tiles():
            release(w)

    return product.from_python


def random_weights(outputs: int, inputs: int, form: Form, rng: np.random.Generator) -> np.ndarray:
    """Blocks of any integers that the form can hold, with scales of any sign."""
    units = outputs * inputs // form.unit

    def halves() -> np.ndarray:
        return rng.standard_normal(units).astype(np.float16)

    def small() -> np.ndarray | None:
        return rng.integers(-128, 128, (units, form.groups)).astype(np.int8) if form.multiplied else None

    integers = rng.choice(np.array(form.integers, np.int8), (units, form.unit))
    offsets = (halves(), small()) if form.offsets else (None, None)
    return arrange(UnpackedBlocks(integers, halves(), small(), *offsets), outputs, form)


def products(x: np.ndarray, weights: np.ndarray, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """By vectors and by tiles."""
    rows, size = x.shape
    room = -(-rows // TILE) * TILE
    inputs = np.full((room, size), 77, np.int8)  # rows that only fill a tile up must not matter
    records = np.full((room, size // form.group, WORDS_PER_GROUP), np.nan, np.float32)
    quantise_for[form.group].from_python(
        x.ctypes.data, rows * size // form.group, inputs.ctypes.data, records.ctypes.data
    )
    outs = [np.full((rows + 1, TILE * len(weights)), np.nan, np.float32) for _ in range(2)]
    start, step, shared = inputs.ctypes.data, outs[0].shape[1], records.ctypes.data
    of_blocks: list[int] = []
    for number, block in enumerate(weights):
        vectors, tiles = (out.ctypes.data + 4 * TILE * number for out in outs)
        form_vectors[form].from_python(start, rows, shared, block.ctypes.data, size, vectors, step)
        of_blocks += block.ctypes.data, tiles
    by_tiles(form, len(weights))(start, rows, shared, size, step, *of_blocks)
    for out in outs:
        assert np.isnan(out[rows]).all(), "a row that nobody asked for was written"
    results = [out[:rows] for out in outs]
    return results[0], results[1]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 50), groups=st.integers(1, 24), blocks=st.integers(1, 2), seed=st.integers(0, 1000))
def test_the_bits_of_vectors(form, rows, groups, blocks, seed):
    rng = np.random.default_rng(seed)
    inputs = -(-groups // form.groups) * form.unit
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    x[:, : form.group] *= rng.choice([0.0, 1e-20, 1.0, 1e20])
    by_vectors, tiled = products(x, random_weights(TILE * blocks, inputs, form, rng), form)
    assert (by_vectors.view(np.int32) == tiled.view(np.int32)).all()


@pytest.mark.parametrize("form", [INT8, INT4], ids=lambda form: form.name)
def test_the_largest_sums(form):
    """127 times 127 in every place: 64 of them are far from what a sum of 32 bits, or a float's integers, can hold."""
    x = np.ones((5, 4 * form.group), np.float32)
    weights = quantise_weights(np.full((TILE, x.shape[1]), -1.0, np.float32), form)
    by_vectors, tiled = products(x, weights, form)
    assert (by_vectors.view(np.int32) == tiled.view(np.int32)).all()
    assert np.allclose(tiled, -x.shape[1], rtol=1e-3)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_llvm_emits_the_instructions_and_keeps_sums_in_registers(form):
    """For CPUs with AMX, whatever CPU this is."""
    for blocks in (1, 2):
        module = ir.Module()
        _row_tile(form, 16, blocks, True, emulated=False).define(module, "row_tile")
        text, _ = x86_assembly(module)
        # Two groups in turn, and one that is left.
        assert [len(re.findall(rf"\b{name}\b", text)) for name in ("tdpbssd", "tilestored")] == [3 * blocks] * 2
        # Spilled in every step, 16 sums would be stored more than 30 times.
        assert len(re.findall(r"vmov\w+\s+%zmm\d+, -?\d*\(%r[sb]p\)", text)) < 16
