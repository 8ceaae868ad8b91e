"""Weights in 8 and 4 bits: what they stand for, products with them against whole-number arithmetic, and the file."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from hierspec.assembly.opening import open_decoder
from hierspec.backends.cpu import packing as packed
from hierspec.backends.cpu import quantised as low_bits
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.cpu.packing import pack_in_memory, packed_weights
from hierspec.backends.cpu.product import BYTES, NIBBLES, byte_tiles, nibble_tiles
from hierspec.backends.cpu.quantised import (
    BYTE_GROUP,
    GROUPS,
    NIBBLE_GROUP,
    RECORD,
    pack,
    quantise_for_bytes,
    quantise_for_nibbles,
    unpack,
)
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.language_model import load
from hierspec.testing.checkpoints import tiny_checkpoint


@njit
def multiply(x, low, records, weights, bits, out):
    rows, size = x.shape
    if bits == 8:
        quantise_for_bytes(x.ctypes.data, rows * size // BYTE_GROUP, low.ctypes.data, records.ctypes.data)
    else:
        quantise_for_nibbles(x.ctypes.data, rows * size // NIBBLE_GROUP, low.ctypes.data, records.ctypes.data)
    for block in range(len(weights)):
        place = out.ctypes.data + block * 64
        if bits == 8:
            byte_tiles(
                low.ctypes.data, rows, records.ctypes.data, weights[block].ctypes.data, size, place, out.shape[1]
            )
        else:
            nibble_tiles(
                low.ctypes.data, rows, records.ctypes.data, weights[block].ctypes.data, size, place, out.shape[1]
            )


def product(x: np.ndarray, weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The compiled product, and the rows in 8 bits that it used, as floats."""
    (rows, size), group = x.shape, GROUPS[bits]
    low, records = np.empty((rows, size), np.int8), np.empty((rows, size // group, RECORD), np.float32)
    out = np.full((rows, 16 * len(weights)), np.nan, np.float32)
    multiply(x, low, records, weights, bits, out)
    used = low.reshape(rows, -1, group).astype(np.float64) * records[:, :, :1]
    return out, used.reshape(rows, size)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9), groups=st.integers(1, 5), blocks=st.integers(1, 3), bits=st.sampled_from([8, 4]),
    seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 300.0]),
)  # fmt: skip
def test_products_are_those_of_the_weights_they_stand_for(rows, groups, blocks, bits, seed, scale):
    rng, group = np.random.default_rng(seed), GROUPS[bits]
    x = (rng.standard_normal((rows, groups * group)) * scale).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    if seed % 5 == 0:
        x[0, :group] = 0  # a group without anything in it
    weights = pack(rng.standard_normal((16 * blocks, groups * group)).astype(np.float32), bits)
    found, used = product(x, weights, bits)
    # The inputs moved by at most half a step of 1/127 of their group's largest number.
    most = np.abs(x).reshape(rows, groups, group).max(axis=2).repeat(group, axis=1)
    assert (np.abs(used - x) <= most / 127 * 0.501).all()
    exact = used @ unpack(weights, bits).astype(np.float64).T
    assert np.allclose(found, exact, rtol=1e-4, atol=2e-5 * scale * group)
    for row in range(rows):  # and every row is what it is alone
        alone, _ = product(x[row : row + 1], weights, bits)
        assert (alone.view(np.int32) == found[row].view(np.int32)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("levels", [15, 11, 3])
def test_numbers_from_such_blocks_come_back_exactly(bits, levels):
    """As GGUF's Q4_0 and Q4_1 blocks have them: a step in float16 times a whole number, plus a float16."""
    rng, group = np.random.default_rng(levels), GROUPS[bits]
    step = rng.uniform(1e-3, 1e-1, (32, 4, 1)).astype(np.float16).astype(np.float32)
    if bits == 8:
        whole = rng.integers(-127, 128, (32, 4, group)).astype(np.float32)
        whole[..., 0] = 127  # the largest number sets the step
        values = step * whole
    else:
        whole = rng.integers(0, levels + 1, (32, 4, group)).astype(np.float32)
        whole[..., 0], whole[..., 1] = 0, levels
        values = step * whole + rng.uniform(-1, 0, (32, 4, 1)).astype(np.float16).astype(np.float32)
    values = values.reshape(32, 4 * group).astype(np.float32)
    # The rounding of the sum may differ; or a finer grid was found that is as good.
    assert np.abs(unpack(pack(values, bits), bits) - values).max() <= (0 if bits == 8 else 3e-4 * step.max())


def test_a_group_of_equal_numbers_and_of_zeros():
    weights = np.zeros((16, 2 * BYTE_GROUP), np.float32)
    weights[:, BYTE_GROUP:] = 0.5
    for bits in (8, 4):
        assert np.abs(unpack(pack(weights, bits), bits) - weights).max() < 1e-3


@pytest.mark.parametrize("kind", [BYTES, NIBBLES])
def test_a_model_in_few_bits_is_near_the_whole_one(tmp_path, kind):
    changes = {"heads": 4, "hidden": 128, "intermediate": 192}
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, "llama", seed=2, **changes))
    config, tensors = checkpoint.config, checkpoint.weights
    backend = CpuBackend(2)
    low = backend.with_weights(config, tensors, pack_in_memory(config, tensors, kind))
    rounded = {**tensors}
    for name, tensor in tensors.items():  # what the weights became, in whole floats
        if name.endswith("_proj.weight"):
            bits = 8 if kind == BYTES else 4
            rounded[name] = torch.from_numpy(unpack(pack(tensor.numpy(), bits), bits))
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    rounded[head] = torch.from_numpy(unpack(pack(tensors[head].numpy(), 8), 8))
    whole = backend.decoder(config, rounded, "float32")
    from backends.test_bits import plain_logits

    tokens = np.random.default_rng(4).integers(0, config.vocabulary, 30).tolist()
    one, two = plain_logits(low, tokens), plain_logits(whole, tokens)
    error = np.sqrt(np.mean((one - two) ** 2) / np.mean(two**2))
    assert 0 < error < 0.06  # random weights have no large features to be sure of: 0.03 seen


def test_the_file_is_made_once_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "_WORTH_A_FILE", 0)
    changes = {"heads": 4, "hidden": 128, "intermediate": 192}
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path / "model", "llama", seed=2, **changes))
    from backends.test_bits import plain_logits

    tokens = [1, 5, 9, 2]
    backend = CpuBackend(2)
    expected = plain_logits(backend.decoder(checkpoint.config, checkpoint.weights, "float32"), tokens)
    made = packed_weights(checkpoint, packed.KINDS["float32"])
    [file] = (tmp_path / "cache" / "packed").iterdir()
    state = file.stat()
    again = packed_weights(checkpoint, packed.KINDS["float32"])
    assert file.stat().st_mtime_ns == state.st_mtime_ns
    for weights in (made, again):
        decoder = backend.with_weights(checkpoint.config, checkpoint.weights, weights)
        assert (plain_logits(decoder, tokens) == expected).all()
    file.write_bytes(file.read_bytes()[:-64])  # cut short: made anew
    assert packed_weights(checkpoint, packed.KINDS["float32"]).bytes == made.bytes
    assert file.stat().st_size == state.st_size


def test_a_draft_may_be_in_few_bits_under_a_whole_target(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", seed=2, heads=4, hidden=128, intermediate=192)
    model = load(folder)
    plain = model.generate([1, 2, 3], plan="plain", max_tokens=30).tokens
    for weights in ("int8", "int4"):
        plan = Plan(tiers=(TierPlan(draft=str(folder), gather=3, weights=weights),))
        found = model.generate([1, 2, 3], plan=plan, max_tokens=30)
        assert found.tokens == plain
        assert 1 < found.stats.tokens_per_pass <= 4  # the same model, but for its rounding, guesses well
    assert model.assembler.drafts.catalogue(str(folder), "int8").decoder.products == "int8"
    assert Plan.from_toml(plan.to_toml()) == plan
    with pytest.raises(HierspecError, match="belongs to a draft"):
        TierPlan(exit_layer=2, head="shared", weights="int8")


def test_low_bits_need_the_compiled_backend(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    checkpoint = load_checkpoint(folder)
    with pytest.raises(HierspecError, match="compiled backend"):
        open_decoder(checkpoint, "cpu", "torch", "int8")
    with pytest.raises(HierspecError, match="choose auto, int8, int4"):
        load(folder, weights="int2")


def test_without_a_dot_instruction_the_numbers_are_the_same(monkeypatch):
    """CPUs without one take a longer way, which must give the same bits."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2 * BYTE_GROUP)).astype(np.float32)
    weights = {bits: pack(rng.standard_normal((16, 2 * BYTE_GROUP)).astype(np.float32), bits) for bits in (8, 4)}
    with_it = {bits: product(x, weights[bits], bits)[0] for bits in (8, 4)}
    monkeypatch.setattr(low_bits, "DOT", "")
    byte_tile, nibble_tile = low_bits._low_tile(1, 8), low_bits._low_tile(1, 4)

    @njit
    def one(low, records, weights, bits, out):
        groups = len(records)
        for_tile = (low.ctypes.data, 0, records.ctypes.data, 0, weights.ctypes.data, groups, out.ctypes.data, 16)
        if bits == 8:
            byte_tile(*for_tile)
        else:
            nibble_tile(*for_tile)

    for bits in (8, 4):
        for row in range(3):
            low = np.empty(2 * BYTE_GROUP, np.int8)
            records = np.empty((len(low) // GROUPS[bits], RECORD), np.float32)
            out, nothing = np.empty(16, np.float32), np.empty((1, 16), np.float32)
            multiply(x[row : row + 1], low[None], records[None], weights[bits], bits, nothing)
            one(low, records, weights[bits], bits, out)
            assert (out.view(np.int32) == with_it[bits][row].view(np.int32)).all()
