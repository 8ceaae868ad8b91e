"""Families as data: found by what files say of themselves, and added with one file and one entry in the registry."""

import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hierspec
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import LayerConfig, expected_tensors
from hierspec.checkpoints.families import FAMILIES, family_named, from_huggingface, to_huggingface
from hierspec.checkpoints.families.family import HUGGINGFACE_NAMES, Family
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import random_weights, tiny_checkpoint, tiny_config

IN_GGUF = [name for name, family in FAMILIES.items() if family.gguf.architecture]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_its_model_type_or_its_class(name: str) -> None:
    written = to_huggingface(tiny_config(name))
    assert written["architectures"] == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
    assert from_huggingface(written).family == name
    del written["model_type"]
    assert from_huggingface(written).family == name
    with pytest.raises(HierspecError, match="'unheard_of' is not supported"):
        from_huggingface({**written, "model_type": "unheard_of"})  # its class may not be what the name suggests


def test_what_is_not_supported_is_one_sentence_with_all_that_is() -> None:
    with pytest.raises(HierspecError) as caught:
        family_named("gpt2")
    assert "\n" not in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_names_are_those_of_the_gguf_package(name: str) -> None:
    form, config = FAMILIES[name].gguf, tiny_config(name)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == form.architecture)
    reference = gguf.get_tensor_name_map(architecture, config.layers)
    for tensor in expected_tensors(config):
        assert form.names(tensor) == reference.get_name(tensor, (".weight", ".bias")), tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_names_of_a_family_are_all_different(name: str) -> None:
    canonical = list(expected_tensors(tiny_config(name, attention_bias=True, output_bias=True, mlp_bias=True)))
    for names in (FAMILIES[name].names, FAMILIES[name].gguf.names):
        assert len({names(tensor) for tensor in canonical}) == len(canonical)


def test_a_new_family_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, writing, tiny checkpoints, loading and decoding all follow from the description."""
    invented = Family(
        name="invented",
        model_class="InventedForCausalLM",
        defaults={"num_key_value_heads": 2, "max_position_embeddings": 64},
        output_bias=False,
        mlp_bias="bias_in_mlp",
        qk_norm=True,
        read_layers=lambda keys, count: tuple(LayerConfig(window=7 * (number % 2)) for number in range(count)),
        names=replace(HUGGINGFACE_NAMES, layer="model.blocks.", parts={"self_attn.o_proj": "attention.out"}),
        tiny={"bias_in_mlp": True},
    )
    monkeypatch.setitem(FAMILIES, "invented", invented)
    folder = tiny_checkpoint(tmp_path / "invented", "invented", seed=2)
    stored = load_file(folder / "model.safetensors")
    assert "model.blocks.3.attention.out.weight" in stored
    assert not any("layers." in name for name in stored)
    checkpoint = load_checkpoint(folder)
    config = checkpoint.config
    assert (config.windows, config.qk_norm, config.mlp_bias, config.output_bias) == ((0, 7, 0, 7), True, True, False)
    expected = random_weights(config, seed=2)
    assert list(checkpoint.weights) == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.weights.items())
    assert TorchBackend().decoder(config, checkpoint.weights, "float32").config.windows[1] == 7
    assert hierspec.load(folder, backend="torch").generate("abc", plan="plain", max_tokens=4).tokens


def test_layers_may_differ_only_in_what_decoders_read_for_each() -> None:
    config = tiny_config("qwen3")
    layers = list(config.layer_configs)
    layers[1] = replace(layers[1], window=5, uses_rotary=False)
    assert replace(config, layer_configs=tuple(layers)).windows == (0, 5, 0, 0)
    layers[1] = replace(layers[1], qk_norm=False)
    with pytest.raises(HierspecError, match="qk_norm must be the same in all layers"):
        replace(config, layer_configs=tuple(layers))


def test_only_families_are_asked_which_family_it_is() -> None:
    root = Path(hierspec.__file__).parent
    question = re.compile(r"\b(family|architecture|model_type)\)? (==|!=|in|not in) [\"'(\[]")
    for path in root.rglob("*.py"):
        if path.parent.name != "families":
            assert not question.search(path.read_text(encoding="utf-8")), path
