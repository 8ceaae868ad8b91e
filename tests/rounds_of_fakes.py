"""Fused rounds over fakes: a scorer and the drafter below it in one call, and notes of what was asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hierspec.core.draft_tree import DraftTree
from hierspec.core.interfaces import UNDRAFTED, Answer, Ask, RequestView, Written
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.sampling import picks
from hierspec.core.verify import coupled
from hierspec.testing.fakes import FakeScorer


class FusedRound(NamedTuple):
    """What was asked, and what was drafted then."""

    request: RequestView
    context: int  # tokens before the draft
    output: int  # of these, those that the request has written
    running: int  # requests
    begun: bool  # whether it was in flight when it was asked for
    goes_on: bool  # whether the next one may begin
    draft: Proposal


class FakeRounds:
    """`RoundScorer`: drafts a tree of one fake's picks and answers with the other's.

    A round that goes on is followed by one in flight, as on a device: `begun` until anything else is asked of it. With
    probability `silence` there is no draft, and it answers with a plain pass.
    """

    def __init__(
        self, target: FakeScorer, drafter: FakeScorer, tree: DraftTree, silence: float = 0.0, seed: int = 0
    ) -> None:
        self.name, self.vocabulary, self.depth = target.name, target.vocabulary, tree.depth
        self.target, self.drafter, self.tree, self.silence = target, drafter, tree, silence
        self.dice = np.random.default_rng(seed)
        self.rounds: list[FusedRound] = []
        self.flight: tuple[RequestView, int] | None = None  # of whom, and the position of the text's last token

    def takes(self, request: RequestView, position: int) -> bool:
        return True

    def begun(self, request: RequestView, position: int) -> bool:
        return self.flight == (request, position)

    def release(self, request: RequestView) -> None:
        raise AssertionError("requests release the scorers of their tiers")

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        return [self.answer(ask) for ask in asks]

    def answer(self, ask: Ask) -> Answer:
        request, count = ask.request, len(ask.context)
        assert ask.context.tolist() == [*request.prompt.tolist(), *request.output]
        assert ask.proposal is NOTHING
        assert (ask.distributions, ask.logits, ask.leads, ask.ahead) == (False, False, False, None)
        begun, self.flight = self.begun(request, count - 1), None
        draft = NOTHING if self.dice.random() < self.silence else self.drafted(ask)
        self.rounds.append(
            FusedRound(request, count, len(request.output), request.running_requests, begun, ask.goes_on, draft)
        )
        [answer] = self.target.score([replace(ask, scorer=self.target, proposal=draft, goes_on=False)])
        if not draft.tokens:
            return answer
        if ask.goes_on:
            self.flight = request, count + len(coupled(draft, answer, request.dice).accepted)
        chain = tuple(
            Written([(token, None)], self.drafter.name, UNDRAFTED) for token in draft.tokens[: self.tree.depth]
        )
        return replace(answer, draft=draft, chain=chain)

    def drafted(self, ask: Ask) -> Proposal:
        """The drafter's picks after every node, as the tree has them."""
        request, tree, tokens = ask.request, self.tree, list[int]()
        texts, ranked = {-1: ask.context}, dict[int, list[int]]()
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
            text = texts[parent]
            if parent not in ranked:
                z = self.drafter.adjusted(text, request)
                ranked[parent] = picks(z, request.sampling, request.seed, len(text), 1 + max(tree.ranks))
            tokens.append(ranked[parent][rank])
            texts[node] = np.append(text, np.int32(tokens[-1]))
        return Proposal(tuple(tokens), tree.parents, (self.drafter.name,) * len(tokens))
