"""A checkpoint and its feature drafter in one call: drafts, verifies and keeps what both have computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import numpy as np
import torch

from hierspec.backends.arena import is_refused
from hierspec.backends.base import DraftedRound, RoundRows, RoundWriter
from hierspec.core.draft_tree import DraftTree
from hierspec.core.errors import out_of_memory
from hierspec.core.foresight import lead_class
from hierspec.core.interfaces import RUNNER_UP, UNDRAFTED, Answer, Ask, RequestView, Written, evidence
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.scorers.base import ModelScorer, WholeHead
from hierspec.scorers.drafters import FeatureScorer
from hierspec.scorers.shortlist import DraftHead
from hierspec.scorers.staircase import KEYS_ONLY


@dataclass(frozen=True, eq=False)
class FeatureRounds:
    """`RoundScorer`. If it cannot draft after all, it answers with a plain pass of the checkpoint."""

    target: ModelScorer
    drafter: FeatureScorer
    greedy: RoundWriter
    sampled: RoundWriter  # for temperatures above 0, where less of a draft is accepted
    # Requests for which the KV cache had no room for two drafts: those are drafted tier by tier.
    _without_room: WeakSet[RequestView] = field(default_factory=WeakSet, init=False)

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def vocabulary(self) -> int:
        return self.target.vocabulary

    @property
    def depth(self) -> int:
        return max(self.greedy.tree.depth, self.sampled.tree.depth)

    @property
    def preparing(self) -> float:
        return self.target.preparing

    def writer(self, request: RequestView) -> RoundWriter:
        return self.sampled if request.sampling.temperature > 0 else self.greedy

    def takes(self, request: RequestView, position: int) -> bool:
        return request not in self._without_room and self.writer(request).takes(request, position)

    def begun(self, request: RequestView, position: int) -> bool:
        return self.writer(request).begun(request, position)

    def release(self, request: RequestView) -> None:
        return

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        try:
            with torch.inference_mode():
                answer = self._round(asks[0]) if len(asks) == 1 else None
        except Exception as error:
            if is_refused(error):
                raise out_of_memory() from error
            raise
        return self.target.score([replace(ask, proposal=NOTHING) for ask in asks]) if answer is None else [answer]

    def _round(self, ask: Ask) -> Answer | None:
        target, drafter, writer, count = self.target, self.drafter, self.writer(ask.request), len(ask.context)
        skipped = int(drafter.skips_first and count > 1)
        [low] = target.pool.prepare([(ask.request, ask.context, NOTHING)])
        if low.heights[count - 1] or (low.heights[: count - 1] < target.layers).any():
            return None
        [staircase], [text] = drafter.aligned([ask])
        pending = np.flatnonzero(staircase.heights[: staircase.used] == 0)
        if len(pending) and pending[0] <= count - skipped - 1 - writer.reread:
            assert drafter.writer is not None
            drafter.read(staircase, pending[pending < count - skipped - 1], text, drafter.writer)
        # Two rounds may be under way, and the second needs room for its whole draft.
        entries = count + 2 * (writer.tree.depth + 1) + len(writer.tree.parents)
        if not (target.pool.reserve(low, entries) and drafter.layer.pool.reserve(staircase, entries)):
            self._without_room.add(ask.request)
            return None
        assert isinstance(drafter.head, DraftHead)
        assert isinstance(target.head, WholeHead)
        rows = RoundRows(
            low.memory,
            low.table,
            low.slots,
            tuple(low.memory.taps.index(layer) for layer in drafter.reads),
            staircase.memory,
            staircase.table,
            staircase.slots,
            skipped,
            target.head.norm,
        )
        drafted = writer.write(ask, rows, drafter.head.extra(ask.request))
        staircase.heights[pending] = KEYS_ONLY
        target.pool.add_computed(low, count - 1, drafted.drafts[list(drafted.accepted)].tolist(), target.layers)
        return self._answer(drafted, writer.tree)

    def _answer(self, drafted: DraftedRound, tree: DraftTree) -> Answer:
        name = self.drafter.name
        tokens, leads = drafted.drafts.tolist(), [lead_class(lead) for lead in drafted.leads.tolist()]
        hows = [RUNNER_UP if rank else UNDRAFTED for rank in tree.ranks]
        reasons = map(evidence, hows, leads)
        draft = Proposal(tuple(tokens), tree.parents, (name,) * len(tokens), (), tuple(reasons))
        chain = tuple(
            Written([(token, None)], name, UNDRAFTED, lead)
            for token, lead in zip(tokens[: tree.depth], leads, strict=False)
        )
        return Answer(drafted.picks[:, None], draft=draft, chain=chain)
