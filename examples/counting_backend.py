"""A whole backend in under 100 lines: a decoder that counts. Run it: python examples/counting_backend.py

It shows what a backend has to answer (`hierspec/backends/base.py` is the contract) and nothing else: what a real one
computes in its layers, this one knows. Scorers, the cache of texts, exits and the engine run on it unchanged.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, Memory
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.scorers.base import ModelScorer, WholeHead
from hierspec.scorers.pool import StaircasePool
from hierspec.stores.context import ContextStore
from hierspec.testing.checkpoints import tiny_config


class CountingMemory:
    """States by slot. Counting needs no keys and values, so there are none."""

    page = 16

    def __init__(self, taps: tuple[int, ...], most_bytes: int) -> None:
        self.taps, self.bytes_per_page = taps, self.page * len(taps) * 4
        self.pages = most_bytes // self.bytes_per_page
        self.states = torch.zeros(len(taps), self.pages * self.page, 1)

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        self.states[:, to] = self.states[:, source]


class CountingDecoder:
    """Every layer leaves a state as it is, and the head says: one more."""

    def __init__(self, backend: CountingBackend, config: DecoderConfig) -> None:
        self.backend, self.config, self.dtype = backend, config, torch.float32
        self.embedding = torch.arange(config.vocabulary, dtype=torch.float32)[:, None]
        self.head_weight, self.norm = self.embedding, torch.ones(1)
        self.products, self.weight_bytes, self.layer_rows = "counting", 0, 0

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> CountingMemory:
        return CountingMemory(taps, most_bytes)

    def embed(self, tokens: np.ndarray) -> Tensor:
        return self.embedding[tokens]

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        self.layer_rows += len(batch.positions) * (stop - start)
        for tap, layer in enumerate(memory.taps):
            if start < layer <= stop:
                memory.states[tap, batch.slots] = hidden
        return hidden

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        following = (states[:, 0].long() + 1) % self.config.vocabulary
        return torch.nn.functional.one_hot(following, self.config.vocabulary).float()


class CountingBackend(TorchBackend):
    """Picks, drafters' heads and joins are torch's: a backend may borrow what it has nothing better for."""

    name, exact = "counting", True

    def decoder(self, config, weights=None, format="float32", origin=None, progress=None):  # type: ignore[no-untyped-def]
        return CountingDecoder(self, config)


def main() -> None:
    config = tiny_config(layers=4, vocabulary=320)
    decoder = CountingBackend().decoder(config)
    pool = StaircasePool(decoder, budget=1 << 20)
    target = ModelScorer("target", decoder, pool, config.layers, WholeHead(decoder))
    hierarchy = Hierarchy((Tier(target, stores=(ContextStore(),)),))
    request = Request([7, 8, 9, 10, 11, 7, 8, 9], Sampling(max_tokens=12), hierarchy)
    for _ in Engine().run([request]):
        pass
    passes = request.stats.passes
    print(f"{request.output} in {passes} passes, {pool.bytes_held()} bytes held")


if __name__ == "__main__":
    main()
