"""Families of decoders: one file per family says how to read its config.json, GGUF keys and tensor names.

A family that differs from these only in data is one more file and one more entry in FAMILIES.
"""

from pathlib import Path
from typing import Any

import numpy as np

from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.families.family import Family
from hierspec.checkpoints.families.gguf import architecture_keys, read_gguf
from hierspec.checkpoints.families.huggingface import read_config, write_config
from hierspec.checkpoints.families.llama import LLAMA
from hierspec.checkpoints.families.mistral import MISTRAL
from hierspec.checkpoints.families.qwen import QWEN2, QWEN3
from hierspec.checkpoints.families.seed_oss import SEED_OSS
from hierspec.checkpoints.families.smollm import SMOLLM3
from hierspec.checkpoints.gguf_header import GgufHeader
from hierspec.checkpoints.values import listed
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown

__all__ = ["FAMILIES", "family_named", "from_gguf", "from_huggingface", "to_huggingface"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,  # after llama, whose name it uses in GGUF files
        QWEN2,
        QWEN3,
        SEED_OSS,
        SMOLLM3,
    )
}


def family_named(name: object) -> Family:
    """A family by `model_type`, which is also DecoderConfig.family."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise HierspecError(
            f"The architecture {shown(name)} is not supported: choose a model of the families {listed(FAMILIES)}."
        )
    return FAMILIES[name]


def from_huggingface(config: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderConfig:
    """Reads a config.json and the generation_config.json beside it."""
    if not isinstance(config, dict):
        raise HierspecError("The model's config.json must hold one JSON object.")
    return read_config(family_named(_model_type(config)), config, generation or {})


def to_huggingface(config: DecoderConfig) -> dict[str, Any]:
    """A config.json with which transformers, version 4 or 5, builds the same model."""
    return write_config(family_named(config.family), config)


def from_gguf(path: Path, header: GgufHeader, content: np.ndarray) -> DecoderConfig:
    """Reads the mapped GGUF file `content`; `path` is for the messages."""
    architecture = header.metadata.get("general.architecture")
    by_architecture: dict[str, list[Family]] = {}
    for family in FAMILIES.values():
        if family.gguf.architecture:
            by_architecture.setdefault(family.gguf.architecture, []).append(family)
    if not isinstance(architecture, str) or architecture not in by_architecture:
        raise HierspecError(
            f"{path} holds a model of the architecture {shown(architecture)}, which is not supported: "
            f"choose a GGUF file of {listed(by_architecture)}."
        )
    keys = architecture_keys(header)
    # Of families that share an architecture, the later one is the special case.
    matching = [family for family in by_architecture[architecture] if family.gguf.matches(keys, header.tensors)]
    return read_gguf(matching[-1], path, header, content)


def _model_type(config: dict[str, Any]) -> object:
    """`model_type`; if it is missing, the family whose class is named in `architectures`."""
    name, classes = config.get("model_type"), config.get("architectures")
    if name is None and isinstance(classes, list):
        return next((family.name for family in FAMILIES.values() if family.model_class in classes), None)
    return name
