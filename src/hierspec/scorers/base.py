"""A checkpoint as scorers: the whole model, and any exit of it, over one pool of staircases."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch.decoder import Kept, Span
from hierspec.backends.torch.pick import answer
from hierspec.core.interfaces import Answer, Ask, RequestView
from hierspec.scorers.staircase import Judge, Staircase, StaircasePool

_CHUNK = 512  # rows of one pass: a long prompt is read in pieces, so that masks and activations stay small

Source = Callable[
    [Staircase, np.ndarray], Tensor
]  # states [slots, hidden] that enter the first layer, to be written on


class Decoder(Judge, Protocol):
    """What a decoder can do, whatever it runs on."""

    layer_rows: int  # rows times layers run so far
    weight_bytes: int  # that a pass over one token reads
    products: str  # how they are computed, for people and for keys of what was measured
    team: ThreadTeam | None  # threads to share other work with
    head_weight: Tensor  # [vocabulary, hidden]
    norm: Tensor  # the last one

    def embed(self, tokens: np.ndarray) -> Tensor: ...

    def run(
        self, hidden: Tensor, positions: np.ndarray, spans: Sequence[Span], start: int, stop: int, kept: Kept = ()
    ) -> Tensor:
        """Layers start..stop over packed rows [rows, hidden]; keys and values are written on the way, and the states
        after the layers that `kept` names."""

    def head(self, hidden: Tensor, norm: Tensor | None = None) -> Tensor:
        """Logits [rows, vocabulary] in float32 of hidden states after any layer, through the last norm, or another."""


class Head(Protocol):
    """From hidden states to logits."""

    def logits(self, asks: Sequence[Ask], states: Sequence[Tensor]) -> Sequence[Tensor]:
        """For each ask [1 + nodes, vocabulary] from states [1 + nodes, hidden]; good until the next call."""

    def release(self, request: RequestView) -> None:
        """The request has ended."""


@dataclass(frozen=True, eq=False)
class WholeHead:
    """The decoder's own head, through its last norm or another one."""

    decoder: Decoder
    norm: Tensor | None = None

    def logits(self, asks: Sequence[Ask], states: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(states) == 1:
            return [self.decoder.head(states[0], self.norm)]
        return self.decoder.head(torch.cat(list(states)), self.norm).split([len(part) for part in states])

    def release(self, request: RequestView) -> None:
        return


@dataclass(frozen=True, eq=False)
class StateScorer(ABC):
    """Scores in two halves: hidden states of what is asked about, and a head that turns them into logits."""

    name: str
    decoder: Decoder  # the checkpoint's
    pool: StaircasePool  # of the checkpoint's staircases
    layers: int  # of the checkpoint that it runs, or whose states it needs
    head: Head
    kind: str = ""  # tells its costs from those of another scorer of this name

    @property
    def vocabulary(self) -> int:
        return self.decoder.config.vocabulary

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        with torch.inference_mode():
            team, found = self.decoder.team, self.logits(asks)
            began = time.perf_counter()
            answers = [answer(ask, logits, team) for ask, logits in zip(asks, found, strict=True)]
            spent = (time.perf_counter() - began) / len(asks)
            for ask in asks:
                ask.stats.pick_seconds += spent
            return answers

    def logits(self, asks: Sequence[Ask]) -> Sequence[Tensor]:
        """For each ask [1 + nodes, vocabulary]: what follows the context, then what follows each node."""
        return self.head.logits(asks, self.states(asks))

    @abstractmethod
    def states(self, asks: Sequence[Ask]) -> list[Tensor]:
        """For each ask [1 + nodes, hidden], as the head takes them."""

    @abstractmethod
    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        """For timing alone: the first `done` positions of these contexts count as computed, whatever is kept for them,
        and the others as not; layers beneath those of a branch count as computed everywhere."""

    def release(self, request: RequestView) -> None:
        self.pool.release(request)
        self.head.release(request)

    def forget(self) -> None:
        """Drop everything computed so far."""
        self.pool.clear()


class ModelScorer(StateScorer):
    """Judges with the first `layers` layers of the checkpoint."""

    def states(self, asks: Sequence[Ask]) -> list[Tensor]:
        staircases = self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks])
        advance(self.decoder, staircases, self.layers)
        boundary = self.pool.boundaries.index(self.layers)
        return [after(staircase, boundary) for staircase in staircases]

    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        for staircase in self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks]):
            staircase.heights[:done] = self.decoder.config.layers
            staircase.heights[done : staircase.used] = 0


def after(staircase: Staircase, boundary: int) -> Tensor:
    """The states from which comes what follows the context, then what follows each node. [1 + nodes, hidden]"""
    return staircase.hidden[boundary, staircase.chain - 1 : staircase.used]


def advance(
    decoder: Decoder,
    staircases: Sequence[Staircase],
    to_layer: int,
    source: Source | None = None,
    among: Sequence[np.ndarray] | None = None,
) -> None:
    """Bring slots of these staircases up to `to_layer`, each layer range only where it is lacking.

    `source` gives what enters the first layer, by default the tokens' embeddings. `among` are the slots of each
    staircase that are meant, by default all; what they see must be there, or be among them.
    """
    if among is None:
        among = [np.arange(staircase.used) for staircase in staircases]
    pending = [slots[s.heights[slots] < to_layer] for s, slots in zip(staircases, among, strict=True)]
    while any(len(slots) for slots in pending):
        room, chunk = _CHUNK, []
        for number, slots in enumerate(pending):
            chunk.append(slots[:room])
            room -= len(chunk[-1])
            pending[number] = slots[len(chunk[-1]) :]
        # Those that stand lowest first, up to where others wait to go on with them.
        levels = sorted(
            {int(height) for s, slots in zip(staircases, chunk, strict=True) for height in s.heights[slots]}
        )
        for start, stop in pairwise([*levels, to_layer]):
            _climb(decoder, staircases, chunk, start, stop, source)


def where(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """An index for these slots, which rise: a slice where they lie side by side, which is quicker."""
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first + 1 == len(slots) else torch.as_tensor(slots, device=device)


def _climb(
    decoder: Decoder,
    staircases: Sequence[Staircase],
    chunk: Sequence[np.ndarray],
    start: int,
    stop: int,
    source: Source | None,
) -> None:
    """Layers start..stop, both boundaries, for the slots of the chunk that stand at `start`."""
    device, boundaries = decoder.device, staircases[0].boundaries
    between = [place for place, layer in enumerate(boundaries) if start < layer < stop]
    spans, inputs, positions, climbing = [], [], [], []
    row = 0
    for staircase, slots in zip(staircases, chunk, strict=True):
        slots = slots[staircase.heights[slots] == start]
        if not len(slots):
            continue
        index = where(slots, device)
        spans.append(Span(slice(row, row + len(slots)), staircase, slots))
        if start:
            inputs.append(staircase.hidden[boundaries.index(start), index])
        elif source is None:
            inputs.append(decoder.embed(staircase.tokens[slots]))
        else:
            inputs.append(source(staircase, slots))
        positions.append(staircase.positions[slots])
        climbing.append((staircase, slots, index))
        row += len(slots)
    if not spans:
        return
    single = len(spans) == 1
    states, places = (inputs[0], positions[0]) if single else (torch.cat(inputs), np.concatenate(positions))
    # A slice of kept states is a view, and a decoder may write its result over what it is given.
    states = states.clone() if single and start else states
    kept = [(boundaries[place], torch.empty_like(states)) for place in between]
    reached = [*(part for _, part in kept), decoder.run(states, places, spans, start, stop, kept)]
    for (staircase, slots, index), span in zip(climbing, spans, strict=True):
        for place, part in zip((*between, boundaries.index(stop)), reached, strict=True):
            staircase.hidden[place, index] = part[span.rows]
        staircase.heights[slots] = stop
