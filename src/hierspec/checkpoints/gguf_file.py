"""A Hugging Face folder in the cache for a GGUF file, made once: complete, or without the weights, which stay there."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hierspec.cache import keep_within_limit
from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.families import to_huggingface
from hierspec.checkpoints.gguf_header import MAGIC, StoredTensor
from hierspec.checkpoints.gguf_weights import GgufModel, open_gguf, sources, stored_matrix
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import refusal, why
from hierspec.in_use import claim, mark_used
from hierspec.paths import cache_folder, whole_folder
from hierspec.progress import Progress, silent

_FORMAT_VERSION = 1  # increase when the same file would be converted differently
_FINGERPRINTED = 1 << 20  # bytes of the header that go into the key
_DTYPES: dict[torch.dtype | None, str] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_STORED_AS = {**_DTYPES, None: "no weights"}
COMPLETE = "complete.json"  # file sizes of a finished folder, to detect a file that was truncated later


def convert(path: Path, dtype: torch.dtype | None, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of the GGUF file `path` with its weights as `dtype`; only the first call makes it.

    Without a dtype the folder has no weights, only the configuration and the tokenizer, which load in milliseconds.
    """
    if dtype not in _STORED_AS:
        raise HierspecError(f"Weights cannot be converted to {dtype}: float32, bfloat16 and float16 are supported.")
    folder = _folder(path, dtype)
    claim(folder)  # before the folder is checked: another process may be deleting it
    if not _is_complete(folder):
        _convert_into(folder, Path(path), dtype, progress or silent)
        claim(folder)
        keep_within_limit()
    mark_used(folder / COMPLETE)
    return folder


def converted(path: Path) -> Path | None:
    """The folder of a GGUF file that was already converted, to any dtype."""
    return next((folder for dtype in _STORED_AS if _is_complete(folder := _folder(path, dtype))), None)


def gguf_config(path: Path) -> DecoderConfig:
    """The configuration alone, read from the file itself."""
    return open_gguf(path).config


def _folder(path: Path, dtype: torch.dtype | None) -> Path:
    path = Path(path)
    return cache_folder() / "converted" / f"{path.stem[:80]}-{_key(path, dtype)}"


def _key(path: Path, dtype: torch.dtype | None) -> str:
    """A key that changes whenever the file may have changed; reads one megabyte, never the whole file."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise HierspecError(f"{path} is not a file: name a GGUF file or a model folder.")
        with path.open("rb") as file:
            start = file.read(_FINGERPRINTED)
        state = path.stat()
    except FileNotFoundError as error:
        raise HierspecError(
            f"There is no file {path}: check its name, or leave MODEL out for the default one."
        ) from error
    except OSError as error:
        raise refusal(path, "fetch it again")(why(error)) from error
    if not start:
        raise HierspecError(f"{path} is empty: fetch it again.")
    if start[: len(MAGIC)] != MAGIC:
        raise HierspecError(f"{path} is not a GGUF file: name one, or a folder with safetensors.")
    identity = [str(path.resolve()), state.st_size, state.st_mtime_ns, _STORED_AS[dtype], _FORMAT_VERSION]
    return hashlib.sha256(json.dumps(identity).encode() + hashlib.sha256(start).digest()).hexdigest()[:20]


def _is_complete(folder: Path) -> bool:
    with suppress(OSError, ValueError, AttributeError):  # absent or damaged: make it again
        sizes = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    return False


def _convert_into(folder: Path, path: Path, dtype: torch.dtype | None, progress: Progress) -> None:
    from hierspec.text.gguf_tokenizer import write_tokenizer  # slow to import, and not needed for a finished folder

    model = open_gguf(path)
    stored_tensors = sources(model)
    described = {**to_huggingface(model.config), "torch_dtype": str(dtype or torch.float32).removeprefix("torch.")}
    with whole_folder(folder) as temporary:
        _write_json(temporary / "config.json", described)
        write_tokenizer(model.header.metadata, temporary)
        if dtype is not None:
            with (temporary / "model.safetensors").open("wb") as file:
                _write_weights(file, model, stored_tensors, dtype, progress)
        sizes = {item.name: item.stat().st_size for item in temporary.iterdir()}
        _write_json(temporary / COMPLETE, sizes)


def _write_weights(
    file: BinaryIO,
    model: GgufModel,
    stored_tensors: dict[str, StoredTensor | None],
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    """Writes the safetensors format directly, so that only one chunk of one tensor is in memory at a time."""
    shapes = expected_tensors(model.config)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * dtype.itemsize
        entry = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [total, total + size]}
        entries[model.family.names(name)] = entry
        total += size
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data starts on a cache line
    file.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for name, stored in stored_tensors.items():
        for values in _values(model, name, stored, shapes[name]):
            data = torch.from_numpy(values).to(dtype).contiguous().view(torch.uint8).numpy()
            file.write(data.data)
            done += data.nbytes
            progress(f"Converting {model.path.name}", done, total)


def _values(model: GgufModel, name: str, stored: StoredTensor | None, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """A tensor's numbers as float32, some rows at a time; zeros if the file lacks the tensor."""
    if stored is None:
        yield np.zeros(shape, np.float32)
        return
    matrix = stored_matrix(model, name, stored)
    for rows in matrix.chunks():
        yield np.array(matrix.floats(rows))  # a copy: torch must not write to the mapped file


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
