"""A drafter's next tokens on a CPU: turns an ask and a text into arguments of the compiled call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Batch, DraftRows, ExtraRows, Memory
from hierspec.backends.cpu.answers import answer
from hierspec.backends.cpu.attention import QUERIES
from hierspec.backends.cpu.decoder import CpuDecoder
from hierspec.backends.cpu.draft_passes import PARTS, run_draft, run_keys
from hierspec.backends.cpu.embedding import EmbeddingTable
from hierspec.backends.cpu.heads import CpuJoin, CpuShortlist
from hierspec.backends.cpu.llvm import LANES
from hierspec.backends.cpu.memory import CpuMemory
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch.pick import picks_wanted
from hierspec.core.foresight import LEADS
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.sampling import NO_TOKEN

_NormedJoin = tuple[CpuJoin, Tensor | None]  # a join and the norms of its features

_NO_FURTHER = np.empty((0, len(LEADS) + 1), np.bool_)
_LEADS = np.array(LEADS)
_ZEROS = np.zeros(QUERIES + 1, np.int64)


class CpuDraftWriter:
    """`DraftWriter`, compiled: a drafter's parts, and scratch memory."""

    at_once = 1

    def __init__(
        self,
        embedding: EmbeddingTable,
        layers: CpuDecoder,
        first: _NormedJoin,
        then: _NormedJoin,
        shortlist: CpuShortlist,
        norm: Tensor | None,
        team: ThreadTeam,
    ) -> None:
        self._layers, self._first, self._then, self._team = layers, first, then, team
        self._shortlist, self._norm = shortlist, norm
        self.most_rows = min(QUERIES, layers.rows_together)  # one attention group, and within the scratch memory below
        self._joins: dict[int, tuple[Memory, tuple[int, ...], tuple[Any, ...]]] = {}
        # Prepare now, not at the first draft: loading compiled code and computing embedding rows take as long as
        # passes.
        self._addresses = np.array([function.address() for function in PARTS], np.int64)
        run_draft.dispatcher()
        vocabulary, hidden = len(embedding.made), layers.config.hidden
        self._vocabulary, self._embedding = vocabulary, embedding
        embedding.add((shortlist.tokens,))
        self._scratch = (
            np.empty((team.threads, QUERIES, hidden), np.float32),
            np.empty((QUERIES, hidden), np.float32),
            np.empty(vocabulary // LANES, np.float32),
        )

    def read(self, memory: Memory, batch: Batch, hidden: Tensor) -> None:
        assert isinstance(memory, CpuMemory)
        layers, last, rows = self._layers, self._layers.config.layers - 1, len(batch.positions)
        if last:
            layers.run(memory, batch, hidden, 0, last)
        layers.layer_rows += rows
        packed, kinds, codes, norms, head_norms, biases, _, rotary, shape, eps, _ = layers.weights
        cos, sin = (table[batch.positions] for table in layers.rotary(int(batch.positions[-1]) + 1))
        scratch = layers.scratch(rows, 0, 1)
        self._team.run(
            run_keys,
            self._team.sync,
            last,
            hidden.numpy(),
            cos,
            sin,
            batch.slots,
            memory.address,
            packed,
            kinds,
            codes,
            norms,
            head_norms,
            biases,
            rotary,
            shape,
            eps,
            *scratch[:5],
            layers.attention_code,
        )

    def write(self, ask: Ask, rows: DraftRows, extra: ExtraRows) -> Answer:
        memory, layers, count = rows.memory, self._layers, len(rows.tokens)
        assert isinstance(memory, CpuMemory)
        sampling = ask.request.sampling
        # Only plain argmax is picked in the compiled call; anything else is picked afterwards, one token per call.
        picked = 0 if ask.distributions or sampling.temperature or sampling.penalised or sampling.logit_bias else 1
        ahead = _NO_FURTHER if ask.ahead is None or not picked else ask.ahead[: len(rows.slots) - count]
        most = 1 + len(ahead)
        end = rows.first + count + most - 1
        picks = np.empty((most, picked * min(picks_wanted(ask), self._vocabulary)), np.int64)
        leads, written = np.empty(most), np.ones(1, np.int64)
        then = self._joined(self._then, memory, (0,))
        self._embedding.add((rows.tokens, extra.tokens))
        head = self._shortlist.arguments(1, self._norm, [extra], [1])
        self._team.run(
            run_draft,
            self._team.sync,
            self._addresses,
            rows.tokens.astype(np.int64),
            (
                np.arange(rows.first, end),
                np.arange(rows.first + 1, end + 1),
                rows.slots[: count + most - 1],
                rows.feature_slots,
                _ZEROS,
                np.array([0, count, 0, 1]),
            ),
            (memory.address, rows.table[None], memory.tap_addresses(0, layers.config.layers)),
            (self._embedding.floats, self._embedding.halves),
            then if rows.own else self._joined(self._first, rows.features, rows.taps),
            then,
            layers.rotary(end),
            layers.weights,
            layers.scratch(count, end, 1),
            head,
            (*self._scratch, np.empty(picks.shape[1])),
            (np.array([*ask.request.stop_ids], np.int64), _LEADS, ahead),
            (picks, leads, written),
        )
        steps = int(written[0])
        layers.layer_rows += (count + steps - 1) * layers.config.layers
        if not picked:
            return answer(ask, torch.from_numpy(head[-1][:1]), self._team)
        for step in range(steps):
            if picks[step, 0] == NO_TOKEN:
                picks[step] = NO_TOKEN
        parts = [(picks[step : step + 1], leads[step : step + 1] if ask.leads else None) for step in range(steps)]
        ahead_of_it = tuple(Answer(picks, leads=leads) for picks, leads in parts[1:])
        return Answer(parts[0][0], leads=parts[0][1], ahead=ahead_of_it)

    def _joined(self, join: _NormedJoin, features: Memory, taps: tuple[int, ...]) -> tuple[Any, ...]:
        """Arguments of a join with these states, cached: there are two joins, and their memories rarely change."""
        known = self._joins.get(id(join))
        if known is None or known[0] is not features or known[1] != taps:
            assert isinstance(features, CpuMemory)
            parts, norms = join
            arguments = features.state_numbers, np.array(taps, np.int64), *parts.arguments(norms), parts.bias
            known = self._joins[id(join)] = features, taps, arguments
        return known[2]
