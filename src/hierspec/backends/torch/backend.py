"""The torch backend: any device, any sizes; the reference for the other backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Decoder, DraftWriter, Join, PassWriter, RoundWriter, Rows, Shortlist
from hierspec.backends.torch.decoder import TorchDecoder
from hierspec.backends.torch.heads import TorchJoin, TorchShortlist
from hierspec.backends.torch.pick import answer
from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.draft_tree import DraftTree
from hierspec.core.interfaces import Answer, Ask
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.checkpoints.load import Checkpoint


class TorchBackend:
    name = "torch"
    exact = False  # libraries choose different kernels for different widths
    asynchronous = False
    formats: tuple[str, ...] = ("float32", "bfloat16", "float16")
    preparing = 0.0

    def __init__(self, device: torch.device | str = "cpu", pick: Callable[[Ask, Tensor], Answer] = answer) -> None:
        self.device = torch.device(device)
        self._pick = pick  # a faster function with the same results, if there is one

    def refuses(self, config: DecoderConfig, format: str) -> str:
        return "" if format in self.formats else "only the compiled backend, on a CPU, has such weights"

    def decoder(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        format: str,
        origin: Checkpoint | None = None,
        progress: Progress = silent,
    ) -> TorchDecoder:
        dtype = getattr(torch, format)
        return TorchDecoder(self, config, {name: tensor.to(dtype) for name, tensor in weights.items()})

    def layers(self, config: DecoderConfig, weights: Mapping[str, Tensor], format: str) -> Decoder:
        return self.decoder(config, weights, format)

    def shortlist(self, decoder: Decoder, tokens: np.ndarray, format: str) -> Shortlist:
        return TorchShortlist(_tensor(decoder.head_weight), tokens, decoder.config.norm_eps)

    def join(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None, format: str) -> Join:
        return TorchJoin(decoder, matrix, bias)

    def draft_writer(
        self,
        decoder: Decoder,
        layers: Decoder,
        joins: tuple[Join, Tensor | None, Join, Tensor | None],
        head: tuple[Shortlist, Tensor | None],
    ) -> DraftWriter | None:
        return None

    def pass_writer(self, decoder: Decoder) -> PassWriter | None:
        return None

    def round_writer(self, drafts: DraftWriter, passes: PassWriter, tree: DraftTree) -> RoundWriter | None:
        return None

    def pick(self, asks: Sequence[Ask], logits: Tensor) -> list[Answer]:
        parts = logits.split([1 + len(ask.proposal) for ask in asks])
        return [self._pick(ask, part) for ask, part in zip(asks, parts, strict=True)]

    def bytes_per_weight(self, format: str) -> float:
        return float(getattr(torch, format).itemsize)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _tensor(rows: Rows) -> Tensor:
    """A table that is a tensor, as in all decoders of this backend."""
    assert isinstance(rows, Tensor)
    return rows
