"""The pieces of vector code against each other: whatever way a sum takes, its bits are the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from hierspec.backends.cpu import amx as matrix_units
from hierspec.backends.cpu import kernels as vector_code
from hierspec.backends.cpu.heads import run_draft_head, run_join
from hierspec.backends.cpu.layers import run_head, run_layers
from hierspec.backends.cpu.product import half_tiles, over_turned_rows, tiles

turn_8, turn_16 = vector_code.turn_8, vector_code.turn_16
_turned = over_turned_rows("turned", vector_code.turned_tile_16, vector_code.turned_tile_8, tiles)
_turned_halves = over_turned_rows(
    "turned_halves", vector_code.turned_half_tile_16, vector_code.turned_half_tile_8, half_tiles
)


@njit
def row_by_row(x, weights, halves, out):
    size = x.shape[1]
    for row in range(len(x)):
        start, place = x[row].ctypes.data, out[row].ctypes.data
        if halves:
            half_tiles(start, size, 1, weights.ctypes.data, size, place, 16)
        else:
            tiles(start, size, 1, weights.ctypes.data, size, place, 16)


@njit
def together(x, ready, weights, halves, out):
    """As CPUs with registers of 16 lanes do it."""
    rows, size = x.shape
    start, turned, row = x.ctypes.data, ready.ctypes.data, 0
    while row + 16 <= rows:
        turn_16(start + 4 * row * size, size, turned + 4 * row * size)
        row += 16
    if row + 8 <= rows:
        turn_8(start + 4 * row * size, size, turned + 4 * row * size)
    if halves:
        _turned_halves(start, turned, rows, weights.ctypes.data, size, out.ctypes.data, 16)
    else:
        _turned(start, turned, rows, weights.ctypes.data, size, out.ctypes.data, 16)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 45), blocks=st.integers(1, 6), seed=st.integers(0, 1000))
@pytest.mark.parametrize("halves", [False, True])
def test_rows_turned_and_together_are_rows_alone(halves, rows, blocks, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 16 * blocks)).astype(np.float32)
    weights = rng.standard_normal((16 * blocks, 16)).astype(np.float32)
    if halves:
        weights = (weights.view(np.int32) >> 16).astype(np.int16)
    one, all_at_once = (np.full((rows, 16), np.nan, np.float32) for _ in range(2))
    row_by_row(x, weights, halves, one)
    together(x, np.empty_like(x), weights, halves, all_at_once)
    assert (one.view(np.int32) == all_at_once.view(np.int32)).all()
    whole = (weights.astype(np.int32) << 16).view(np.float32) if halves else weights
    assert np.allclose(one, x.astype(np.float64) @ whole.astype(np.float64), atol=1e-4)


def test_compiled_functions_share_one_number_as_their_default():
    """With two, numba's quick way into a function is open to one of them only; a call of others takes 0.2 ms more."""
    kept = [run_layers, run_head, run_join, run_draft_head]
    assert {function.py_func.__defaults__ for function in kept} == {(matrix_units.CODE,)}
