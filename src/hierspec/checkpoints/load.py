"""Opens a checkpoint: a Hugging Face folder, a GGUF file, a hub name or the default model.

Weights are memory-mapped, and every tensor's name, type and shape is checked before use.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hierspec.checkpoints.cast_weights import CastWeights
from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.default import DEFAULT_NAME, default_model, default_model_here
from hierspec.checkpoints.delta import ChangedWeights
from hierspec.checkpoints.families import family_named, from_huggingface
from hierspec.checkpoints.gguf_file import convert, converted, gguf_config
from hierspec.checkpoints.gguf_weights import GgufWeights, open_gguf
from hierspec.checkpoints.packs import EARLY_EXIT, Pack, open_pack, shipped_pack
from hierspec.checkpoints.tensor_files import check_stored, missing, opened
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_object, shown
from hierspec.progress import Progress, silent

__all__ = [
    "Checkpoint",
    "expected_tensors",
    "find_source",
    "known_config",
    "load_checkpoint",
    "model_folder",
    "read_config",
    "stored_in_blocks",
]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EARLY_EXIT_NAME = "default-ee"  # the default model plus the delta of its pack
_REMEDY = "fetch the model again"
_LONGEST_NAME = 255  # bytes of a file name, on every common system
_OPTIONS = "give a model folder, a .gguf file, a hub name such as org/name, or nothing for the default model"


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: Path  # Hugging Face layout: config.json, weights, tokenizer
    config: DecoderConfig
    weights: Mapping[str, torch.Tensor]  # canonical names, exactly those of expected_tensors(config)
    dtype: torch.dtype
    pack: Pack | None = None  # parts that were trained for it
    variant: str = ""  # hash of a change to the weights that was made after reading them from the folder
    file: Path | None = None  # the GGUF file that holds the weights; the folder then has none
    enlarged: str = ""  # the sizes that it was enlarged to (`enlarged`); its weights are then in no file


def load_checkpoint(
    source: str | Path | None = None,
    dtype: torch.dtype | Callable[[DecoderConfig], torch.dtype] = torch.float32,
    progress: Progress | None = None,
    pack: str | Path | None = None,
    as_stored: bool | Callable[[DecoderConfig], bool] = False,
) -> Checkpoint:
    """Finds `source` (None or "default", a folder, a .gguf file or a hub name) and maps its weights as `dtype`.

    A function as `dtype` gets the model's configuration, before anything is converted. `pack` is the folder of its
    pack, "none", or None for the pack that ships for it. "default-ee" is the default model's early-exit variant: the
    default weights plus a delta from the pack. `as_stored`: the weights of a GGUF file stay in it (`GgufWeights`), and
    nothing is converted. It may also be a function of the configuration; files of floats alone are then read like
    others.
    """
    if isinstance(dtype, torch.dtype):
        _check_dtype(dtype)
    name, path = _locate(source, progress or silent)
    weights: Mapping[str, torch.Tensor] | None = _weights_in_file(source, path, as_stored)
    if weights is not None:
        dtype, folder = torch.float32, convert(path, None, progress)
        config = read_config(folder)
    else:
        if not isinstance(dtype, torch.dtype):
            dtype = dtype(_config(path))
            _check_dtype(dtype)
        folder = path if path.is_dir() else convert(path, dtype, progress)
        config = read_config(folder)
        weights = _read_weights(folder, _weight_files(folder), config, dtype, progress or silent)
    if pack is None:
        opened = shipped_pack(config, weights)
    else:
        opened = None if str(pack) == "none" else open_pack(Path(pack).expanduser(), config, weights)
    file = path if isinstance(weights, GgufWeights) else None
    checkpoint = Checkpoint(name, folder, config, weights, dtype, opened, file=file)
    return _early_exit(checkpoint) if str(source) == _EARLY_EXIT_NAME else checkpoint


def _weights_in_file(
    source: str | Path | None, path: Path, as_stored: bool | Callable[[DecoderConfig], bool]
) -> GgufWeights | None:
    """The weights of a GGUF file, if `load_checkpoint` is to leave them there; else None."""
    if path.is_dir() or not stored_in_blocks(source):
        if as_stored is True:
            raise HierspecError(f"{source} has no bits of a GGUF file to run in (--weights file): use --weights auto.")
        return None
    if as_stored is False or not (as_stored is True or as_stored(_config(path))):
        return None
    _config(path)  # gives the reason if the file is not a GGUF file
    weights = GgufWeights(open_gguf(path))
    return weights if as_stored is True or weights.has_blocks() else None


def _early_exit(checkpoint: Checkpoint) -> Checkpoint:
    """The early-exit variant of a model: a different model with the same tokenizer."""
    pack = checkpoint.pack
    if pack is None or not pack.has(EARLY_EXIT):
        why = f"the pack {pack.folder.name} has no {EARLY_EXIT}" if pack else "there is no pack for the default model"
        raise HierspecError(f"{_EARLY_EXIT_NAME} is not available: {why}; give one that has it (--pack FOLDER).")
    weights = ChangedWeights(checkpoint.weights, pack.read(EARLY_EXIT))
    name, variant = f"{checkpoint.name}-ee", pack.hashes[EARLY_EXIT]
    return replace(checkpoint, name=name, weights=weights, pack=pack.early_exit(), variant=variant)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise HierspecError(f"Weights cannot be loaded as {dtype}: float32, bfloat16 and float16 are supported.")


def _config(path: Path) -> DecoderConfig:
    folder = path if path.is_dir() else converted(path)
    return gguf_config(path) if folder is None else read_config(folder)


def known_config(source: str | Path | None) -> DecoderConfig | None:
    """The configuration of a model on this machine; None if it would have to be fetched first."""
    path = default_model_here() if _is_default(source) else Path(str(source)).expanduser()
    if path is None or not (path.is_dir() or (path.suffix == ".gguf" and path.is_file())):
        return None
    return _config(path)


def known_folder(source: str | Path | None) -> Path | None:
    """The folder with configuration and tokenizer of a model on this machine; None if it would have to be fetched
    first.

    For a GGUF file the folder has no weights.
    """
    path = default_model_here() if _is_default(source) else Path(str(source)).expanduser()
    if path is None or path.is_dir():
        return path
    return convert(path, None) if path.suffix == ".gguf" and path.is_file() else None


def find_source(source: str | Path | None) -> Path | None:
    """A model's folder or GGUF file; None if it has to be fetched (a hub name, the default model). Fetches nothing.

    Raises HierspecError if it can be none of these.
    """
    if _is_default(source):
        return None
    path = Path(str(source)).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        return path
    if path.exists():
        raise HierspecError(f"{path} is neither a model folder nor a .gguf file: {_OPTIONS}.")
    if isinstance(source, str) and _HUB_NAME.fullmatch(source):
        return None
    raise HierspecError(f"There is no model at {source}: {_OPTIONS}.")


def model_folder(source: str) -> Path:
    """The folder of a model that is a folder, or is fetched from the hub."""
    path = find_source(source)
    return _download(source) if path is None else path


def read_config(folder: Path) -> DecoderConfig:
    """The configuration of a Hugging Face folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise HierspecError(f"{folder} is not a model folder, it has no config.json: {_OPTIONS}.")
    generation = folder / "generation_config.json"
    described = read_object(generation, _REMEDY) if generation.is_file() else None
    return from_huggingface(read_object(path, _REMEDY), described)


def _locate(source: str | Path | None, progress: Progress) -> tuple[str, Path]:
    """The name of a model, and its folder or GGUF file, fetched if needed."""
    if _is_default(source):
        return DEFAULT_NAME, default_model(progress)
    path = find_source(source)
    if path is None:
        return str(source), _download(str(source))
    return (path.resolve().name if path.is_dir() else path.stem), path


def stored_in_blocks(source: str | Path | None) -> bool:
    """Whether a model is a GGUF file whose weights are used unchanged."""
    if str(source) == _EARLY_EXIT_NAME:  # its weights are the file's plus a delta
        return False
    return _is_default(source) or (Path(str(source)).suffix == ".gguf" and not Path(str(source)).expanduser().is_dir())


def _is_default(source: str | Path | None) -> bool:
    return source is None or str(source) in ("default", _EARLY_EXIT_NAME)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise HierspecError(
            f"There is no folder {name}, and fetching it from the hub needs: pip install 'hierspec[hub]'."
        ) from error
    try:
        # Files in subfolders and "consolidated" ones repeat the weights in other layouts.
        include, exclude = ["*.safetensors", "*.json", "*.jinja"], ["*/*", "consolidated*"]
        return Path(snapshot_download(name, allow_patterns=include, ignore_patterns=exclude))
    except Exception as error:  # the hub raises dozens of types: network, permissions, names, disks
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(". ") or type(error).__name__
        raise HierspecError(
            f"There is no folder {name}, and the hub did not give it ({reason}): {_OPTIONS}."
        ) from error


def _weight_files(folder: Path) -> dict[str, str] | str:
    """The single file with all tensors, or each tensor's shard by its name."""
    if (folder / "model.safetensors").is_file():
        return "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_object(index, _REMEDY).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
            raise HierspecError(f"{index} is damaged: it has no weight_map from tensors to files.")
        for file in sorted(set(shards.values())):
            # A name with folders in it could point anywhere on this machine.
            if Path(file).name != file or not file.isprintable() or len(file.encode()) > _LONGEST_NAME:
                raise HierspecError(f"{index} is damaged: {shown(file)} is not the name of a file beside it.")
            if not (folder / file).is_file():
                raise HierspecError(f"{folder} is incomplete: {file} is missing, fetch the model again.")
        return shards
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pth")):
        raise HierspecError(f"{folder} holds pickle weights, which hierspec never opens: convert them to safetensors.")
    raise HierspecError(f"{folder} has no weights: model.safetensors or model.safetensors.index.json is needed.")


def _read_weights(
    folder: Path, files: dict[str, str] | str, config: DecoderConfig, dtype: torch.dtype, progress: Progress
) -> Mapping[str, torch.Tensor]:
    """Maps the weights without reading them; a tensor with another stored type is cast on access."""
    expected = expected_tensors(config)
    stored_name = family_named(config.family).names
    by_file: dict[str, list[str]] = {}  # canonical names
    for name, shape in expected.items():
        file = files if isinstance(files, str) else files.get(stored_name(name))
        if file is None:
            raise missing(folder, stored_name(name), shape, _REMEDY)
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        _check_file(folder / file, {stored_name(name): expected[name] for name in names})
    weights: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        with opened(folder / file, _REMEDY) as tensors:
            for name in names:
                weights[name] = tensors.get_tensor(stored_name(name))
                progress("Loading weights", len(weights), len(expected))
    ordered = {name: weights[name] for name in expected}
    return CastWeights(ordered, dtype) if any(tensor.dtype != dtype for tensor in ordered.values()) else ordered


def _check_file(path: Path, expected: dict[str, tuple[int, ...]]) -> None:
    with opened(path, _REMEDY) as tensors:
        present = set(tensors.keys())
        for name, shape in expected.items():
            if name not in present:
                raise missing(path, name, shape, _REMEDY)
            check_stored(path, tensors, name, shape, _REMEDY)
