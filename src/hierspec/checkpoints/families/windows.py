"""Sliding windows as several families write them in config.json."""

from collections.abc import Sequence
from typing import Any

from hierspec.checkpoints.config import LayerConfig
from hierspec.checkpoints.families.family import Keys
from hierspec.checkpoints.values import check, integer
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown


def window_size(keys: Keys) -> int:
    """`sliding_window`, or 0 if it is null."""
    return 0 if keys["sliding_window"] is None else integer(keys, "sliding_window")


def positive_window(window: int) -> int:
    check(window > 0, "layers with a sliding window need a positive sliding_window", window)
    return window


def windows_by_layer_type(keys: Keys, count: int, window: int) -> list[int]:
    """The window of each layer, from `layer_types`."""
    types = keys["layer_types"]
    if not isinstance(types, list) or len(types) != count:
        raise HierspecError(f"The model's config is damaged: layer_types must list all {count} layers.")
    return [_window_of(layer_type, window) for layer_type in types]


def _window_of(layer_type: object, window: int) -> int:
    if layer_type in ("full_attention", "attention"):
        return 0
    if layer_type == "sliding_attention":
        return positive_window(window)
    raise HierspecError(
        f"Layers of type {shown(layer_type)} are not supported: only full_attention and sliding_attention are."
    )


def write_layer_types(layers: Sequence[LayerConfig]) -> dict[str, Any]:
    sizes = sorted({layer.window for layer in layers} - {0})
    return {
        "use_sliding_window": bool(sizes),
        "sliding_window": sizes[0] if sizes else None,
        "layer_types": ["sliding_attention" if layer.window else "full_attention" for layer in layers],
    }
