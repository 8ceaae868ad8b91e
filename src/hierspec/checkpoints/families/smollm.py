"""SmolLM3: some layers have no rotary positions. SmolLM and SmolLM2 belong to the family llama."""

from typing import Any

from hierspec.checkpoints.config import LayerConfig
from hierspec.checkpoints.families.family import Family, Keys, Layers
from hierspec.checkpoints.families.windows import (
    positive_window,
    window_size,
    windows_by_layer_type,
    write_layer_types,
)
from hierspec.checkpoints.values import check, integer
from hierspec.core.errors import HierspecError


def _read_layers(keys: Keys, count: int) -> Layers:
    rotary = _rotary_layers(keys, count)
    size = window_size(keys)
    if keys.get("layer_types") is not None:
        # Unlike Qwen, it applies the window to layers listed as sliding even if use_sliding_window is off.
        windows = windows_by_layer_type(keys, count, size)
    else:
        used = bool(keys.get("use_sliding_window")) and keys["sliding_window"] is not None
        windows = [positive_window(size) if used and not rotated else 0 for rotated in rotary]
    return tuple(
        LayerConfig(window=window, uses_rotary=rotated) for window, rotated in zip(windows, rotary, strict=True)
    )


def _rotary_layers(keys: Keys, count: int) -> list[bool]:
    flags = keys.get("no_rope_layers")  # its name says the opposite: 1 marks a layer *with* rotary
    if flags is None:
        interval = integer({"no_rope_layer_interval": 4, **keys}, "no_rope_layer_interval")
        check(interval > 0, "no_rope_layer_interval must be positive", interval)
        return [(number + 1) % interval != 0 for number in range(count)]
    if not isinstance(flags, list) or len(flags) < count:
        raise HierspecError(f"The model's config is damaged: no_rope_layers must list all {count} layers.")
    return [bool(flag) for flag in flags[:count]]


def _write_layers(layers: Layers) -> dict[str, Any]:
    return {**write_layer_types(layers), "no_rope_layers": [int(layer.uses_rotary) for layer in layers]}


SMOLLM3 = Family(
    name="smollm3",
    model_class="SmolLM3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
    read_layers=_read_layers,
    write_layers=_write_layers,
)
