"""Sums in 16 bits, on x86 CPUs without VNNI: never cut off, and the same bits as by any other instructions."""

import gguf
import numpy as np
import pytest
from backends.cpu.test_file_blocks import ARRANGED
from checkpoints.test_gguf import random_blocks
from llvmlite import binding

from hierspec.backends.cpu import group_reader, short_sums, vector_products
from hierspec.backends.cpu.forms import FORM_OF, FORMS, arrange
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP
from hierspec.backends.cpu.vector_products import vector_tile
from hierspec.checkpoints.gguf_blocks import UnpackedBlocks, unpack

FEATURES = binding.get_host_cpu_features()
WIDTHS = [
    pytest.param(
        feature == "avx512bw",
        marks=pytest.mark.skipif(not FEATURES.get(feature, False), reason=f"this CPU has no {feature}"),
        id=feature,
    )
    for feature in ("avx2", "avx512bw")
]


def largest_numbers(form, rng):
    """For 16 outputs and two units: integers as large as they get, of one sign and of mixed ones."""
    count = 32
    least, most = form.integers[0], form.integers[-1]
    integers = np.full((count, form.unit), most)
    integers[1::3] = least
    integers[2::3] = rng.choice([least, most], integers[2::3].shape)
    small = [np.ones((count, form.groups), np.int8) if form.multiplied else None for _ in range(2)]
    ones = np.ones(count, np.float16)
    offsets = (ones, small[1]) if form.offsets else (None, None)
    return UnpackedBlocks(integers.astype(np.int8).reshape(-1), ones, small[0], *offsets)


def products(form, weights, inputs, rows):
    """Of so many rows of 8-bit inputs at a time."""
    size = inputs.shape[1]
    scales = np.ones((len(inputs), size // form.group, WORDS_PER_GROUP), np.float32)
    sums = inputs.reshape(len(inputs), -1, form.group).sum(axis=2, dtype=np.int32)
    scales[:, :, 1], scales.view(np.int32)[:, :, 2] = sums, -128 * sums
    out, tile = np.empty((len(inputs), 16), np.float32), vector_tile(rows, form).from_python
    for row in range(0, len(inputs), rows):
        words = scales.shape[1] * WORDS_PER_GROUP
        places = inputs[row:].ctypes.data, size, scales[row:].ctypes.data, words, weights.ctypes.data, scales.shape[1]
        tile(*places, out[row:].ctypes.data, 16)
    return out


@pytest.mark.parametrize("wide", WIDTHS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_sums_of_the_largest_numbers_have_the_bits_of_sums_in_32_bits(form, wide, monkeypatch):
    rng = np.random.default_rng(0)
    weights = arrange(largest_numbers(form, rng), 16, form)
    inputs = np.full((8, 2 * form.unit), 127, np.int8)
    inputs[1] = -127
    inputs[2:] = rng.choice([-127, 127], inputs[2:].shape)

    def by(instruction):
        for module in (vector_products, group_reader):
            monkeypatch.setattr(module, "dot_instruction", lambda: instruction)

    by("")
    expected = products(form, weights, inputs, 1)
    for module in (vector_products, short_sums):
        monkeypatch.setattr(module, "has_wide_bytes", lambda: wide)
    by("vpmaddubsw")
    for rows in (1, 2, 4, 8):
        assert (products(form, weights, inputs, rows).view(np.int32) == expected.view(np.int32)).all(), rows


@pytest.mark.parametrize("kind", ARRANGED, ids=lambda kind: kind.name)
def test_no_file_has_larger_integers_than_its_form_says(kind):
    form, size = FORM_OF[kind.name], gguf.GGML_QUANT_SIZES[kind][1]
    raw = random_blocks((64, 512), kind, np.random.default_rng(3)).reshape(-1, size)
    assert set(np.unique(unpack(raw, kind.name).integers)) <= set(form.integers)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_at_least_one_step_fits(form):
    steps = short_sums.steps_in_16_bits(form)
    assert steps >= 1
    assert 2 * form.largest * 127 * steps < 1 << 15
