"""Random packs and EAGLE heads for tests, for any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import (
    EARLY_EXIT,
    EXITS,
    FEATURE,
    SMALL,
    VOCABULARY,
    fingerprint,
    layers_like,
    write_pack,
)
from hierspec.testing.checkpoints import random_weights

_START = "model.layers.0."


def tiny_pack(
    folder: Path | str,
    model: Path | str,
    exits: Sequence[int] = (2, 4),
    tokens: int = 100,
    seed: int = 0,
    taps: Sequence[int] = (1, 3),
) -> Path:
    """Writes a random pack with all possible parts, for the model in the folder `model`.

    The adapter of the first exit has one layer, those of other exits have two.
    """
    checkpoint = load_checkpoint(model, torch.float32, pack="none")
    config, generator = checkpoint.config, torch.Generator().manual_seed(seed)
    single = layers_like(config, [0])

    def layer(prefix: str, number: int) -> dict[str, torch.Tensor]:
        weights = random_weights(single, seed + number)
        return {prefix + name.removeprefix(_START): weights[name] for name in weights if name.startswith(_START)}

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(config.hidden, generator=generator)

    def adapter(number: int, seed: int) -> dict[str, torch.Tensor]:
        prefix = f"exit.{number}."
        if number == exits[0]:
            tensors = layer(f"{prefix}layer.", seed)
        else:
            tensors = layer(f"{prefix}layers.0.", seed) | layer(f"{prefix}layers.1.", seed + 200)
        return tensors | {f"{prefix}norm.weight": norm()}

    adapters: dict[str, torch.Tensor] = {}
    for number in exits:
        adapters |= adapter(number, number)
    fc = torch.randn(config.hidden, 2 * config.hidden, generator=generator) / config.hidden**0.5
    feature = {"feature.norm.weight": norm(), "feature.fc.weight": fc}
    for number in range(2):
        feature |= layer(f"feature.layers.{number}.", 98 + number)
    if taps:
        widths = config.hidden, (2 + len(taps)) * config.hidden
        feature["feature.first.weight"] = torch.randn(*widths, generator=generator) / config.hidden**0.5
        feature["feature.taps"] = torch.tensor(taps, dtype=torch.int32)
    small = {"small.norm.weight": norm()}
    for number in range(2):
        small |= layer(f"small.layers.{number}.", 50 + number)
    frequent = np.random.default_rng(seed).permutation(config.vocabulary)[:tokens].astype(np.int32)
    # The first exit of the variant has a norm, the others adapters.
    delta = {f"exit.{exits[0]}.norm.weight": norm()} if exits else {}
    for number in exits[1:]:
        delta |= adapter(number, 30 + number)
    for number, name in ((0, "self_attn.q_proj.weight"), (config.layers - 1, "mlp.down_proj.weight")):
        outputs, inputs = checkpoint.weights[f"model.layers.{number}.{name}"].shape
        delta[f"layers.{number}.{name}.a"] = torch.randn(2, inputs, generator=generator) / inputs**0.5
        delta[f"layers.{number}.{name}.b"] = 0.5 * torch.randn(outputs, 2, generator=generator)
    files = {
        EXITS: adapters,
        FEATURE: feature,
        SMALL: small,
        VOCABULARY: {"tokens": torch.from_numpy(frequent)},
        EARLY_EXIT: delta,
    }
    return write_pack(
        folder,
        checkpoint.name,
        fingerprint(config, checkpoint.weights),
        files,
        hidden=config.hidden,
        vocabulary=config.vocabulary,
    )


def tiny_eagle(folder: Path | str, config: DecoderConfig, seed: int = 0, bias: bool = True) -> Path:
    """Writes a random EAGLE head for a target with this configuration, in the published format."""
    folder = _described(folder, config, bias=bias)
    single = layers_like(config, [0])
    weights = random_weights(single, seed)
    tensors = {
        name.removeprefix("model."): weights[name].clone()
        for name in expected_tensors(single)
        if name.startswith(_START) and "input_layernorm" not in name
    }
    generator = torch.Generator().manual_seed(seed)
    tensors["fc.weight"] = torch.randn(config.hidden, 2 * config.hidden, generator=generator) / config.hidden**0.5
    if bias:
        tensors["fc.bias"] = 0.1 * torch.randn(config.hidden, generator=generator)
    tensors["embed_tokens.weight"] = weights["model.embed_tokens.weight"]  # published, but not used
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_eagle3(folder: Path | str, config: DecoderConfig, seed: int = 0, tokens: int | None = 100) -> Path:
    """Writes a random EAGLE-3 head with a draft vocabulary of `tokens`; None: all of the target's, without d2t."""
    hidden, generator = config.hidden, torch.Generator().manual_seed(seed)
    extra = {} if tokens is None else {"draft_vocab_size": tokens}
    folder = _described(folder, config, **extra)
    single = layers_like(config, [0])
    weights = random_weights(single, seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / hidden**0.5

    tensors = {
        "midlayer." + name.removeprefix(_START): weights[name].clone()
        for name in expected_tensors(single)
        if name.startswith(_START)
    }
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = random(len(tensors[name]), 2 * hidden)
    for name in ("midlayer.hidden_norm.weight", "norm.weight"):
        tensors[name] = 1 + random(hidden)
    tensors["fc.weight"] = random(hidden, 3 * hidden)
    tensors["lm_head.weight"] = 8 * random(tokens or config.vocabulary, hidden)
    if tokens is not None:
        chosen = torch.randperm(config.vocabulary, generator=generator)[:tokens].sort().values
        tensors["d2t"] = chosen - torch.arange(tokens)
        tensors["t2d"] = torch.isin(torch.arange(config.vocabulary), chosen)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _described(folder: Path | str, config: DecoderConfig, **extra: object) -> Path:
    """A folder with the config.json of a head for a target with this configuration."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    described = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden,
        "vocab_size": config.vocabulary,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary.theta,
    }
    (folder / "config.json").write_text(json.dumps(described | extra), encoding="utf-8")
    return folder
