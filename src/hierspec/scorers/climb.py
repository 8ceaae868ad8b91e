"""Runs tokens of texts through the layers of a decoder, each layer range only for those that lack it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, Decoder
from hierspec.scorers.staircase import Staircase

CHUNK = 512  # rows of one pass: a long prompt is prefilled in pieces, so that activations stay small
_NONE_DRAFTED = np.empty(0, np.int64)

Source = Callable[[Staircase, np.ndarray], Tensor]  # states [entries, hidden] that enter the first layer


def advance(
    decoder: Decoder,
    staircases: Sequence[Staircase],
    to_layer: int,
    source: Source | None = None,
    among: Sequence[np.ndarray] | None = None,
) -> None:
    """Compute entries of these staircases up to `to_layer`.

    `source` gives the input of the first layer, by default the tokens' embeddings. `among` limits the work to some
    entries of each staircase; what they attend to must be computed already, or be among them.
    """
    if among is None:
        pending = [np.flatnonzero(s.heights[: s.used] < to_layer) for s in staircases]
    else:
        pending = [entries[s.heights[entries] < to_layer] for s, entries in zip(staircases, among, strict=True)]
    while any(len(entries) for entries in pending):
        room, chunk = CHUNK, []
        for number, entries in enumerate(pending):
            chunk.append(entries[:room])
            room -= len(chunk[-1])
            pending[number] = entries[len(chunk[-1]) :]
        # Start with the lowest entries, and let others join where they have stopped.
        levels = sorted({int(h) for s, entries in zip(staircases, chunk, strict=True) for h in s.heights[entries]})
        for start, stop in pairwise([*levels, to_layer]):
            _climb(decoder, staircases, chunk, start, stop, source)


def states_after(staircases: Sequence[Staircase], tap: int) -> Tensor:
    """[rows, hidden]: for each text the state of its last context token, then those of its nodes."""
    parts = [read(staircase, tap, slice(staircase.chain - 1, staircase.used)) for staircase in staircases]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read(staircase: Staircase, tap: int, entries: slice | np.ndarray) -> Tensor:
    """The states of these entries, which are sorted; a view if their slots are contiguous."""
    slots = staircase.slots[entries]
    first, last = int(slots[0]), int(slots[-1])
    states = staircase.memory.states[tap]
    # Slots within a page rise with the entries, so only a page boundary can break them up.
    if last - first + 1 == len(slots) and (last - first < staircase.memory.page or (np.diff(slots) == 1).all()):
        return states[first : last + 1]
    return states[torch.as_tensor(slots, device=states.device)]


def _climb(
    decoder: Decoder,
    staircases: Sequence[Staircase],
    chunk: Sequence[np.ndarray],
    start: int,
    stop: int,
    source: Source | None,
) -> None:
    """Run layers start..stop, each a tap or the bottom, on the entries of the chunk that have got to `start`."""
    climbing: list[tuple[Staircase, np.ndarray]] = []
    inputs: list[Tensor] = []
    for staircase, entries in zip(staircases, chunk, strict=True):
        entries = entries[staircase.heights[entries] == start]
        if not len(entries):
            continue
        climbing.append((staircase, entries))
        if start:
            inputs.append(read(staircase, staircase.memory.taps.index(start), entries))
        elif source is None:
            inputs.append(decoder.embed(staircase.tokens[entries]))
        else:
            inputs.append(source(staircase, entries))
    if not climbing:
        return
    # What was read may be a view of the memory, and a decoder may overwrite its input.
    hidden = torch.cat(inputs) if len(inputs) > 1 else inputs[0].clone() if start else inputs[0]
    decoder.run(climbing[0][0].memory, joined_batch(climbing), hidden, start, stop)
    for staircase, entries in climbing:
        staircase.heights[entries] = stop


def joined_batch(climbing: Sequence[tuple[Staircase, np.ndarray]]) -> Batch:
    """The batch of entries of several texts, one text after the other."""
    parts = [batch_of(staircase, entries) for staircase, entries in climbing]
    if len(parts) == 1:
        return parts[0]
    rows, path_ends = [0], [0]
    for part in parts:
        rows.append(rows[-1] + len(part.positions))
        path_ends.append(path_ends[-1] + len(part.paths))
    tables = np.zeros((len(parts), max(part.tables.shape[1] for part in parts)), np.int64)
    for text, part in enumerate(parts):
        tables[text, : part.tables.shape[1]] = part.tables
    starts = [part.path_starts[:-1] + before for part, before in zip(parts, path_ends, strict=False)]
    return Batch(
        positions=np.concatenate([part.positions for part in parts]),
        slots=np.concatenate([part.slots for part in parts]),
        text_starts=np.array(rows, np.int64),
        tables=tables,
        lengths=np.concatenate([part.lengths for part in parts]),
        path_starts=np.concatenate((*starts, path_ends[-1:])),
        paths=np.concatenate([part.paths for part in parts]),
        drafted=_drafted(parts),
    )


def _drafted(parts: Sequence[Batch]) -> np.ndarray:
    if not any(len(part.drafted) for part in parts):
        return _NONE_DRAFTED
    return np.concatenate(
        [part.drafted if len(part.drafted) else np.zeros(len(part.positions), np.int64) for part in parts]
    )


def batch_of(staircase: Staircase, entries: np.ndarray) -> Batch:
    """The batch of one text."""
    lengths, path_starts, paths = staircase.seen(entries)
    return Batch(
        positions=staircase.positions[entries],
        slots=staircase.slots[entries],
        text_starts=np.array([0, len(entries)], np.int64),
        tables=staircase.table[None],
        lengths=lengths,
        path_starts=path_starts,
        paths=paths,
        drafted=_NONE_DRAFTED if entries[-1] < staircase.chain else (entries >= staircase.chain).astype(np.int64),
    )
