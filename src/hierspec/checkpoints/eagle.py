"""EAGLE heads: public folders with config.json and safetensors, read as feature drafters.

EAGLE and EAGLE-2: `fc.weight` on embedding and feature, one layer without an input norm, no last norm, and the target's
embeddings and head. EAGLE-3: `fc.weight` on the target's hidden states after three of its layers, one layer whose
attention reads embedding and feature concatenated, a last norm, and a separate head for a draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.families import from_huggingface
from hierspec.checkpoints.packs import Branch, FeatureBranch
from hierspec.checkpoints.tensor_files import check_stored, missing, opened, token_ids
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_object, shown

_REMEDY = "fetch it again, or choose another head"
_START, _MIDDLE = "layers.0.", "midlayer."
_CONCATENATED = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_DRAFT_TO_TARGET = "d2t"  # a token's id in the target's vocabulary minus its id in the draft vocabulary
HIDDEN_NORM = "model.layers.0.hidden_norm.weight"


@dataclass(frozen=True)
class Eagle3Branch(Branch):
    """An EAGLE-3 head. At positions the target has computed, the feature is fc on its states after the layers `taps`.

    The layer's queries, keys and values read the normed embedding concatenated with the feature normed by HIDDEN_NORM;
    the result of attention is added to the feature. The layer's output is the feature of the positions it drafts.
    """

    fc: Tensor  # [hidden, 3 * hidden]
    taps: tuple[int, ...]
    head: Tensor  # [draft vocabulary, hidden]
    tokens: np.ndarray  # [draft vocabulary]: ids in the target's vocabulary


def is_eagle(source: str | Path) -> bool:
    """Whether this is a folder with an EAGLE head in it."""
    folder = Path(source).expanduser()
    try:
        return (folder / "config.json").is_file() and any("fc.weight" in names for names in _names(folder).values())
    except (HierspecError, OSError):
        return False  # opening it as a model will give the reason


def read_eagle(source: str | Path, target: DecoderConfig) -> FeatureBranch | Eagle3Branch:
    """The head in this folder, for a target with this configuration."""
    folder = Path(source).expanduser()
    described, files = read_object(folder / "config.json", _REMEDY), _names(folder)
    present = {name for names in files.values() for name in names}
    # A head is a layer of its family; the default of norm_eps is the target's.
    config = from_huggingface({"num_hidden_layers": 1, "rms_norm_eps": target.norm_eps, **described})
    for what, of_head, of_target in (
        ("hidden size", config.hidden, target.hidden),
        ("vocabulary", config.vocabulary, target.vocabulary),
    ):
        if of_head != of_target:
            raise HierspecError(
                f"The head {folder} is for a model of {what} {of_head}, and this one has {of_target}: choose another."
            )
    if config.layers != 1 or "layers.1.self_attn.q_proj.weight" in present:
        raise HierspecError(f"{folder} has {config.layers} layers: only heads of one layer are supported.")
    config = replace(config, tied=True, context=target.context)
    if any(name.startswith(_MIDDLE) for name in present):
        return _read_eagle3(folder, files, described, config, target.layers)
    shapes = _layer_shapes(config, _START)
    shapes.pop(f"{_START}input_layernorm.weight")
    shapes["fc.weight"] = (config.hidden, 2 * config.hidden)
    optional = {
        "fc.bias": (config.hidden,),
        f"{_START}input_layernorm.weight": (config.hidden,),
        "norm.weight": (config.hidden,),
    }
    shapes.update({name: shape for name, shape in optional.items() if name in present})
    tensors = _tensors(folder, files, shapes)
    layer = {f"model.{name}": tensor for name, tensor in tensors.items() if name.startswith(_START)}
    return FeatureBranch(
        config, layer, tensors.get("norm.weight"), tensors["fc.weight"], tensors.get("fc.bias"), skips_first=True
    )


def _read_eagle3(
    folder: Path, files: dict[Path, list[str]], described: dict[str, Any], config: DecoderConfig, layers: int
) -> Eagle3Branch:
    nested = described.get("eagle_config")
    for key in ("norm_before_residual", "norm_before_fc", "eagle_aux_hidden_state_layer_ids"):
        if described.get(key) or (isinstance(nested, dict) and nested.get(key)):
            raise HierspecError(
                f"The config.json of {folder} sets {key}, a form of EAGLE-3 that is not supported: choose another head."
            )
    taps = (2, layers // 2, layers - 3)  # as the heads are trained: low, middle, high
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise HierspecError(f"EAGLE-3 heads are for models of 7 layers and more, and this one has {layers}.")
    hidden, present = config.hidden, {name for names in files.values() for name in names}
    shapes = {
        name: (shape[0], 2 * shape[1]) if name.endswith(_CONCATENATED) else shape
        for name, shape in _layer_shapes(config, _MIDDLE).items()
    }
    shapes |= {f"{_MIDDLE}hidden_norm.weight": (hidden,), "norm.weight": (hidden,), "fc.weight": (hidden, 3 * hidden)}
    count = described.get("draft_vocab_size", config.vocabulary)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= config.vocabulary:
        raise HierspecError(
            f"{folder} is damaged: its draft_vocab_size must lie between 1 and {config.vocabulary}, not {shown(count)}."
        )
    shapes["lm_head.weight"] = (count, hidden)
    if _DRAFT_TO_TARGET in present or count != config.vocabulary:
        shapes[_DRAFT_TO_TARGET] = (count,)
    tensors = _tensors(folder, files, shapes)
    tokens: np.ndarray = np.arange(count, dtype=np.int64)
    if _DRAFT_TO_TARGET in tensors:
        tokens = tokens + np.array(token_ids(folder, _DRAFT_TO_TARGET, tensors, _REMEDY), dtype=np.int64)
    if tokens.min() < 0 or tokens.max() >= config.vocabulary or len(np.unique(tokens)) != count:
        raise HierspecError(
            f"{folder} is damaged: d2t does not name {count} tokens of a vocabulary of {config.vocabulary}."
        )
    layer = {
        f"model.{_START}{name.removeprefix(_MIDDLE)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(_MIDDLE)
    }
    return Eagle3Branch(
        config,
        layer,
        norm=tensors["norm.weight"],
        fc=tensors["fc.weight"],
        taps=taps,
        head=tensors["lm_head.weight"],
        tokens=tokens.astype(np.int32),
    )


def _layer_shapes(config: DecoderConfig, start: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a decoder layer, whose names begin with `start` in this file."""
    canonical = f"model.{_START}"
    return {
        start + name.removeprefix(canonical): shape
        for name, shape in expected_tensors(config).items()
        if name.startswith(canonical)
    }


def _tensors(folder: Path, files: dict[Path, list[str]], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, names in files.items():
        with opened(path, _REMEDY) as file:
            for name in names:
                if name in shapes:
                    check_stored(path, file, name, shapes[name], _REMEDY, integers=name == _DRAFT_TO_TARGET)
                    tensors[name] = file.get_tensor(name)
    for name, shape in shapes.items():
        if name not in tensors:
            raise missing(folder, name, shape, _REMEDY)
    return tensors


def _names(folder: Path) -> dict[Path, list[str]]:
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path, _REMEDY) as file:
            names[path] = list(file.keys())
    return names
