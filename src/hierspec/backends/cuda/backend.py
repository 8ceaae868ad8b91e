"""The CUDA backend: one NVIDIA GPU, kernels in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Decoder, DraftWriter, Join, PassWriter, RoundWriter, Shortlist
from hierspec.backends.cuda.attention import LARGEST_GROUP
from hierspec.backends.cuda.branches import MOST_BRANCHED
from hierspec.backends.cuda.decoder import CudaDecoder
from hierspec.backends.cuda.drafting import CudaDraftWriter
from hierspec.backends.cuda.graphs import Graphs
from hierspec.backends.cuda.heads import CudaJoin, CudaShortlist
from hierspec.backends.cuda.launching import Compiling, interpreted
from hierspec.backends.cuda.passes import CudaPassWriter
from hierspec.backends.cuda.pick import Picker
from hierspec.backends.cuda.rounds import CudaRoundWriter
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.draft_tree import DraftTree
from hierspec.core.interfaces import Answer, Ask
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.checkpoints.load import Checkpoint

_HEAD_SIZES = (32, 64, 128, 256)
_OLDEST = (8, 0)  # compute capability with bfloat16 tensor cores


class CudaBackend:
    name = "cuda"
    exact = True
    asynchronous = True
    formats: tuple[str, ...] = ("bfloat16", "int8")

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)  # a CPU only if kernels are interpreted, for tests

    @property
    def preparing(self) -> float:
        return Graphs.preparing + Compiling.seconds

    @cached_property
    def _picker(self) -> Picker:
        return Picker(self.device)

    def refuses(self, config: DecoderConfig, format: str) -> str:
        if format not in self.formats:
            return "its weights must be bfloat16 or int8"
        if config.head_size not in _HEAD_SIZES:
            return f"its heads have {config.head_size} numbers, not {', '.join(map(str, _HEAD_SIZES))}"
        if config.heads // config.kv_heads > LARGEST_GROUP:
            return f"more than {LARGEST_GROUP} heads share one for keys"
        if config.output_bias or config.mlp_bias:
            return "it has biases outside of queries, keys and values"
        if config.hidden % 16 or config.intermediate % 16:
            return "its sizes are not multiples of 16"
        return why_not_here(self.device)

    def decoder(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        format: str,
        origin: Checkpoint | None = None,
        progress: Progress = silent,
    ) -> CudaDecoder:
        return CudaDecoder(self, config, weights, format)

    def layers(self, config: DecoderConfig, weights: Mapping[str, Tensor], format: str) -> Decoder:
        # Some drafters have a layer without its first norm, and some have sizes that are refused: torch runs them all.
        if self.refuses(config, format) or "model.layers.0.input_layernorm.weight" not in weights:
            return TorchBackend(self.device).layers(config, weights, "float32")
        return CudaDecoder(self, config, weights, format)

    def shortlist(self, decoder: Decoder, tokens: np.ndarray, format: str) -> Shortlist:
        assert isinstance(decoder, CudaDecoder)
        return CudaShortlist(decoder, tokens, format)

    def join(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None, format: str) -> Join:
        assert isinstance(decoder, CudaDecoder)
        return CudaJoin(decoder, matrix, bias, format)

    def draft_writer(
        self,
        decoder: Decoder,
        layers: Decoder,
        joins: tuple[Join, Tensor | None, Join, Tensor | None],
        head: tuple[Shortlist, Tensor | None],
    ) -> DraftWriter | None:
        first, first_norms, then, norms = joins
        if not isinstance(layers, CudaDecoder):
            return None
        assert isinstance(first, CudaJoin)
        assert isinstance(then, CudaJoin)
        assert isinstance(head[0], CudaShortlist)
        return CudaDraftWriter(layers, (first, first_norms), (then, norms), head[0], head[1], self._picker)

    def pass_writer(self, decoder: Decoder) -> PassWriter | None:
        return CudaPassWriter(decoder) if isinstance(decoder, CudaDecoder) else None

    def round_writer(self, drafts: DraftWriter, passes: PassWriter, tree: DraftTree) -> RoundWriter | None:
        if not (isinstance(drafts, CudaDraftWriter) and isinstance(passes, CudaPassWriter)):
            return None
        if max(len(tree.continued(depth)) for depth in range(tree.depth)) > MOST_BRANCHED:
            return None
        return CudaRoundWriter(drafts, passes, tree)

    def pick(self, asks: Sequence[Ask], logits: Tensor) -> list[Answer]:
        return self._picker.answers(asks, logits)

    def bytes_per_weight(self, format: str) -> float:
        return 1.0 if format == "int8" else float(getattr(torch, format).itemsize)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def why_not_here(device: torch.device) -> str:
    """Why kernels do not run on this device; "" if they do."""
    if device.type != "cuda":
        return "" if interpreted() else "it runs on an NVIDIA GPU only"
    if torch.version.cuda is None:
        return "this GPU is not NVIDIA's"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return "this GPU has no matrix units for bfloat16"
    return ""
