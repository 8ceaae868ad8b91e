"""EAGLE heads: public folders with config.json and safetensors, read as feature drafters.

The first layout (EAGLE, EAGLE-2): `fc.weight` on embedding and feature, one layer without an input norm, no last norm,
and the target's own embeddings and head. EAGLE-3 taps three layers and is not read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hierspec.checkpoints.config import DecoderConfig, expected_tensors, from_huggingface
from hierspec.checkpoints.packs import FeatureBranch
from hierspec.core.errors import HierspecError

_START = "layers.0."


def is_eagle(source: str | Path) -> bool:
    """Whether this is a folder with an EAGLE head in it."""
    folder = Path(source).expanduser()
    try:
        return (folder / "config.json").is_file() and any("fc.weight" in names for names in _names(folder).values())
    except (SafetensorError, OSError):
        return False  # whoever opens it as a model says what is wrong


def read_eagle(source: str | Path, target: DecoderConfig) -> FeatureBranch:
    """The head in this folder, for a target with this configuration."""
    folder = Path(source).expanduser()
    try:
        described: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = _names(folder)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise HierspecError(f"{folder} is damaged or cannot be read ({error}): fetch it again.") from error
    present = {name for names in files.values() for name in names}
    if any(name.startswith("midlayer.") for name in present):
        raise HierspecError(
            f"{folder} holds an EAGLE-3 head, which hierspec does not read yet: give an EAGLE or EAGLE-2 one."
        )
    # A head is a layer of its family; keys it leaves out are those of the target.
    config = replace(
        from_huggingface({"num_hidden_layers": 1, **described}), norm_eps=described.get("rms_norm_eps", target.norm_eps)
    )
    for what, own, models in (
        ("hidden size", config.hidden, target.hidden),
        ("vocabulary", config.vocabulary, target.vocabulary),
    ):
        if own != models:
            raise HierspecError(
                f"The head {folder} is for a model of {what} {own}, and this one has {models}: choose another."
            )
    if config.layers != 1 or "layers.1.self_attn.q_proj.weight" in present:
        raise HierspecError(f"{folder} has {config.layers} layers: heads of one layer are read.")
    config = replace(config, tied=True, context=target.context)
    shapes = {
        name.removeprefix("model."): shape
        for name, shape in expected_tensors(config).items()
        if name.startswith(f"model.{_START}") and "input_layernorm" not in name
    }
    shapes["fc.weight"] = (config.hidden, 2 * config.hidden)
    optional = {
        "fc.bias": (config.hidden,),
        f"{_START}input_layernorm.weight": (config.hidden,),
        "norm.weight": (config.hidden,),
    }
    shapes.update({name: shape for name, shape in optional.items() if name in present})
    tensors: dict[str, torch.Tensor] = {}
    for path, names in files.items():
        with safe_open(path, framework="pt", device="cpu") as opened:
            tensors.update({name: opened.get_tensor(name) for name in names if name in shapes})
    for name, shape in shapes.items():
        found = list(tensors[name].shape) if name in tensors else "missing"
        if found != list(shape):
            raise HierspecError(
                f"{folder} does not fit its config.json: {name} should be {list(shape)} and is {found}."
            )
    layer = {f"model.{name}": tensor for name, tensor in tensors.items() if name.startswith(_START)}
    return FeatureBranch(
        config, layer, tensors.get("norm.weight"), tensors["fc.weight"], tensors.get("fc.bias"), skips_first=True
    )


def _names(folder: Path) -> dict[Path, list[str]]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as opened:
            found[path] = list(opened.keys())
    return found
