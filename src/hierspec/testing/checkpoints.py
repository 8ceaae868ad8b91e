"""Random checkpoints of every family, small enough for tests: ours, and those of people who build on hierspec."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hierspec.checkpoints.config import DecoderConfig, LayerConfig, expected_tensors
from hierspec.checkpoints.families import family_named, from_huggingface, to_huggingface

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTE_TOKENIZER_SIZE = len(SPECIAL_TOKENS) + 256
_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PER_LAYER = {"windows": "window", "rotary_layers": "uses_rotary"}  # these list a value for each layer
_ALL_LAYERS = {field.name for field in fields(LayerConfig)} - set(_PER_LAYER.values())


def tiny_config(family: str = "llama", **changes: Any) -> DecoderConfig:
    """A decoder of a few thousand weights with all special features of its family.

    `changes` are fields of DecoderConfig, the number of `layers`, `windows` and `rotary_layers` with a value for each
    layer, or fields of LayerConfig for all layers.
    """
    layers = {"num_hidden_layers": changes.pop("layers")} if "layers" in changes else {}
    config = from_huggingface({"model_type": family, **_SIZES, **family_named(family).tiny, **layers})
    shared = {name: changes.pop(name) for name in _ALL_LAYERS & changes.keys()}
    layer_configs = [replace(layer, **shared) for layer in config.layer_configs]
    for name, field in _PER_LAYER.items():
        if name in changes:
            values = zip(layer_configs, changes.pop(name), strict=True)
            layer_configs = [replace(layer, **{field: value}) for layer, value in values]
    return replace(config, **{"layer_configs": tuple(layer_configs), **changes})


def tiny_checkpoint(
    folder: Path | str,
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Writes a random Hugging Face folder that `load_checkpoint` and transformers both open, and returns it.

    `changes` are those of `tiny_config`. The tokenizer has the 256 bytes and SPECIAL_TOKENS; a `vocabulary` too small
    for them gets no tokenizer.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **changes)
    stored_name = family_named(family).names
    weights = {stored_name(name): tensor.to(dtype) for name, tensor in random_weights(config, seed).items()}
    described = {**to_huggingface(config), "torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", described)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_shards(folder, weights, shards)
    if config.vocabulary >= _BYTE_TOKENIZER_SIZE:
        write_byte_tokenizer(folder)
    return folder


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal weights, large enough that logits differ clearly and tokens do not just repeat."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1 + 0.1 * noise
        elif len(shape) == 1:
            weights[name] = 0.3 * noise
        elif name == "model.embed_tokens.weight":
            # Smaller than what the layers add; otherwise a tied head would predict the input token again.
            weights[name] = 0.3 * noise
        else:
            weights[name] = 1.5 * noise / shape[1] ** 0.5
    return weights


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja of a tokenizer with one token per byte."""
    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_text, start_of_message, end_of_message = SPECIAL_TOKENS
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start_of_message,
        "eos_token": end_of_message,
        "pad_token": end_of_text,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", described)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_shards(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {name: weights[name] for name in names[shard::shards]}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
