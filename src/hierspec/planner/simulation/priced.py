"""A model's scorers without computation: their real bookkeeping runs, while layers and heads only add up seconds.

Which positions a pass must run through which layers depends on what earlier passes left in the cache. That logic is not
repeated here: the scorers are the real ones, on decoders whose layers cost what a table says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, Decoder, Memory
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Ask, RequestView
from hierspec.planner.simulation.cost_table import CostTable, Curve, Parts
from hierspec.scorers.base import ModelScorer, StateScorer
from hierspec.scorers.drafters import AdapterScorer, FeatureScorer, Layer, SmallScorer
from hierspec.scorers.pool import StaircasePool

_MEMORY = 1 << 40  # bytes: nothing is ever evicted, since nothing is really stored


@dataclass
class Meter:
    seconds: float = 0.0


class PricedMemory:
    """Keys, values and states that nobody reads. A page holds a whole text, so a slot gives the position."""

    page, pages, bytes_per_page = 1 << 20, 1 << 20, 0

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.states = torch.zeros(1).expand(len(taps), self.page * self.pages, 1)

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        return


class PricedDecoder:
    """Layers that take no time and count what they would have taken. States have one number."""

    def __init__(self, decoder: Decoder, meter: Meter) -> None:
        self.config = replace(decoder.config, hidden=1)
        self.embedding, self.head_weight, self.norm = decoder.embedding, decoder.head_weight, decoder.norm
        self.dtype, self.backend = torch.float32, decoder.backend
        self.products, self.weight_bytes, self.layer_rows = decoder.products, 0, 0
        self.curves: dict[int, Curve] = {}  # by number of layers: seconds of the first layers
        self._meter = meter

    def memory(self, taps: tuple[int, ...], most_bytes: int) -> PricedMemory:
        return PricedMemory(taps)

    def embed(self, tokens: np.ndarray) -> Tensor:
        return torch.zeros(len(tokens), 1)

    def logits(self, states: Tensor, norm: Tensor | None = None) -> Tensor:
        raise AssertionError("a priced scorer has a head of its own")

    def run(self, memory: Memory, batch: Batch, hidden: Tensor, start: int, stop: int) -> Tensor:
        rows, texts = len(batch.positions), len(batch.tables)
        context = int(batch.positions[batch.text_starts[1:] - 1].sum() + texts) // texts
        upper, lower = (self._up_to(layers, rows, context, texts) for layers in (stop, start))
        self._meter.seconds += max(upper - lower, 0.0)
        return hidden

    def _up_to(self, layers: int, rows: int, context: int, batch: int) -> float:
        """Seconds of the first `layers` layers: as measured, or interpolated between measured numbers of layers."""
        if layers in self.curves:
            return self.curves[layers].seconds(rows, context, batch)
        if not layers:
            return 0.0
        below = max((known for known in self.curves if known < layers), default=0)
        above = min((known for known in self.curves if known > layers), default=0)
        if not above:
            raise HierspecError("Nobody has measured what passes of the target cost; put it first among the scorers.")
        one, two = (self._up_to(known, rows, context, batch) for known in (below, above))
        return one + (two - one) * (layers - below) / (above - below)


@dataclass(frozen=True, eq=False)
class PricedHead:
    curve: Curve
    meter: Meter

    def logits(self, asks: Sequence[Ask], states: Tensor) -> Tensor:
        self.meter.seconds += self.curve.seconds(len(states))
        return states

    def release(self, request: RequestView) -> None:
        return


@dataclass
class PricedJoin:
    """A join is measured together with the layers after it: its time is what these rows take more than others do."""

    meter: Meter
    these: Curve | None = None
    others: Curve | None = None
    bytes: int = 0

    def __call__(
        self, tokens: np.ndarray, states: Tensor, taps: Sequence[int], slots: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        if self.these is not None and self.others is not None:
            context, rows = int(slots[-1]) % PricedMemory.page + 1, len(tokens)
            more = self.these.seconds(rows, context) - self.others.seconds(rows, context)
            self.meter.seconds += max(more, 0.0)
        return torch.zeros(len(tokens), 1)


@dataclass
class PricedScorers:
    """Priced copies of scorers. What the real ones share (a checkpoint, its staircases) their copies share too."""

    table: CostTable
    meter: Meter = field(default_factory=Meter)
    _decoders: dict[int, PricedDecoder] = field(default_factory=dict)
    _pools: dict[int, StaircasePool] = field(default_factory=dict)
    _scorers: dict[int, StateScorer] = field(default_factory=dict)

    def copy(self, scorer: StateScorer) -> StateScorer:
        if id(scorer) not in self._scorers:
            self._scorers[id(scorer)] = self._copy(scorer, self.table.of(scorer))
        return self._scorers[id(scorer)]

    def seconds(self, scorer: StateScorer, asks: Sequence[Ask]) -> float:
        """The time of a pass of this priced scorer, given all passes before it."""
        before = self.meter.seconds
        with torch.inference_mode():
            scorer.head.logits(asks, scorer.states(asks))
        return self.meter.seconds - before

    def forget(self) -> None:
        """Drop everything that counts as computed."""
        for pool in self._pools.values():
            pool.clear()

    def _copy(self, scorer: StateScorer, parts: Parts) -> StateScorer:
        decoder = self._decoder(scorer.decoder)
        pool = self._pool(scorer.pool, decoder)
        if scorer.layers:
            pool.add_tap(scorer.layers)
        if parts.base is not None:
            decoder.curves[scorer.layers] = parts.base
        changes: dict[str, Any] = {"decoder": decoder, "pool": pool, "head": PricedHead(parts.head, self.meter)}
        if isinstance(scorer, ModelScorer):
            return replace(scorer, **changes)
        assert isinstance(scorer, AdapterScorer | FeatureScorer | SmallScorer)
        own = self._decoder(scorer.layer.decoder)
        assert parts.own is not None
        own.curves[own.config.layers] = parts.later or parts.own
        changes["layer"] = Layer(own, self._pool(scorer.layer.pool, own))
        if isinstance(scorer, FeatureScorer):
            first = PricedJoin(self.meter, parts.own, parts.later)
            changes |= {"first": first, "join": PricedJoin(self.meter)}
            for layer in scorer.reads:
                pool.add_tap(layer)
        return replace(scorer, **changes)

    def _decoder(self, decoder: Decoder) -> PricedDecoder:
        return self._decoders.setdefault(id(decoder), PricedDecoder(decoder, self.meter))

    def _pool(self, pool: StaircasePool, decoder: PricedDecoder) -> StaircasePool:
        if id(pool) not in self._pools:
            self._pools[id(pool)] = StaircasePool(decoder, _MEMORY)
        return self._pools[id(pool)]
