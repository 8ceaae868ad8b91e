"""The model without some of its layers: a draft that needs no training and no weights of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from hierspec.backends.torch.decoder import Kept, Span
from hierspec.core.errors import HierspecError
from hierspec.scorers.base import Decoder, ModelScorer, WholeHead
from hierspec.scorers.staircase import KeyValueMemory, StaircasePool


class SkippingDecoder:
    """A decoder that leaves layers out. From the first of them on its states are not the model's, so it needs a
    pool of its own."""

    def __init__(self, decoder: Decoder, skipped: Collection[int]) -> None:
        layers = decoder.config.layers
        outside = [layer for layer in skipped if not 0 <= layer < layers]
        if outside:
            raise HierspecError(f"skip_layers names layer {outside[0]}, but the model's layers are 0 to {layers - 1}.")
        if len(set(skipped)) == layers:
            raise HierspecError("skip_layers names every layer of the model; leave some to run.")
        self._decoder = decoder
        self._kept = [layer not in set(skipped) for layer in range(layers)]
        self.config, self.embedding = decoder.config, decoder.embedding
        self.dtype, self.device, self.team = decoder.dtype, decoder.device, decoder.team
        self.head_weight, self.norm = decoder.head_weight, decoder.norm
        self.weight_bytes, self.products = decoder.weight_bytes, decoder.products
        self.layer_rows = 0

    def new_memory(self) -> KeyValueMemory:
        return self._decoder.new_memory()

    def embed(self, tokens: np.ndarray) -> Tensor:
        return self._decoder.embed(tokens)

    def head(self, hidden: Tensor, norm: Tensor | None = None) -> Tensor:
        return self._decoder.head(hidden, norm)

    def run(
        self, hidden: Tensor, positions: np.ndarray, spans: Sequence[Span], start: int, stop: int, kept: Kept = ()
    ) -> Tensor:
        """The layers of start..stop that are not skipped, in runs of neighbours."""
        if kept:  # from one of those layers to the next
            for layer, states in kept:
                hidden = self.run(hidden, positions, spans, start, layer)
                states.copy_(hidden)
                start = layer
        first = start
        for layer in range(start, stop + 1):
            if layer < stop and self._kept[layer]:
                continue
            if first < layer:
                hidden = self._decoder.run(hidden, positions, spans, first, layer)
                self.layer_rows += len(positions) * (layer - first)
            first = layer + 1
        return hidden


def skipping_scorer(decoder: Decoder, skipped: Collection[int], kv_memory: int) -> ModelScorer:
    """The model without these layers as a scorer, with a cache of its own."""
    skipping = SkippingDecoder(decoder, skipped)
    return ModelScorer(
        f"without {in_runs(skipped)}",
        skipping,
        StaircasePool(skipping, kv_memory),
        decoder.config.layers,
        WholeHead(skipping),
    )


def in_runs(layers: Collection[int]) -> str:
    """3,5-8 and the like."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
