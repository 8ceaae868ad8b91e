"""Forward passes on a GPU in one graph: copy in, embeddings, layers, head, picks, copy out.

If a request may continue by itself, the pick kernel writes the token where the next pass reads it, and several passes
form one graph. Everything that differs from call to call is in the numbers that are copied in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import PassRows
from hierspec.backends.cuda.ahead import steps_allowed, steps_wanted
from hierspec.backends.cuda.attention import ROWS
from hierspec.backends.cuda.decoder import CudaDecoder
from hierspec.backends.cuda.filters import changes_logits
from hierspec.backends.cuda.fused import gather_rows
from hierspec.backends.cuda.graphs import Exchange, rounded_up
from hierspec.backends.cuda.memory import CudaMemory
from hierspec.backends.cuda.pick import PickScratch, parameters, parameters_of_steps, unpacked
from hierspec.backends.cuda.pick_kernels import PARAMETERS, launch_picks
from hierspec.backends.cuda.scratch import places_at
from hierspec.backends.cuda.work import MOST_NUMBERS, MOST_ROWS, Work, bucket, fits, steps_of, work_of
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.interfaces import Answer, Ask

_MOST_STEPS = 8  # passes per graph
_COUNTS = (1, 4, 8)  # picks per row: few values, since each has its own graphs
_WORDS = 2  # 32-bit words per 64-bit number


class CudaPassWriter:
    """`PassWriter`: memory for numbers in and out, and for picks."""

    instead_of_small_heads = True  # a small model spends most of its time between kernels

    def __init__(self, decoder: CudaDecoder) -> None:
        self.decoder = decoder
        vocabulary, rows = len(decoder.head_weight), MOST_ROWS + _MOST_STEPS
        given = rows * PARAMETERS * _WORDS + MOST_ROWS + _MOST_STEPS * MOST_NUMBERS
        self._exchange = Exchange(rounded_up(given), rows * (_COUNTS[-1] + 1), decoder.device)
        self._scratch = PickScratch(MOST_ROWS, _COUNTS[-1], vocabulary, decoder.device)

    def takes(self, asks: Sequence[Ask], rows: int) -> bool:
        """Whether the fused picks suffice: filters, penalties and distributions need whole logits, many picks a
        loop."""
        return rows <= MOST_ROWS and not any(
            ask.distributions or changes_logits(ask) or picks_wanted(ask) > _COUNTS[-1] for ask in asks
        )

    def answers(self, asks: Sequence[Ask], rows: PassRows) -> list[Answer] | None:
        decoder, memory, batch = self.decoder, rows.memory, rows.batch
        assert isinstance(memory, CudaMemory)
        config, count = decoder.config, len(batch.positions)
        group, windows = config.heads // config.kv_heads, config.windows[: rows.stop]
        if not fits(batch, group):
            return None
        work = work_of(batch, group, max(windows) if all(windows) else 0, memory.spare)
        ahead = steps_allowed(asks, len(rows.room), _MOST_STEPS, _MOST_STEPS)
        last = int(batch.positions[-1]) + 1
        later = steps_of(last, rows.room[: len(ahead)], batch.tables[0], windows) if len(ahead) else None
        decoder.have_positions(int(batch.positions.max()) + 1 + len(ahead))
        wanted = bucket(max(map(picks_wanted, asks)), _COUNTS)
        size = self._put(asks, rows, work, None if later is None else later.numbers)
        gain = decoder.gain(rows.norm)
        steps = 0 if later is None else later.pieces
        shape = work.width, work.pieces, work.tree, work.tile, len(ahead), steps
        key = "pass", decoder.number_of(memory), rows.start, rows.stop, shape, gain.data_ptr(), wanted, size
        launch = partial(self._launch, rows, work, len(ahead), steps, wanted, size, gain)
        decoder.graphs.run(key, launch)
        for ask in asks:  # while the device computes
            ask.request.catch_up()
        answered = self._exchange.wait((work.width + len(ahead)) * (wanted + 1))
        picks, leads = unpacked(answered.reshape(-1, wanted + 1))
        decoder.layer_rows += count * (rows.stop - rows.start)
        answers, row = [], 0
        for ask in asks:
            end = row + 1 + len(ask.proposal)
            answers.append(_answer(ask, picks[row:end], leads[row:end]))
            row = end
        return [self._with_later(asks[0], answers[0], picks, leads, work, rows.stop, ahead)] if ahead else answers

    def _with_later(
        self,
        ask: Ask,
        first: Answer,
        picks: np.ndarray,
        leads: np.ndarray,
        work: Work,
        stop: int,
        ahead: Sequence[np.ndarray],
    ) -> Answer:
        """The answer to an ask that continued by itself, cut to the steps that it wanted."""
        written = [work.rows - 1, *range(work.width, work.width + len(ahead))]  # one row for each token
        more = written[1 : steps_wanted(ask, picks[written, 0], leads[written], ahead)]
        self.decoder.layer_rows += len(more) * stop
        later = tuple(_answer(ask, picks[row : row + 1], leads[row : row + 1]) for row in more)
        return Answer(first.picks, leads=first.leads, ahead=later)

    def _put(self, asks: Sequence[Ask], rows: PassRows, work: Work, later: np.ndarray | None) -> int:
        """Writes what the graph copies in; returns how many numbers that is, rounded up.

        Order: parameters of picks, tokens, the rows of the first pass, the rows of the passes that follow.
        """
        numbers, steps = self._exchange.numbers, 0 if later is None else len(later)
        ends = (work.width + steps) * PARAMETERS * _WORDS
        keys = numbers[:ends].view(np.int64).reshape(-1, PARAMETERS)
        keys[:] = 0  # for padding rows
        row = 0
        for ask in asks:
            keys[row : row + 1 + len(ask.proposal)] = parameters(ask, False)
            row += 1 + len(ask.proposal)
        if steps:
            keys[work.width :] = parameters_of_steps(asks[0], len(asks[0].context) + 1, steps)
        numbers[ends : ends + len(rows.tokens)] = rows.tokens
        numbers[ends + len(rows.tokens) : ends + work.width] = 0
        at = ends + work.width
        numbers[at : at + len(work.numbers)] = work.numbers
        at += len(work.numbers)
        if later is not None:
            numbers[at : at + later.size] = later.ravel()
            at += later.size
        return rounded_up(at)

    def _launch(
        self, rows: PassRows, work: Work, later: int, pieces: int, wanted: int, size: int, gain: Tensor
    ) -> None:
        decoder, memory, exchange = self.decoder, rows.memory, self._exchange
        assert isinstance(memory, CudaMemory)
        hidden, given = decoder.scratch.hidden, exchange.given
        exchange.copy_in(size)
        ends = (work.width + later) * PARAMETERS * _WORDS
        keys = given[:ends].view(torch.int64)
        places, _ = places_at(given, ends + work.width, work.width, work.pieces)
        if rows.start:
            states = memory.all_states[memory.taps.index(rows.start)]
            gather_rows(places.slots, states, hidden, work.width)
        else:
            gather_rows(given[ends:], decoder.embedding, hidden, work.width)
        at = ends + work.width + len(work.numbers)
        decoder.launch(memory, work, rows.start, rows.stop, places, gain)
        self.launch_picks(work.width, keys, exchange.answered, wanted)
        for step in range(later):
            token = exchange.answered[(work.width + step - 1) * (wanted + 1) :]
            if not step:
                token = exchange.answered[(work.rows - 1) * (wanted + 1) :]
            gather_rows(token, decoder.embedding, hidden, 1)
            one = Work(1, 1, pieces, False, ROWS, work.numbers)
            places, at = places_at(given, at, 1, pieces)
            row = work.width + step
            out = exchange.answered[row * (wanted + 1) :]
            decoder.launch(memory, one, 0, rows.stop, places, gain)
            self.launch_picks(1, keys[row * PARAMETERS :], out, wanted)
        exchange.copy_out((work.width + later) * (wanted + 1))

    def launch_picks(self, width: int, keys: Tensor, out: Tensor, wanted: int) -> None:
        """Head and picks for states that have entered the norm before the head."""
        logits = self.decoder.room_for_logits(width)
        self.decoder.launch_head(width, logits)
        launch_picks(logits, keys, self._scratch.arrays, out, width, wanted)


def _answer(ask: Ask, picks: np.ndarray, leads: np.ndarray) -> Answer:
    return Answer(picks[:, : picks_wanted(ask)], leads=leads if ask.leads else None)
