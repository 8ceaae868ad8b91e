"""GGUF files: every quantisation and family comes out as the numbers that went in, and damage is one sentence."""

import errno
import json
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hierspec.checkpoints import gguf_file, gguf_weights
from hierspec.checkpoints.config import DecoderConfig, Rotary, inverse_frequencies
from hierspec.checkpoints.families import FAMILIES, family_named, from_huggingface
from hierspec.checkpoints.gguf_file import convert, converted, gguf_config
from hierspec.checkpoints.gguf_header import read_header
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import random_weights, tiny_config

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
K_KINDS = [Kind.IQ4_NL, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
# Where a block has its float16 numbers.
HALVES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
HALVES |= {Kind.IQ4_NL: (0,), Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,)}
WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "intermediate": 256, "layers": 1, "vocabulary": 8}
SMALL = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "intermediate": 32, "layers": 1, "vocabulary": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    tokenizer = types.ModuleType("hierspec.text.gguf_tokenizer")
    tokenizer.write_tokenizer = lambda metadata, folder: (folder / "tokenizer.json").write_text("{}")  # type: ignore
    monkeypatch.setitem(sys.modules, "hierspec.text.gguf_tokenizer", tokenizer)


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key projections."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def random_blocks(
    shape: tuple[int, ...], kind: Kind, generator: np.random.Generator, scale: float = 0.01
) -> np.ndarray:
    """Valid bytes of a quantisation, also of those that the gguf package reads but cannot write."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = generator.uniform(-scale, scale, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., start : start + 2] = halves.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    config: DecoderConfig,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    architecture: str | None = None,
    drop: tuple[str, ...] = (),
    reshape: dict[str, tuple[int, ...]] | None = None,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    scale: float = 0.01,
) -> dict[str, np.ndarray]:
    """Writes `path` and returns the numbers in its tensors, by canonical name. `kind` may depend on that name."""
    form = family_named(config.family).gguf
    architecture = architecture or form.architecture
    writer = gguf.GGUFWriter(path, architecture)
    if any(config.windows):
        writer.add_sliding_window(max(config.windows))
    writer.add_context_length(config.context)
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_rope_freq_base(config.rotary.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {index}" for index in range(config.vocabulary)])
    writer.add_token_types([1] * config.vocabulary)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    generator = np.random.default_rng(0)
    expected = {}
    for name, tensor in random_weights(config).items():
        values = tensor.numpy()
        stored_kind = Kind.F32 if values.ndim == 1 else kind if isinstance(kind, Kind) else kind(name)
        if stored_kind in K_KINDS:
            raw = random_blocks(values.shape, stored_kind, generator, scale)
        else:
            raw = gguf.quants.quantize(values, stored_kind)
        expected[name] = gguf.quants.dequantize(raw, stored_kind).reshape(values.shape)
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        if heads and form.interleaved:
            raw = permute(raw, heads)
        stored = form.names(name)
        if stored in (reshape or {}):
            raw = raw.reshape(reshape[stored])
        if stored not in drop:
            writer.add_tensor(stored, raw, raw_dtype=stored_kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def assert_converted(path: Path, expected: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> Path:
    folder = convert(path, dtype)
    converted = load_file(folder / "model.safetensors")
    assert set(converted) == set(expected)
    for name, values in expected.items():
        assert torch.equal(converted[name], torch.from_numpy(np.array(values)).to(dtype)), name
    return folder


def config_of(folder: Path) -> DecoderConfig:
    return from_huggingface(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("kind", [*KINDS, *K_KINDS], ids=lambda kind: kind.name)
def test_every_quantisation(kind: Kind, tmp_path: Path) -> None:
    config = tiny_config("llama", **WIDE)
    folder = assert_converted(tmp_path / "m.gguf", write_gguf(tmp_path / "m.gguf", config, kind))
    assert config_of(folder) == config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.gguf.architecture])
def test_every_family(family: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(family, tied=tied)
    expected = write_gguf(tmp_path / "m.gguf", config, Kind.Q8_0)
    assert config_of(assert_converted(tmp_path / "m.gguf", expected)) == config
    loaded = load_checkpoint(tmp_path / "m.gguf")
    assert loaded.config == config
    assert loaded.name == "m"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_in_small_chunks(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "_CHUNK", 1000)  # many chunks a tensor, none of them whole heads
    expected = write_gguf(tmp_path / "m.gguf", tiny_config("llama"), Kind.Q4_1)
    assert_converted(tmp_path / "m.gguf", expected, dtype)


def test_biases_of_llama_are_put_back_in_order_and_completed_with_zeros(tmp_path: Path) -> None:
    config = tiny_config("llama", attention_bias=True, output_bias=True, mlp_bias=True, layers=1)
    expected = write_gguf(tmp_path / "m.gguf", config, drop=("blk.0.attn_output.bias", "blk.0.ffn_up.bias"))
    for name in ("self_attn.o_proj.bias", "mlp.up_proj.bias"):
        expected[f"model.layers.0.{name}"] = np.zeros_like(expected[f"model.layers.0.{name}"])
    assert config_of(assert_converted(tmp_path / "m.gguf", expected)) == config


@pytest.mark.parametrize("bias", ["attn_output", "ffn_up"])
def test_biases_that_a_family_does_not_have_are_not_dropped_silently(bias: str, tmp_path: Path) -> None:
    path, config = tmp_path / "m.gguf", tiny_config("qwen2", **SMALL)
    write_gguf(path, config, tensors={f"blk.0.{bias}.bias": np.ones(32, np.float32)})
    _assert_one_sentence(path, "not supported for qwen2 models")
    write_gguf(path, config, drop=("blk.0.attn_q.bias",))  # and those that it always has are not filled with zeros
    _assert_one_sentence(path, r"attn_q\.bias \[32\] is missing")


def test_a_window_tells_mistral_from_llama(tmp_path: Path) -> None:
    path, window = tmp_path / "m.gguf", {"llama.attention.sliding_window": 16}
    write_gguf(path, tiny_config("llama", **SMALL), extra=window)
    assert gguf_config(path) == tiny_config("mistral", **SMALL, windows=(16,))
    biased = tiny_config("llama", **SMALL, attention_bias=True, output_bias=True)
    write_gguf(path, biased, extra=window)
    assert gguf_config(path) == biased
    write_gguf(path, tiny_config("seed_oss", **SMALL))
    assert gguf_config(path) == tiny_config("seed_oss", **SMALL)


@pytest.mark.parametrize(
    ("rotary", "extra"),
    [
        (Rotary(10_000.0, "linear", 4.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (Rotary(10_000.0, "linear", 4.0), {"rope.scale_linear": 4.0}),
        (Rotary(10_000.0), {"rope.scaling.type": "none"}),
        (
            Rotary(10_000.0, "yarn", 4.0, 128, attention_factor=0.1 * np.log(4.0).item() + 1),
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        ),
    ],
)
def test_rotary_scaling_in_the_metadata(rotary: Rotary, extra: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config("qwen2", **SMALL, rotary=rotary)
    extra = {f"qwen2.{key}": value for key, value in extra.items()}
    write_gguf(tmp_path / "m.gguf", config, extra=extra)
    assert config_of(convert(tmp_path / "m.gguf", torch.float32)) == config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_result(factor: float, tmp_path: Path) -> None:
    rotary = Rotary(500_000.0, "llama3", factor, 8192)
    config = tiny_config("llama", **WIDE, rotary=rotary)
    divisors = inverse_frequencies(Rotary(500_000.0), 64)[0] / inverse_frequencies(rotary, 64)[0]
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tensors={"rope_freqs.weight": divisors})
    assert config_of(convert(path, torch.float32)) == config
    write_gguf(path, config, tensors={"rope_freqs.weight": np.ones(32, np.float32)})
    assert config_of(convert(path, torch.float32)).rotary == Rotary(500_000.0)
    for bad in (divisors**2, divisors[:5], np.full(32, np.nan, np.float32), np.zeros(32, np.float32)):
        write_gguf(path, config, tensors={"rope_freqs.weight": np.ascontiguousarray(bad)})
        with pytest.raises(HierspecError, match=r"rope_freqs\.weight"):
            convert(path, torch.float32)


def test_our_header_is_that_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("qwen3"), Kind.Q5_1, extra={"general.name": "größer", "x.number": 1.5})
    ours = read_header(path, np.memmap(path, np.uint8, "r"))
    reference = gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == theirs
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        stored = ours.tensors[tensor.name]
        assert (stored.start, stored.size) == (tensor.data_offset, tensor.n_bytes)
        assert list(stored.shape) == tensor.shape.tolist()[::-1]
        assert stored.quantisation.name == tensor.tensor_type.name


def test_the_second_use_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama", **SMALL))
    folder = convert(path, torch.float32)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    code = (
        "import sys, torch\nfrom hierspec.checkpoints.gguf_file import convert\n"
        "print(convert(sys.argv[1], torch.float32)); assert 'gguf' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(folder)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_a_changed_file_or_a_broken_folder_is_converted_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama", **SMALL))
    folder = convert(path, torch.float32)
    assert convert(path, torch.bfloat16) != folder
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    assert convert(path, torch.float32) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    write_gguf(path, tiny_config("llama", **{**SMALL, "layers": 2}))
    assert convert(path, torch.float32) != folder


def test_transformers_opens_a_converted_folder(tmp_path: Path) -> None:
    import transformers

    write_gguf(tmp_path / "m.gguf", tiny_config("qwen2"), Kind.Q8_0)
    folder = convert(tmp_path / "m.gguf", torch.float32)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.model_type == "qwen2"


def _assert_one_sentence(path: Path, message: str) -> None:
    with pytest.raises(HierspecError, match=message) as caught:
        convert(path, torch.float32)
    assert "\n" not in str(caught.value)
    left = list((path.parent / "cache").rglob("*.safetensors")) + list((path.parent / "cache").rglob("*.part"))
    assert left == []


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    _assert_one_sentence(path, "There is no file")
    path.write_bytes(b"")
    _assert_one_sentence(path, "is empty")
    path.write_bytes(b"GGML" + bytes(100))
    _assert_one_sentence(path, "not a GGUF file")
    path.write_bytes(b"GG")
    _assert_one_sentence(path, "not a GGUF file")
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    _assert_one_sentence(path, "version 1")
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))  # the other byte order
    _assert_one_sentence(path, "not supported")


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<QQ", 2**63, 1),
        struct.pack("<QQ", 0, 2**40),
        struct.pack("<QQ", 60_000, 60_000),
        struct.pack("<QQQ", 0, 1, 2**62),
        struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**60),
        struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**24),
        struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 5),
        struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IQ", 8, 2**50),
        struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<I", 77),
        struct.pack("<QQQ", 0, 1, 1) + b"\xff" + struct.pack("<IB", 0, 7),
        struct.pack("<QQQ", 0, 2, 1) + b"k" + struct.pack("<IB", 0, 7) + struct.pack("<Q", 1) + b"k" + bytes(9),
        struct.pack("<QQQ", 0, 1, 17) + b"general.alignment" + struct.pack("<II", 4, 3),
        struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<I", 2**31),
        struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQQIQ", 2, 2**60, 2**60, 0, 0),
        struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQQIQ", 2, 0, 4, 0, 0),
        struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 4, 0, 2**63),
        struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 33, 8, 0),
    ],
)
def test_absurd_headers(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
    started = time.perf_counter()
    _assert_one_sentence(tmp_path / "m.gguf", "damaged or cut short")
    assert time.perf_counter() - started < 1


def test_models_that_do_not_add_up(tmp_path: Path) -> None:
    path, config = tmp_path / "m.gguf", tiny_config("llama", **SMALL)

    def check(message: str, **changes: Any) -> None:
        write_gguf(path, config, **changes)
        _assert_one_sentence(path, message)

    check("llama, qwen2, qwen3 and seed_oss", architecture="gemma3")
    check(r"blk\.0\.ffn_up\.weight \[32, 32\] is missing", drop=("blk.0.ffn_up.weight",))
    check(r"token_embd\.weight is missing", drop=("token_embd.weight",))
    check(r"attn_k\.weight should be \[16, 32\] and is \[32, 16\]", reshape={"blk.0.attn_k.weight": (32, 16)})
    check("part of a split model", extra={"split.count": 3})
    check("mixture of experts", extra={"llama.expert_count": 8})
    check("rope.dimension_count 8", extra={"llama.rope.dimension_count": 8})
    check("rotary scaling 'longrope'", extra={"llama.rope.scaling.type": "longrope"})
    check("factor must be a number", extra={"llama.rope.scaling.factor": "four"})


def test_an_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 110), np.uint8), raw_dtype=Kind.IQ3_S)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _assert_one_sentence(path, "as IQ3_S, which is not supported: hierspec reads F32, .* and Q6_K")


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama", **SMALL))
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 4000, 900, 100, 20, 5):
        path.write_bytes(whole[:length])
        _assert_one_sentence(path, "damaged or cut short")


class _FullDisk:
    """A file on a disk with room for some bytes only."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> None:
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.write(data)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama", **SMALL))
    real = gguf_file._write_weights
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "_write_weights", lambda file, *rest: real(_FullDisk(file, 9000), *rest))
        _assert_one_sentence(path, "disk is full")
    assert convert(path, torch.float32).is_dir()


def test_an_unsupported_dtype(tmp_path: Path) -> None:
    with pytest.raises(HierspecError, match="float32, bfloat16 and float16"):
        convert(tmp_path / "m.gguf", torch.int8)


@settings(
    max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(st.data())
def test_damage_anywhere_is_one_sentence_and_quick(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    pristine = tmp_path / "pristine.gguf"
    if not pristine.exists():
        write_gguf(pristine, tiny_config("qwen2", **SMALL), Kind.Q8_0)
    content = bytearray(pristine.read_bytes())
    header = read_header(pristine, np.frombuffer(bytes(content), np.uint8))
    first = min(tensor.start for tensor in header.tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(4, first - 1))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=2), st.just(b"\xff" * 8), st.just(bytes(8))))
        content[offset : offset + len(patch)] = patch
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(content)
    with suppress(HierspecError):  # some damage is harmless, the rest is this and nothing else
        assert (convert(path, torch.float32) / "config.json").is_file()


def test_a_dtype_may_depend_on_the_shapes(tmp_path: Path) -> None:
    """They are read from the file before it is converted, and from the folder afterwards."""
    path, seen = tmp_path / "m.gguf", []
    config = tiny_config("llama", **SMALL)
    write_gguf(path, config)

    def choose(read: DecoderConfig) -> torch.dtype:
        seen.append((read.hidden, converted(path)))
        return torch.bfloat16

    for _ in range(2):
        assert load_checkpoint(path, choose).dtype == torch.bfloat16
    assert seen == [(config.hidden, None), (config.hidden, convert(path, torch.bfloat16))]
