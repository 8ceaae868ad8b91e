"""A drafter's next tokens on a GPU: join, layers, head and pick, token after token, in one graph.

A step of a small drafter takes less than waiting for its pick does. So the kernel that picks writes the token where the
next step reads it, and all steps run that an ask allows; where it would have ended earlier, the host drops the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, DraftRows, ExtraRows, Memory
from hierspec.backends.cuda.attention import Places
from hierspec.backends.cuda.decoder import CudaDecoder
from hierspec.backends.cuda.filters import changes_logits
from hierspec.backends.cuda.graphs import Inbox
from hierspec.backends.cuda.head_kernels import gathered_product, listed_product
from hierspec.backends.cuda.heads import CudaJoin, CudaShortlist, room_for
from hierspec.backends.cuda.memory import CudaMemory
from hierspec.backends.cuda.pick import Picker, PickScratch, parameters, unpacked
from hierspec.backends.cuda.pick_kernels import PARAMETERS, launch_picks
from hierspec.backends.cuda.scratch import places_at
from hierspec.backends.cuda.work import Work, bucket, in_passes, work_of
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.foresight import LEADS
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.sampling import noise_keys

_NormedJoin = tuple[CudaJoin, Tensor | None]  # and the norms of its features
_MOST_STEPS = 16
_COUNTS = (2, 4, 8)  # picks of a step: two at least, since how far the first is ahead decides whether to go on
_INBOX = 1 << 17  # numbers of a call
_WORDS = 2  # of the inbox in a number of 64 bits
_NO_PATHS = np.zeros(0, np.int64)


class CudaDraftWriter:
    """`DraftWriter`: a drafter's parts, and memory between them."""

    most_rows = 16

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
        self._logits = torch.full((1, vocabulary), -math.inf, device=device)
        self._inbox = Inbox(_INBOX, torch.int32, device)
        self._scratch = PickScratch(1, _COUNTS[-1], vocabulary, device)
        self._out = torch.zeros(_MOST_STEPS * (_COUNTS[-1] + 1), dtype=torch.int64, device=device)
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
            layers.launch_keys(memory, last, work.width, places, first_head=config.heads)

    def write(self, ask: Ask, rows: DraftRows, extra: ExtraRows) -> Answer:
        memory, features, layers, count = rows.memory, rows.features, self._layers, len(rows.tokens)
        assert isinstance(memory, CudaMemory)
        assert isinstance(features, CudaMemory)
        # What needs more than the largest of logit and noise is picked afterwards, and then there is one token a call.
        picked = not (ask.distributions or changes_logits(ask) or picks_wanted(ask) > _COUNTS[-1])
        ahead: Sequence[np.ndarray] = ()
        if picked and ask.ahead is not None:
            ahead = list(ask.ahead[: min(len(rows.slots) - count, _MOST_STEPS - 1)])
        steps = 1 + len(ahead)
        layers.have_positions(rows.first + count + steps)
        works = [self._work(rows, 0, count, memory)]
        works += [self._work(rows, count + step, 1, memory) for step in range(steps - 1)]
        wanted = bucket(max(picks_wanted(ask), 2), _COUNTS) if picked else 0
        self._use_extras(extra)
        most = room_for(len(extra.tokens), len(self._shortlist.table)) if len(extra.tokens) else 0
        self._inbox.put(self._numbers(ask, rows, works, picked))
        shapes = tuple((work.width, work.pieces, work.tile) for work in works)
        numbers = layers.number_of(memory), layers.number_of(features)
        layers.graphs.run(
            ("draft", id(self), numbers, rows.own, rows.taps, count, shapes, wanted, most),
            lambda: self._launch(rows, memory, features, works, wanted, most),
        )
        if not picked:
            layers.layer_rows += count * layers.config.layers
            return self._picker.answers([ask], self._logits)[0]
        picks, leads = unpacked(
            self._out[: steps * (wanted + 1)].to("cpu", copy=True).numpy().reshape(steps, wanted + 1)
        )
        written = _steps_wanted(ask, picks[:, 0], leads, ahead)
        layers.layer_rows += (count + written - 1) * layers.config.layers
        parts = [
            Answer(picks[step : step + 1, : picks_wanted(ask)], leads=leads[step : step + 1] if ask.leads else None)
            for step in range(written)
        ]
        return Answer(parts[0].picks, leads=parts[0].leads, ahead=tuple(parts[1:]))

    def _work(self, rows: DraftRows, start: int, count: int, memory: CudaMemory) -> Work:
        """Of some rows of the text, of which each sees all before it."""
        positions = np.arange(rows.first + start, rows.first + start + count)
        config = self._layers.config
        batch = Batch(
            positions=positions,
            slots=rows.slots[start : start + count],
            text_starts=np.array([0, count]),
            tables=rows.table[None],
            lengths=positions + 1,
            path_starts=np.zeros(count + 1, np.int64),
            paths=_NO_PATHS,
            drafted=_NO_PATHS,
        )
        window = max(config.windows) if all(config.windows) else 0
        return work_of(batch, config.heads // config.kv_heads, window, memory.spare)

    def _numbers(self, ask: Ask, rows: DraftRows, works: Sequence[Work], picked: bool) -> np.ndarray:
        """All that a call copies to the device: what picks need, tokens, slots of features, the rows of all steps."""
        keys = np.zeros((len(works), PARAMETERS), np.int64)
        if picked:
            keys[:] = parameters(ask, False)
            if ask.request.sampling.temperature > 0:
                keys[:, :2] = [noise_keys(ask.request.seed, len(ask.context) + step) for step in range(len(works))]
        given = np.concatenate((rows.tokens, rows.feature_slots)).astype(np.int32)
        return np.concatenate((keys.ravel().view(np.int32), given, *(work.numbers for work in works)))

    def _use_extras(self, extra: ExtraRows) -> None:
        """Let these be the extra tokens, at the addresses that graphs have."""
        if extra is self._extra:
            return
        assert isinstance(extra.rows, Tensor)
        self._logits.fill_(-math.inf)  # other tokens had logits there
        self._extras[: len(extra.rows)].copy_(extra.rows)
        self._extra_count.copy_(extra.rows[-1:])
        self._extra = extra

    def _launch(
        self,
        rows: DraftRows,
        memory: CudaMemory,
        features: CudaMemory,
        works: Sequence[Work],
        wanted: int,
        most: int,
    ) -> None:
        layers, numbers, count = self._layers, self._inbox.buffer, works[0].rows
        hidden, at = layers.scratch.hidden, len(works) * PARAMETERS * _WORDS
        keys = numbers[:at].view(torch.int64)
        tokens, slots = numbers[at : at + count], numbers[at + count : at + 2 * count]
        at += 2 * count
        join, norms = self._then if rows.own else self._first
        states, taps = (memory, (0,)) if rows.own else (features, rows.taps)
        join.launch(tokens, states.all_states, join.taps(taps), slots, join.floats(norms), hidden, count)
        last = count - 1
        for step, work in enumerate(works):
            places, at = places_at(numbers, at, work.width, work.pieces)
            self._launch_layers(memory, work, places)
            self._launch_head(hidden[last : last + 1], most)
            if not wanted:
                return
            out = self._out[step * (wanted + 1) :]
            launch_picks(self._logits, keys[step * PARAMETERS :], self._scratch.arrays, out, 1, wanted)
            if step + 1 < len(works):
                join, norms = self._then
                slots = places.slots[last : last + 1]
                join.launch(out, memory.all_states, join.taps((0,)), slots, join.floats(norms), hidden, 1)
            last = 0

    def _launch_layers(self, memory: CudaMemory, work: Work, places: Places) -> None:
        layers = self._layers
        for number in range(layers.config.layers):
            tap = None
            if number + 1 in memory.taps:
                tap = memory.all_states[memory.taps.index(number + 1)], places.slots
            layers.launch_layer(memory, number, work, places, tap)

    def _launch_head(self, state: Tensor, most: int) -> None:
        shortlist = self._shortlist
        shortlist.launch_norm(state, self._norm, self._x, 1)
        listed_product(self._x, shortlist.weight, shortlist.listed, self._logits, 1)
        if most:
            gathered_product(self._x, shortlist.table, self._extras, self._extra_count, self._logits, 1, most)


def _steps_wanted(ask: Ask, picks: np.ndarray, leads: np.ndarray, ahead: Sequence[np.ndarray]) -> int:
    """How many steps are answered: up to the first that ends the text, or after which the ask wants no more."""
    least = len(LEADS)
    for step, allowed in enumerate(ahead):
        token = int(picks[step])
        if token < 0 or token in ask.request.stop_ids:
            return step + 1
        least = min(least, sum(bool(leads[step] >= bound) for bound in LEADS))
        if not allowed[least]:
            return step + 1
    return 1 + len(ahead)
