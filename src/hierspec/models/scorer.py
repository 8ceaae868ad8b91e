"""A checkpoint as scorers: the whole model, and any exit of it, over one pool of staircases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hierspec.core.hierarchy import AnyRequest, Ask
from hierspec.core.verify import Answer
from hierspec.models.cache import Judge, Staircase, StaircasePool
from hierspec.models.decoder import Span
from hierspec.models.pick import answer
from hierspec.models.team import Team

_CHUNK = 512  # rows of one pass: a long prompt is read in pieces, so that masks and activations stay small


class AnyDecoder(Judge, Protocol):
    """What a decoder can do, whatever it runs on."""

    layer_rows: int  # rows times layers run so far
    weight_bytes: int  # that a pass over one token reads
    products: str  # how they are computed, for people and for keys of what was measured
    team: Team | None  # threads to share other work with

    def embed(self, tokens: np.ndarray) -> Tensor: ...

    def run(self, hidden: Tensor, positions: np.ndarray, spans: Sequence[Span], start: int, stop: int) -> Tensor:
        """Layers start..stop over packed rows [rows, hidden]; keys and values are written on the way."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32 of hidden states after any layer."""


@dataclass(frozen=True, eq=False)
class ModelScorer:
    """Judges with the first `layers` layers of a decoder, through its last norm and head."""

    name: str
    decoder: AnyDecoder
    pool: StaircasePool
    layers: int

    @property
    def vocabulary(self) -> int:
        return self.decoder.config.vocabulary

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        with torch.inference_mode():
            team = self.decoder.team
            return [answer(ask, logits, team) for ask, logits in zip(asks, self.logits(asks), strict=True)]

    def logits(self, asks: Sequence[Ask]) -> Sequence[Tensor]:
        """For each ask [1 + nodes, vocabulary]: what follows the context, then what follows each node."""
        staircases = self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks])
        advance(self.decoder, staircases, self.layers)
        boundary = self.pool.boundaries.index(self.layers)
        rows = [staircase.hidden[boundary, staircase.chain - 1 : staircase.used] for staircase in staircases]
        if len(rows) == 1:
            return [self.decoder.head(rows[0])]
        return self.decoder.head(torch.cat(rows)).split([len(part) for part in rows])

    def release(self, request: AnyRequest) -> None:
        self.pool.release(request)


def advance(decoder: AnyDecoder, staircases: Sequence[Staircase], to_layer: int) -> None:
    """Bring every slot of these staircases up to `to_layer`, each layer range only where it is lacking."""
    pending = [np.flatnonzero(s.heights[: s.used] < to_layer) for s in staircases]
    while any(len(slots) for slots in pending):
        room, chunk = _CHUNK, []
        for number, slots in enumerate(pending):
            chunk.append(slots[:room])
            room -= len(chunk[-1])
            pending[number] = slots[len(chunk[-1]) :]
        start = 0
        for place, stop in enumerate(staircases[0].boundaries):
            if stop <= to_layer:
                _climb(decoder, staircases, chunk, start, stop, place)
            start = stop


def _where(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """An index for these slots, which rise: a slice where they lie side by side, which is quicker."""
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first + 1 == len(slots) else torch.as_tensor(slots, device=device)


def _climb(
    decoder: AnyDecoder, staircases: Sequence[Staircase], chunk: Sequence[np.ndarray], start: int, stop: int, place: int
) -> None:
    """Layers start..stop for the slots of the chunk that stand at `start`; boundary number `place` is `stop`."""
    device = decoder.device
    spans, inputs, positions, climbing = [], [], [], []
    row = 0
    for staircase, slots in zip(staircases, chunk, strict=True):
        slots = slots[staircase.heights[slots] == start]
        if not len(slots):
            continue
        where = _where(slots, device)
        spans.append(Span(slice(row, row + len(slots)), staircase, slots))
        if start == 0:
            inputs.append(decoder.embed(staircase.tokens[slots]))
        else:
            inputs.append(staircase.hidden[place - 1, where])
        positions.append(staircase.positions[slots])
        climbing.append((staircase, slots, where))
        row += len(slots)
    if not spans:
        return
    single = len(spans) == 1
    states, places = (inputs[0], positions[0]) if single else (torch.cat(inputs), np.concatenate(positions))
    # A slice of kept states is a view, and a decoder may write its result over what it is given.
    states = states.clone() if single and start else states
    hidden = decoder.run(states, places, spans, start, stop)
    for (staircase, slots, where), span in zip(climbing, spans, strict=True):
        staircase.hidden[place, where] = hidden[span.rows]
        staircase.heights[slots] = stop
