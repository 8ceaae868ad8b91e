"""From a GGUF file's metadata and tensors to a decoder's configuration, using the data of its family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.checkpoints.config import BIASES, DecoderConfig
from hierspec.checkpoints.families.family import Family, Keys
from hierspec.checkpoints.gguf_header import GgufHeader
from hierspec.checkpoints.rotary import Rotary, inverse_frequencies, yarn_attention_factor
from hierspec.checkpoints.values import check, integer, number
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown

# The file stores only the result of llama3 scaling; all of Llama 3.1, 3.2 and 3.3 use these parameters.
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def architecture_keys(header: GgufHeader) -> dict[str, Any]:
    """The metadata under the architecture's prefix, without that prefix."""
    prefix = f"{header.metadata.get('general.architecture')}."
    return {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}


def read_gguf(family: Family, path: Path, header: GgufHeader, content: np.ndarray) -> DecoderConfig:
    """The configuration of the mapped file `content`; `path` is for error messages."""
    keys = architecture_keys(header)
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise HierspecError(f"{path} is one part of a split model: merge the parts with llama-gguf-split first.")
    if keys.get("expert_count"):
        raise HierspecError(f"{path} holds a mixture of experts, which is not supported.")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise HierspecError(f"{path} is not a whole model: the tensor token_embd.weight is missing or misshapen.")
    count, hidden = integer(keys, "block_count"), integer(keys, "embedding_length")
    heads, context = _uniform(keys, "attention.head_count"), integer(keys, "context_length")
    check(0 < count <= 10_000 and heads > 0, "layers and heads must be positive", (count, heads))
    head_size = integer({"attention.key_length": hidden // heads, **keys}, "attention.key_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_size) != head_size:
            raise HierspecError(
                f"{path} has {key} {shown(keys[key])} for heads of {head_size}, which is not supported."
            )
    vocabulary = embedding.shape[0]
    biases = _biases(family, path, header)
    return DecoderConfig(
        family=family.name,
        vocabulary=vocabulary,
        hidden=hidden,
        heads=heads,
        kv_heads=_uniform({"attention.head_count_kv": heads, **keys}, "attention.head_count_kv"),
        head_size=head_size,
        intermediate=_uniform(keys, "feed_forward_length"),
        norm_eps=_decimal(number(keys, "attention.layer_norm_rms_epsilon")),
        context=context,
        tied="output.weight" not in header.tensors,
        rotary=_rotary(path, header, content, keys, context, head_size),
        layer_configs=tuple(
            replace(layer, qk_norm=family.qk_norm, **biases) for layer in family.gguf.read_layers(keys, count)
        ),
        bos_id=next(iter(_ids(header.metadata, vocabulary, "bos")), None),
        eos_ids=_ids(header.metadata, vocabulary, "eos", "eot", "eom"),
    )


def may_be_absent(family: Family, name: str) -> bool:
    """Whether a GGUF file may lack this tensor, given by its canonical name; it is then all zeros.

    One key of config.json enables several biases together; GGUF files may have only some of them.
    """
    part, kind = name.rsplit(".", 1)
    return kind == "bias" and any(
        part.endswith(parts) and isinstance(getattr(family, field), str) for field, parts in BIASES.items()
    )


def _biases(family: Family, path: Path, header: GgufHeader) -> dict[str, bool]:
    """The bias fields of LayerConfig. A file has no key for them, only the tensors."""
    present = {
        field: any(family.gguf.names(f"model.layers.0.{part}.bias") in header.tensors for part in parts)
        for field, parts in BIASES.items()
    }
    switches = {field: getattr(family, field) for field in BIASES}
    biases = {}
    for field, switch in switches.items():
        if isinstance(switch, str):
            biases[field] = any(present[other] for other in BIASES if switches[other] == switch)
        else:
            biases[field] = switch
            if present[field] and not switch:
                raise HierspecError(f"{path} has biases ({field}), which are not supported for {family.name} models.")
    return biases


def _rotary(path: Path, header: GgufHeader, content: np.ndarray, keys: Keys, context: int, head_size: int) -> Rotary:
    theta = number(keys, "rope.freq_base", 10_000.0)
    if "rope_freqs.weight" in header.tensors:
        return _llama3(path, header, content, keys, theta, head_size)
    scaling = keys.get("rope.scaling.type", "linear" if "rope.scale_linear" in keys else "none")
    factor = number(keys, "rope.scaling.factor", number(keys, "rope.scale_linear", 1.0))
    if scaling == "none" or (scaling == "linear" and factor in (0.0, 1.0)):
        return Rotary(theta)
    if scaling == "linear":
        return Rotary(theta, "linear", factor)
    if scaling != "yarn":
        raise HierspecError(
            f"{path} has the rotary scaling {shown(scaling)}, which is not supported: linear and yarn are."
        )
    check(factor > 0, "the rotary scaling's factor must be positive", factor)
    attention_factor = number(keys, "rope.scaling.attn_factor", number(keys, "rope.scaling.yarn_attn_factor", 1.0))
    return Rotary(
        theta,
        "yarn",
        factor,
        integer({"rope.scaling.original_context_length": context, **keys}, "rope.scaling.original_context_length"),
        beta_fast=number(keys, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=number(keys, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor * yarn_attention_factor(factor),
    )


def _llama3(path: Path, header: GgufHeader, content: np.ndarray, keys: Keys, theta: float, head_size: int) -> Rotary:
    """Recovers the llama3 scaling from its result in the file, a divisor for each frequency."""
    stored = header.tensors["rope_freqs.weight"]
    if stored.quantisation.name != "F32" or stored.shape != (head_size // 2,):
        raise HierspecError(
            f"{path} contradicts itself: rope_freqs.weight should be F32 [{head_size // 2}] "
            f"and is {stored.quantisation.name} {list(stored.shape)}."
        )
    divisors = content[stored.start : stored.start + stored.size].view("<f4").astype(np.float64)
    unscaled = Rotary(theta)
    if np.allclose(divisors, 1.0):
        return unscaled
    key = "rope.scaling.original_context_length"
    original = integer({key: _LLAMA3_CONTEXT, **keys}, key)
    factor = _decimal(float(divisors.max()))
    if np.isfinite(divisors).all() and factor > 1:
        rotary = Rotary(theta, "llama3", factor, original, _LLAMA3_LOW, _LLAMA3_HIGH)
        expected = inverse_frequencies(unscaled, head_size)[0] / inverse_frequencies(rotary, head_size)[0]
        if np.allclose(expected, divisors, rtol=1e-3):
            return rotary
    raise HierspecError(f"{path} scales its rotary frequencies (rope_freqs.weight) in a way that is not supported.")


def _uniform(keys: Keys, key: str) -> int:
    """A number that some files give per layer; layers that differ are not supported."""
    value = keys.get(key)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    return integer({key: value}, key)


def _decimal(value: float) -> float:
    """The decimal number that people wrote: GGUF stores 1e-5 as the nearest float32, 9.99999974e-06."""
    return float(f"{value:.6g}")


def _ids(metadata: Keys, vocabulary: int, *names: str) -> tuple[int, ...]:
    values = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return tuple(dict.fromkeys(item for item in values if isinstance(item, int) and 0 <= item < vocabulary))
