"""The compiled CPU backend: numba, and one team of threads for everything that runs on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hierspec import compiling
from hierspec.backends.base import Decoder, DraftWriter, Join, PassWriter, RoundWriter, Shortlist
from hierspec.backends.cpu import amx
from hierspec.backends.cpu.answers import answer, answers
from hierspec.backends.cpu.decoder import CpuDecoder
from hierspec.backends.cpu.drafting import CpuDraftWriter
from hierspec.backends.cpu.features import is_arm
from hierspec.backends.cpu.forms import INT4, INT8
from hierspec.backends.cpu.functions import needed_functions
from hierspec.backends.cpu.heads import CpuJoin, CpuShortlist
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.packing import KINDS, PackedWeights, kind_for, pack_in_memory, packed_weights
from hierspec.backends.cpu.passes import CpuPassWriter
from hierspec.backends.cpu.product import BFLOAT16, BFLOAT16_AMX, FLOAT32
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.draft_tree import DraftTree
from hierspec.core.interfaces import Answer, Ask
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.checkpoints.load import Checkpoint

_LOW_BITS = {"int8": INT8, "int4": INT4}
_EMBEDDINGS = torch.float32, torch.bfloat16  # dtypes that compiled functions read
_BYTES_IN_A_FILE = 0.75  # bytes per weight, roughly: files differ


class CpuBackend:
    name = "compiled"
    exact = True
    asynchronous = False
    formats: tuple[str, ...] = ("float32", "bfloat16", "int8", "int4", "file")
    preparing = 0.0

    def __init__(self, threads: int, matrix_units: bool = True) -> None:
        self.device = torch.device("cpu")
        self.team = ThreadTeam(threads)
        self._matrix_units = matrix_units  # use AMX for bfloat16 if the CPU has it

    def refuses(self, config: DecoderConfig, format: str) -> str:
        sizes = (config.hidden, config.intermediate, config.head_size, config.vocabulary)
        if any(size % LANES for size in sizes):
            return f"its sizes are not multiples of {LANES}"
        if config.output_bias or config.mlp_bias:
            return "it has biases outside of queries, keys and values"
        if format not in self.formats:
            return "its weights must be float32 or bfloat16"
        inputs = (config.hidden, config.intermediate, config.heads * config.head_size)
        # The head has 8 bits even if the layers have 4.
        if format in _LOW_BITS and any(size % INT8.group for size in inputs):
            return f"its sizes are not multiples of {INT8.group}"
        return "" if os.name == "posix" else "this system is not supported"

    def decoder(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        format: str,
        origin: Checkpoint | None = None,
        progress: Progress = silent,
    ) -> CpuDecoder:
        kind = kind_for(format, self._matrix_units)
        if origin is None:
            return self.with_weights(config, weights, pack_in_memory(config, weights, kind))
        return self.with_weights(config, weights, packed_weights(origin, kind, progress))

    def with_weights(self, config: DecoderConfig, weights: Mapping[str, Tensor], packed: PackedWeights) -> CpuDecoder:
        """A decoder with weights that are already packed."""
        return CpuDecoder(self, self.team, config, weights, packed, self._cache_format({*packed.kinds}))

    def _cache_format(self, kinds: set[int]) -> str:
        """How keys and values are stored: rounded if weights are quantised, and always for tile attention.

        Long texts spend most of their time reading them. ARM keeps float32, since float16 was not measured there.
        """
        quantised = not kinds <= {FLOAT32, BFLOAT16}
        if BFLOAT16_AMX in kinds or (quantised and self._matrix_units and amx.available()):
            return "bfloat16"
        return "float16" if quantised and not is_arm() else "float32"

    def layers(self, config: DecoderConfig, weights: Mapping[str, Tensor], format: str) -> Decoder:
        # Some drafters have a layer without its first norm, and some have sizes that are refused: torch runs them all.
        if self.refuses(config, format) or "model.layers.0.input_layernorm.weight" not in weights:
            return TorchBackend(self.device).layers(config, weights, "float32")
        packed = pack_in_memory(config, weights, KINDS[format], head=False)
        return self.with_weights(config, weights, packed)

    def shortlist(self, decoder: Decoder, tokens: np.ndarray, format: str) -> Shortlist:
        # Four bits are too few to tell the best token from the second best.
        kind = KINDS["int8" if format == "int4" else format]
        return CpuShortlist(decoder.head_weight, tokens, decoder.config.norm_eps, kind, self.team)

    def join(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None, format: str) -> Join:
        return CpuJoin(decoder, matrix.to(decoder.embedding.dtype), bias, KINDS[format], self.team)

    def draft_writer(
        self,
        decoder: Decoder,
        layers: Decoder,
        joins: tuple[Join, Tensor | None, Join, Tensor | None],
        head: tuple[Shortlist, Tensor | None],
    ) -> DraftWriter | None:
        first, first_norms, then, norms = joins
        if not (isinstance(decoder, CpuDecoder) and isinstance(layers, CpuDecoder)):
            return None
        if decoder.embedding.dtype not in _EMBEDDINGS:
            return None
        assert isinstance(first, CpuJoin)
        assert isinstance(then, CpuJoin)
        assert isinstance(head[0], CpuShortlist)
        return CpuDraftWriter(
            decoder.embedding_table, layers, (first, first_norms), (then, norms), head[0], head[1], self.team
        )

    def pass_writer(self, decoder: Decoder) -> PassWriter | None:
        if not isinstance(decoder, CpuDecoder) or decoder.embedding.dtype not in _EMBEDDINGS:
            return None
        return CpuPassWriter(decoder, self.team)

    def round_writer(self, drafts: DraftWriter, passes: PassWriter, tree: DraftTree) -> RoundWriter | None:
        return None

    def pick(self, asks: Sequence[Ask], logits: Tensor) -> list[Answer]:
        return [answer(asks[0], logits, self.team)] if len(asks) == 1 else answers(asks, logits, self.team)

    def bytes_per_weight(self, format: str) -> float:
        if form := _LOW_BITS.get(format):
            return form.unit_bytes / (form.unit * LANES)
        if format == "file":
            return _BYTES_IN_A_FILE
        return float(getattr(torch, format).itemsize)

    def synchronize(self) -> None:
        return

    def compile(self, draft_heads: bool = False, progress: Progress = silent) -> None:
        """Compiles all that greedy decoding needs: takes seconds on a machine's first use, later reads files."""
        compiling.finish(needed_functions(draft_heads), progress)
