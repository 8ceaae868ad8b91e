"""A request whose tier 0 is somebody else: a host runs the target, and hierspec's stores and lower tiers draft for it.

The recursion is the one that runs every plan. Where it would ask the target, its ask is the draft that goes to the host;
what the host wrote comes back as the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hierspec.assembly.assembler import Assembler
from hierspec.core.engine import failure_of
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.plan import Plan
from hierspec.core.request import Request, Step
from hierspec.core.sampling import NO_TOKEN, Sampling
from hierspec.hosts.host_pace import HostPace

_LOG = logging.getLogger("hierspec")
_MOST_FAILURES = 8  # after so many nothing is drafted any more: something is wrong that does not go away
_GREEDY = Sampling(max_tokens=1 << 30, seed=0)  # drafters write their likeliest tokens; the host knows when a text ends


def check_guest_plan(plan: Plan) -> None:
    """Refuse what a host's own verification rules out."""
    if plan.rule != "coupled":
        raise HierspecError(f'rule = "{plan.rule}" compares distributions, and a host compares tokens; leave rule out.')


class GuestRequest(Request):
    """A text that a host writes."""

    drafted: tuple[int, ...] = ()  # the chain that the host verifies next


class Guest:
    """Drafts for all requests of a host under one plan."""

    def __init__(self, assembler: Assembler, plan: Plan, pace: HostPace, context: int, namespace: str = "") -> None:
        check_guest_plan(plan)
        # What the tiers' paces would weigh are costs of the target's passes; the host's pace weighs its steps instead.
        target, *below = assembler.hierarchy(plan.fixed()).tiers
        nodes = max(1, min(plan.budget, 2 * pace.most))  # of a store's tree, from which a chain is chosen
        self.hierarchy = Hierarchy((replace(target, pace=pace, budget=nodes), *below), plan.rule)
        self.pace, self._assembler, self._context, self._namespace = pace, assembler, context, namespace
        self._failures = 0

    def begin(self, text: np.ndarray) -> GuestRequest | None:
        """A request that the host has begun with this text; None where nothing is drafted for it."""
        if self._failures >= _MOST_FAILURES:
            return None
        try:
            return GuestRequest(text, _GREEDY, self.hierarchy, context=self._context, namespace=self._namespace)
        except HierspecError as error:  # such as ids outside the vocabulary, which stand for pictures
            _LOG.debug("Nothing is drafted for a request: %s", error)
            return None

    def wrote(self, request: GuestRequest, tokens: Sequence[int]) -> bool:
        """The host has written these tokens in place of the last draft. False where the request has ended by that, or
        could not have written them."""
        rows = len(request.drafted) + 1
        if len(tokens) <= rows:
            # The host may have verified less than all: what it says nothing about ends the walk.
            picks = np.array([*tokens, *[NO_TOKEN] * (rows - len(tokens))], np.int64)[:, None]
            step = self._advance(request, Answer(picks))
            if not isinstance(step, Step) or step.tokens != tuple(tokens):
                request.cancel()
        else:
            request.cancel()
        return request.ended is None

    def draft(self, requests: Sequence[GuestRequest]) -> None:
        """Decide what should follow each of them (`drafted`). Forward passes of drafters are shared."""
        host, waiting = self.hierarchy.tiers[0].scorer, dict[GuestRequest, Ask]()
        for request in requests:
            request.running_requests, request.drafted = len(requests), ()
            outcome = self._advance(request, None)
            if isinstance(outcome, Ask):
                waiting[request] = outcome
        while waiting:
            groups: dict[int, list[tuple[GuestRequest, Ask]]] = {}
            for request, ask in waiting.items():
                if ask.scorer is host:
                    request.drafted = ask.proposal.tokens
                else:
                    groups.setdefault(id(ask.scorer), []).append((request, ask))
            waiting = {}
            for group in groups.values():
                for (request, _), answer in zip(group, self._score(group), strict=True):
                    outcome = None if answer is None else self._advance(request, answer)
                    if isinstance(outcome, Ask):
                        waiting[request] = outcome

    def end(self, request: GuestRequest) -> None:
        """The host has no more of it: what it wrote may be learnt for others."""
        request.cancel()

    def close(self) -> None:
        """Write down what the next run can begin with."""
        self._assembler.close()

    def _score(self, group: Sequence[tuple[GuestRequest, Ask]]) -> Sequence[Answer | None]:
        try:
            return group[0][1].scorer.score([ask for _, ask in group])
        except Exception as error:
            for request, _ in group:
                self._fail(request, error)
            return [None] * len(group)

    def _advance(self, request: GuestRequest, answer: Answer | None) -> Ask | Step | None:
        """The request's next ask or step; None where it failed: the host goes on without drafts for it."""
        if request.ended is not None:
            return None
        try:
            return request.ask(answer)
        except Exception as error:
            self._fail(request, error)
            return None

    def _fail(self, request: GuestRequest, error: Exception) -> None:
        request.fail(failure_of("Drafting", error))
        self._failures += 1
        if self._failures <= _MOST_FAILURES:
            end = "; nothing is drafted any more" if self._failures == _MOST_FAILURES else ""
            _LOG.warning("A request goes on without drafts: %s%s", request.error, end)
