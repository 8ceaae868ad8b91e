"""Weights in the layout of the compiled pass: packed once into a cache file, then memory-mapped.

So a model is in memory once, in pages that the system may share between processes and reclaim; the original weights
are not read again. Packing handles one part of one matrix at a time, so it needs little memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.cpu import amx
from hierspec.backends.cpu.forms import FORM_OF, arrange, scales_apart
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.product import BFLOAT16, BFLOAT16_AMX, FLOAT32, FORM_OF_KIND, INT4, INT8
from hierspec.backends.cpu.quantised import quantise_weights
from hierspec.cache import folder_name, keep_within_limit
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.gguf_weights import GgufWeights, StoredMatrix
from hierspec.core.errors import HierspecError
from hierspec.in_use import claim, mark_used
from hierspec.paths import cache_folder, whole_file
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.checkpoints.load import Checkpoint

KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "bfloat16-matrix": BFLOAT16_AMX, "int8": INT8, "int4": INT4}
FILE = -1  # not a kind: each matrix has the kind that stores what the GGUF file has
_NAMES = {**{kind: form.name for kind, form in FORM_OF_KIND.items()}, **{kind: name for name, kind in KINDS.items()}}
_KIND_OF_FORM = {form: kind for kind, form in FORM_OF_KIND.items()}
_LAYOUT = 7  # increase when the same weights would be packed differently
_ALIGNED = 64
_WORTH_A_FILE = 32 << 20  # bytes; smaller models are packed at every start
_AT_ONCE = 1 << 22  # weights
# In the order of `layer_products.py`.
_MATRICES = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")


@dataclass(frozen=True, eq=False)
class PackedWeights:
    name: str  # how weights are stored
    kinds: tuple[int, ...]  # kinds that the layers use
    layer_kinds: np.ndarray  # [layers, 7]: index into `kinds` for each matrix
    layers: np.ndarray  # [layers, 7]: address of each matrix
    head_kind: int
    head: int  # address
    bytes: int  # total: what a pass over one token reads
    owner: Any  # keeps the memory alive


@dataclass(frozen=True)
class _Matrix:
    """A matrix to pack."""

    name: str
    shape: tuple[int, int]
    kind: int

    @property
    def bytes(self) -> int:
        return packed_bytes(self.shape, self.kind)


def kind_for(name: str, matrices: bool = True) -> int:
    """The kind for weights in this format: bfloat16 is stored as AMX tiles if the CPU has AMX and `matrices` allows
    it."""
    if name == "file":
        return FILE
    return BFLOAT16_AMX if name == "bfloat16" and matrices and amx.available() else KINDS[name]


def pack_in_memory(config: DecoderConfig, weights: Mapping[str, Tensor], kind: int, head: bool = True) -> PackedWeights:
    """Packs the weights into this process's memory; `head`: include the output head."""
    matrices = _matrices(config, weights, kind, head)
    starts = _starts(matrices)
    memory = np.empty(starts[-1] + _ALIGNED, np.uint8)
    memory = memory[-memory.ctypes.data % _ALIGNED :]
    for matrix, start in zip(matrices, starts, strict=False):
        for part in _parts(weights, matrix):
            octets = part.reshape(-1).view(np.uint8)
            memory[start : start + octets.size] = octets
            start += octets.size
    return _addressed(config, kind, matrices, memory.ctypes.data, memory)


def packed_weights(checkpoint: Checkpoint, kind: int, progress: Progress = silent) -> PackedWeights:
    """The weights from their cache file, which the first call makes."""
    config = checkpoint.config
    matrices = _matrices(config, checkpoint.weights, kind)
    starts = _starts(matrices)
    if starts[-1] < _WORTH_A_FILE:
        return pack_in_memory(config, checkpoint.weights, kind)
    path = cache_folder() / "packed" / f"{folder_name(checkpoint.folder)[:80]}-{_key(checkpoint, kind)}.weights"
    claim(path)  # before the file is checked: another process may be deleting it
    if not path.is_file() or path.stat().st_size != starts[-1]:
        try:
            done, total = 0, sum(matrix.bytes for matrix in matrices)
            with whole_file(path) as temporary, temporary.open("wb") as file:
                for matrix, start in zip(matrices, starts, strict=False):
                    file.write(bytes(start - file.tell()))
                    for part in _parts(checkpoint.weights, matrix):
                        file.write(part.data)
                        done += part.nbytes
                        progress("Packing weights (once)", done, total)
                    if isinstance(checkpoint.weights, GgufWeights):
                        checkpoint.weights.release()
                file.write(bytes(starts[-1] - file.tell()))
        except HierspecError:  # for example a full disk: use memory instead
            return pack_in_memory(config, checkpoint.weights, kind)
        claim(path)
        keep_within_limit()
    mark_used(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    first = np.frombuffer(mapped, np.uint8).ctypes.data
    return _addressed(config, kind, matrices, first, mapped)


def _starts(matrices: list[_Matrix]) -> list[int]:
    """Where each matrix begins, and where the last one ends."""
    sizes = [-(-matrix.bytes // _ALIGNED) * _ALIGNED for matrix in matrices]
    starts: list[int] = np.cumsum([0, *sizes]).tolist()
    return starts


def _addressed(config: DecoderConfig, kind: int, matrices: list[_Matrix], first: int, owner: Any) -> PackedWeights:
    """Packed weights whose matrices are in memory from address `first` on."""
    addresses = [first + start for start in _starts(matrices)]
    count = config.layers * len(_MATRICES)
    layers, head = matrices[:count], matrices[count:]
    # Routines that all kinds share come from the first kind, so the one whose BEGIN configures tiles must be first.
    kinds = tuple(sorted({matrix.kind for matrix in layers}, key=lambda kind: (kind != BFLOAT16_AMX, kind)))
    names = dict.fromkeys(_NAMES[matrix.kind] for matrix in matrices)
    shape = config.layers, len(_MATRICES)
    return PackedWeights(
        "+".join(names) if kind == FILE else _NAMES[kind],
        kinds,
        np.array([kinds.index(matrix.kind) for matrix in layers], np.int64).reshape(shape),
        np.array(addresses[:count], np.int64).reshape(shape),
        head[0].kind if head else kind,
        addresses[count] if head else 0,
        sum(matrix.bytes for matrix in matrices),
        owner,
    )


def _head_kind(kind: int) -> int:
    # Four bits are too few to tell the best token from the second best; GGUF files also keep more bits for the head.
    return INT8 if kind == INT4 else kind


def _matrices(config: DecoderConfig, weights: Mapping[str, Tensor], kind: int, head: bool = True) -> list[_Matrix]:
    """All matrices, in the order of the file."""
    heads, kv_heads = config.heads * config.head_size, config.kv_heads * config.head_size
    hidden, intermediate = config.hidden, config.intermediate
    outputs = (heads, kv_heads, kv_heads, hidden, intermediate, intermediate, hidden)
    inputs = (hidden, hidden, hidden, heads, hidden, hidden, intermediate)
    shapes = list(zip(outputs, inputs, strict=True))
    named = [
        (f"model.layers.{layer}.{name}_proj.weight", shape, kind)
        for layer in range(config.layers)
        for name, shape in zip(_MATRICES, shapes, strict=True)
    ]
    if head:
        name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        named.append((name, (config.vocabulary, hidden), _head_kind(kind)))
    if kind != FILE:
        return [_Matrix(*each) for each in named]
    assert isinstance(weights, GgufWeights)
    return [_Matrix(name, shape, _stored_kind(weights.stored(name))) for name, shape, _ in named]


def _stored_kind(stored: StoredMatrix | None) -> int:
    """The kind that stores the file's numbers exactly."""
    if stored is None or stored.quantisation in ("F32", "F16"):
        return FLOAT32
    if stored.quantisation == "BF16":
        return BFLOAT16
    return _KIND_OF_FORM[FORM_OF[stored.quantisation]]


def packed_bytes(shape: tuple[int, int], kind: int) -> int:
    outputs, inputs = shape
    if form := FORM_OF_KIND.get(kind):
        return outputs // LANES * form.block_bytes(inputs)
    if kind == BFLOAT16_AMX:
        return outputs // LANES * amx.steps(inputs) * amx.TILE_BYTES
    return outputs * inputs * (4 if kind == FLOAT32 else 2)


def _parts(weights: Mapping[str, Tensor], matrix: _Matrix) -> Iterator[np.ndarray]:
    """Packs a matrix, some outputs at a time."""
    stored = weights.stored(matrix.name) if isinstance(weights, GgufWeights) else None
    if stored is not None and stored.block > 1 and matrix.kind == _stored_kind(stored):
        for rows in stored.chunks():
            yield arrange(stored.unpacked(rows), len(rows), FORM_OF_KIND[matrix.kind])
        return
    weight = weights[matrix.name]
    if matrix.kind == BFLOAT16:
        weight = weight.to(torch.bfloat16)
    step = max(1, _AT_ONCE // matrix.shape[1] // LANES) * LANES
    for start in range(0, len(weight), step):
        yield packed(weight[start : start + step], matrix.kind)


def packed(weight: Tensor, kind: int) -> np.ndarray:
    """[outputs, inputs] -> [outputs / 16, inputs, 16]: 16 weights that are multiplied with the same input are
    adjacent."""
    if kind in (INT8, INT4):
        return quantise_weights(weight.float().numpy(), FORM_OF_KIND[kind])
    if kind == BFLOAT16_AMX:
        tiles: np.ndarray = to_tiles(weight).view(torch.int16).numpy()
        return tiles
    blocks = weight.view(len(weight) // LANES, LANES, weight.shape[1]).transpose(1, 2).contiguous()
    lanes: np.ndarray = (blocks.view(torch.int16) if kind == BFLOAT16 else blocks).numpy()
    return lanes


def to_tiles(weight: Tensor) -> Tensor:
    """[outputs, inputs] as the tiles of `amx.py`, [outputs / 16, inputs / 32, 16 pairs, 16 outputs, 2], in bfloat16."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, -inputs % amx.DEPTH))
    parts = padded.view(outputs // LANES, LANES, -1, amx.DEPTH // 2, 2)
    return parts.permute(0, 2, 3, 1, 4).contiguous()


def _key(checkpoint: Checkpoint, kind: int) -> str:
    """Changes whenever the weights may have changed."""
    files = sorted(Path(checkpoint.folder).glob("*.safetensors"))
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    identity = [str(checkpoint.folder.resolve()), states, str(checkpoint.dtype), kind, scales_apart(), _LAYOUT]
    if checkpoint.variant:
        identity.append(checkpoint.variant)
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
