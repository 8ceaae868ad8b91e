"""Forward passes of a decoder on a CPU in one call: turns an ask and its rows into arguments of the compiled
function."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hierspec.backends.base import PassRows
from hierspec.backends.cpu.answers import filters_of, keys_of
from hierspec.backends.cpu.decoder import CpuDecoder
from hierspec.backends.cpu.layers import run_head, run_layers
from hierspec.backends.cpu.memory import CpuMemory
from hierspec.backends.cpu.pick import greedy_rows, sample_rows
from hierspec.backends.cpu.text_passes import run_text
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.foresight import LEADS
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.sampling import NO_TOKEN

_MOST_ROWS = 64
_CALL_SECONDS = 0.03  # most time per call: somebody waits for its first token, or wants to stop it
_LEADS = np.array(LEADS)
_NO_STEPS = np.empty((0, len(LEADS) + 1), np.bool_)
_ZEROS, _ONE_GROUP, _NO_KEYS = np.zeros(2, np.int64), np.array([0, 1]), np.empty((0, 2), np.int64)
_UNCHANGED = (1.0, 0.0, 0.0), np.empty(0, np.int32), np.empty(0), np.empty((0, 0))  # no penalties or biases


class CpuPassWriter:
    """`PassWriter` for one request at a time."""

    instead_of_small_heads = False  # a small model spends most of its time in the head
    room_needed = 0  # it begins nothing before it is asked

    def __init__(self, decoder: CpuDecoder, team: ThreadTeam) -> None:
        self._decoder, self._team = decoder, team
        self._step_seconds = _CALL_SECONDS  # of a pass over one token, as last measured
        self._logits = np.empty((0, 0), np.float32)
        self._addresses: dict[bool, np.ndarray] = {}  # by whether it samples: only functions in use are compiled

    def takes(self, asks: Sequence[Ask], rows: int) -> bool:
        """Whether it is one small ask without penalties or bias: penalties change with every token."""
        if len(asks) != 1 or rows > _MOST_ROWS or asks[0].distributions:
            return False
        sampling = asks[0].request.sampling
        return not (sampling.penalised or sampling.logit_bias)

    def answers(self, asks: Sequence[Ask], rows: PassRows) -> list[Answer] | None:
        if rows.start:
            return None  # continues from an exit's states; this call always starts with embeddings
        [ask], batch, memory, decoder = asks, rows.batch, rows.memory, self._decoder
        assert isinstance(memory, CpuMemory)
        sampling, vocabulary, count = ask.request.sampling, decoder.config.vocabulary, len(rows.tokens)
        ahead = _NO_STEPS
        if ask.ahead is not None and count == 1:
            ahead = ask.ahead[: min(len(rows.room), max(int(_CALL_SECONDS / self._step_seconds) - 1, 0))]
        steps, first = len(ahead), int(batch.positions[0]) + 1
        table = decoder.embedding_table
        cosines, sines = decoder.rotary(int(batch.positions.max()) + 1 + steps)
        positions, slots, groups = np.arange(first, first + steps), rows.room[:steps], decoder.groups(batch)
        longest = int(batch.lengths.max()) + len(batch.paths) + steps
        picks = np.empty((count + steps, min(picks_wanted(ask), vocabulary)), np.int64)
        leads, written = np.empty(count + steps), np.zeros(1, np.int64)
        filters = filters_of(sampling, vocabulary)
        keys = keys_of(ask, steps) if sampling.temperature else _NO_KEYS
        began = time.perf_counter()
        self._team.run(
            run_text,
            self._team.sync,
            self._addresses_of(sampling.temperature > 0),
            rows.stop,
            table.rows(rows.tokens),
            (cosines[batch.positions], sines[batch.positions]),
            (cosines, sines),
            (batch.positions, batch.slots, batch.drafted, batch.lengths, batch.path_starts, batch.paths, *groups),
            (positions, slots, positions + 1, _ONE_GROUP, _ZEROS),
            (memory.address, batch.tables, memory.tap_addresses(0, rows.stop)),
            (table.floats, table.halves, table.made),
            decoder.weights,
            decoder.scratch(count, longest, len(groups[1])),
            (*decoder.head_arguments(rows.norm), self._logits_of(count)),
            (float(sampling.temperature), filters, keys, *_UNCHANGED),
            (np.array([*ask.request.stop_ids], np.int64), _LEADS, ahead),
            (picks, leads, written),
        )
        done = int(written[0])
        if count == 1:
            self._step_seconds = (time.perf_counter() - began) / max(done, 1)
        decoder.layer_rows += done * rows.stop
        if NO_TOKEN in picks[:, 0].tolist():  # faster than numpy for a few numbers
            picks[picks[:, 0] == NO_TOKEN] = NO_TOKEN

        def part(first: int, end: int, ahead: tuple[Answer, ...] = ()) -> Answer:
            return Answer(picks[first:end], leads=leads[first:end] if ask.leads else None, ahead=ahead)

        return [part(0, count, tuple(part(row, row + 1) for row in range(count, done)))]

    def _logits_of(self, rows: int) -> np.ndarray:
        """Memory for the logits of so many rows: they are not needed once tokens are picked."""
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._decoder.config.vocabulary), np.float32)
        return self._logits[:rows]

    def _addresses_of(self, samples: bool) -> np.ndarray:
        """Addresses of the functions that `run_text` calls."""
        if samples not in self._addresses:
            functions = run_layers, run_head, sample_rows if samples else greedy_rows
            self._addresses[samples] = np.array([function.address() for function in functions], np.int64)
        return self._addresses[samples]
