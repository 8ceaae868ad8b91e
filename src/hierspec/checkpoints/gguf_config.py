"""Reads a decoder's configuration out of a GGUF file's metadata and tensor shapes."""

from pathlib import Path
from typing import Any

import numpy as np

from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.gguf_header import GgufHeader
from hierspec.checkpoints.rotary import Rotary, inverse_frequencies, yarn_attention_factor
from hierspec.checkpoints.values import check, integer, listed, number
from hierspec.core.errors import HierspecError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The file keeps only the outcome of llama3 scaling; every Llama 3.1, 3.2 and 3.3 was made with these numbers.
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def config_from_gguf(path: Path, header: GgufHeader, content: np.ndarray) -> DecoderConfig:
    """The configuration of the mapped GGUF file `content`; `path` is for the messages."""
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise HierspecError(
            f"{path} holds a model of the architecture {architecture!r}, which is not supported: "
            f"hierspec reads GGUF files of {listed(ARCHITECTURES)}."
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise HierspecError(f"{path} is one part of a split model: merge the parts with llama-gguf-split first.")
    if own.get("expert_count"):
        raise HierspecError(f"{path} holds a mixture of experts, which is not supported.")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise HierspecError(f"{path} is not a whole model: the tensor token_embd.weight is missing or misshapen.")
    layers, hidden = integer(own, "block_count"), integer(own, "embedding_length")
    heads, context = _one(own, "attention.head_count"), integer(own, "context_length")
    check(0 < layers <= 10_000 and heads > 0, "layers and heads must be positive", (layers, heads))
    head_size = integer({"attention.key_length": hidden // heads, **own}, "attention.key_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_size) != head_size:
            raise HierspecError(f"{path} has {key} {own[key]} for heads of {head_size}, which is not supported.")
    window = integer(own, "attention.sliding_window") if own.get("attention.sliding_window") else 0
    biased = architecture == "qwen2" or _has_bias(header, "attn_q", "attn_k", "attn_v", "attn_output")
    # Mistral calls itself llama here; only a window tells them apart, and without one they are the same model.
    mistral = architecture == "llama" and window > 0 and not biased
    vocabulary = embedding.shape[0]
    return DecoderConfig(
        architecture="mistral" if mistral else architecture,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_one({"attention.head_count_kv": heads, **own}, "attention.head_count_kv"),
        head_size=head_size,
        intermediate=_one(own, "feed_forward_length"),
        norm_eps=_short(number(own, "attention.layer_norm_rms_epsilon")),
        context=context,
        tied="output.weight" not in header.tensors,
        rotary=_rotary(path, header, content, own, context, head_size),
        windows=(window if mistral else 0,) * layers,
        rotary_layers=(True,) * layers,
        attention_bias=biased,
        output_bias=biased and architecture != "qwen2",
        mlp_bias=architecture == "llama" and _has_bias(header, "ffn_gate", "ffn_up", "ffn_down"),
        qk_norm=architecture == "qwen3",
        bos_id=next(iter(_ids(header.metadata, vocabulary, "bos")), None),
        eos_ids=_ids(header.metadata, vocabulary, "eos", "eot", "eom"),
    )


def _rotary(
    path: Path, header: GgufHeader, content: np.ndarray, own: dict[str, Any], context: int, head_size: int
) -> Rotary:
    theta = number(own, "rope.freq_base", 10_000.0)
    if "rope_freqs.weight" in header.tensors:
        return _llama3(path, header, content, own, theta, head_size)
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = number(own, "rope.scaling.factor", number(own, "rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return Rotary(theta)
    if kind == "linear":
        return Rotary(theta, "linear", factor)
    if kind != "yarn":
        raise HierspecError(f"{path} has the rotary scaling {kind!r}, which is not supported: linear and yarn are.")
    sharper = number(own, "rope.scaling.attn_factor", number(own, "rope.scaling.yarn_attn_factor", 1.0))
    return Rotary(
        theta,
        "yarn",
        factor,
        integer({"rope.scaling.original_context_length": context, **own}, "rope.scaling.original_context_length"),
        beta_fast=number(own, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=number(own, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=sharper * yarn_attention_factor(factor),
    )


def _llama3(
    path: Path, header: GgufHeader, content: np.ndarray, own: dict[str, Any], theta: float, head_size: int
) -> Rotary:
    """Finds the llama3 scaling whose outcome, a divisor per frequency, the file holds."""
    stored = header.tensors["rope_freqs.weight"]
    if stored.kind.name != "F32" or stored.shape != (head_size // 2,):
        raise HierspecError(
            f"{path} contradicts itself: rope_freqs.weight should be F32 [{head_size // 2}] "
            f"and is {stored.kind.name} {list(stored.shape)}."
        )
    divisors = content[stored.start : stored.start + stored.size].view("<f4").astype(np.float64)
    plain = Rotary(theta)
    if np.allclose(divisors, 1.0):
        return plain
    key = "rope.scaling.original_context_length"
    original = integer({key: _LLAMA3_CONTEXT, **own}, key)
    factor = _short(float(divisors.max()))
    if np.isfinite(divisors).all() and factor > 1:
        rotary = Rotary(theta, "llama3", factor, original, _LLAMA3_LOW, _LLAMA3_HIGH)
        outcome = inverse_frequencies(plain, head_size)[0] / inverse_frequencies(rotary, head_size)[0]
        if np.allclose(outcome, divisors, rtol=1e-3):
            return rotary
    raise HierspecError(f"{path} scales its rotary frequencies (rope_freqs.weight) in a way that is not supported.")


def _one(source: dict[str, Any], key: str) -> int:
    """A number that some files give once per layer; layers that differ are not supported."""
    value = source.get(key)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    return integer({key: value}, key)


def _short(value: float) -> float:
    """GGUF holds 1e-5 as the nearest float32, 9.99999974e-06: this is the number that people wrote."""
    return float(f"{value:.6g}")


def _has_bias(header: GgufHeader, *parts: str) -> bool:
    return any(f"blk.0.{part}.bias" in header.tensors for part in parts)


def _ids(metadata: dict[str, Any], vocabulary: int, *names: str) -> tuple[int, ...]:
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    inside = [item for item in found if isinstance(item, int) and 0 <= item < vocabulary]
    return tuple(dict.fromkeys(inside))
