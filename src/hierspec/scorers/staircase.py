"""The staircase: what is already computed for a text, position by position, up to which layer.

A cache is a memo. `align` is told the whole context and proposal, keeps what it holds of exactly that and forgets
the rest; dropping a staircase costs time, never a different token. Exits of one checkpoint and the checkpoint
itself share a staircase: a position climbs from boundary to boundary, each layer at most once while it is kept.

    slot     0 1 2 3 4 | 5 6 7      context | proposal nodes
    layers  30 # # # # .
             8 # # # # . . #        hidden states are kept at every boundary,
             4 # # # # # # # .      so a position can go on from where it stands
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from hierspec.checkpoints.config import DecoderConfig
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import RequestView
from hierspec.core.proposal import Proposal

_GROWTH = 256  # slots; memory grows in steps of this at least,
_LEAST_GROWTH = 32  # or of this where it is short
_MOST_IDLE = 8  # staircases of ended requests that wait for a prompt that begins alike


class KeyValueMemory(Protocol):
    """Keys and values of one text by slot, laid out as a decoder likes to read them."""

    @property
    def bytes_per_slot(self) -> int: ...

    def grow(self, slots: int, used: int) -> None:
        """Room for `slots` slots; the first `used` stay."""

    def move(self, to: list[int], old: list[int]) -> None:
        """Slot to[i] becomes what slot old[i] was, all at once."""


class RowMemory:
    """The plain layout, [layers, 2, kv_heads, slots, head_size], on any device."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.zeros(config.layers, 2, config.kv_heads, 0, config.head_size, dtype=dtype, device=device)

    @property
    def bytes_per_slot(self) -> int:
        layers, two, kv_heads, _, head_size = self.numbers.shape
        return layers * two * kv_heads * head_size * self.numbers.element_size()

    def grow(self, slots: int, used: int) -> None:
        old = self.numbers
        self.numbers = old.new_zeros(*old.shape[:3], slots, old.shape[4])
        self.numbers[:, :, :, :used] = old[:, :, :, :used]

    def move(self, to: list[int], old: list[int]) -> None:
        self.numbers[:, :, :, to] = self.numbers[:, :, :, old]


class Staircase:
    """Keys, values, boundary states and heights of one text. Slot i < `chain` is position i of the context."""

    def __init__(
        self, memory: KeyValueMemory, boundaries: Sequence[int], hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.memory = memory
        self.boundaries = tuple(boundaries)  # layers after which hidden states are kept, the last layer included
        self.used = 0
        self.chain = 0
        self.tokens = np.empty(0, np.int32)
        self.parents = np.empty(0, np.int32)
        self.positions = np.empty(0, np.int32)
        self.heights = np.empty(0, np.int32)  # layers that a slot has been through: 0 or a boundary
        self.hidden = torch.empty(len(self.boundaries), 0, hidden, dtype=dtype, device=device)

    def bytes_for(self, slots: int) -> int:
        """Bytes that `slots` slots take on the device."""
        states = self.hidden.shape[0] * self.hidden.shape[2] * self.hidden.element_size()
        return slots * (self.memory.bytes_per_slot + states)

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    def grow(self, slots: int) -> None:
        """Room for `slots` slots; what is held stays."""
        for name in ("tokens", "parents", "positions", "heights"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros(slots - len(old), np.int32))))
        self.memory.grow(slots, self.used)
        hidden = self.hidden
        self.hidden = hidden.new_zeros(hidden.shape[0], slots, hidden.shape[2])
        self.hidden[:, : self.used] = hidden[:, : self.used]

    def common(self, context: np.ndarray) -> int:
        """How many leading tokens of the context it holds."""
        size = min(self.chain, len(context))
        if not size:
            return 0
        differs = self.tokens[:size] != context[:size]
        first = int(differs.argmax())
        return first if differs[first] else size

    def align(self, context: np.ndarray, proposal: Proposal) -> None:
        """Make slots 0.. hold the context and the slots after it the proposal's nodes, keeping what is known.

        New slots have height 0. There must be room for all of them.
        """
        length, wanted = len(context), len(context) + len(proposal)
        same = self.common(context)
        if self.used in (same, self.chain) and not proposal.tokens:
            # Nothing that is held can follow: where the context leaves the chain there are no nodes. So it is in
            # drafting, token by token, where every microsecond counts.
            self.tokens[same:length] = context[same:]
            self.heights[same:length] = 0
            self.parents[same:length] = np.arange(same - 1, length - 1)
            self.positions[same:length] = np.arange(same, length)
            self.chain = self.used = length
            return
        held = self._held_children(same)
        at = same - 1
        come_from = []  # held slot of wanted slot same, same + 1, ...; -1 where nothing is held
        for token in context[same:]:
            at = held.get((at, int(token)), -2)
            if at < 0:
                break
            come_from.append(at)
        come_from += [-1] * (length - same - len(come_from))
        place = {-1: come_from[-1] if come_from else same - 1}
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            place[node] = held.get((place[parent], token), -1) if place[parent] >= 0 else -1
            come_from.append(place[node])

        moves = [(slot, held_at) for slot, held_at in enumerate(come_from, same) if 0 <= held_at != slot]
        heights = [self.heights[slot] if slot >= 0 else 0 for slot in come_from]
        if moves:
            to, old = [slot for slot, _ in moves], [slot for _, slot in moves]
            self.memory.move(to, old)
            self.hidden[:, to] = self.hidden[:, old]
        self.tokens[same:length] = context[same:]
        self.tokens[length:wanted] = proposal.tokens
        self.heights[same:wanted] = heights
        self.parents[same:length] = np.arange(same - 1, length - 1)
        self.positions[same:length] = np.arange(same, length)
        for node, (parent, depth) in enumerate(zip(proposal.parents, proposal.depths(), strict=True)):
            self.parents[length + node] = length + parent  # a parent of -1 is the context's last slot
            self.positions[length + node] = length + depth
        self.chain, self.used = length, wanted

    def visible(self, slots: np.ndarray, window: int) -> np.ndarray | None:
        """[len(slots), used]: which slots each of these sees; None where all see everything."""
        keys = np.arange(self.used)
        seen = (keys[None, :] <= slots[:, None]) & (keys < self.chain)
        for row, slot in enumerate(slots):
            seen[row, self.path(int(slot))] = True
        if window:
            seen &= self.positions[slots][:, None] - self.positions[None, : self.used] < window
        return None if seen.all() else seen

    def path(self, slot: int) -> list[int]:
        """The proposal's slots from the context down to `slot`, itself last; nothing for a slot of the context."""
        slots = []
        while slot >= self.chain:
            slots.append(slot)
            slot = int(self.parents[slot])
        return slots[::-1]

    def _held_children(self, same: int) -> dict[tuple[int, int], int]:
        """(slot, token) -> the held slot after it, for the slots from `same` on."""
        slots = range(same, self.used)
        return {(int(self.parents[slot]), int(self.tokens[slot])): slot for slot in reversed(slots)}


class Judge(Protocol):
    """What the pool needs to know of a decoder."""

    config: DecoderConfig
    embedding: torch.Tensor  # [vocabulary, hidden], in the dtype of the weights
    dtype: torch.dtype  # of hidden states
    device: torch.device

    def new_memory(self) -> KeyValueMemory: ...


class StaircasePool:
    """The staircases of one checkpoint, by request, within a stated number of bytes.

    Ended requests leave theirs behind for a later prompt that begins alike (the next turn of a chat). When memory
    is short the longest unused ones go first; a running request that lost its own computes it anew.
    """

    def __init__(self, decoder: Judge, budget: int) -> None:
        self.decoder, self.budget = decoder, budget
        self.boundaries: tuple[int, ...] = (decoder.config.layers,)
        self._running: weakref.WeakKeyDictionary[RequestView, Staircase] = weakref.WeakKeyDictionary()
        self._idle: list[Staircase] = []
        self._use: list[Staircase] = []  # least recently used first

    def add_boundary(self, layer: int) -> None:
        """Keep hidden states after this layer too."""
        if layer not in self.boundaries:
            self.boundaries = tuple(sorted({*self.boundaries, layer}))
            self.clear()

    def clear(self) -> None:
        """Forget everything. Never changes what is written."""
        self._running.clear()
        self._idle, self._use = [], []

    def staircases(self) -> list[Staircase]:
        """All that is kept, the least recently used first."""
        return list(self._use)

    def bytes_held(self) -> int:
        return sum(staircase.bytes_for(staircase.capacity) for staircase in self._use)

    def release(self, request: RequestView) -> None:
        staircase = self._running.pop(request, None)
        if staircase is not None and any(staircase is known for known in self._use):
            self._idle.append(staircase)
            if len(self._idle) > _MOST_IDLE:
                self._forget(self._idle[0])

    def prepare(self, wanted: Sequence[tuple[RequestView, np.ndarray, Proposal]]) -> list[Staircase]:
        """The staircases of these requests, each aligned with its context and proposal and with room for them."""
        pinned: list[Staircase] = []
        for request, context, proposal in wanted:
            staircase = self._running.get(request) or self._taken_over(context)
            self._running[request] = staircase
            self._use = [known for known in self._use if known is not staircase] + [staircase]
            pinned.append(staircase)
            self._make_room(staircase, len(context) + len(proposal), pinned)
            staircase.align(context, proposal)
        return pinned

    def _taken_over(self, context: np.ndarray) -> Staircase:
        best = max(self._idle, key=lambda staircase: staircase.common(context), default=None)
        if best is None or not best.common(context):
            decoder = self.decoder
            return Staircase(
                decoder.new_memory(), self.boundaries, decoder.config.hidden, decoder.dtype, decoder.device
            )
        self._idle = [known for known in self._idle if known is not best]
        return best

    def _make_room(self, staircase: Staircase, slots: int, pinned: list[Staircase]) -> None:
        if slots <= staircase.capacity:
            return
        for candidate in list(self._use):
            if self._bytes_with(staircase, slots + _LEAST_GROWTH) <= self.budget:
                break
            if not any(candidate is one for one in pinned):
                self._forget(candidate)
        generous = max(slots + _GROWTH, min(2 * staircase.capacity, slots + 16 * _GROWTH))
        wished = (generous, slots + _LEAST_GROWTH, slots)
        sizes = [size for size in wished if self._bytes_with(staircase, size) <= self.budget]
        if not sizes:
            raise HierspecError(
                f"Keys and values need {self._bytes_with(staircase, slots) / 2**20:.0f} MiB but the budget is "
                f"{self.budget / 2**20:.0f} MiB; raise --kv-memory, or run fewer or shorter requests."
            )
        staircase.grow(sizes[0])

    def _bytes_with(self, staircase: Staircase, slots: int) -> int:
        return self.bytes_held() + staircase.bytes_for(slots - staircase.capacity)

    def _forget(self, staircase: Staircase) -> None:
        self._use = [known for known in self._use if known is not staircase]
        self._idle = [known for known in self._idle if known is not staircase]
        for request in [request for request, held in self._running.items() if held is staircase]:
            del self._running[request]
