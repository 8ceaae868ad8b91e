"""Weights as the compiled pass reads them: packed once into a file of the cache, and mapped from there ever after.

So a model is held in memory once, as pages that the system may share between processes and take back; what it was
packed from is not read again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.cpu import amx
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.product import BFLOAT16, BFLOAT16_AMX, FLOAT32, INT4, INT8
from hierspec.backends.cpu.quantised import block_bytes, quantise_weights
from hierspec.cache import folder_name, keep_within_limit
from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.errors import HierspecError
from hierspec.in_use import claim, mark_used
from hierspec.paths import cache_folder, whole_file
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.checkpoints.load import Checkpoint

KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "bfloat16-matrix": BFLOAT16_AMX, "int8": INT8, "int4": INT4}
_NAMES = {kind: name for name, kind in KINDS.items()}
_LAYOUT = 3  # count up when the same weights would now be packed differently
_ALIGNED = 64
_WORTH_A_FILE = 32 << 20  # bytes; smaller models are packed at every start
_PARTS = (("self_attn.q", "self_attn.k", "self_attn.v"), ("self_attn.o",), ("mlp.gate",), ("mlp.up",), ("mlp.down",))


@dataclass(frozen=True, eq=False)
class PackedWeights:
    kind: int  # how the layers are stored
    head_kind: int
    layers: np.ndarray  # [layers, 5]: addresses of qkv, output, gate, up, down
    head: int  # address
    bytes: int  # of all of it: what a pass over one token reads
    owner: Any  # keeps the memory

    @property
    def name(self) -> str:
        return _NAMES[self.kind]


def kind_for(name: str, matrices: bool = True) -> int:
    """How weights of this name are stored here: bfloat16 as matrix units take it, where there are such and they may."""
    return BFLOAT16_AMX if name == "bfloat16" and matrices and amx.available() else KINDS[name]


def pack_in_memory(config: DecoderConfig, weights: Mapping[str, Tensor], kind: int) -> PackedWeights:
    """The weights packed into memory of this process."""
    arrays = [packed(weight, own) for weight, own in _matrices(config, weights, kind)]
    return _addressed(config, kind, [array.ctypes.data for array in arrays], sum(a.nbytes for a in arrays), arrays)


def pack_layers(config: DecoderConfig, weights: Mapping[str, Tensor], kind: int) -> PackedWeights:
    """The same of layers that have no head of their own."""
    layers = islice(_matrices(config, weights, kind), config.layers * len(_PARTS))
    arrays = [packed(weight, own) for weight, own in layers]
    return _addressed(
        config, kind, [*(array.ctypes.data for array in arrays), 0], sum(a.nbytes for a in arrays), arrays
    )


def packed_weights(checkpoint: Checkpoint, kind: int, progress: Progress = silent) -> PackedWeights:
    """The weights from their file, which is made on the first call."""
    config = checkpoint.config
    sizes = [packed_bytes(shape, own) for shape, own in _shapes(config, kind)]
    if sum(sizes) < _WORTH_A_FILE:
        return pack_in_memory(config, checkpoint.weights, kind)
    starts = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
    path = cache_folder() / "packed" / f"{folder_name(checkpoint.folder)[:80]}-{_key(checkpoint, kind)}.weights"
    claim(path)  # before it is looked at: another process may be deleting it
    if not path.is_file() or path.stat().st_size != starts[-1]:
        try:
            with whole_file(path) as temporary, temporary.open("wb") as file:
                for number, (weight, own) in enumerate(_matrices(config, checkpoint.weights, kind)):
                    file.write(packed(weight, own).data)
                    file.write(bytes(starts[number + 1] - starts[number] - sizes[number]))
                    progress("Packing weights (once)", number + 1, len(sizes))
        except HierspecError:  # a full disk, say: memory will do
            return pack_in_memory(config, checkpoint.weights, kind)
        claim(path)
        keep_within_limit()
    mark_used(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    first = np.frombuffer(mapped, np.uint8).ctypes.data
    return _addressed(config, kind, [first + start for start in starts[:-1]], sum(sizes), mapped)


def _addressed(config: DecoderConfig, kind: int, addresses: list[int], size: int, owner: Any) -> PackedWeights:
    layers = np.array(addresses[:-1], np.int64).reshape(config.layers, len(_PARTS))
    return PackedWeights(kind, _head_kind(kind), layers, addresses[-1], size, owner)


def _head_kind(kind: int) -> int:
    # Four bits are too few to tell the best token from the second best; GGUF files keep their heads in more, too.
    return INT8 if kind == INT4 else kind


def _shapes(config: DecoderConfig, kind: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Outputs and inputs of every matrix, and how it is stored, in the order of the file."""
    heads, kv_heads = config.heads * config.head_size, config.kv_heads * config.head_size
    hidden, intermediate = config.hidden, config.intermediate
    for _ in range(config.layers):
        yield (heads + 2 * kv_heads, hidden), kind
        yield (hidden, heads), kind
        yield (intermediate, hidden), kind
        yield (intermediate, hidden), kind
        yield (hidden, intermediate), kind
    yield (config.vocabulary, hidden), _head_kind(kind)


def _matrices(config: DecoderConfig, weights: Mapping[str, Tensor], kind: int) -> Iterator[tuple[Tensor, int]]:
    for layer in range(config.layers):
        for names in _PARTS:
            yield torch.cat([weights[f"model.layers.{layer}.{name}_proj.weight"] for name in names]), kind
    yield weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"], _head_kind(kind)


def packed_bytes(shape: tuple[int, int], kind: int) -> int:
    outputs, inputs = shape
    if kind in (INT8, INT4):
        bits = 8 if kind == INT8 else 4
        return outputs // LANES * block_bytes(inputs, bits)
    if kind == BFLOAT16_AMX:
        return outputs // LANES * amx.steps(inputs) * amx.TILE_BYTES
    return outputs * inputs * (4 if kind == FLOAT32 else 2)


def packed(weight: Tensor, kind: int) -> np.ndarray:
    """[outputs, inputs] -> [outputs / 16, inputs, 16]: the 16 weights that meet one input are neighbours."""
    if kind in (INT8, INT4):
        return quantise_weights(weight.float().numpy(), 8 if kind == INT8 else 4)
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
    identity = [str(checkpoint.folder.resolve()), states, str(checkpoint.dtype), kind, _LAYOUT]
    if checkpoint.variant:
        identity.append(checkpoint.variant)
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
