"""Scorers with layers of their own beside a checkpoint's: adapters of exits, feature drafters, small models.

Those layers, mostly one, have a staircase of their own, aligned to the same context and proposal as the checkpoint's.
So it is a cache like any other: what is missing is computed, and what is kept is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Decoder, DraftRows, DraftWriter, Join
from hierspec.core.interfaces import Answer, Ask, RequestView
from hierspec.scorers.base import StateScorer
from hierspec.scorers.climb import CHUNK, advance, batch_of, states_after
from hierspec.scorers.climb import read as states_of
from hierspec.scorers.pool import StaircasePool
from hierspec.scorers.shortlist import DraftHead
from hierspec.scorers.staircase import KEYS_ONLY, Staircase


@dataclass(frozen=True, eq=False)
class Layer:
    """The layers of a branch, and the pool of what they have computed."""

    decoder: Decoder
    pool: StaircasePool


@dataclass(frozen=True, eq=False)
class BranchScorer(StateScorer):
    layer: Layer = field(kw_only=True)

    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        wanted = [(ask.request, ask.context, ask.proposal) for ask in asks]
        if self.layers:
            for staircase in self.pool.prepare(wanted):
                self.pool.assume(staircase, staircase.used, self.decoder.config.layers)
        for staircase in self.layer.pool.prepare(wanted):
            self.layer.pool.assume(staircase, done, self.layer.decoder.config.layers)

    @property
    def pools(self) -> tuple[StaircasePool, ...]:
        return self.pool, self.layer.pool

    def known(self, context: np.ndarray) -> int:
        return self.layer.pool.known(context)

    def release(self, request: RequestView) -> None:
        super().release(request)
        self.layer.pool.release(request)

    def forget(self) -> None:
        super().forget()
        self.layer.pool.clear()


@dataclass(frozen=True, eq=False)
class AdapterScorer(BranchScorer):
    """An exit with one or a few decoder layers of its own after the checkpoint's first `layers`."""

    def states(self, asks: Sequence[Ask]) -> Tensor:
        wanted = [(ask.request, ask.context, ask.proposal) for ask in asks]
        beneath = self.pool.prepare(wanted)
        advance(self.decoder, beneath, self.layers)
        tap = self.pool.taps.index(self.layers)
        staircases = self.layer.pool.prepare(wanted)
        under = {id(staircase): low for staircase, low in zip(staircases, beneath, strict=True)}

        def source(staircase: Staircase, entries: np.ndarray) -> Tensor:
            # Both staircases hold this context and this proposal, so their entries correspond.
            return states_of(under[id(staircase)], tap, entries).to(self.layer.decoder.dtype, copy=True)

        advance(self.layer.decoder, staircases, self.layer.decoder.config.layers, source)
        return states_after(staircases, 0)


@dataclass(frozen=True, eq=False)
class SmallScorer(BranchScorer):
    """A small model with the checkpoint's embeddings: all its layers are its own, and it needs no hidden states."""

    def states(self, asks: Sequence[Ask]) -> Tensor:
        staircases = self.layer.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks])
        small = self.layer.decoder

        def source(staircase: Staircase, entries: np.ndarray) -> Tensor:
            return self.decoder.embed(staircase.tokens[entries]).to(small.dtype)

        advance(small, staircases, small.config.layers, source)
        return states_after(staircases, 0)


@dataclass(frozen=True, eq=False)
class FeatureScorer(BranchScorer):
    """Layers whose input is a token's embedding and the feature of the position before it.

    Up to the last token but one that the target has written, a feature is the checkpoint's last hidden state,
    normalised: the target computes it anyway. States after other layers may be added to it, or replace it. Beyond that
    a feature is the drafter's own state. So a draft depends on the context and on how much of it is written, never on
    what is cached.
    """

    first: Join = field(kw_only=True)  # for features of the checkpoint
    join: Join = field(kw_only=True)  # for features of its own
    # Layers of the checkpoint whose states are its features; the pool keeps them.
    reads: tuple[int, ...] = field(kw_only=True)
    first_norms: Tensor | None = field(kw_only=True)  # [reads, hidden]: norms of those states; None: no norm
    norm: Tensor | None = field(kw_only=True)  # [1, hidden]: norm of its own states; None: no norm
    skips_first: bool = False  # there is no entry for the text's first token
    writer: DraftWriter | None = None  # several tokens in one call, where the backend has that

    @property
    def at_once(self) -> int:
        return 1 if self.writer is None else self.writer.at_once

    def in_one_call(self, asks: Sequence[Ask]) -> bool:
        if self.writer is None or len(asks) != 1:
            return False
        [ask] = asks
        return not ask.proposal.tokens and not ask.logits and ask.request.constraint is None

    def _score(self, asks: Sequence[Ask]) -> list[Answer]:
        answer = self._written(asks[0]) if self.in_one_call(asks) else None
        return super()._score(asks) if answer is None else [answer]

    def _written(self, ask: Ask) -> Answer | None:
        """The answer in one call; None if more must be computed than the end of the text."""
        writer = self.writer
        assert writer is not None
        [staircase], [text] = self.aligned([ask])
        pending = np.flatnonzero(staircase.heights[: staircase.used] == 0)
        own = staircase.chain > text.count
        if not len(pending) or (own and len(pending) > 1) or pending[0] + len(pending) != staircase.chain:
            return None
        if len(pending) > writer.most_rows:
            self.read(staircase, pending[:-1], text, writer)
            pending = pending[-1:]
        first = int(pending[0])
        features = _slots(staircase, staircase.parents[pending]) if own else text.slots(pending)
        low = staircase if own else text.beneath
        assert low is not None
        assert isinstance(self.head, DraftHead)
        rows = DraftRows(
            staircase.memory,
            staircase.table,
            first,
            staircase.tokens[first : staircase.chain],
            staircase.slots[first:],
            own,
            low.memory,
            () if own else tuple(low.memory.taps.index(layer) for layer in self.reads),
            features,
        )
        answer = writer.write(ask, rows, self.head.extra(ask.request))
        picked = [int(each.picks[0, 0]) for each in (answer, *answer.ahead) if each.picks is not None]
        self.layer.pool.add_computed(staircase, first, picked[:-1], self.layer.decoder.config.layers)
        return answer

    def read(self, staircase: Staircase, entries: np.ndarray, text: _Features, writer: DraftWriter) -> None:
        """Compute only keys and values of these entries, since nobody needs their states.

        All of them follow features of the checkpoint.
        """
        for start in range(0, len(entries), CHUNK):
            chunk = entries[start : start + CHUNK]
            writer.read(staircase.memory, batch_of(staircase, chunk), self._joined(staircase, chunk, text))
            staircase.heights[chunk] = KEYS_ONLY

    def states(self, asks: Sequence[Ask]) -> Tensor:
        staircases, texts = self.aligned(asks)
        features = {id(staircase): text for staircase, text in zip(staircases, texts, strict=True)}

        def source(staircase: Staircase, entries: np.ndarray) -> Tensor:
            return self._joined(staircase, entries, features[id(staircase)])

        drafter = self.layer.decoder
        # An entry that follows one of the drafter's own states must wait for it, so entries are computed in waves
        # (mostly one).
        waiting = True
        while waiting:
            waves = [_ready(staircase, features[id(staircase)].count) for staircase in staircases]
            advance(drafter, staircases, drafter.config.layers, source, [ready for ready, _ in waves])
            waiting = any(others for _, others in waves)
        return states_after(staircases, 0)

    def aligned(self, asks: Sequence[Ask]) -> tuple[list[Staircase], list[_Features]]:
        """The staircases of these asks and the features of their texts, computed where they were missing."""
        skipped = [int(self.skips_first and len(ask.context) > 1) for ask in asks]
        staircases = self.layer.pool.prepare(
            [(ask.request, ask.context[skip:], ask.proposal) for ask, skip in zip(asks, skipped, strict=True)]
        )
        features: list[_Features] = []
        lacking: list[Ask] = []
        for ask, staircase, skip in zip(asks, staircases, skipped, strict=True):
            written = min(len(ask.request.prompt) + len(ask.request.output), len(ask.context))
            count, made = max(written - skip, 0), staircase.from_features or 0
            if made != count:
                # The features between the two counts change, and with them all later entries.
                self.layer.pool.recompute(staircase, min(made, count))
            staircase.from_features = count
            if count and staircase.heights[count - 1] == KEYS_ONLY:
                self.layer.pool.recompute(staircase, count - 1)  # the head or the next entry needs its state now
            text = _Features(count, skip)
            features.append(text)
            if not staircase.heights[:count].all():
                lacking.append(ask)
                text.lacking = True
        if lacking:
            began = time.perf_counter()
            beneath = self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in lacking])
            texts = [text for text in features if text.lacking]
            for text, low in zip(texts, beneath, strict=True):
                text.beneath = low
            among = [np.arange(max(text.count + text.skip - 1, 0)) for text in texts]
            advance(self.decoder, beneath, self.layers, None, among)
            _charge_target(lacking, time.perf_counter() - began)
        return staircases, features

    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        super().assume_computed(asks, done)
        for ask in asks:
            skip = int(self.skips_first and len(ask.context) > 1)
            [staircase] = self.layer.pool.prepare([(ask.request, ask.context[skip:], ask.proposal)])
            written = min(len(ask.request.prompt) + len(ask.request.output), len(ask.context))
            staircase.from_features = max(written - skip, 0)
            self.layer.pool.assume(staircase, done - skip, self.layer.decoder.config.layers)

    def known(self, context: np.ndarray) -> int:
        return super().known(context[int(self.skips_first) :])

    def _joined(self, staircase: Staircase, entries: np.ndarray, text: _Features) -> Tensor:
        """What enters the layers at these entries. [entries, hidden]"""
        count = int(np.searchsorted(entries, text.count))  # entries are sorted; this many follow checkpoint features
        parts = []
        if count:
            low = text.beneath
            assert low is not None
            slots, tokens = text.slots(entries[:count]), staircase.tokens[entries[:count]]
            taps = [low.memory.taps.index(layer) for layer in self.reads]
            parts.append(self.first(tokens, low.memory.states, taps, slots, self.first_norms))
        if count < len(entries):
            entries = entries[count:]
            slots, tokens = _slots(staircase, staircase.parents[entries]), staircase.tokens[entries]
            parts.append(self.join(tokens, staircase.memory.states, [0], slots, self.norm))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slots(staircase: Staircase, entries: np.ndarray) -> np.ndarray:
    """The memory slots of these entries; -1 for an entry before the first."""
    slots = staircase.slots[entries]
    slots[entries < 0] = -1
    return slots


@dataclass(eq=False)
class _Features:
    """Where the features of one text come from in one call."""

    count: int  # entries that follow features of the checkpoint
    skip: int  # entries of the checkpoint's staircase before the first
    lacking: bool = False  # some of those entries must be computed
    beneath: Staircase | None = None  # the checkpoint's staircase, which holds the features

    def slots(self, entries: np.ndarray) -> np.ndarray:
        """Where the features of these entries are."""
        assert self.beneath is not None
        return _slots(self.beneath, entries + (self.skip - 1))


def _charge_target(asks: Sequence[Ask], seconds: float) -> None:
    """Count this time as the target's: its own layers ran, mostly over a prompt, and it will find them computed."""
    for ask in asks:
        tiers = ask.request.stats.tiers
        if tiers and tiers[0] is not ask.stats:
            tiers[0].seconds += seconds / len(asks)
            ask.stats.seconds -= seconds / len(asks)
            ask.stats.prefill_seconds -= seconds  # its pass, which takes as long for each of them, also prefills


def _ready(staircase: Staircase, from_features: int) -> tuple[np.ndarray, int]:
    """Entries to compute whose feature is available, and how many others must still wait."""
    pending = np.flatnonzero(staircase.heights[: staircase.used] == 0)
    parents = staircase.parents[pending]
    ready = pending[(pending < from_features) | (parents < 0) | (staircase.heights[parents] > 0)]
    return ready, len(pending) - len(ready)
