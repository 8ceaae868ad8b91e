"""Weights in a GGUF file's own bits: the numbers are gguf's, products have one set of bits, mixed files run."""

import random
import sys
import types

import gguf
import numpy as np
import pytest
from backends.test_bits import check_anything_goes, plain_logits
from checkpoints.test_gguf import HALVES, random_blocks, write_gguf
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.backends.cpu import group_reader, packing, vector_products
from hierspec.backends.cpu.backend import CpuBackend
from hierspec.backends.cpu.forms import FORM_OF, FORMS, arrange, dequantise
from hierspec.backends.cpu.packing import packed_weights
from hierspec.backends.cpu.quantised import WORDS_PER_GROUP, quantise_for
from hierspec.backends.cpu.vector_products import form_vectors, vector_tile
from hierspec.checkpoints.gguf_blocks import unpack
from hierspec.checkpoints.load import load_checkpoint
from hierspec.testing.checkpoints import tiny_config

SIZES = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_size": 32, "intermediate": 512, "layers": 3}
EXTREMES = np.array([65504, -65504, 6e-8, -6e-8, 0.0, -0.0, 8190, 2e-5], np.float16)
ALL = sorted(HALVES, key=lambda kind: kind.name)
ARRANGED = [kind for kind in ALL if kind.name in FORM_OF]


def extreme_blocks(outputs: int, inputs: int, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Random blocks, some of them with the largest and the smallest scales that there are."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random_blocks((outputs, inputs), kind, rng).reshape(-1, size)
    for start in HALVES[kind]:
        extremes = rng.permutation(EXTREMES)[: len(blocks)]
        blocks[: len(extremes), start : start + 2] = extremes.view(np.uint8).reshape(-1, 2)
    return blocks


def bits(floats: np.ndarray) -> np.ndarray:
    return floats.astype(np.float32).view(np.int32)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_the_numbers_are_those_of_gguf(kind):
    rng = np.random.default_rng(kind.value)
    blocks = extreme_blocks(32, 512, kind, rng)
    expected = gguf.quants.dequantize(blocks, kind).reshape(32, 512)
    unpacked = unpack(blocks, kind.name)
    assert (bits(unpacked.values().reshape(32, 512)) == bits(expected)).all()
    form = FORM_OF[kind.name]
    arranged = arrange(unpacked, 32, form)
    assert arranged.nbytes == 2 * form.block_bytes(512)
    assert (bits(dequantise(arranged, 512, form)) == bits(expected)).all()


def multiply(x: np.ndarray, arranged: np.ndarray, form, tiles=None) -> tuple[np.ndarray, np.ndarray]:
    """The compiled product, and the rows in 8 bits that it used, as floats."""
    rows, size = x.shape
    inputs = np.empty((rows, size), np.int8)
    scales = np.empty((rows, size // form.group, WORDS_PER_GROUP), np.float32)
    out = np.full((rows, 16 * len(arranged)), np.nan, np.float32)
    quantise_for[form.group].from_python(
        x.ctypes.data, rows * size // form.group, inputs.ctypes.data, scales.ctypes.data
    )
    for block in range(len(arranged)):
        target = out.ctypes.data + 64 * block
        weights = arranged[block].ctypes.data
        (tiles or form_vectors[form].from_python)(
            inputs.ctypes.data, rows, scales.ctypes.data, weights, size, target, out.shape[1]
        )
    used = inputs.reshape(rows, -1, form.group).astype(np.float64) * scales[:, :, :1]
    return out, used.reshape(rows, size)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(ARRANGED),
    rows=st.integers(1, 20),
    units=st.integers(1, 3),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_the_numbers_and_have_the_same_bits_at_every_width(kind, rows, units, blocks, seed):
    rng, form = np.random.default_rng(seed), FORM_OF[kind.name]
    outputs, inputs = 16 * blocks, form.unit * units
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    if seed % 5 == 0:
        x[0, : form.group] = 0  # a group of zeros
    raw = random_blocks((outputs, inputs), kind, rng).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    arranged = arrange(unpack(raw, kind.name), outputs, form)
    result, used = multiply(x, arranged, form)
    weights = gguf.quants.dequantize(raw, kind).reshape(outputs, inputs).astype(np.float64)
    # Sums of terms that partly cancel: what may be rounded is a share of the terms, not of the sum.
    terms = np.abs(used) @ np.abs(weights).T
    assert (np.abs(result - used @ weights.T) <= 1e-5 * terms + 1e-30).all()
    for width in {1, 2, 3, 4, 5, rows}:
        for first in range(0, rows, width):
            alone, _ = multiply(np.ascontiguousarray(x[first : first + width]), arranged, form)
            assert (bits(alone) == bits(result[first : first + width])).all()


@pytest.mark.parametrize("kind", ARRANGED, ids=lambda kind: kind.name)
def test_widths_1_to_20(kind):
    rng, form = np.random.default_rng(1), FORM_OF[kind.name]
    x = rng.standard_normal((20, 512)).astype(np.float32)
    raw = random_blocks((32, 512), kind, rng).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    arranged = arrange(unpack(raw, kind.name), 32, form)
    together, _ = multiply(x, arranged, form)
    for width in range(1, 20):
        assert (bits(multiply(x[:width], arranged, form)[0]) == bits(together[:width])).all()


@pytest.mark.parametrize("form", [form for form in FORMS if form in FORM_OF.values()], ids=lambda form: form.name)
def test_without_a_dot_instruction_and_with_eight_rows_the_bits_are_the_same(form, monkeypatch):
    kind = next(Kind[name] for name, its in FORM_OF.items() if its == form)
    rng = np.random.default_rng(2)
    raw = random_blocks((16, 256), kind, rng).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    arranged, x = arrange(unpack(raw, kind.name), 16, form), rng.standard_normal((8, 256)).astype(np.float32)
    expected, _ = multiply(x, arranged, form)

    def only(rows: int):
        """Tiles of so many rows, as other CPUs use them."""
        tile = vector_tile(rows, form).from_python

        def tiles(inputs, count, scales, weights, size, out, out_step):
            groups = size // form.group
            for row in range(0, count, rows):
                its = scales + row * groups * WORDS_PER_GROUP * 4
                tile(
                    inputs + row * size, size, its, groups * WORDS_PER_GROUP, weights, groups,
                    out + row * out_step * 4, out_step,
                )  # fmt: skip

        return tiles

    assert (bits(multiply(x, arranged, form, only(8))[0]) == bits(expected)).all()
    for module in (vector_products, group_reader):
        monkeypatch.setattr(module, "dot_instruction", lambda: "")
    assert (bits(multiply(x, arranged, form, only(2))[0]) == bits(expected)).all()


def mixed(name: str) -> Kind:
    """As many kinds as a layer has matrices; keys and values, gates and ups differ."""
    layer = int(name.split(".")[2]) if ".layers." in name else 0
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    kinds = (
        (Kind.Q4_K, Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.Q4_K, Kind.Q4_K, Kind.Q6_K),
        (Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.Q2_K, Kind.Q3_K, Kind.Q5_1, Kind.BF16),
        (Kind.IQ4_NL, Kind.Q4_0, Kind.F32, Kind.Q5_0, Kind.F32, Kind.Q4_K, Kind.Q4_1),
    )
    for part, kind in zip(parts, kinds[layer], strict=True):
        if part in name:
            return kind
    return Kind.Q6_K


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own; the files have no tokenizer worth reading."""
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    tokenizer = types.ModuleType("hierspec.text.gguf_tokenizer")
    tokenizer.write_tokenizer = lambda metadata, folder: (folder / "tokenizer.json").write_text("{}")  # type: ignore
    monkeypatch.setitem(sys.modules, "hierspec.text.gguf_tokenizer", tokenizer)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_of_many_kinds_runs_with_the_same_bits_however_it_is_read(family, tmp_path, cache):
    config = tiny_config(family, tied=family == "qwen2", **SIZES)
    expected = write_gguf(tmp_path / "m.gguf", config, mixed, scale=1e-4)
    checkpoint = load_checkpoint(tmp_path / "m.gguf", as_stored=True)
    decoder = CpuBackend(2).decoder(config, checkpoint.weights, "file", checkpoint)
    assert {"q4_k", "q6_k", "int4", "bfloat16"} < set(decoder.products.split("+"))
    rng = random.Random(3)
    tokens = [rng.randrange(config.vocabulary) for _ in range(70)]
    check_anything_goes(decoder, tokens, rng, rounds=15)
    # And they are the model's: what differs from products in float32 is the rounding of inputs to 8 bits.
    in_floats = load_checkpoint(tmp_path / "m.gguf")
    for name, values in expected.items():
        assert (bits(in_floats.weights[name].numpy()) == bits(values)).all(), name
        assert (bits(checkpoint.weights[name].numpy()) == bits(values)).all(), name
    reference = plain_logits(CpuBackend(2).decoder(config, in_floats.weights, "float32"), tokens)
    found = plain_logits(decoder, tokens)
    assert 0 < np.sqrt(np.mean((found - reference) ** 2) / np.mean(reference**2)) < 0.05
    assert (found.argmax(axis=1) == reference.argmax(axis=1)).mean() > 0.9


def test_its_packed_file_is_made_once_and_holds_the_same(tmp_path, cache, monkeypatch):
    config = tiny_config("qwen2", **SIZES)
    write_gguf(tmp_path / "m.gguf", config, mixed)
    checkpoint, backend, tokens = load_checkpoint(tmp_path / "m.gguf", as_stored=True), CpuBackend(2), [1, 5, 9, 2]
    expected = plain_logits(backend.decoder(config, checkpoint.weights, "file", checkpoint), tokens)
    assert not (tmp_path / "cache" / "packed").exists()  # small models are packed at every start
    monkeypatch.setattr(packing, "_WORTH_A_FILE", 0)
    reports = []
    first = packed_weights(checkpoint, packing.FILE, lambda what, done, total: reports.append((done, total)))
    [file] = (tmp_path / "cache" / "packed").iterdir()
    state = file.stat()
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1] == first.bytes
    second = packed_weights(load_checkpoint(tmp_path / "m.gguf", as_stored=True), packing.FILE)
    assert file.stat().st_mtime_ns == state.st_mtime_ns
    for packed in (first, second):
        found = plain_logits(backend.with_weights(config, checkpoint.weights, packed), tokens)
        assert (bits(found) == bits(expected)).all()
    # Nothing was converted on the way: the cache has no floats of this model.
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
