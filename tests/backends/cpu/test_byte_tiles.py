"""Products by matrix units, or by what emulates them here, have the bits of products by vectors."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.backends.cpu.byte_tiles import configure, has_byte_tiles, over_rows_by_tiles, release
from hierspec.backends.cpu.quantised import (
    GROUPS,
    WORDS_PER_GROUP,
    quantise_for_int4,
    quantise_for_int8,
    quantise_weights,
)
from hierspec.backends.cpu.routines import routine
from hierspec.backends.cpu.tiles import int4_tiles, int8_tiles

TILE = 16


@cache
def by_tiles(bits: int):
    over = over_rows_by_tiles(bits, emulated=not has_byte_tiles())

    @routine(7)
    def product(w, x, rows, *rest):
        if has_byte_tiles():
            configure(w, rows, bits)
        over(w, x, rows, *rest)
        if has_byte_tiles():
            release(w)

    return product.from_python


def products(x: np.ndarray, weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """By vectors and by tiles."""
    rows, size = x.shape
    room = -(-rows // TILE) * TILE
    inputs = np.full((room, size), 77, np.int8)  # rows that only fill a tile up must not matter
    records = np.full((room, size // GROUPS[bits], WORDS_PER_GROUP), np.nan, np.float32)
    quantise = quantise_for_int8 if bits == 8 else quantise_for_int4
    quantise.from_python(x.ctypes.data, rows * size // GROUPS[bits], inputs.ctypes.data, records.ctypes.data)
    results = []
    for multiply in (int8_tiles if bits == 8 else int4_tiles).from_python, by_tiles(bits):
        out = np.full((rows + 1, TILE * len(weights)), np.nan, np.float32)
        for number, block in enumerate(weights):
            target = out.ctypes.data + 4 * TILE * number
            given = inputs.ctypes.data, rows, records.ctypes.data, block.ctypes.data, size, target, out.shape[1]
            multiply(*given)
        assert np.isnan(out[rows]).all(), "a row that nobody asked for was written"
        results.append(out[:rows])
    return results[0], results[1]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 50),
    groups=st.integers(1, 12),
    blocks=st.integers(1, 2),
    bits=st.sampled_from([8, 4]),
    seed=st.integers(0, 1000),
)
def test_the_bits_of_vectors(rows, groups, blocks, bits, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, groups * GROUPS[bits])).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    x[:, : GROUPS[bits]] *= rng.choice([0.0, 1e-20, 1.0, 1e20])
    weights = quantise_weights(rng.standard_normal((TILE * blocks, x.shape[1])).astype(np.float32), bits)
    by_vectors, tiled = products(x, weights, bits)
    assert (by_vectors.view(np.int32) == tiled.view(np.int32)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_sums(bits):
    """127 times 127 in every place: 64 of them are far from what a sum of 32 bits, or a float's integers, can hold."""
    x = np.ones((5, 4 * GROUPS[bits]), np.float32)
    weights = quantise_weights(np.full((TILE, x.shape[1]), -1.0, np.float32), bits)
    by_vectors, tiled = products(x, weights, bits)
    assert (by_vectors.view(np.int32) == tiled.view(np.int32)).all()
    assert np.allclose(tiled, -x.shape[1], rtol=1e-3)
