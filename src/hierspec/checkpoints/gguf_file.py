"""Turns a GGUF file into a Hugging Face folder in the cache, once: later loads map that folder in milliseconds."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hierspec.cache import keep_within_limit
from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.families import family_named, from_gguf, to_huggingface
from hierspec.checkpoints.families.family import Family
from hierspec.checkpoints.families.gguf import may_be_absent
from hierspec.checkpoints.gguf_header import MAGIC, GgufHeader, StoredTensor, read_header
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import refusal, why
from hierspec.in_use import claim, mark_used
from hierspec.paths import cache_folder, whole_folder
from hierspec.progress import Progress, silent

_FORMAT_VERSION = 1  # count up when the same file would now be converted differently
_FINGERPRINTED = 1 << 20  # bytes of the header that go into the key
_CHUNK = 1 << 22  # numbers dequantised at a time
_STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_COMPLETE = "complete.json"  # file sizes of a finished folder, to notice a file that was cut short later


def convert(path: Path, dtype: torch.dtype, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of the GGUF file `path` with its weights as `dtype`; made on the first call only."""
    if dtype not in _STORED_AS:
        raise HierspecError(f"Weights cannot be converted to {dtype}: float32, bfloat16 and float16 are supported.")
    folder = _folder(path, dtype)
    claim(folder)  # before it is looked at: another process may be deleting it
    if not _is_complete(folder):
        _convert_into(folder, Path(path), dtype, progress or silent)
        claim(folder)
        keep_within_limit()
    mark_used(folder / _COMPLETE)
    return folder


def converted(path: Path) -> Path | None:
    """The folder of a GGUF file that was converted before, to any dtype."""
    return next((folder for dtype in _STORED_AS if _is_complete(folder := _folder(path, dtype))), None)


def gguf_config(path: Path) -> DecoderConfig:
    """The configuration alone, read from the file itself."""
    return _open(path).config


@dataclass(frozen=True)
class _GgufModel:
    """A GGUF file, mapped, with its header read."""

    path: Path
    content: np.ndarray  # bytes
    header: GgufHeader
    config: DecoderConfig
    family: Family


def _open(path: Path) -> _GgufModel:
    content = np.memmap(path, dtype=np.uint8, mode="r")
    header = read_header(path, content)
    config = from_gguf(path, header, content)
    return _GgufModel(path, content, header, config, family_named(config.family))


def _folder(path: Path, dtype: torch.dtype) -> Path:
    path = Path(path)
    return cache_folder() / "converted" / f"{path.stem[:80]}-{_key(path, dtype)}"


def _key(path: Path, dtype: torch.dtype) -> str:
    """Changes whenever the file may have changed; reads one megabyte, never the whole file."""
    try:
        if path.exists() and not path.is_file():  # a pipe would never end
            raise HierspecError(f"{path} is not a file.")
        with path.open("rb") as file:
            start = file.read(_FINGERPRINTED)
        state = path.stat()
    except FileNotFoundError as error:
        raise HierspecError(f"There is no file {path}.") from error
    except OSError as error:
        raise refusal(path, "fetch it again")(why(error)) from error
    if not start:
        raise HierspecError(f"{path} is empty: fetch it again.")
    if start[: len(MAGIC)] != MAGIC:
        raise HierspecError(f"{path} is not a GGUF file.")
    identity = [str(path.resolve()), state.st_size, state.st_mtime_ns, _STORED_AS[dtype], _FORMAT_VERSION]
    return hashlib.sha256(json.dumps(identity).encode() + hashlib.sha256(start).digest()).hexdigest()[:20]


def _is_complete(folder: Path) -> bool:
    with suppress(OSError, ValueError, AttributeError):  # absent or damaged: make it again
        sizes = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    return False


def _convert_into(folder: Path, path: Path, dtype: torch.dtype, progress: Progress) -> None:
    from hierspec.text.gguf_tokenizer import write_tokenizer  # slow to import, and not needed for a finished folder

    model = _open(path)
    sources = _sources(model)
    described = {**to_huggingface(model.config), "torch_dtype": str(dtype).removeprefix("torch.")}
    with whole_folder(folder) as temporary:
        _write_json(temporary / "config.json", described)
        write_tokenizer(model.header.metadata, temporary)
        with (temporary / "model.safetensors").open("wb") as file:
            _write_weights(file, model, sources, dtype, progress)
        sizes = {item.name: item.stat().st_size for item in temporary.iterdir()}
        _write_json(temporary / _COMPLETE, sizes)


def _sources(model: _GgufModel) -> dict[str, StoredTensor | None]:
    """Where each tensor comes from, by canonical name; None means zeros."""
    sources: dict[str, StoredTensor | None] = {}
    for name, shape in expected_tensors(model.config).items():
        gguf_name = model.family.gguf.names(name)
        stored = model.header.tensors.get(gguf_name)
        if stored is None and not may_be_absent(model.family, name):
            raise HierspecError(f"{model.path} is not a whole model: the tensor {gguf_name} {list(shape)} is missing.")
        if stored is not None and stored.shape != shape:
            raise HierspecError(
                f"{model.path} contradicts itself: {gguf_name} should be {list(shape)} and is {list(stored.shape)}."
            )
        sources[name] = stored
    return sources


def _write_weights(
    file: BinaryIO,
    model: _GgufModel,
    sources: dict[str, StoredTensor | None],
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    """Writes the safetensors format itself, so that one chunk of one tensor is all that is ever in memory."""
    shapes = expected_tensors(model.config)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * dtype.itemsize
        entry = {"dtype": _STORED_AS[dtype], "shape": shape, "data_offsets": [total, total + size]}
        entries[model.family.names(name)] = entry
        total += size
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data starts on a cache line
    file.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for name, stored in sources.items():
        chunks = _zeros(shapes[name]) if stored is None else _values(model.content, stored, _row_order(name, model))
        for values in chunks:
            data = torch.from_numpy(values).to(dtype).contiguous().view(torch.uint8).numpy()
            file.write(data.data)
            done += data.nbytes
            progress(f"Converting {model.path.name}", done, total)


def _zeros(shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    yield np.zeros(shape, dtype=np.float32)


def _values(content: np.ndarray, stored: StoredTensor, order: np.ndarray | None) -> Iterator[np.ndarray]:
    """The tensor's numbers as float32, some rows at a time, its rows in the given order."""
    dequantize = _dequantizer(stored)
    raw = content[stored.start : stored.start + stored.size]
    rows = stored.shape[0]  # a vector is rows of one number, so that it can be reordered too
    row_numbers = int(np.prod(stored.shape[1:]))
    if len(stored.shape) == 1 and stored.quantisation.block > 1:
        rows, row_numbers = 1, stored.shape[0]
    raw = raw.reshape(rows, -1)
    step = max(1, _CHUNK // row_numbers)
    for start in range(0, rows, step):
        chunk = slice(start, start + step) if order is None else order[start : start + step]
        yield dequantize(np.array(raw[chunk]))


def _dequantizer(stored: StoredTensor) -> Callable[[np.ndarray], np.ndarray]:
    from gguf import GGMLQuantizationType, quants  # slow to import, and not needed for a finished folder

    gguf_type = GGMLQuantizationType(stored.quantisation.code)
    return lambda rows: quants.dequantize(rows, gguf_type)


def _row_order(name: str, model: _GgufModel) -> np.ndarray | None:
    """Puts the halves of query and key heads back together where the family's GGUF files interleave them."""
    config = model.config
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None or not model.family.gguf.interleaved:
        return None
    interleaved = np.arange(heads * config.head_size).reshape(heads, config.head_size // 2, 2)
    return interleaved.swapaxes(1, 2).reshape(-1)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
