"""Scorers with layers of their own beside a checkpoint's: adapters of exits, feature drafters, small models.

Those layers, mostly one, have a staircase of their own, aligned to the same context and proposal as the checkpoint's.
So it is a memo like any other: what is lacking is computed, what is kept is computed once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hierspec.core.interfaces import Ask, RequestView
from hierspec.scorers.base import Decoder, StateScorer, advance, after, where
from hierspec.scorers.staircase import Staircase, StaircasePool


@dataclass(frozen=True, eq=False)
class Layer:
    """The layer of a branch and what it has computed."""

    decoder: Decoder
    pool: StaircasePool


@dataclass(frozen=True, eq=False)
class _BranchScorer(StateScorer):
    layer: Layer = field(kw_only=True)

    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        wanted = [(ask.request, ask.context, ask.proposal) for ask in asks]
        if self.layers:
            for staircase in self.pool.prepare(wanted):
                staircase.heights[: staircase.used] = self.decoder.config.layers
        for staircase in self.layer.pool.prepare(wanted):
            staircase.heights[:done] = self.layer.decoder.config.layers
            staircase.heights[done : staircase.used] = 0

    def release(self, request: RequestView) -> None:
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
class SmallScorer(_BranchScorer):
    """A small model with the checkpoint's embeddings: all its layers are its own, and it needs none of its states."""

    def states(self, asks: Sequence[Ask]) -> list[Tensor]:
        staircases = self.layer.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks])
        own = self.layer.decoder

        def source(staircase: Staircase, slots: np.ndarray) -> Tensor:
            return self.decoder.embed(staircase.tokens[slots]).to(own.dtype)

        advance(own, staircases, own.config.layers, source)
        return [after(staircase, 0) for staircase in staircases]


class Join(Protocol):
    """A matrix on the embeddings of tokens and, beside them, one or several features."""

    bytes: int

    def __call__(
        self, tokens: np.ndarray, states: Tensor, boundaries: Sequence[int], places: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        """[tokens, hidden]. Features are states [boundary, place, hidden] at each of the boundaries and at `places`,
        each through its own of `norms` [boundaries, hidden], or as they are; the place -1 stands for zeros."""


@dataclass(frozen=True, eq=False)
class FeatureScorer(_BranchScorer):
    """Layers on the token's embedding and the feature of the position before it.

    A feature is the checkpoint's last state, normed, up to the last token but one of what the target has written: there
    the target has been, or will have to go. States after other layers may stand beside it, or in its place. Beyond that
    it is the drafter's own. So what it says depends on the context and on how much of it is written, never on what
    happens to be kept.
    """

    first: Join = field(kw_only=True)  # where features are the checkpoint's
    join: Join = field(kw_only=True)  # where they are its own
    # Layers of the checkpoint whose states are its features; the pool keeps them.
    reads: tuple[int, ...] = field(kw_only=True)
    first_norms: Tensor | None = field(kw_only=True)  # [reads, hidden]: of those; None: as they are
    norm: Tensor | None = field(kw_only=True)  # [1, hidden], of its own; None: as the layers give them
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
            if not staircase.heights[:real].all():
                lacking.append(ask)
                place.lacks = True
        if lacking:
            began = time.perf_counter()
            beneath = self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in lacking])
            lower = [place for place in places.values() if place.lacks]
            for place, low in zip(lower, beneath, strict=True):
                place.beneath = low
            among = [np.arange(max(place.real + place.skip - 1, 0)) for place in lower]
            advance(self.decoder, beneath, self.layers, None, among)
            _charge_target(lacking, time.perf_counter() - began)

        def source(staircase: Staircase, slots: np.ndarray) -> Tensor:
            return self._joined(staircase, slots, places[id(staircase)])

        own = self.layer.decoder
        # What follows a position of the drafter's own waits for it: wave by wave, mostly one.
        waiting = True
        while waiting:
            found = [_ready(staircase, places[id(staircase)].real) for staircase in staircases]
            advance(own, staircases, own.config.layers, source, [ready for ready, _ in found])
            waiting = any(others for _, others in found)
        return [after(staircase, 0) for staircase in staircases]

    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        super().assume_computed(asks, done)
        for ask in asks:
            skip = int(self.skips_first and len(ask.context) > 1)
            [staircase] = self.layer.pool.prepare([(ask.request, ask.context[skip:], ask.proposal)])
            written = min(len(ask.request.prompt) + len(ask.request.output), len(ask.context))
            self._real[staircase] = max(written - skip, 0)
            staircase.heights[: done - skip] = self.layer.decoder.config.layers
            staircase.heights[done - skip : staircase.used] = 0

    def _joined(self, staircase: Staircase, slots: np.ndarray, place: _Place) -> Tensor:
        """What enters the layers at these slots. [slots, hidden]"""
        count = int(np.searchsorted(slots, place.real))  # slots rise; so many follow features of the checkpoint
        parts = []
        if count:
            assert place.beneath is not None
            before = slots[:count] + (place.skip - 1)
            low = place.beneath
            boundaries = [low.boundaries.index(layer) for layer in self.reads]
            parts.append(self.first(staircase.tokens[slots[:count]], low.hidden, boundaries, before, self.first_norms))
        if count < len(slots):
            slots = slots[count:]
            parents = staircase.parents[slots]
            parts.append(self.join(staircase.tokens[slots], staircase.hidden, [0], parents, self.norm))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(eq=False)
class _Place:
    """What is known of one text in one call."""

    real: int  # slots that follow features of the checkpoint
    skip: int  # slots of the checkpoint's staircase before the first
    lacks: bool = False  # some of those are to be computed
    beneath: Staircase | None = None  # the checkpoint's, where they are


def _charge_target(asks: Sequence[Ask], seconds: float) -> None:
    """These were layers of the target's, mostly a whole prompt, which it will find computed: not a draft's time."""
    for ask in asks:
        tiers = ask.request.stats.tiers
        if tiers and tiers[0] is not ask.stats:
            tiers[0].seconds += seconds / len(asks)
            ask.stats.seconds -= seconds / len(asks)


def _ready(staircase: Staircase, real: int) -> tuple[np.ndarray, int]:
    """Slots to be computed whose feature is there, and how many others there are."""
    pending = np.flatnonzero(staircase.heights[: staircase.used] == 0)
    parents = staircase.parents[pending]
    found = pending[(pending < real) | (parents < 0) | (staircase.heights[parents] > 0)]
    return found, len(pending) - len(found)


class TorchJoin:
    """Through torch, on any device."""

    def __init__(self, decoder: Decoder, matrix: Tensor, bias: Tensor | None) -> None:
        self._decoder = decoder
        self._matrix = matrix.to(decoder.device, decoder.dtype)
        self._bias = None if bias is None else bias.to(decoder.device, decoder.dtype)
        self.bytes = self._matrix.numel() * self._matrix.element_size()

    def __call__(
        self, tokens: np.ndarray, states: Tensor, boundaries: Sequence[int], places: np.ndarray, norms: Tensor | None
    ) -> Tensor:
        decoder = self._decoder
        index = torch.as_tensor(places.clip(0), device=decoder.device)
        nowhere = torch.as_tensor(places < 0, device=decoder.device)
        parts = [decoder.embed(tokens)]
        for number, boundary in enumerate(boundaries):
            feature = states[boundary, index]
            if norms is not None:
                weight = norms[number].to(feature)
                feature = functional.rms_norm(feature, (feature.shape[-1],), weight, decoder.config.norm_eps)
            feature[nowhere] = 0
            parts.append(feature)
        return functional.linear(torch.cat(parts, dim=1), self._matrix, self._bias)
