"""Qwen2 and Qwen2.5, with biases on queries, keys and values, and Qwen3, with norms of query and key heads."""

from hierspec.checkpoints.config import LayerConfig
from hierspec.checkpoints.families.family import Family, GgufFormat, Keys, Layers
from hierspec.checkpoints.families.windows import (
    positive_window,
    window_size,
    windows_by_layer_type,
    write_layer_types,
)
from hierspec.checkpoints.values import integer

_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096}


def _read_layers(keys: Keys, count: int) -> Layers:
    size = window_size(keys)
    used = bool(keys.get("use_sliding_window")) and keys["sliding_window"] is not None
    if keys.get("layer_types") is not None:
        windows = windows_by_layer_type(keys, count, size if used else 0)
    else:
        first = integer(keys, "max_window_layers")
        windows = [positive_window(size) if used and number >= first else 0 for number in range(count)]
    return tuple(LayerConfig(window=window) for window in windows)


QWEN2 = Family(
    name="qwen2",
    model_class="Qwen2ForCausalLM",
    defaults=_DEFAULTS,
    attention_bias=True,
    output_bias=False,
    mlp_bias=False,
    read_layers=_read_layers,
    write_layers=write_layer_types,
    gguf=GgufFormat("qwen2"),
)

QWEN3 = Family(
    name="qwen3",
    model_class="Qwen3ForCausalLM",
    defaults={**_DEFAULTS, "head_dim": 128},
    mlp_bias=False,
    qk_norm=True,
    read_layers=_read_layers,
    write_layers=write_layer_types,
    gguf=GgufFormat("qwen3"),
)
