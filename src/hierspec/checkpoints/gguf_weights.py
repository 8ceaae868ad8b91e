"""The tensors of a memory-mapped GGUF file: as the file stores them, or as floats made on access."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hierspec.checkpoints.config import DecoderConfig, expected_tensors
from hierspec.checkpoints.families import family_named, from_gguf
from hierspec.checkpoints.families.family import Family
from hierspec.checkpoints.families.gguf import may_be_absent
from hierspec.checkpoints.gguf_blocks import UnpackedBlocks, unpack
from hierspec.checkpoints.gguf_header import GgufHeader, StoredTensor, read_header
from hierspec.core.errors import HierspecError

_CHUNK = 1 << 20  # numbers unpacked at a time: as many as caches hold
_CHUNK_ROWS = 16  # whole blocks of 16 outputs, for packing
_KEPT_ROWS = 4096  # rows of a table that are cached as floats


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """One tensor of the file. A vector is one row if it has blocks, else rows of one number."""

    raw: np.ndarray  # [rows, bytes of a row]: the file's bytes
    quantisation: str  # its name
    block: int  # numbers per block
    shape: tuple[int, ...]
    order: np.ndarray | None  # permutation of its rows; None: as stored

    def chunks(self) -> Iterator[np.ndarray]:
        """Bytes of some rows at a time, as many as are unpacked at once, in order."""
        per_row = int(np.prod(self.shape)) // len(self.raw)
        step = max(1, _CHUNK // per_row // _CHUNK_ROWS) * _CHUNK_ROWS
        for start in range(0, len(self.raw), step):
            yield self.raw[start : start + step] if self.order is None else self.raw[self.order[start : start + step]]

    def unpacked(self, rows: np.ndarray) -> UnpackedBlocks:
        """Unpacks rows of bytes, for tensors that are not floats."""
        blocks = int(np.prod(self.shape)) // len(self.raw) // self.block * len(rows)
        return unpack(np.ascontiguousarray(rows).reshape(blocks, -1), self.quantisation)

    def floats(self, rows: np.ndarray) -> np.ndarray:
        """Rows of bytes as float32."""
        rows = np.ascontiguousarray(rows)
        if self.quantisation == "F32":
            return rows.view(np.float32)
        if self.quantisation == "F16":
            return rows.view(np.float16).astype(np.float32)
        if self.quantisation == "BF16":
            return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self.unpacked(rows).values().reshape(len(rows), -1)


class StoredRows:
    """A table of which few rows are used: rows become floats on access, and some are cached."""

    dtype = torch.float32

    def __init__(self, matrix: StoredMatrix) -> None:
        assert matrix.order is None
        self._matrix = matrix
        self.shape = torch.Size(matrix.shape)
        self._kept = np.empty((min(_KEPT_ROWS, matrix.shape[0]), matrix.shape[1]), np.float32)
        self._owners = np.full(len(self._kept), -1, np.int64)  # the row that each cached entry holds

    def __getitem__(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(self._matrix.floats(self._matrix.raw[rows.numpy()]))

    def few(self, rows: np.ndarray) -> np.ndarray:
        """The same for the few rows of a pass, which texts use repeatedly."""
        places = rows % len(self._kept)
        missing = self._owners[places] != rows
        known_rows = self._kept[places]
        if missing.any():
            wanted = rows[missing]
            known_rows[missing] = floats = self._matrix.floats(self._matrix.raw[wanted])
            own, first = np.unique(places[missing], return_index=True)  # two rows may map to the same entry
            self._owners[own] = -1  # first: Ctrl-C may come next
            self._kept[own] = floats[first]
            self._owners[own] = wanted[first]
        return known_rows


class GgufWeights(Mapping[str, Tensor]):
    """The weights of a GGUF file as float32, by canonical names. Nothing is cached: each access unpacks the tensor."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._sources = sources(model)
        self._shapes = expected_tensors(model.config)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        stored = self.stored(name)
        if stored is None:
            return torch.zeros(shape)
        floats = np.empty((len(stored.raw), int(np.prod(shape)) // len(stored.raw)), np.float32)
        done = 0
        for rows in stored.chunks():
            floats[done : done + len(rows)] = stored.floats(rows)
            done += len(rows)
        return torch.from_numpy(floats).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __str__(self) -> str:
        """Which quantisations its matrices have."""
        stored = (self._sources[name] for name, shape in self._shapes.items() if len(shape) == 2)
        counts = Counter(source.quantisation.name for source in stored if source is not None)
        return ", ".join(f"{count} in {name}" for name, count in counts.most_common())

    def has_blocks(self) -> bool:
        """Whether any tensor is quantised; a file of floats alone may as well be read as floats."""
        return any(source is not None and source.quantisation.block > 1 for source in self._sources.values())

    def stored(self, name: str) -> StoredMatrix | None:
        """A tensor as the file stores it; None if it is absent, which means zeros."""
        source = self._sources[name]
        return None if source is None else stored_matrix(self._model, name, source)

    def rows(self, name: str) -> StoredRows:
        """A matrix of which few rows are used at a time."""
        stored = self.stored(name)
        assert stored is not None
        return StoredRows(stored)

    def release(self) -> None:
        """Lets the system reclaim the memory of the mapped file; it is read again when needed."""
        self._model.mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, eq=False)
class GgufModel:
    """A memory-mapped GGUF file with its parsed header."""

    path: Path
    mapped: mmap.mmap
    content: np.ndarray  # its bytes
    header: GgufHeader
    config: DecoderConfig
    family: Family


def open_gguf(path: Path) -> GgufModel:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content = np.frombuffer(mapped, np.uint8)
    header = read_header(path, content)
    config = from_gguf(path, header, content)
    return GgufModel(path, mapped, content, header, config, family_named(config.family))


def sources(model: GgufModel) -> dict[str, StoredTensor | None]:
    """The stored tensor for each canonical name; None means zeros."""
    known_rows: dict[str, StoredTensor | None] = {}
    for name, shape in expected_tensors(model.config).items():
        gguf_name = model.family.gguf.names(name)
        stored = model.header.tensors.get(gguf_name)
        if stored is None and not may_be_absent(model.family, name):
            raise HierspecError(f"{model.path} is not a whole model: the tensor {gguf_name} {list(shape)} is missing.")
        if stored is not None and stored.shape != shape:
            raise HierspecError(
                f"{model.path} contradicts itself: {gguf_name} should be {list(shape)} and is {list(stored.shape)}."
            )
        known_rows[name] = stored
    return known_rows


def stored_matrix(model: GgufModel, name: str, stored: StoredTensor) -> StoredMatrix:
    rows, quantisation = stored.shape[0], stored.quantisation
    if len(stored.shape) == 1 and quantisation.block > 1:
        rows = 1
    raw = model.content[stored.start : stored.start + stored.size].reshape(rows, -1)
    return StoredMatrix(raw, quantisation.name, quantisation.block, stored.shape, _row_order(name, model))


def _row_order(name: str, model: GgufModel) -> np.ndarray | None:
    """The permutation that joins the halves of query and key heads, if the family's GGUF files interleave them."""
    config = model.config
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None or not model.family.gguf.interleaved:
        return None
    interleaved = np.arange(heads * config.head_size).reshape(heads, config.head_size // 2, 2)
    return interleaved.swapaxes(1, 2).reshape(-1)
