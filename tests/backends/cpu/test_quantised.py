"""Weights in 8 and 4 bits: what they represent, products with them against integer arithmetic, and the file."""

import ctypes
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.assembly.opening import open_decoder
from hierspec.backends.cpu import packing, vector_products
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.cpu.forms import FORMS, INT4, INT8, Form, arrange, dequantise
from hierspec.backends.cpu.packing import pack_in_memory, packed_weights
from hierspec.backends.cpu.product import FORM_OF_KIND, Code, product_code
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP, quantise_for, quantise_weights
from hierspec.backends.cpu.vector_products import form_vectors, vector_tile
from hierspec.checkpoints.cast_weights import CastWeights
from hierspec.checkpoints.gguf_blocks import UnpackedBlocks
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.language_model import load
from hierspec.testing.checkpoints import tiny_checkpoint


def _rounded(weight: torch.Tensor, form: Form) -> torch.Tensor:
    """What weights in few bits represent."""
    return torch.from_numpy(dequantise(quantise_weights(weight.numpy(), form), weight.shape[1], form))


def aligned(numbers: np.ndarray) -> np.ndarray:
    """A copy that starts at a cache line."""
    memory = np.zeros(numbers.nbytes + 64, np.uint8)
    copy = memory[-memory.ctypes.data % 64 :][: numbers.nbytes].view(numbers.dtype).reshape(numbers.shape)
    copy[...] = numbers
    return copy


def multiply(x, inputs, scales, weights, form, out):
    rows, size = x.shape
    ready, group_scales = inputs.ctypes.data, scales.ctypes.data
    quantise_for[form.group].from_python(x.ctypes.data, rows * size // form.group, ready, group_scales)
    for block in range(len(weights)):
        target = out.ctypes.data + block * 64
        form_vectors[form].from_python(
            ready, rows, group_scales, weights[block].ctypes.data, size, target, out.shape[1]
        )


def product(x: np.ndarray, weights: np.ndarray, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """The compiled product, and the rows in 8 bits that it used, as floats."""
    (rows, size), group = x.shape, form.group
    inputs, scales = np.empty((rows, size), np.int8), np.empty((rows, size // group, WORDS_PER_GROUP), np.float32)
    out = np.full((rows, 16 * len(weights)), np.nan, np.float32)
    multiply(x, inputs, scales, weights, form, out)
    used = inputs.reshape(rows, -1, group).astype(np.float64) * scales[:, :, :1]
    return out, used.reshape(rows, size)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    blocks=st.integers(1, 3),
    form=st.sampled_from([INT8, INT4]),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
def test_products_are_those_of_the_weights_they_represent(rows, groups, blocks, form, seed, scale):
    rng, group = np.random.default_rng(seed), form.group
    x = (rng.standard_normal((rows, groups * group)) * scale).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    if seed % 5 == 0:
        x[0, :group] = 0  # a group of zeros
    weights = quantise_weights(rng.standard_normal((16 * blocks, groups * group)).astype(np.float32), form)
    result, used = product(x, weights, form)
    # The inputs moved by at most half a step of 1/127 of their group's largest number.
    largest = np.abs(x).reshape(rows, groups, group).max(axis=2).repeat(group, axis=1)
    assert (np.abs(used - x) <= largest / 127 * 0.501).all()
    exact = used @ dequantise(weights, groups * group, form).astype(np.float64).T
    assert np.allclose(result, exact, rtol=1e-4, atol=2e-5 * scale * group)
    for row in range(rows):  # and every row has the bits it has alone
        alone, _ = product(x[row : row + 1], weights, form)
        assert (alone.view(np.int32) == result[row].view(np.int32)).all()


@pytest.mark.parametrize("kind", FORM_OF_KIND)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_blocks_multiplied_together_have_the_bits_of_one_at_a_time(kind, blocks):
    """Of all rows that tiles of rows divide differently, and nothing else is written."""
    form, code = FORM_OF_KIND[kind], product_code(kind)
    size, step, rng = 2 * form.unit, 16 * (blocks + 2), np.random.default_rng(blocks)
    if form in (INT8, INT4):
        weights = quantise_weights(rng.standard_normal((16 * blocks, size)).astype(np.float32), form)
    else:
        weights = rng.integers(0, 60, (blocks, form.block_bytes(size))).astype(np.uint8)  # small float16 numbers
    weights = aligned(weights)
    for rows in (1, 2, 3, 4, 5, 7, 8, 11, 12, 14, 21):
        x = rng.standard_normal((rows, size)).astype(np.float32)
        inputs, scales = aligned(np.empty((rows, size), np.int8)), np.empty((rows, size, WORDS_PER_GROUP), np.float32)
        alone, together = np.full((rows, step), np.nan, np.float32), np.full((rows, step), np.nan, np.float32)
        multiply(x, inputs, scales, weights, form, alone)
        given = inputs.ctypes.data, scales.ctypes.data, rows, weights.ctypes.data, size, together.ctypes.data
        prepare, product = (
            ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(int(code[of]))
            for of, count in ((Code.PREPARE, 5), (Code.PRODUCT, 10))
        )
        prepare(x.ctypes.data, rows, size, *given[:2])
        product(x.ctypes.data, *given, step, 0, blocks)
        assert np.array_equal(alone.view(np.int32), together.view(np.int32))


@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("levels", [15, 11, 3])
def test_numbers_from_such_blocks_come_back_exactly(form, levels):
    """As in GGUF's Q4_0 and Q4_1 blocks: a step in float16 times an integer, plus a float16."""
    rng, group = np.random.default_rng(levels), form.group
    step = rng.uniform(1e-3, 1e-1, (32, 4, 1)).astype(np.float16).astype(np.float32)
    if form == INT8:
        integers = rng.integers(-127, 128, (32, 4, group)).astype(np.float32)
        integers[..., 0] = 127  # the largest number sets the step
        values = step * integers
    else:
        integers = rng.integers(0, levels + 1, (32, 4, group)).astype(np.float32)
        integers[..., 0], integers[..., 1] = 0, levels
        values = step * integers + rng.uniform(-1, 0, (32, 4, 1)).astype(np.float16).astype(np.float32)
    values = values.reshape(32, 4 * group).astype(np.float32)
    # The rounding of the sum may differ; or a finer grid fits as well.
    assert np.abs(dequantise(quantise_weights(values, form), values.shape[1], form) - values).max() <= (
        0 if form == INT8 else 3e-4 * step.max()
    )


def test_a_group_of_equal_numbers_and_of_zeros():
    weights = np.zeros((16, 2 * INT8.group), np.float32)
    weights[:, INT8.group :] = 0.5
    for form in (INT8, INT4):
        assert np.abs(dequantise(quantise_weights(weights, form), weights.shape[1], form) - weights).max() < 1e-3


@pytest.mark.parametrize("form", [INT8, INT4])
def test_a_quantised_model_is_near_the_original(tmp_path, form):
    changes = {"heads": 4, "hidden": 128, "intermediate": 192}
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, "llama", seed=2, **changes))
    config, tensors = checkpoint.config, checkpoint.weights
    backend = CpuBackend(2)
    in_few_bits = backend.with_weights(config, tensors, pack_in_memory(config, tensors, packing.KINDS[form.name]))
    rounded = {**tensors}
    for name, tensor in tensors.items():  # the quantised weights, as floats
        if name.endswith("_proj.weight"):
            rounded[name] = _rounded(tensor, form)
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    rounded[head] = _rounded(tensors[head], INT8)
    in_floats = backend.decoder(config, rounded, "float32")
    from backends.test_bits import plain_logits

    tokens = np.random.default_rng(4).integers(0, config.vocabulary, 30).tolist()
    logits, expected = plain_logits(in_few_bits, tokens), plain_logits(in_floats, tokens)
    error = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert 0 < error < 0.06  # random weights have no large features: 0.03 seen


def test_the_file_is_written_once_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "_WORTH_A_FILE", 0)
    changes = {"heads": 4, "hidden": 128, "intermediate": 192}
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path / "model", "llama", seed=2, **changes))
    from backends.test_bits import plain_logits

    tokens = [1, 5, 9, 2]
    backend = CpuBackend(2)
    expected = plain_logits(backend.decoder(checkpoint.config, checkpoint.weights, "float32"), tokens)
    written = packed_weights(checkpoint, packing.KINDS["float32"])
    [file] = (tmp_path / "cache" / "packed").iterdir()
    state = file.stat()
    again = packed_weights(checkpoint, packing.KINDS["float32"])
    assert file.stat().st_mtime_ns == state.st_mtime_ns
    for weights in (written, again):
        decoder = backend.with_weights(checkpoint.config, checkpoint.weights, weights)
        assert (plain_logits(decoder, tokens) == expected).all()
    file.write_bytes(file.read_bytes()[:-64])  # cut short: written again
    assert packed_weights(checkpoint, packing.KINDS["float32"]).bytes == written.bytes
    assert file.stat().st_size == state.st_size


def test_a_draft_may_be_quantised_under_a_target_that_is_not(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", seed=2, heads=4, hidden=128, intermediate=192)
    model = load(folder, device="cpu")
    plain = model.generate([1, 2, 3], plan="plain", max_tokens=30).tokens
    for weights in ("int8", "int4"):
        plan = Plan(tiers=(TierPlan(draft=str(folder), gather=3, weights=weights),))
        drafted = model.generate([1, 2, 3], plan=plan, max_tokens=30)
        assert drafted.tokens == plain
        assert 1 < drafted.stats.tokens_per_pass <= 4  # the same model, but for its rounding, drafts well
    assert model.assembler.drafts.catalogue(str(folder), "int8").decoder.products == "int8"
    assert Plan.from_toml(plan.to_toml()) == plan
    with pytest.raises(HierspecError, match="belongs to a draft"):
        TierPlan(exit_layer=2, head="shared", weights="int8")


def test_quantised_weights_need_the_compiled_backend(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    checkpoint = load_checkpoint(folder)
    with pytest.raises(HierspecError, match="compiled backend"):
        open_decoder(checkpoint, "cpu", "torch", "int8")
    with pytest.raises(HierspecError, match="choose auto, file, int8, int4"):
        load(folder, weights="int2")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("units", [1, 25, 70])
def test_many_rows_have_the_bits_that_each_has_alone(form, units):
    """Many rows may go another way than few (`sdot_tiles.py`), and long ones in several pieces."""
    rng = np.random.default_rng(units)
    x = rng.standard_normal((31, units * form.unit)).astype(np.float32)
    outputs, count = 32, 32 * units
    small = [rng.integers(-31, 32, (count, form.groups), np.int8) if form.multiplied else None for _ in range(2)]
    blocks = UnpackedBlocks(
        rng.choice(np.array(form.integers, np.int8), count * form.unit),
        rng.standard_normal(count).astype(np.float16),
        small[0],
        rng.standard_normal(count).astype(np.float16) if form.offsets else None,
        small[1] if form.offsets else None,
    )
    weights = arrange(blocks, outputs, form)
    alone = np.concatenate([product(x[row : row + 1], weights, form)[0] for row in range(len(x))])
    for rows in (12, 13, 17, 31):
        result, _ = product(x[:rows], weights, form)
        assert (result.view(np.int32) == alone[:rows].view(np.int32)).all()


def test_without_a_dot_instruction_the_bits_are_the_same(monkeypatch):
    """CPUs without one use more instructions, which must give the same bits."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2 * INT8.group)).astype(np.float32)
    values = {form: rng.standard_normal((16, 2 * INT8.group)).astype(np.float32) for form in (INT8, INT4)}
    weights = {form: quantise_weights(values[form], form) for form in (INT8, INT4)}
    expected = {form: product(x, weights[form], form)[0] for form in (INT8, INT4)}
    monkeypatch.setattr(vector_products, "dot_instruction", lambda: "")
    tiles = {form: vector_tile(1, form).from_python for form in (INT8, INT4)}

    for form in (INT8, INT4):
        for row in range(3):
            inputs = np.empty(2 * INT8.group, np.int8)
            scales = np.empty((len(inputs) // form.group, WORDS_PER_GROUP), np.float32)
            out, unused = np.empty(16, np.float32), np.empty((1, 16), np.float32)
            multiply(x[row : row + 1], inputs[None], scales[None], weights[form], form, unused)
            addresses = [array.ctypes.data for array in (inputs, scales, weights[form], out)]
            tiles[form](addresses[0], 0, addresses[1], 0, addresses[2], len(scales), addresses[3], 16)
            assert (out.view(np.int32) == expected[form][row].view(np.int32)).all()


@pytest.mark.skipif(vector_products.dot_instruction() == "vpdpbusd", reason="weights of other CPUs are signed")
@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_products_of_pairs_have_the_same_bits(form, rows):
    """i8mm, or what emulates it here."""
    rng, groups = np.random.default_rng(rows), 5
    x = rng.standard_normal((rows, groups * form.group)).astype(np.float32)
    weights = quantise_weights(rng.standard_normal((16, x.shape[1])).astype(np.float32), form)
    expected, _ = product(x, weights, form)
    inputs, scales = np.empty(x.shape, np.int8), np.empty((rows, groups, WORDS_PER_GROUP), np.float32)
    out, unused = np.full((rows, 16), np.nan, np.float32), np.empty((rows, 16), np.float32)
    multiply(x, inputs, scales, weights, form, unused)
    given = inputs.ctypes.data, x.shape[1], scales.ctypes.data, groups * WORDS_PER_GROUP, weights.ctypes.data, groups
    vector_tile(rows, form, by_pairs=True).from_python(*given, out.ctypes.data, 16)
    assert (out.view(np.int32) == expected.view(np.int32)).all()


def test_packing_unpacks_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Shards in bfloat16, as float32 and in 8 bits: a tensor is gone before the next one is asked for."""
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "_WORTH_A_FILE", 0)
    changes = {"heads": 4, "hidden": 128, "intermediate": 192, "tied": False}
    folder = tiny_checkpoint(tmp_path / "model", "llama", seed=2, dtype=torch.bfloat16, shards=3, **changes)
    as_stored, backend = load_checkpoint(folder, torch.bfloat16).weights, CpuBackend(2)
    checkpoint = load_checkpoint(folder)
    assert isinstance(checkpoint.weights, CastWeights)
    everything = {name: tensor.float() for name, tensor in as_stored.items()}
    made: list[weakref.ref[torch.Tensor]] = []
    real = CastWeights.__getitem__

    def watched(self, name):
        assert not [tensor for ref in made if (tensor := ref()) is not None], name
        tensor = real(self, name)
        made.append(weakref.ref(tensor))
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(CastWeights, "__getitem__", watched)
        kinds = packed_weights(checkpoint, packing.KINDS["int8"]), packed_weights(checkpoint, packing.KINDS["float32"])
    assert len(made) == 2 * (7 * checkpoint.config.layers + 1)
    from backends.test_bits import plain_logits

    for packed, format in zip(kinds, ("int8", "float32"), strict=True):
        decoder = backend.with_weights(checkpoint.config, checkpoint.weights, packed)
        expected = plain_logits(backend.decoder(checkpoint.config, everything, format), [1, 5, 9, 2])
        assert (plain_logits(decoder, [1, 5, 9, 2]) == expected).all()
