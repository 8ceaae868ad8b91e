"""Small stand-ins for tests, ours and those of people who build on hierspec: random checkpoints of every family."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hierspec.checkpoints.config import DecoderConfig, Rotary, expected_tensors, to_huggingface

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BYTE_TOKENIZER_SIZE = len(SPECIAL_TOKENS) + 256


def tiny_config(architecture: str = "llama", **changes: Any) -> DecoderConfig:
    """A decoder of a few thousand weights with every peculiarity of its family; `changes` are DecoderConfig fields."""
    layers = changes.get("layers", 4)
    smollm3 = architecture == "smollm3"
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocabulary": 320,
        "hidden": 64,
        "layers": layers,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 16,
        "intermediate": 96,
        "norm_eps": 1e-5,
        "context": 512,
        "tied": smollm3,
        "rotary": Rotary(10_000.0),
        "windows": ((24,) if architecture == "mistral" else (0,)) * layers,
        "rotary_layers": tuple(not smollm3 or (layer + 1) % 4 != 0 for layer in range(layers)),
        "attention_bias": architecture == "qwen2",
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": architecture == "qwen3",
        "bos_id": 1,
        "eos_ids": (2,),
    }
    return DecoderConfig(**{**fields, **changes})


def tiny_checkpoint(
    folder: Path | str,
    architecture: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Writes a random Hugging Face folder that `load_checkpoint` and transformers both open, and returns it.

    Its tokenizer knows the 256 bytes and SPECIAL_TOKENS; a `vocabulary` too small for them gets no tokenizer.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture, **changes)
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(config, seed).items()}
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
    """Normal weights, loud enough that logits differ clearly and no token merely repeats the one before it."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1 + 0.1 * noise
        elif len(shape) == 1:
            weights[name] = 0.3 * noise
        elif name == "model.embed_tokens.weight":
            # Quieter than what the layers add, or a tied head would read the input token back.
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
    end, start, turn = SPECIAL_TOKENS
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": turn,
        "pad_token": end,
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
        mine = {name: weights[name] for name in names[shard::shards]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
