"""Configurations: read as transformers reads them, written so that transformers reads them back."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hierspec.checkpoints.config import Rotary, inverse_frequencies
from hierspec.checkpoints.families import FAMILIES, from_huggingface, to_huggingface
from hierspec.checkpoints.rotary import rotary_table
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import tiny_config

CLASSES = transformers.CONFIG_MAPPING  # by model_type
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "pad_token_id": 0,
}
ROTARIES = [
    Rotary(10_000.0),
    Rotary(500_000.0, "linear", 4.0),
    Rotary(500_000.0, "llama3", 8.0, 1024, 1.0, 4.0),
    Rotary(500_000.0, "llama3", 32.0, 8192, 1.0, 4.0),
    Rotary(1_000_000.0, "yarn", 4.0, 1024, attention_factor=1.1),
    Rotary(10_000.0, "yarn", 16.0, 256, beta_fast=16.0, beta_slow=2.0, truncate=False, attention_factor=0.9),
]


@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
@pytest.mark.parametrize("rotary", ROTARIES, ids=lambda rotary: rotary.scaling)
def test_frequencies_are_bit_equal_to_transformers(rotary: Rotary, head_size: int) -> None:
    config = tiny_config("llama", rotary=rotary, head_size=head_size, hidden=4 * head_size)
    reference_config = transformers.LlamaConfig(**to_huggingface(config))
    if rotary.scaling == "none":
        reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(reference_config)
        expected, factor = reference.inv_freq, reference.attention_scaling
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rotary.scaling](reference_config, torch.device("cpu"))
    frequencies, attention_factor = inverse_frequencies(rotary, head_size)
    assert frequencies.dtype == np.float32
    assert np.array_equal(frequencies, expected.numpy())
    assert attention_factor == factor


@pytest.mark.parametrize(
    "extra", [{}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"attention_factor": 1.3}, {"factor": None}, {"beta_fast": 0}]
)
def test_the_attention_factor_of_yarn_is_that_of_transformers(extra: dict[str, Any]) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **extra}
    reference = transformers.LlamaConfig(**SIZES, rope_theta=50_000.0, rope_scaling=dict(scaling))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    rotary = from_huggingface({"model_type": "llama", **SIZES, "rope_theta": 50_000.0, "rope_scaling": scaling}).rotary
    frequencies, attention_factor = inverse_frequencies(rotary, 16)
    assert np.array_equal(frequencies, expected.numpy())
    assert attention_factor == factor


@pytest.mark.parametrize("rotary", ROTARIES, ids=lambda rotary: rotary.scaling)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_configuration_comes_back_through_transformers(family: str, rotary: Rotary, tmp_path) -> None:
    config = tiny_config(family, rotary=rotary, eos_ids=(2, 7))
    reference = CLASSES[family](**to_huggingface(config))
    assert from_huggingface(reference.to_dict()) == config  # version 5 keys
    reference.save_pretrained(tmp_path)
    assert from_huggingface(json.loads((tmp_path / "config.json").read_text())) == config
    assert from_huggingface(to_huggingface(config)) == config  # version 4 keys


WINDOW_CASES = [
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 100}),
    ("mistral", {"sliding_window": 100, "layer_types": ["full_attention"] * 6}),
    *[
        (name, changes)
        for name in ("qwen2", "qwen3")
        for changes in (
            {},
            {"sliding_window": 100},
            {"use_sliding_window": True},
            {"use_sliding_window": True, "sliding_window": None},
            {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 4},
            {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 4},
            {
                "use_sliding_window": True,
                "sliding_window": 100,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
            },
        )
    ],
    ("smollm3", {}),
    ("smollm3", {"no_rope_layer_interval": 3}),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 0, 1]}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 100}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 100, "no_rope_layers": [1, 0, 1, 1, 0, 1]}),
    ("smollm3", {"use_sliding_window": False, "sliding_window": 100}),
    ("llama", {"sliding_window": 100}),
]


@pytest.mark.parametrize(("family", "changes"), WINDOW_CASES)
def test_windows_and_rotary_layers_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    reference = CLASSES[family](**SIZES, **changes)
    raw = {"model_type": family, **SIZES, **changes}
    for source in (raw, reference.to_dict()):
        config = from_huggingface(source)
        assert list(config.windows) == _windows_by_mask(reference, family)
        flags = getattr(reference, "no_rope_layers", [1] * 6)
        assert list(config.rotary_layers) == [bool(flag) for flag in flags]


def _windows_by_mask(reference: Any, family: str) -> list[int]:
    if family == "llama":
        return [0] * 6
    if family == "mistral":
        return [reference.sliding_window or 0] * 6
    return [reference.sliding_window if kind == "sliding_attention" else 0 for kind in reference.layer_types]


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_heads_and_ties_are_those_of_transformers(family: str) -> None:
    for changes in ({}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}):
        reference = CLASSES[family](**SIZES, **changes)
        config = from_huggingface({"model_type": family, **SIZES, **changes})
        model = transformers.AutoModelForCausalLM.from_config(reference)
        layer = model.model.layers[0]
        assert config.attention_bias == (layer.self_attn.q_proj.bias is not None)
        assert config.output_bias == (layer.self_attn.o_proj.bias is not None)
        assert config.mlp_bias == (layer.mlp.up_proj.bias is not None)
        assert config.qk_norm == hasattr(layer.self_attn, "q_norm")
        assert config.heads * config.head_size == layer.self_attn.q_proj.out_features
        assert config.kv_heads * config.head_size == layer.self_attn.k_proj.out_features
        assert config.tied == reference.tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_get_the_defaults_of_transformers(family: str) -> None:
    reference = CLASSES[family]()
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sparse = {"model_type": family, **{key: getattr(reference, key) for key in needed}}
    assert from_huggingface(sparse) == from_huggingface(reference.to_dict())


def test_generation_settings_decide_where_text_ends() -> None:
    raw = {"model_type": "llama", **SIZES}
    assert from_huggingface(raw).eos_ids == (2, 5)
    assert from_huggingface(raw, {"eos_token_id": [9, 8]}).eos_ids == (9, 8)
    assert from_huggingface(raw, {"eos_token_id": 9}).eos_ids == (9,)
    assert from_huggingface(raw, {"temperature": 0.6}).eos_ids == (2, 5)
    assert from_huggingface({**raw, "eos_token_id": [2, 300, -1]}).eos_ids == (2,)  # outside the vocabulary
    assert from_huggingface({**raw, "bos_token_id": None}).bos_id is None


def test_rotary_parameters_per_type_of_layer() -> None:
    kinds = {"layer_types": ["full_attention"] * 6}
    linear = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    raw = {"model_type": "qwen3", **SIZES, **kinds, "rope_parameters": {"full_attention": linear}}
    assert from_huggingface(raw).rotary == Rotary(5000.0, "linear", 2.0)
    raw["rope_parameters"]["sliding_attention"] = {**linear, "factor": 3.0}
    with pytest.raises(HierspecError, match="differ between types"):
        from_huggingface(raw)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BAD = [
    ({"model_type": "gpt2"}, "llama, mistral, qwen2, qwen3, seed_oss and smollm3"),
    ({"model_type": None}, "llama, mistral, qwen2, qwen3, seed_oss and smollm3"),
    ({"model_type": ["llama"]}, "not supported"),
    ({"hidden_act": "gelu"}, "only silu"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "none, linear, llama3 and yarn"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a number"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}}, "low freq"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"bits": 4}}, "Quantised"),
    ({"rope_theta": 10**400}, "rope_theta must be a number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
    ({"rms_norm_eps": [1] * 10**5}, "rms_norm_eps must be a number, not .{1,200}$"),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings must lie between"),
    ({"model_type": "mistral", "sliding_window": 10**30}, "sliding_window must lie between"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, "factor must lie between"),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": 10**400}}, "must lie between"),
    ({"rope_scaling": {**YARN, "factor": 1e308}}, "factor must lie between"),
    ({"rope_scaling": {**YARN, "factor": -1.0}}, "factor must lie between"),
    ({"rope_scaling": {**YARN, "beta_fast": 1e308}}, "beta_fast must lie between"),
    ({"rope_scaling": {**YARN, "beta_slow": 5e-324}}, "beta_slow must lie between"),
    ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": -10 / math.log(4)}}, "cannot be negative"),
    ({"vocab_size": 0}, "vocabulary must be positive"),
    ({"vocab_size": "many"}, "vocab_size must be a whole number"),
    ({"hidden_size": 65}, "no multiple"),
    ({"head_dim": 15}, "even"),
    ({"num_attention_heads": 0}, "num_attention_heads must be positive"),
    ({"num_key_value_heads": 3}, "multiple of kv_heads"),
    ({"num_key_value_heads": 0}, "kv_heads must be positive"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"rms_norm_eps": 0}, "epsilon"),
    ({"max_position_embeddings": 0}, "context must be positive"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"model_type": "mistral", "sliding_window": 0}, "positive sliding_window"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 6}, "positive sliding_window"),
    ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 6}, "linear_attention"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "all 6 layers"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, "all 6 layers"),
    ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_configurations_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HierspecError, match=message) as caught:
        from_huggingface({"model_type": "llama", **SIZES, **changes})
    assert "\n" not in str(caught.value)


def test_what_a_family_cannot_have_is_not_written() -> None:
    with pytest.raises(HierspecError, match="cannot be written"):
        to_huggingface(tiny_config("qwen3", windows=(8, 16, 0, 0)))
    with pytest.raises(HierspecError, match="cannot be written"):
        to_huggingface(tiny_config("mistral", attention_bias=True))


def test_cosines_and_sines_are_rounded_once_and_stay_as_a_table_grows():
    """Every process has the same bits: those of float64, rounded. In float32, torch's differ between processes."""
    rotary = Rotary(10_000.0)
    frequencies, _ = inverse_frequencies(rotary, 64)
    short, long = rotary_table(rotary, 64, 100), rotary_table(rotary, 64, 4000)
    for table, longer, exact in zip(short, long, (math.cos, math.sin), strict=True):
        assert table.dtype == np.float32
        assert (table.view(np.int32) == longer[:100].view(np.int32)).all()
        for position in (0, 1, 7, 99):
            angles = np.float32(position) * np.asarray(frequencies, np.float32)
            expected = np.array([exact(float(angle)) for angle in angles]).astype(np.float32)
            assert (table[position] == expected).all()
