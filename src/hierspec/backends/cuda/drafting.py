"""A drafter's next tokens on a GPU: join, layers, head and pick, one token after the other, in one graph.

A step of a small drafter takes less time than waiting for its pick. So the pick kernel writes the token where the next
step reads it, and all steps that an ask allows run; if the draft should have ended earlier, the host drops the rest.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, DraftRows, ExtraRows, Memory
from hierspec.backends.cuda.ahead import steps_allowed, steps_wanted
from hierspec.backends.cuda.attention import FIELDS, ROWS
from hierspec.backends.cuda.decoder import CudaDecoder
from hierspec.backends.cuda.filters import changes_logits
from hierspec.backends.cuda.fused import gather_rows
from hierspec.backends.cuda.graphs import Exchange, rounded_up
from hierspec.backends.cuda.head_kernels import gathered_product, listed_product
from hierspec.backends.cuda.heads import CudaJoin, CudaShortlist, room_for
from hierspec.backends.cuda.memory import CudaMemory
from hierspec.backends.cuda.pick import Picker, PickScratch, parameters_of_steps, unpacked
from hierspec.backends.cuda.pick_kernels import PARAMETERS, launch_picks
from hierspec.backends.cuda.scratch import places_at
from hierspec.backends.cuda.work import (
    MOST_NUMBERS,
    MOST_PIECES,
    ROW_ARRAYS,
    Steps,
    Work,
    bucket,
    in_passes,
    steps_of,
    work_of,
)
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.interfaces import Answer, Ask

_NormedJoin = tuple[CudaJoin, Tensor | None]  # a join and the norms of its features
_MOST_STEPS = 16
_COUNTS = (4, 8)  # picks per step: at least two, because the lead of the first decides whether to continue
_WORDS = 2  # 32-bit words per 64-bit number
_NO_PATHS = np.zeros(0, np.int64)


class CudaDraftWriter:
    """`DraftWriter`: a drafter's parts, and scratch memory."""

    most_rows = 16
    at_once = 4  # H200, default model: 0.27 ms for one token, 0.51 for four; the call itself takes 0.2

    def __init__(
        self,
        layers: CudaDecoder,
        first: _NormedJoin,
        then: _NormedJoin,
        shortlist: CudaShortlist,
        norm: Tensor | None,
        picker: Picker,
    ) -> None:
        self._layers, self._first, self._then = layers, first, then
        self._shortlist, self._norm, self._picker = shortlist, norm, picker
        device, (vocabulary, hidden) = layers.device, shortlist.table.shape
        self._x = torch.zeros((1, hidden), dtype=torch.bfloat16, device=device)
        self._state = torch.zeros((1, hidden), device=device)  # state of the last of several rows
        self._logits = torch.full((1, vocabulary), -math.inf, device=device)
        given = _MOST_STEPS * (PARAMETERS * _WORDS + ROW_ARRAYS + MOST_PIECES * FIELDS) + MOST_NUMBERS
        self._exchange = Exchange(rounded_up(given), _MOST_STEPS * (_COUNTS[-1] + 1), device)
        self._scratch = PickScratch(1, _COUNTS[-1], vocabulary, device)
        self._extra: ExtraRows | None = None
        self._extras = torch.zeros(vocabulary + 1, dtype=torch.int32, device=device)
        self._extra_count = torch.zeros(1, dtype=torch.int32, device=device)

    def read(self, memory: Memory, batch: Batch, hidden: Tensor) -> None:
        assert isinstance(memory, CudaMemory)
        layers, config, last = self._layers, self._layers.config, self._layers.config.layers - 1
        if last:
            layers.run(memory, batch, hidden, 0, last)
        layers.layer_rows += len(batch.positions)
        group = config.heads // config.kv_heads
        for rows, part in in_passes(batch, group):
            work = work_of(part, group, 0, memory.spare)
            layers.scratch.inbox.put(work.numbers)
            layers.scratch.hidden[: work.rows].copy_(hidden[rows])
            places = layers.scratch.places(work.width, work.pieces)
            layers.launch_entry(layers.layers[last].attention_norm, work.width)
            layers.launch_keys(memory, last, work.width, places, first_head=config.heads)

    def write(self, ask: Ask, rows: DraftRows, extra: ExtraRows) -> Answer:
        memory, features, layers, count = rows.memory, rows.features, self._layers, len(rows.tokens)
        assert isinstance(memory, CudaMemory)
        assert isinstance(features, CudaMemory)
        # The fused kernel only takes the argmax of logits and noise; anything else is picked afterwards, one token per
        # call.
        picked = not (ask.distributions or changes_logits(ask) or picks_wanted(ask) > _COUNTS[-1])
        ahead = steps_allowed([ask], len(rows.slots) - count, _MOST_STEPS, self.at_once) if picked else ()
        layers.have_positions(rows.first + count + len(ahead) + 1)
        work = self._work(rows, count, memory)
        later = None
        if ahead:
            slots, windows = rows.slots[count : count + len(ahead)], layers.config.windows
            later = steps_of(rows.first + count, slots, rows.table, windows)
        wanted = bucket(max(picks_wanted(ask), 2), _COUNTS) if picked else 0
        self._use_extras(extra)
        most = room_for(len(extra.tokens), len(self._shortlist.table)) if len(extra.tokens) else 0
        size = self._put(ask, rows, work, later, picked)
        shape = work.width, work.pieces, work.tile, len(ahead), 0 if later is None else later.pieces
        numbers = layers.number_of(memory), layers.number_of(features)
        layers.graphs.run(
            ("draft", id(self), numbers, rows.own, rows.taps, shape, wanted, most, size),
            lambda: self._launch(rows, work, later, wanted, most, size),
        )
        if not picked:
            layers.layer_rows += count * layers.config.layers
            return self._picker.answers([ask], self._logits)[0]
        steps = 1 + len(ahead)
        picks, leads = unpacked(self._exchange.wait(steps * (wanted + 1)).reshape(steps, wanted + 1))
        written = steps_wanted(ask, picks[:, 0], leads, ahead)
        layers.layer_rows += (count + written - 1) * layers.config.layers
        parts = [
            Answer(picks[step : step + 1, : picks_wanted(ask)], leads=leads[step : step + 1] if ask.leads else None)
            for step in range(written)
        ]
        return Answer(parts[0].picks, leads=parts[0].leads, ahead=tuple(parts[1:]))

    def _work(self, rows: DraftRows, count: int, memory: CudaMemory) -> Work:
        """The work of the first rows; each sees all tokens before it."""
        positions = np.arange(rows.first, rows.first + count)
        config = self._layers.config
        batch = Batch(
            positions=positions,
            slots=rows.slots[:count],
            text_starts=np.array([0, count]),
            tables=rows.table[None],
            lengths=positions + 1,
            path_starts=np.zeros(count + 1, np.int64),
            paths=_NO_PATHS,
            drafted=_NO_PATHS,
        )
        window = max(config.windows) if all(config.windows) else 0
        return work_of(batch, config.heads // config.kv_heads, window, memory.spare)

    def _put(self, ask: Ask, rows: DraftRows, work: Work, later: Steps | None, picked: bool) -> int:
        """Writes everything that a call copies to the device; returns how many numbers that is, rounded up.

        Order: parameters of picks, tokens, slots of features, index and slot of the last row, the rows of all steps.
        """
        steps, count = 1 if later is None else 1 + len(later.numbers), work.rows
        keys = np.zeros((steps, PARAMETERS), np.int64)
        if picked:
            keys[:] = parameters_of_steps(ask, len(ask.context), steps)
        joined = np.zeros((2, work.width), np.int32)
        joined[1] = -1  # padding rows have no features
        joined[0, :count], joined[1, :count] = rows.tokens, rows.feature_slots
        last = np.array((count - 1, rows.slots[count - 1]), np.int32)
        parts = [keys.ravel().view(np.int32), joined.ravel(), last, work.numbers]
        if later is not None:
            parts.append(later.numbers.ravel())
        at, numbers = 0, self._exchange.numbers
        for part in parts:
            numbers[at : at + len(part)] = part
            at += len(part)
        return rounded_up(at)

    def _use_extras(self, extra: ExtraRows) -> None:
        """Makes these the extra tokens, at the addresses that graphs hold."""
        if extra is self._extra:
            return
        assert isinstance(extra.rows, Tensor)
        self._logits.fill_(-math.inf)  # clear the logits of the previous extra tokens
        self._extras[: len(extra.rows)].copy_(extra.rows)
        self._extra_count.copy_(extra.rows[-1:])
        self._extra = extra

    def _launch(self, rows: DraftRows, work: Work, later: Steps | None, wanted: int, most: int, size: int) -> None:
        layers, numbers, width, memory = self._layers, self._exchange.given, work.width, rows.memory
        assert isinstance(memory, CudaMemory)
        assert isinstance(rows.features, CudaMemory)
        self._exchange.copy_in(size)
        steps = 1 if later is None else 1 + len(later.numbers)
        hidden, at = layers.scratch.hidden, steps * PARAMETERS * _WORDS
        keys = numbers[:at].view(torch.int64)
        tokens, slots, last = numbers[at : at + width], numbers[at + width : at + 2 * width], at + 2 * width
        at = last + 2
        join, norms = self._then if rows.own else self._first
        states, taps = (memory, (0,)) if rows.own else (rows.features, rows.taps)
        join.launch(tokens, states.all_states, join.taps(taps), slots, join.floats(norms), hidden, width)
        for step in range(steps):
            places, at = places_at(numbers, at, work.width, work.pieces)
            layers.launch(memory, work, 0, layers.config.layers, places)
            state = hidden[:1]
            if work.width > 1:  # the number of real rows differs from call to call
                gather_rows(numbers[last:], hidden, self._state, 1)
                state = self._state
            self._launch_head(state, most)
            if not wanted:
                return
            out = self._exchange.answered[step * (wanted + 1) :]
            launch_picks(self._logits, keys[step * PARAMETERS :], self._scratch.arrays, out, 1, wanted)
            if later is not None and step + 1 < steps:
                join, norms = self._then
                slots = numbers[last + 1 : last + 2] if not step else places.slots[:1]
                join.launch(out, memory.all_states, join.taps((0,)), slots, join.floats(norms), hidden, 1)
                work = Work(1, 1, later.pieces, False, ROWS, work.numbers)
        self._exchange.copy_out(steps * (wanted + 1))

    def _launch_head(self, state: Tensor, most: int) -> None:
        shortlist = self._shortlist
        shortlist.launch_norm(state, self._norm, self._x, 1)
        listed_product(self._x, shortlist.weight, shortlist.listed, self._logits, 1)
        if most:
            gathered_product(self._x, shortlist.table, self._extras, self._extra_count, self._logits, 1, most)
