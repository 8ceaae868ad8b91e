"""Forward passes on a GPU in one graph: copy in, embeddings, layers, head, picks, copy out.

If a request may continue by itself, the pick kernel writes the token where the next pass reads it, and several passes
form one graph. Everything that differs from call to call is in the numbers that are copied in. While the host looks at
the tokens of one call, the device may already be at work on the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, PassRows
from hierspec.backends.cuda.ahead import steps_allowed, steps_wanted
from hierspec.backends.cuda.attention import ROWS
from hierspec.backends.cuda.decoder import CudaDecoder
from hierspec.backends.cuda.filters import changes_logits
from hierspec.backends.cuda.fused import gather_rows
from hierspec.backends.cuda.graphs import Exchange, rounded_up
from hierspec.backends.cuda.launching import SMALL
from hierspec.backends.cuda.memory import CudaMemory
from hierspec.backends.cuda.pick import PickScratch, parameters, parameters_of_steps, unpacked
from hierspec.backends.cuda.pick_kernels import PARAMETERS, launch_picks
from hierspec.backends.cuda.scratch import places_at
from hierspec.backends.cuda.work import MOST_NUMBERS, MOST_ROWS, Work, bucket, fits, steps_of, work_of
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.interfaces import Answer, Ask, RequestView

_MOST_STEPS = 8  # passes per graph
_COUNTS = (1, 4, 8)  # picks per row: few values, since each has its own graphs
_WORDS = 2  # 32-bit words per 64-bit number
# Further passes of a graph while the next one is launched before its tokens are known: what it takes must cover what
# Python takes, and what comes after the end of a text is lost.
_STEPS_OF_SMALL, _STEPS_OF_LARGE = 3, 1
_NO_PATHS = np.zeros(0, np.int64)


@dataclass(eq=False)
class _Call:
    """A graph that was launched, and what its answers mean."""

    exchange: int
    work: Work
    ahead: Sequence[np.ndarray]
    wanted: int  # picks per row
    # Of a call that was launched before it was asked for: its request, context, layers, norm and pages.
    about: tuple[weakref.ref[RequestView], int, int, int, bytes] | None = None

    @property
    def last(self) -> int:
        """The row of its last token."""
        return self.work.width + len(self.ahead) - 1 if len(self.ahead) else self.work.rows - 1

    @property
    def answers(self) -> int:
        """Numbers of all its rows' answers."""
        return (self.work.width + len(self.ahead)) * (self.wanted + 1)


class CudaPassWriter:
    """`PassWriter`: memory for numbers in and out, and for picks."""

    instead_of_small_heads = True  # a small model spends most of its time between kernels

    def __init__(self, decoder: CudaDecoder) -> None:
        self.decoder = decoder
        vocabulary, rows = len(decoder.head_weight), MOST_ROWS + _MOST_STEPS
        given = rows * PARAMETERS * _WORDS + MOST_ROWS + _MOST_STEPS * MOST_NUMBERS
        # Two take turns: the host reads the answers of one call while the device works on the next.
        self._exchanges = [Exchange(rounded_up(given), rows * (_COUNTS[-1] + 1), decoder.device) for _ in range(2)]
        self._scratch = PickScratch(MOST_ROWS, _COUNTS[-1], vocabulary, decoder.device)
        self._steps = _STEPS_OF_SMALL if decoder.config.hidden <= SMALL else _STEPS_OF_LARGE
        self._begun: _Call | None = None  # launched and not asked for yet

    @property
    def room_needed(self) -> int:
        """Slots after the last token for a call and the one after it."""
        return 2 * (self._steps + 1)

    def takes(self, asks: Sequence[Ask], rows: int) -> bool:
        """Whether the fused picks suffice: filters, penalties and distributions need whole logits, many picks a
        loop."""
        return rows <= MOST_ROWS and not any(
            ask.distributions or changes_logits(ask) or picks_wanted(ask) > _COUNTS[-1] for ask in asks
        )

    def answers(self, asks: Sequence[Ask], rows: PassRows) -> list[Answer] | None:
        decoder, count = self.decoder, len(rows.batch.positions)
        if not fits(rows.batch, decoder.config.heads // decoder.config.kv_heads):
            return None
        ahead = steps_allowed(asks, len(rows.room), _MOST_STEPS, _MOST_STEPS)
        begun, self._begun = self._begun, None
        about = None if begun is None or len(ahead) < self._steps else begun.about
        is_begun = about is not None and _is_about(about, asks, rows)
        goes_on = asks[0].goes_on and len(ahead) >= self._steps and len(rows.room) >= self.room_needed
        if is_begun or goes_on:
            ahead = ahead[: self._steps]
        call = begun if begun is not None and is_begun else self._launched(asks, rows, ahead, None)
        if goes_on:
            self._begun = self._next(asks[0], rows, call)
        for ask in asks:  # while the device computes
            ask.request.catch_up()
        picks, leads = unpacked(self._exchanges[call.exchange].wait(call.answers).reshape(-1, call.wanted + 1))
        decoder.layer_rows += count * (rows.stop - rows.start)
        answers, row = [], 0
        for ask in asks:
            end = row + 1 + len(ask.proposal)
            answers.append(_answer(ask, picks[row:end], leads[row:end]))
            row = end
        return [self._with_later(asks[0], answers[0], picks, leads, call, rows.stop)] if len(ahead) else answers

    def _next(self, ask: Ask, rows: PassRows, call: _Call) -> _Call:
        """Launches the call after this one, which goes on from a token that only the device knows."""
        used = len(call.ahead)
        context = len(ask.context) + 1 + used
        position = np.array([context - 1])
        one = np.array([0, 1])
        batch = Batch(
            positions=position,
            slots=rows.room[used : used + 1],
            text_starts=one,
            tables=rows.batch.tables,
            lengths=position + 1,
            path_starts=np.zeros(2, np.int64),
            paths=_NO_PATHS,
            drafted=_NO_PATHS,
        )
        following = replace(rows, batch=batch, tokens=np.zeros(1, np.int32), room=rows.room[used + 1 :])
        # Only the length of a context counts here, since penalties need whole logits.
        later = replace(ask, context=np.broadcast_to(ask.context[-1], context))
        begun = self._launched([later], following, call.ahead, call)
        begun.about = weakref.ref(ask.request), context, rows.stop, id(rows.norm), rows.batch.tables.tobytes()
        return begun

    def _launched(self, asks: Sequence[Ask], rows: PassRows, ahead: Sequence[np.ndarray], after: _Call | None) -> _Call:
        """Launches a call; the token of one `after` another is that one's last."""
        decoder, memory, batch = self.decoder, rows.memory, rows.batch
        assert isinstance(memory, CudaMemory)
        config = decoder.config
        group, windows = config.heads // config.kv_heads, config.windows[: rows.stop]
        work = work_of(batch, group, max(windows) if all(windows) else 0, memory.spare)
        last = int(batch.positions[-1]) + 1
        later = steps_of(last, rows.room[: len(ahead)], batch.tables[0], windows) if len(ahead) else None
        decoder.have_positions(int(batch.positions.max()) + 1 + len(ahead))
        exchange = 0 if after is None else 1 - after.exchange
        call = _Call(exchange, work, ahead, bucket(max(map(picks_wanted, asks)), _COUNTS))
        self._exchanges[exchange].free()
        size = self._put(asks, rows, call, None if later is None else later.numbers)
        gain = decoder.gain(rows.norm)
        steps = 0 if later is None else later.pieces
        shape = work.width, work.pieces, work.tree, work.tile, len(ahead), steps
        source = None if after is None else (after.exchange, after.last * (after.wanted + 1))
        key = "pass", decoder.number_of(memory), rows.start, rows.stop, shape, gain.data_ptr(), call.wanted, size
        launch = partial(self._launch, rows, call, steps, size, gain, source)
        decoder.graphs.run((*key, exchange, source), launch)
        self._exchanges[exchange].launched()
        return call

    def _with_later(
        self, ask: Ask, first: Answer, picks: np.ndarray, leads: np.ndarray, call: _Call, stop: int
    ) -> Answer:
        """The answer to an ask that continued by itself, cut to the steps that it wanted."""
        work, ahead = call.work, call.ahead
        written = [work.rows - 1, *range(work.width, work.width + len(ahead))]  # one row for each token
        more = written[1 : steps_wanted(ask, picks[written, 0], leads[written], ahead)]
        self.decoder.layer_rows += len(more) * stop
        later = tuple(_answer(ask, picks[row : row + 1], leads[row : row + 1]) for row in more)
        return Answer(first.picks, leads=first.leads, ahead=later)

    def _put(self, asks: Sequence[Ask], rows: PassRows, call: _Call, later: np.ndarray | None) -> int:
        """Writes what the graph copies in; returns how many numbers that is, rounded up.

        Order: parameters of picks, tokens, the rows of the first pass, the rows of the passes that follow.
        """
        numbers, work = self._exchanges[call.exchange].numbers, call.work
        steps = 0 if later is None else len(later)
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
        self, rows: PassRows, call: _Call, pieces: int, size: int, gain: Tensor, source: tuple[int, int] | None
    ) -> None:
        """`source`: the exchange among whose answers the token of the only row is, and where."""
        decoder, memory, exchange = self.decoder, rows.memory, self._exchanges[call.exchange]
        assert isinstance(memory, CudaMemory)
        work, later, wanted = call.work, len(call.ahead), call.wanted
        hidden, given = decoder.scratch.hidden, exchange.given
        exchange.copy_in(size)
        ends = (work.width + later) * PARAMETERS * _WORDS
        keys = given[:ends].view(torch.int64)
        places, _ = places_at(given, ends + work.width, work.width, work.pieces)
        if rows.start:
            states = memory.all_states[memory.taps.index(rows.start)]
            gather_rows(places.slots, states, hidden, work.width)
        elif source is None:
            gather_rows(given[ends:], decoder.embedding, hidden, work.width)
        else:
            gather_rows(self._exchanges[source[0]].answered[source[1] :], decoder.embedding, hidden, 1)
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


def _is_about(
    about: tuple[weakref.ref[RequestView], int, int, int, bytes], asks: Sequence[Ask], rows: PassRows
) -> bool:
    """Whether a call that was launched before it was asked for is this one: the pages of a text may only grow."""
    request, context, stop, norm, pages = about
    if len(asks) > 1 or request() is not asks[0].request or len(asks[0].context) != context or rows.start:
        return False
    return rows.stop == stop and id(rows.norm) == norm and rows.batch.tables.tobytes().startswith(pages)


def _answer(ask: Ask, picks: np.ndarray, leads: np.ndarray) -> Answer:
    return Answer(picks[:, : picks_wanted(ask)], leads=leads if ask.leads else None)
