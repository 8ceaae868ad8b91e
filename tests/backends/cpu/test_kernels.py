"""Kernels against each other: however a sum is computed, its bits are the same."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.backends.cpu.compiled import filter_version, kernel_version
from hierspec.backends.cpu.head_passes import run_draft_head, run_join
from hierspec.backends.cpu.kernels import add_segment
from hierspec.backends.cpu.layers import run_head, run_layers
from hierspec.backends.cpu.pick import adjust_rows, greedy_rows, sample_rows
from hierspec.backends.cpu.tiles import block_tiles, transpose_rows, transposed_tiles, two_block_tiles


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def row_by_row(x, weights, stored, out):
    multiply = block_tiles[stored, False].from_python
    size = x.shape[1]
    for row in range(len(x)):
        multiply(address(x[row]), size, 1, address(weights), size, address(out[row]), 16)


def together(x, prepared, weights, stored, out):
    """As CPUs with registers of 16 lanes do it."""
    rows, size = x.shape
    transpose_rows.from_python(address(x), rows, size, address(prepared))
    multiply = transposed_tiles[stored].from_python
    multiply(address(x), address(prepared), rows, address(weights), size, address(out), 16)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 45), blocks=st.integers(1, 6), seed=st.integers(0, 1000))
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_transposed_rows_have_the_bits_of_single_rows(stored, rows, blocks, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 16 * blocks)).astype(np.float32)
    weights = rng.standard_normal((16 * blocks, 16)).astype(np.float32)
    if stored == "bfloat16":
        weights = (weights.view(np.int32) >> 16).astype(np.int16)
    single, all_at_once = (np.full((rows, 16), np.nan, np.float32) for _ in range(2))
    row_by_row(x, weights, stored, single)
    together(x, np.empty_like(x), weights, stored, all_at_once)
    assert (single.view(np.int32) == all_at_once.view(np.int32)).all()
    floats = (weights.astype(np.int32) << 16).view(np.float32) if stored == "bfloat16" else weights
    assert np.allclose(single, x.astype(np.float64) @ floats.astype(np.float64), atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 21), steps=st.integers(1, 20), seed=st.integers(0, 1000))
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_two_blocks_at_once_have_the_bits_of_one_after_the_other(stored, onto, rows, steps, seed):
    rng = np.random.default_rng(seed)
    size = 4 * steps
    x = rng.standard_normal((rows, size + 3)).astype(np.float32)[:, :size]
    weights = rng.standard_normal((3, size, 16)).astype(stored)  # the second block is not the next one
    before = rng.standard_normal((rows, 48)).astype(np.float32)
    apart, twice = before.copy(), before.copy()
    one_block, two_blocks = block_tiles[stored, onto], two_block_tiles[stored, onto]
    for block, column in ((0, 0), (2, 32)):
        out = address(apart) + 4 * column
        one_block.from_python(address(x), size + 3, rows, address(weights[block]), size, out, 48)
    offset = address(weights[2]) - address(weights)
    given = address(x), size + 3, rows, address(weights), offset, size, address(twice), 48, 4 * 32
    two_blocks.from_python(*given, 1 << 12)  # what it prefetches makes no difference
    assert (apart.view(np.int32) == twice.view(np.int32)).all()
    assert (twice[:, 16:32] == before[:, 16:32]).all()
    right = before * onto + np.concatenate([x.astype(np.float64) @ block.astype(np.float64) for block in weights], 1)
    assert np.allclose(twice[:, :16], right[:, :16], atol=1e-4)
    assert np.allclose(twice[:, 32:], right[:, 32:], atol=1e-4)


def test_compiled_functions_share_one_number_as_their_default():
    """With two, numba's fast dispatch works for one of them only; a call of others takes 0.2 ms more."""
    compiled = [run_layers, run_head, run_join, run_draft_head]
    assert {function.dispatcher().__defaults__ for function in compiled} == {(kernel_version(),)}
    assert isinstance(kernel_version(), int)
    picks = [greedy_rows, adjust_rows, sample_rows]
    assert {function.dispatcher().__defaults__ for function in picks} == {(filter_version(),)}
    assert isinstance(filter_version(), float)


@numba.njit
def _add_segment(values, count, scale, state):
    return add_segment(values, count, scale, state)


@pytest.mark.parametrize("counts", [[1], [4], [7], [2, 3], [1, 16, 5]])
def test_a_softmax_in_segments_is_that_of_float64(counts):
    """Of all scores at once: what is largest is 1 exactly, and what is padded 0 exactly."""
    scale = 0.125
    scales = np.array([scale, scale * np.log2(np.e)], np.float32)
    rng = np.random.default_rng(len(counts))
    segments = [rng.normal(0, 200, 16 * count).astype(np.float32) for count in counts]
    for segment in segments:
        segment[:2], segment[-3:] = -np.inf, -np.inf
    everything = np.concatenate(segments).astype(np.float64)
    expected = np.exp(scale * (everything - everything.max()))
    state, factors = np.array([-np.inf, 0], np.float32), []
    for count, segment in zip(counts, segments, strict=True):
        factors.append(_add_segment(address(segment), count, address(scales), address(state)))
    assert factors[0] == 0  # there was nothing to scale
    for number, segment in enumerate(segments):
        assert not segment[:2].any()
        assert not segment[-3:].any()
        segment *= np.prod(factors[number + 1 :], dtype=np.float32)
    found = np.concatenate(segments)
    assert found.max() == 1
    assert state[0] == everything.max()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(state[1], expected.sum(), rtol=2e-6)
