"""Mistral: Llama without biases and with one sliding window in all layers."""

from collections.abc import Container
from typing import Any

from hierspec.checkpoints.config import BIASES, LayerConfig
from hierspec.checkpoints.families.family import GGUF_NAMES, Family, GgufFormat, Keys, Layers
from hierspec.checkpoints.families.windows import positive_window, window_size
from hierspec.checkpoints.values import integer

_GGUF_WINDOW = "attention.sliding_window"


def _read_layers(keys: Keys, count: int) -> Layers:
    size = window_size(keys)
    window = 0 if keys["sliding_window"] is None else positive_window(size)
    return (LayerConfig(window=window),) * count


def _write_layers(layers: Layers) -> dict[str, Any]:
    return {"sliding_window": layers[0].window or None}


def _read_gguf_layers(keys: Keys, count: int) -> Layers:
    return (LayerConfig(window=integer(keys, _GGUF_WINDOW)),) * count


def _matches(keys: Keys, tensors: Container[str]) -> bool:
    """Whether a GGUF file of architecture llama is Mistral's: only a window distinguishes them."""
    biases = (GGUF_NAMES(f"model.layers.0.{part}.bias") for part in (*BIASES["attention_bias"], *BIASES["output_bias"]))
    return bool(keys.get(_GGUF_WINDOW)) and not any(bias in tensors for bias in biases)


MISTRAL = Family(
    name="mistral",
    model_class="MistralForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    read_layers=_read_layers,
    write_layers=_write_layers,
    gguf=GgufFormat("llama", interleaved=True, read_layers=_read_gguf_layers, matches=_matches),
    tiny={"sliding_window": 24},
)
