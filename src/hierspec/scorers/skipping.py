"""The model without some of its layers: a draft that needs no training and no weights of its own."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from torch import Tensor

from hierspec.backends.base import Batch, Decoder, Memory
from hierspec.core.errors import HierspecError
from hierspec.scorers.base import ModelScorer, WholeHead
from hierspec.scorers.pool import StaircasePool


class SkippingDecoder:
    """A decoder that leaves layers out. It needs a pool of its own: from the first of them on its states differ."""

    def __init__(self, decoder: Decoder, skipped: Collection[int]) -> None:
        layers = decoder.config.layers
        outside = [layer for layer in skipped if not 0 <= layer < layers]
        if outside:
            raise HierspecError(f"skip_layers names layer {outside[0]}, but the model's layers are 0 to {layers - 1}.")
        if len(set(skipped)) == layers:
            raise HierspecError("skip_layers names every layer of the model; leave some to run.")
        self._decoder = decoder
        self._runs = [layer not in set(skipped) for layer in range(layers)]
        self.backend, self.config, self.embedding = decoder.backend, decoder.config, decoder.embedding
        self.dtype = decoder.dtype
        self.head_weight, self.norm = decoder.head_weight, decoder.norm
        self.weight_bytes, self.products = decoder.weight_bytes, decoder.products
        self.layer_rows = 0

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> Memory:
        return self._decoder.memory(taps, most_bytes)

    def embed(self, tokens: np.ndarray) -> Tensor:
        return self._decoder.embed(tokens)

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        return self._decoder.logits(states, norm)

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Run the layers of start..stop that are not skipped, in contiguous ranges."""
        first = start
        for layer in range(start, stop + 1):
            if layer < stop and self._runs[layer]:
                continue
            if first < layer:
                hidden = self._decoder.run(memory, batch, hidden, first, layer)
                self.layer_rows += len(batch.positions) * (layer - first)
            if layer < stop and layer + 1 in memory.taps:  # a skipped layer at a tap: states pass through it
                memory.states[memory.taps.index(layer + 1), batch.slots] = hidden
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
