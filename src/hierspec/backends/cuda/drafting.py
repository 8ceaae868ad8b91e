"""A drafter's next tokens on a GPU: join, layers, head and picks, one token after the other, in one graph.

A step of a small drafter takes less time than waiting for its pick. So the pick kernel writes the token where the next
step reads it, and all steps that an ask allows run; if the draft should have ended earlier, the host drops the rest.
The same passes continue runners-up (`branches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, DraftRows, ExtraRows, Memory
from hierspec.backends.cuda.ahead import steps_allowed, steps_wanted
from hierspec.backends.cuda.attention import FIELDS
from hierspec.backends.cuda.branches import MOST_BRANCHED, Branched, branched, runners_up
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
    Work,
    bucket,
    fits,
    in_passes,
    work_of,
)
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.interfaces import Answer, Ask

_NormedJoin = tuple[CudaJoin, Tensor | None]  # a join and the norms of its features
_MOST_STEPS = 8
_COUNTS = (4, 8)  # picks per step: at least two, because the lead of the first decides whether to continue
_WORDS = 2  # 32-bit words per 64-bit number
_NO_PATHS = np.zeros(0, np.int64)


class CudaDraftWriter:
    """`DraftWriter`: a drafter's parts, and scratch memory."""

    most_rows = 16
    at_once = 5  # a token takes a quarter of what a call takes, so a fifth one is worth it while most are accepted

    def __init__(
        self,
        layers: CudaDecoder,
        first: _NormedJoin,
        then: _NormedJoin,
        shortlist: CudaShortlist,
        norm: Tensor | None,
        picker: Picker,
    ) -> None:
        self.layers, self.first, self.then = layers, first, then
        self.shortlist, self._norm, self._picker = shortlist, norm, picker
        device, (vocabulary, hidden) = layers.device, shortlist.table.shape
        self._x = torch.zeros((MOST_BRANCHED, hidden), dtype=torch.bfloat16, device=device)
        self.state = torch.zeros((1, hidden), device=device)  # state of the last of several rows
        self.logits = torch.full((MOST_BRANCHED, vocabulary), -math.inf, device=device)
        of_row = PARAMETERS * _WORDS + 2 + ROW_ARRAYS + _MOST_STEPS  # at most, the slots of its path included
        given = _MOST_STEPS * (MOST_BRANCHED * of_row + MOST_PIECES * FIELDS) + MOST_NUMBERS
        self._exchange = Exchange(rounded_up(given), _MOST_STEPS * MOST_BRANCHED * (_COUNTS[-1] + 1), device)
        self.scratch = PickScratch(MOST_BRANCHED, _COUNTS[-1], vocabulary, device)
        self._extra: ExtraRows | None = None
        self._extras = torch.zeros(vocabulary + 1, dtype=torch.int32, device=device)
        self._extra_count = torch.zeros(1, dtype=torch.int32, device=device)

    def read(self, memory: Memory, batch: Batch, hidden: Tensor) -> None:
        assert isinstance(memory, CudaMemory)
        layers, config, last = self.layers, self.layers.config, self.layers.config.layers - 1
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
        memory, features, layers, count = rows.memory, rows.features, self.layers, len(rows.tokens)
        assert isinstance(memory, CudaMemory)
        assert isinstance(features, CudaMemory)
        # The fused kernel only takes the argmax of logits and noise; anything else is picked afterwards, one token per
        # call.
        picked = not (ask.distributions or changes_logits(ask) or picks_wanted(ask) > _COUNTS[-1])
        ahead = steps_allowed([ask], len(rows.slots) - count, _MOST_STEPS, self.at_once) if picked else ()
        layers.have_positions(rows.first + count + len(ahead) + 1)
        work = self._work(rows, count, memory)
        tree = branched(len(ahead), runners_up(ask.candidates))
        # Slots of drafted tokens by number: those of the chain, then those of branches, on the spare page; last (-1)
        # the slot of the token before them.
        branches = np.arange(memory.spare + 1, memory.spare + memory.page)
        slots = np.concatenate((rows.slots[count : count + len(ahead)], branches, rows.slots[count - 1 : count]))
        later = self._later(rows, count, memory, tree, slots)
        if later is None:  # so long a context that the rows of a pass do not fit
            tree, later, ahead = branched(0, 0), [], ()
        wanted = bucket(max(picks_wanted(ask), 2), _COUNTS) if picked else 0
        self.use_extras(extra)
        most = room_for(len(extra.tokens), len(self.shortlist.table)) if len(extra.tokens) else 0
        size = self._put(ask, rows, work, tree, later, slots, wanted)
        shape = work.width, work.pieces, work.tile, *((each.rows, each.pieces, each.tile) for each in later)
        numbers = layers.number_of(memory), layers.number_of(features)
        layers.graphs.run(
            ("draft", id(self), numbers, rows.own, rows.taps, shape, wanted, most, size),
            lambda: self._launch(rows, work, tree, later, wanted, most, size),
        )
        self._exchange.launched()
        ask.request.catch_up()  # while the device computes
        if not picked:
            layers.layer_rows += count * layers.config.layers
            return self._picker.answers([ask], self.logits[:1])[0]
        picks, leads = unpacked(self._exchange.wait(tree.rows * (wanted + 1)).reshape(tree.rows, wanted + 1))
        chain = [0, *tree.firsts]  # rows of the chain's tokens
        written = steps_wanted(ask, picks[chain, 0], leads[chain], ahead)
        layers.layer_rows += (count + written - 1) * layers.config.layers
        parts = [
            Answer(
                picks[row : row + 1, : picks_wanted(ask)],
                leads=leads[row : row + 1] if ask.leads else None,
                branches=_branches(ask, tree, step, written - 1, picks, leads),
            )
            for step, row in enumerate(chain[:written])
        ]
        return replace(parts[0], ahead=tuple(parts[1:]))

    def _work(self, rows: DraftRows, count: int, memory: CudaMemory) -> Work:
        """The work of the first rows; each sees all tokens before it."""
        positions = np.arange(rows.first, rows.first + count)
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
        return self._work_of(batch, memory)

    def _work_of(self, batch: Batch, memory: CudaMemory) -> Work:
        config = self.layers.config
        window = max(config.windows) if all(config.windows) else 0
        return work_of(batch, config.heads // config.kv_heads, window, memory.spare)

    def _later(
        self, rows: DraftRows, count: int, memory: CudaMemory, tree: Branched, slots: np.ndarray
    ) -> list[Work] | None:
        """The work of the passes after the first; None if the last and widest does not fit."""
        config, length, works = self.layers.config, rows.first + count, list[Work]()
        for number in reversed(range(len(tree.passes))):
            each = tree.passes[number]
            here = len(each.slots)
            batch = Batch(
                positions=np.full(here, length + number),
                slots=slots[each.slots],
                text_starts=np.array((0, here)),
                tables=rows.table[None],
                lengths=np.full(here, length),
                path_starts=each.path_starts,
                paths=slots[each.paths],
                drafted=_NO_PATHS,
            )
            if not works and not fits(batch, config.heads // config.kv_heads):
                return None
            works.append(self._work_of(batch, memory))
        return works[::-1]

    def _put(
        self,
        ask: Ask,
        rows: DraftRows,
        work: Work,
        tree: Branched,
        later: Sequence[Work],
        slots: np.ndarray,
        wanted: int,
    ) -> int:
        """Writes everything that a call copies to the device; returns how many numbers that is, rounded up.

        Order: parameters of picks, tokens, slots of features, index and slot of the last row, its work; then for every
        later pass: where the tokens of its rows are among the picks, slots of features, its work.
        """
        count = work.rows
        keys = np.zeros((tree.rows, PARAMETERS), np.int64)
        if wanted:
            of_steps = parameters_of_steps(ask, len(ask.context), 1 + len(later))
            keys[:] = np.repeat(of_steps, [1, *(len(each.slots) for each in tree.passes)], axis=0)
        joined = np.zeros((2, work.width), np.int32)
        joined[1] = -1  # padding rows have no features
        joined[0, :count], joined[1, :count] = rows.tokens, rows.feature_slots
        last = np.array((count - 1, rows.slots[count - 1]), np.int32)
        parts = [keys.ravel().view(np.int32), joined.ravel(), last, work.numbers]
        before = 0
        for each, first, of_pass in zip(tree.passes, tree.firsts, later, strict=True):
            parts += [(before + each.sources) * (wanted + 1) + each.ranks, slots[each.features], of_pass.numbers]
            before = first
        at, numbers = 0, self._exchange.numbers
        for part in parts:
            numbers[at : at + len(part)] = part
            at += len(part)
        return rounded_up(at)

    def use_extras(self, extra: ExtraRows) -> None:
        """Makes these the extra tokens, at the addresses that graphs hold."""
        if extra is self._extra:
            return
        assert isinstance(extra.rows, Tensor)
        self.logits.fill_(-math.inf)  # clear the logits of the previous extra tokens
        self._extras[: len(extra.rows)].copy_(extra.rows)
        self._extra_count.copy_(extra.rows[-1:])
        self._extra = extra

    def _launch(
        self, rows: DraftRows, work: Work, tree: Branched, later: Sequence[Work], wanted: int, most: int, size: int
    ) -> None:
        layers, numbers, width, memory = self.layers, self._exchange.given, work.width, rows.memory
        assert isinstance(memory, CudaMemory)
        assert isinstance(rows.features, CudaMemory)
        self._exchange.copy_in(size)
        hidden, at = layers.scratch.hidden, tree.rows * PARAMETERS * _WORDS
        keys = numbers[:at].view(torch.int64)
        tokens, slots, last = numbers[at : at + width], numbers[at + width : at + 2 * width], at + 2 * width
        join, norms = self.then if rows.own else self.first
        states, taps = (memory, (0,)) if rows.own else (rows.features, rows.taps)
        join.launch(tokens, states.all_states, join.taps(taps), slots, join.floats(norms), hidden, width)
        places, _ = places_at(numbers, last + 2, width, work.pieces)
        at = last + 2 + len(work.numbers)
        layers.launch(memory, work, 0, layers.config.layers, places)
        state = hidden[:1]
        if width > 1:  # the number of real rows differs from call to call
            gather_rows(numbers[last:], hidden, self.state, 1)
            state = self.state
        self.launch_head(state, 1, most)
        if not wanted:
            return
        answered, scratch = self._exchange.answered, self.scratch.arrays
        launch_picks(self.logits, keys, scratch, answered, 1, wanted)
        join, norms = self.then
        last_layer = join.taps((0,))
        for each, first, of_pass in zip(tree.passes, tree.firsts, later, strict=True):
            here = len(each.slots)
            index, slots, at = numbers[at : at + here], numbers[at + here : at + 2 * here], at + 2 * here
            join.launch(answered, memory.all_states, last_layer, slots, join.floats(norms), hidden, here, index)
            places, _ = places_at(numbers, at, of_pass.width, of_pass.pieces)
            at += len(of_pass.numbers)
            layers.launch(memory, of_pass, 0, layers.config.layers, places)
            self.launch_head(hidden[:here], here, most)
            out = answered[first * (wanted + 1) :]
            launch_picks(self.logits, keys[first * PARAMETERS :], scratch, out, here, wanted)
        self._exchange.copy_out(tree.rows * (wanted + 1))

    def launch_head(self, states: Tensor, rows: int, most: int) -> None:
        shortlist = self.shortlist
        shortlist.launch_norm(states, self._norm, self._x, rows)
        listed_product(self._x, shortlist.weight, shortlist.listed, self.logits, rows)
        if most:
            gathered_product(self._x, shortlist.table, self._extras, self._extra_count, self.logits, rows, most)


def _branches(
    ask: Ask, tree: Branched, step: int, most: int, picks: np.ndarray, leads: np.ndarray
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """What follows the runners-up of the chain's token at this step, up to step `most`: tokens and their leads."""
    branches: list[tuple[tuple[int, float], ...]] = []
    at, endings = (0, *tree.firsts)[step], ask.request.stop_ids
    for rank in range(1, runners_up(ask.candidates) + 1):
        row, branch = tree.branches.get((step, rank), -1), list[tuple[int, float]]()
        token = int(picks[at, rank])
        for first in tree.firsts[step:most] if row >= 0 else ():
            if token in endings or (token := int(picks[first + row, 0])) < 0:
                break
            branch.append((token, float(leads[first + row])))
        branches.append(tuple(branch))
    return tuple(branches)
