"""Scorers that add one layer of their own to a checkpoint's states: adapters of exits, and feature drafters.

The layer has a staircase of its own, of one storey, aligned to the same context and proposal as the checkpoint's. So it
is a memo like any other: what is lacking is computed, what is kept is computed once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hierspec.core.hierarchy import AnyRequest, Ask
from hierspec.models.cache import Staircase, StaircasePool
from hierspec.models.scorer import AnyDecoder, StateScorer, advance, after, where


@dataclass(frozen=True, eq=False)
class Layer:
    """The layer of a branch and what it has computed."""

    decoder: AnyDecoder
    pool: StaircasePool


@dataclass(frozen=True, eq=False)
class _BranchScorer(StateScorer):
    layer: Layer = field(kw_only=True)

    def release(self, request: AnyRequest) -> None:
        super().release(request)
        self.layer.pool.release(request)

    def forget(self) -> None:
        super().forget()
        self.layer.pool.clear()


@dataclass(frozen=True, eq=False)
class AdapterScorer(_BranchScorer):
    """An exit with a decoder layer of its own after the checkpoint's first `layers`."""

    def states(self, asks: Sequence[Ask]) -> list[Tensor]:
        wanted = [(ask.request, ask.context, ask.proposal) for ask in asks]
        beneath = self.pool.prepare(wanted)
        advance(self.decoder, beneath, self.layers)
        boundary = self.pool.boundaries.index(self.layers)
        staircases = self.layer.pool.prepare(wanted)
        under = {id(staircase): low for staircase, low in zip(staircases, beneath, strict=True)}

        def source(staircase: Staircase, slots: np.ndarray) -> Tensor:
            # Slots of the two staircases are the same ones: both hold this context and this proposal.
            found = under[id(staircase)].hidden[boundary, where(slots, self.decoder.device)]
            return found.to(self.layer.decoder.dtype, copy=True)

        advance(self.layer.decoder, staircases, 1, source)
        return [after(staircase, 0) for staircase in staircases]


@dataclass(frozen=True, eq=False)
class FeatureScorer(_BranchScorer):
    """One layer on the token's embedding and the feature of the position before it.

    A feature is the checkpoint's last state, normed, up to the last token but one of what the target has written: there
    the target has been, or will have to go. Beyond that it is the drafter's own. So what it says depends on the
    context and on how much of it is written, never on what happens to be kept.
    """

    join: Callable[[Tensor, Tensor], Tensor] = field(kw_only=True)  # embeddings and features, each [rows, hidden]
    norm: Tensor | None = field(kw_only=True)  # of its own features; None: as the layer gives them
    skips_first: bool = False  # the text's first token has no place
    # How many slots of a staircase were made from features of the checkpoint.
    _real: weakref.WeakKeyDictionary[Staircase, int] = field(default_factory=weakref.WeakKeyDictionary, init=False)

    def states(self, asks: Sequence[Ask]) -> list[Tensor]:
        skipped = [int(self.skips_first and len(ask.context) > 1) for ask in asks]
        staircases = self.layer.pool.prepare(
            [(ask.request, ask.context[skip:], ask.proposal) for ask, skip in zip(asks, skipped, strict=True)]
        )
        places: dict[int, _Place] = {}
        lacking: list[Ask] = []
        for ask, staircase, skip in zip(asks, staircases, skipped, strict=True):
            written = min(len(ask.request.prompt) + len(ask.request.output), len(ask.context))
            real, made = max(written - skip, 0), self._real.get(staircase, 0)
            if made != real:
                # Between the two numbers features change, and after them what saw those.
                staircase.heights[min(made, real) : staircase.used] = 0
                self._real[staircase] = real
            places[id(staircase)] = place = _Place(real, skip)
            if (staircase.heights[:real] == 0).any():
                lacking.append(ask)
                place.lacks = True
        if lacking:
            beneath = self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in lacking])
            lower = [place for place in places.values() if place.lacks]
            for place, low in zip(lower, beneath, strict=True):
                place.beneath = low
            among = [np.arange(max(place.real + place.skip - 1, 0)) for place in lower]
            advance(self.decoder, beneath, self.layers, None, among)

        def source(staircase: Staircase, slots: np.ndarray) -> Tensor:
            features = self._features(staircase, slots, places[id(staircase)])
            return self.join(self.decoder.embed(staircase.tokens[slots]), features)

        # What follows a position of the drafter's own waits for it: wave by wave, mostly one.
        while True:
            ready = [_ready(staircase, places[id(staircase)].real) for staircase in staircases]
            if not any(len(slots) for slots in ready):
                break
            advance(self.layer.decoder, staircases, 1, source, ready)
        return [after(staircase, 0) for staircase in staircases]

    def _features(self, staircase: Staircase, slots: np.ndarray, place: _Place) -> Tensor:
        """Of the positions before these slots. [slots, hidden]"""
        decoder, own = self.decoder, self.layer.decoder
        count = int(np.searchsorted(slots, place.real))  # slots rise; so many follow features of the checkpoint
        parts = []
        if count:
            assert place.beneath is not None
            before = slots[:count] + (place.skip - 1)
            if before[0] < 0:
                parts.append(torch.zeros(1, decoder.config.hidden, dtype=own.dtype, device=own.device))
                before = before[1:]
            if len(before):
                states = place.beneath.hidden[-1, where(before, decoder.device)]
                parts.append(_normed(states, decoder.norm, decoder.config.norm_eps).to(own.dtype))
        if count < len(slots):
            before = staircase.parents[slots[count:]]
            states = staircase.hidden[0, torch.as_tensor(before.clip(0), device=own.device)]
            parts.append(_normed(states, self.norm, own.config.norm_eps))
            if before[0] < 0:
                parts[-1][torch.as_tensor(before < 0, device=own.device)] = 0
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(eq=False)
class _Place:
    """What is known of one text in one call."""

    real: int  # slots that follow features of the checkpoint
    skip: int  # slots of the checkpoint's staircase before the first
    lacks: bool = False  # some of those are to be computed
    beneath: Staircase | None = None  # the checkpoint's, where they are


def _ready(staircase: Staircase, real: int) -> np.ndarray:
    """Slots to be computed whose feature is there."""
    pending = np.flatnonzero(staircase.heights[: staircase.used] == 0)
    parents = staircase.parents[pending]
    found: np.ndarray = pending[(pending < real) | (parents < 0) | (staircase.heights[parents] > 0)]
    return found


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else functional.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
