"""Weights as the compiled pass reads them: packed once into a file of the cache, and mapped from there ever after.

So a model is held in memory once, as pages that the system may share between processes and take back; what it was
packed from is not read again. Packing takes one part of one matrix at a time, so it needs no memory of its own.
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
FILE = -1  # no kind: each matrix has the one that holds what the GGUF file has
_NAMES = {**{kind: form.name for kind, form in FORM_OF_KIND.items()}, **{kind: name for name, kind in KINDS.items()}}
_KIND_OF_FORM = {form: kind for kind, form in FORM_OF_KIND.items()}
_LAYOUT = 7  # count up when the same weights would now be packed differently
_ALIGNED = 64
_WORTH_A_FILE = 32 << 20  # bytes; smaller models are packed at every start
_AT_ONCE = 1 << 22  # weights
# In the order of `layer_products.py`.
_MATRICES = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")


@dataclass(frozen=True, eq=False)
class PackedWeights:
    name: str  # how they are stored
    kinds: tuple[int, ...]  # of products that layers need
    layer_kinds: np.ndarray  # [layers, 7]: which of those each matrix is
    layers: np.ndarray  # [layers, 7]: addresses
    head_kind: int
    head: int  # address
    bytes: int  # of all of it: what a pass over one token reads
    owner: Any  # keeps the memory


@dataclass(frozen=True)
class _Matrix:
    """One matrix that is to be packed."""

    name: str
    shape: tuple[int, int]
    kind: int

    @property
    def bytes(self) -> int:
        return packed_bytes(self.shape, self.kind)


def kind_for(name: str, matrices: bool = True) -> int:
    """How weights of this name are stored here: bfloat16 as matrix units take it, where there are such and they may."""
    if name == "file":
        return FILE
    return BFLOAT16_AMX if name == "bfloat16" and matrices and amx.available() else KINDS[name]


def pack_in_memory(config: DecoderConfig, weights: Mapping[str, Tensor], kind: int, head: bool = True) -> PackedWeights:
    """The weights packed into memory of this process; `head`: with one."""
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
    """The weights from their file, which is made on the first call."""
    config = checkpoint.config
    matrices = _matrices(config, checkpoint.weights, kind)
    starts = _starts(matrices)
    if starts[-1] < _WORTH_A_FILE:
        return pack_in_memory(config, checkpoint.weights, kind)
    path = cache_folder() / "packed" / f"{folder_name(checkpoint.folder)[:80]}-{_key(checkpoint, kind)}.weights"
    claim(path)  # before it is looked at: another process may be deleting it
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
        except HierspecError:  # a full disk, say: memory will do
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
    """Where each begins, and where the last one ends."""
    sizes = [-(-matrix.bytes // _ALIGNED) * _ALIGNED for matrix in matrices]
    starts: list[int] = np.cumsum([0, *sizes]).tolist()
    return starts


def _addressed(config: DecoderConfig, kind: int, matrices: list[_Matrix], first: int, owner: Any) -> PackedWeights:
    """Matrices that stand in memory from the address `first` on."""
    addresses = [first + start for start in _starts(matrices)]
    count = config.layers * len(_MATRICES)
    layers, head = matrices[:count], matrices[count:]
    # What all kinds share is taken from the first: the one that may need tiles made ready.
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
    # Four bits are too few to tell the best token from the second best; GGUF files keep their heads in more, too.
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
    """The kind whose numbers are exactly those of the file."""
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
    """A matrix as it is packed, some outputs after others."""
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
    """[outputs, inputs] -> [outputs / 16, inputs, 16]: the 16 weights that meet one input are neighbours."""
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
