"""Packs: parts trained for a model and shipped beside its weights, so that it can draft for itself.

A folder with pack.json and safetensors files: adapters of exits, a feature drafter, a small model, a draft vocabulary,
the delta of an early-exit variant. pack.json holds the fingerprint of the model and the hash of each file. Matrices are
stored in 8 bits (`eight_bits`) and read as floats.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.eight_bits import from_eight_bits, in_eight_bits
from hierspec.checkpoints.tensor_files import check_tensor, loaded, token_ids
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_object, refusal, shown, why
from hierspec.paths import whole_folder

FORMAT = 1
EXITS, FEATURE, SMALL, VOCABULARY, EARLY_EXIT = (
    f"{name}.safetensors" for name in ("exits", "feature", "small", "vocabulary", "early-exit")
)
LEARNT = "learnt.json"
_MOST_LEARNT = 1_000_000  # bytes of that file
SHIPPED = Path(__file__).parent.parent / "packs"
_DESCRIPTION = "pack.json"
_INSTEAD = "fetch it again, or go without it (--pack none)"
# Names of tensors of an exit, or of one of several layers; no model has a million of either.
_ADAPTER = re.compile(r"exit\.([0-9]{1,6})\.layers?\..+")
_EXIT_NORM = re.compile(r"exit\.([0-9]{1,6})\.norm\.weight")
_LAYER_NUMBER = re.compile(r"([0-9]{1,6})\..+")


@dataclass(frozen=True)
class Branch:
    """Decoder layers beside the target's, mostly one: their weights by canonical names, and the norm after them."""

    config: DecoderConfig  # of these layers
    layer: dict[str, Tensor]  # model.layers.0.…, model.layers.1.…; the input norm is missing if there is none
    norm: Tensor | None  # None: the output of the layers is not normed


@dataclass(frozen=True)
class FeatureBranch(Branch):
    """A feature drafter: its layers read fc(embedding of a token, feature of the position before it).

    At positions that the target has computed, the feature is the target's last hidden state, normed. A drafter with
    `first` uses that matrix there instead of fc; it also reads the hidden states after the layers `taps`, each scaled
    to unit RMS.
    """

    fc: Tensor  # [hidden, 2 * hidden]
    fc_bias: Tensor | None = None
    skips_first: bool = False  # skips the text's first token, which has no feature before it
    taps: tuple[int, ...] = ()
    first: Tensor | None = None  # [hidden, (2 + taps) * hidden]; None: fc everywhere


@dataclass(frozen=True)
class Pack:
    """An opened pack. Files are read when needed and checked against their hashes each time."""

    folder: Path
    model: str
    target: str  # fingerprint of the model it was trained for
    hidden: int
    vocabulary: int
    hashes: Mapping[str, str] = field(hash=False)  # by the name of the file
    is_variant: bool = False  # holds only what fits the early-exit variant of its model

    def has(self, file: str) -> bool:
        return file in self.hashes

    def early_exit(self) -> Pack:
        """The parts that fit the early-exit variant; other adapters and drafters were trained on other hidden
        states."""
        return replace(
            self, is_variant=True, hashes={f: h for f, h in self.hashes.items() if f in (VOCABULARY, EARLY_EXIT)}
        )

    def learnt(self) -> dict[str, Any]:
        """Acceptance rates measured when the pack was made: the starting point for a model without statistics of its
        own."""
        if not self.has(LEARNT):
            return {}
        content = self._content(LEARNT)
        try:
            learnt = json.loads(content) if len(content) <= _MOST_LEARNT else None
        except (ValueError, RecursionError):
            learnt = None
        if not isinstance(learnt, dict):
            raise HierspecError(f"{self.folder / LEARNT} is damaged: {_INSTEAD}.")
        return learnt

    def _content(self, file: str) -> bytes:
        path = self.folder / file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise refusal(path, _INSTEAD)(why(error)) from error
        if hashlib.sha256(content).hexdigest() != self.hashes[file]:
            raise HierspecError(f"{path} is damaged (its hash is not the one in {_DESCRIPTION}): {_INSTEAD}.")
        return content

    def read(self, file: str) -> dict[str, Tensor]:
        path = self.folder / file
        return from_eight_bits(path, loaded(path, self._content(file), _INSTEAD), _INSTEAD)

    def matrix_size(self, name: str, shape: Sequence[int]) -> int:
        """The number of elements of one of its matrices in the model that runs."""
        return math.prod(shape)

    def exits(self) -> tuple[int, ...]:
        """Exits that have an adapter."""
        return self._exits_with_adapter

    def adapter(self, exit_layer: int, config: DecoderConfig) -> Branch:
        """The adapter of one exit, for a target with this configuration."""
        if exit_layer not in (exits := self.exits()):
            available = f"has adapters for exits {', '.join(map(str, exits))}" if exits else "has no adapters of exits"
            raise HierspecError(
                f"The pack {self.folder.name} {available}, not for exit_layer {exit_layer}; choose one that it has, or "
                'head = "shared".'
            )
        file, several = self._adapters, f"exit.{exit_layer}.layers."
        tensors = self.read(file)
        norm = self._tensor(file, tensors, f"exit.{exit_layer}.norm.weight", (config.hidden,))
        if not any(name.startswith(several) for name in tensors):
            alike = layers_like(config, adapter_layers(config, exit_layer, 1))
            layer = self._layers(file, tensors, f"exit.{exit_layer}.layer.", alike, "model.layers.0.")
            return Branch(alike, layer, norm)
        count = self._count(file, tensors, several, config)
        alike = layers_like(config, adapter_layers(config, exit_layer, count))
        return Branch(alike, self._layers(file, tensors, several, alike), norm)

    def feature(self, config: DecoderConfig) -> FeatureBranch:
        """The feature drafter: as many layers as the file has, shaped like the target's last."""
        tensors, hidden = self.read(FEATURE), config.hidden
        count = self._count(FEATURE, tensors, "feature.layers.", config)
        like_last = layers_like(config, range(config.layers - count, config.layers))
        layers = self._layers(FEATURE, tensors, "feature.layers.", like_last)
        norm = self._tensor(FEATURE, tensors, "feature.norm.weight", (hidden,))
        fc = self._tensor(FEATURE, tensors, "feature.fc.weight", (hidden, 2 * hidden))
        if not {"feature.first.weight", "feature.taps"} & set(tensors):
            return FeatureBranch(like_last, layers, norm, fc)
        has_taps = "feature.taps" in tensors
        taps = tuple(token_ids(self.folder / FEATURE, "feature.taps", tensors, _INSTEAD)) if has_taps else ()
        if list(taps) != sorted(set(taps)) or any(not 1 <= tap < config.layers for tap in taps):
            raise HierspecError(
                f"{self.folder / FEATURE} does not fit the model: feature.taps should be rising layer numbers between "
                f"1 and {config.layers - 1}, not {', '.join(map(str, taps[:9]))}; {_INSTEAD}."
            )
        first = self._tensor(FEATURE, tensors, "feature.first.weight", (hidden, (2 + len(taps)) * hidden))
        return FeatureBranch(like_last, layers, norm, fc, taps=taps, first=first)

    def small(self, config: DecoderConfig) -> Branch:
        """The small model, which shares the target's embeddings and head: as many layers as the file has."""
        tensors = self.read(SMALL)
        like_first = layers_like(config, range(self._count(SMALL, tensors, "small.layers.", config)))
        layers = self._layers(SMALL, tensors, "small.layers.", like_first)
        return Branch(like_first, layers, self._tensor(SMALL, tensors, "small.norm.weight", (config.hidden,)))

    def draft_vocabulary(self) -> np.ndarray | None:
        """Tokens that drafting tiers score, in ascending order; None if the pack has none."""
        if not self.has(VOCABULARY):
            return None
        tokens = np.unique(token_ids(self.folder / VOCABULARY, "tokens", self.read(VOCABULARY), _INSTEAD))
        if not len(tokens) or tokens[0] < 0 or tokens[-1] >= self.vocabulary:
            raise HierspecError(
                f"The draft vocabulary of the pack {self.folder.name} has tokens outside the model's vocabulary of "
                f"{self.vocabulary}: {_INSTEAD}."
            )
        return tokens.astype(np.int32)

    def exits_with_norm(self) -> tuple[int, ...]:
        """Exits of the early-exit variant that have a separate norm and no adapter."""
        exits = set(self._exit_norms) if self.is_variant else set()
        return tuple(sorted(exits - set(self.exits())))

    def exit_norm(self, exit_layer: int) -> Tensor | None:
        """The norm that an exit of the early-exit variant uses instead of the final norm, if it has no adapter."""
        if not self.is_variant or exit_layer in self.exits():
            return None
        return self._exit_norms.get(exit_layer)

    @property
    def _adapters(self) -> str:
        """The file with adapters: the variant's are stored with its delta."""
        return EARLY_EXIT if self.is_variant else EXITS

    # Needed for every request, so they are read once.
    @cached_property
    def _exits_with_adapter(self) -> tuple[int, ...]:
        names = self.read(self._adapters) if self.has(self._adapters) else ()
        return tuple(sorted({int(match[1]) for match in map(_ADAPTER.fullmatch, names) if match}))

    @cached_property
    def _exit_norms(self) -> dict[int, Tensor]:
        tensors = self.read(EARLY_EXIT)
        return {
            int(match[1]): self._tensor(EARLY_EXIT, tensors, name, (self.hidden,))
            for name in tensors
            if (match := _EXIT_NORM.fullmatch(name))
        }

    def _count(self, file: str, tensors: dict[str, Tensor], prefix: str, config: DecoderConfig) -> int:
        """How many layers have names with this prefix."""
        names = (name.removeprefix(prefix) for name in tensors if name.startswith(prefix))
        count = 1 + max((int(match[1]) for match in map(_LAYER_NUMBER.fullmatch, names) if match), default=0)
        if count > config.layers:
            raise HierspecError(
                f"{self.folder / file} does not fit the model: it has {count} layers, and the model {config.layers}; "
                f"{_INSTEAD}."
            )
        return count

    def _layers(
        self, file: str, tensors: dict[str, Tensor], prefix: str, config: DecoderConfig, start: str = "model.layers."
    ) -> dict[str, Tensor]:
        """The layers of this configuration by canonical names, which begin with `start`."""
        expected = {name: shape for name, shape in expected_tensors(config).items() if name.startswith(start)}
        return {
            name: self._tensor(file, tensors, prefix + name.removeprefix(start), shape)
            for name, shape in expected.items()
        }

    def _tensor(self, file: str, tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
        return check_tensor(self.folder / file, name, tensors.get(name), shape, _INSTEAD)


def layers_like(config: DecoderConfig, numbers: Sequence[int]) -> DecoderConfig:
    """A configuration with layers like these of the target: training starts from copies of them."""
    return replace(config, layer_configs=tuple(config.layer_configs[number] for number in numbers), tied=True)


def adapter_layers(config: DecoderConfig, exit_layer: int, count: int) -> list[int]:
    """Layers of the target that an exit adapter's layers copy: the one after the exit, then the last ones."""
    return [min(exit_layer, config.layers - 1), *range(config.layers - count + 1, config.layers)]


def fingerprint(config: DecoderConfig, weights: Mapping[str, Tensor]) -> str:
    """A hash of the sizes and all norms: differs between models, but not between dtypes of one model."""
    sizes = [config.hidden, config.layers, config.heads, config.kv_heads, config.vocabulary]
    digest = hashlib.sha256(json.dumps(sizes).encode())
    for layer in range(config.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            digest.update(_as_bytes(weights[f"model.layers.{layer}.{name}.weight"]))
    digest.update(_as_bytes(weights["model.norm.weight"]))
    return digest.hexdigest()


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().astype("<i2").tobytes()


def write_pack(
    folder: Path | str,
    model: str,
    target: str,
    files: Mapping[str, Mapping[str, Tensor]],
    *,
    hidden: int,
    vocabulary: int,
    texts: Mapping[str, str] | None = None,
    learnt: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a whole pack or nothing: safetensors `files` by name, and `texts` (such as a model card).

    An existing pack of the same model keeps files that are not given.
    """
    folder = Path(folder)
    hashes: dict[str, str] = {}
    with whole_folder(folder) as temporary:
        if (folder / _DESCRIPTION).is_file() and (old := _described(folder)).target == target:
            hashes.update(old.hashes)
            for path in folder.iterdir():
                if path.is_file():
                    shutil.copyfile(path, temporary / path.name)
        for name, tensors in files.items():
            on_cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            content = save(in_eight_bits(on_cpu))
            (temporary / name).write_bytes(content)
            hashes[name] = hashlib.sha256(content).hexdigest()
        if learnt is not None:
            content = (json.dumps(learnt) + "\n").encode()
            (temporary / LEARNT).write_bytes(content)
            hashes[LEARNT] = hashlib.sha256(content).hexdigest()
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        described = {
            "format": FORMAT,
            "model": model,
            "target": target,
            "hidden": hidden,
            "vocabulary": vocabulary,
            "files": {name: {"sha256": sha256} for name, sha256 in sorted(hashes.items())},
        }
        (temporary / _DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return folder


def open_pack(folder: Path | str, config: DecoderConfig, weights: Mapping[str, Tensor]) -> Pack:
    """The pack in this folder, which must have been trained for the model with this configuration and these weights."""
    pack = _described(Path(folder))
    for what, of_pack, of_model in (
        ("hidden size", pack.hidden, config.hidden),
        ("vocabulary", pack.vocabulary, config.vocabulary),
    ):
        if of_pack != of_model:
            raise HierspecError(
                f"The pack {folder} is for a model of {what} {shown(of_pack)}, and this one has {of_model}: choose "
                "another pack, or none (--pack none)."
            )
    if pack.target != fingerprint(config, weights):
        raise HierspecError(
            f"The pack {folder} was made for another model ({shown(pack.model)}; the fingerprints differ): choose "
            "another pack, or none (--pack none)."
        )
    return pack


def shipped_pack(config: DecoderConfig, weights: Mapping[str, Tensor], home: Path | None = None) -> Pack | None:
    """The pack that ships for this model, if any."""
    folders = sorted(path.parent for path in (home or SHIPPED).glob(f"*/{_DESCRIPTION}"))
    if not folders:
        return None
    target = fingerprint(config, weights)
    return next((pack for pack in map(_described, folders) if pack.target == target), None)


def _described(folder: Path) -> Pack:
    path = folder / _DESCRIPTION
    if not path.exists():
        raise HierspecError(f"{folder} is not a pack, it has no {_DESCRIPTION}: {_INSTEAD}.")
    content = read_object(path, _INSTEAD)
    if content.get("format") != FORMAT:
        raise HierspecError(
            f"{path} has format {shown(content.get('format'))}, and this hierspec reads {FORMAT}: update hierspec, or "
            "go without the pack (--pack none)."
        )
    types = {"model": str, "target": str, "hidden": int, "vocabulary": int, "files": dict}
    if any(not isinstance(content.get(key), types[key]) for key in types):
        raise HierspecError(f"{path} is damaged: it must hold {', '.join(types)}; {_INSTEAD}.")
    hashes = {}
    for name, about in content["files"].items():
        # A name with folders in it could point anywhere on this machine.
        if Path(name).name != name or not isinstance(about, dict) or not isinstance(about.get("sha256"), str):
            raise HierspecError(f"{path} is damaged: {shown(name)} is not a file beside it with its hash; {_INSTEAD}.")
        hashes[name] = about["sha256"]
    return Pack(folder, content["model"], content["target"], content["hidden"], content["vocabulary"], hashes)
