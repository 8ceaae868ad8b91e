"""A request whose tier 0 is somebody else: a host runs the target, and hierspec's stores and lower tiers draft for it.

The recursion is the one that runs every plan. Where it would ask the target, its ask is the draft that goes to the
host; what the host wrote comes back as the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from hierspec.assembly.assembler import Assembler
from hierspec.core.engine import failure_of
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.pass_times import PassClock, tell_times
from hierspec.core.plan import Plan
from hierspec.core.request import Step
from hierspec.core.sampling import NO_TOKEN, Sampling
from hierspec.hosts.guest_request import GuestRequest
from hierspec.hosts.host_pace import HostPace
from hierspec.pacing.pace import AdaptivePace

_LOG = logging.getLogger("hierspec")
_MOST_FAILURES = 8  # after this many nothing is drafted any more: something is wrong for good
_LEARNT = "drafts for target"  # the name under which packs and earlier runs keep it
_BRANCHES = 4  # nodes beside the longest chain: by what was learnt, a store's first draft may not be its best
_GREEDY = Sampling(max_tokens=1 << 30, seed=0)  # drafters write their likeliest tokens; the host knows when a text ends


def check_guest_plan(plan: Plan) -> None:
    """Refuse what a host's own verification rules out."""
    if plan.rule != "coupled":
        raise HierspecError(f'rule = "{plan.rule}" compares distributions, and a host compares tokens; leave rule out.')


class Guest:
    """Drafts for all requests of a host under one plan."""

    def __init__(self, assembler: Assembler, plan: Plan, pace: HostPace, context: int, namespace: str = "") -> None:
        check_guest_plan(plan)
        assembler.adopt(_LEARNT, pace)
        # Lower tiers weigh their time against that of the host's steps, if those are timed.
        weighed = plan if pace.adapts and assembler.costs.times_host else plan.fixed()
        target, *below = assembler.hierarchy(weighed).tiers
        if isinstance(target.pace, AdaptivePace):
            pace.router = target.pace.router
        nodes = max(1, min(plan.budget, pace.most + _BRANCHES))  # of a store's tree, from which a chain is chosen
        self.hierarchy = Hierarchy((replace(target, pace=pace, budget=nodes), *below), plan.rule)
        self.pace, self._assembler, self._context, self._namespace = pace, assembler, context, namespace
        self._tiers = bool(below)  # draft models beside the stores
        self._failures, self._spent = 0, 0.0

    def begin(self, text: np.ndarray) -> GuestRequest | None:
        """A request that the host has begun with this text; None if nothing is drafted for it."""
        if self._failures >= _MOST_FAILURES:
            return None
        try:
            return GuestRequest(text, _GREEDY, self.hierarchy, context=self._context, namespace=self._namespace)
        except HierspecError as error:  # such as ids outside the vocabulary, which stand for pictures
            _LOG.debug("Nothing is drafted for a request: %s", error)
            return None

    def sleeps(self, requests: int, tokens: int) -> bool:
        """Whether we need not look at the tokens that the host just wrote: `caught_up` passes them on later.

        Never with draft models, which follow the text token by token.
        """
        return not self._tiers and self.pace.sleeps(requests, tokens)

    def caught_up(self, request: GuestRequest, tokens: Sequence[int]) -> None:
        """The host wrote these tokens in steps that were not looked at."""
        request.drafted, request.proposals = (), ()
        if tokens:
            request.follow(tokens)

    def wrote(self, request: GuestRequest, tokens: Sequence[int]) -> bool:
        """The host has verified the last draft and written these tokens.

        Returns False if the request has ended by that, or cannot have written them.
        """
        rows = len(request.drafted) + 1
        if not self._tiers and len(tokens) <= rows:
            self.pace.learn_drafts(request.proposals, tokens)
            request.follow(tokens)
        elif len(tokens) <= rows:
            # The host may have verified only a part of the draft: the walk ends where it says nothing.
            picks = np.array([*tokens, *[NO_TOKEN] * (rows - len(tokens))], np.int64)[:, None]
            request.last_pass = None  # it was a drafter's: the host's steps are timed elsewhere
            step = self._advance(request, Answer(picks))
            if not isinstance(step, Step) or step.tokens != tuple(tokens):
                request.cancel()
        else:
            request.cancel()
        return request.ended is None

    def draft(self, requests: Sequence[GuestRequest]) -> None:
        """Decide what should follow each of them (`drafted`). Forward passes of drafters are shared."""
        if not self._tiers:
            for request in requests:
                self._look_up(request)
            return
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
                    began = perf_counter()
                    outcome = None if answer is None else self._advance(request, answer)
                    request.between = perf_counter() - began
                    if isinstance(outcome, Ask):
                        waiting[request] = outcome

    def end(self, request: GuestRequest) -> None:
        """The host has finished this text: it may now be learnt for others."""
        self.pace.text_ends(request)
        request.cancel()

    def close(self) -> None:
        """Save what the next run can begin with."""
        self._assembler.close()

    def _look_up(self, request: GuestRequest) -> None:
        """What the recursion does if only stores draft, in a third of the time: a test compares the two."""
        tier, request.proposals, request.drafted = self.hierarchy.tiers[0], [], ()
        room = request.limit - len(request.output) - 1
        if room < 1 or not self.pace.drafting:
            return
        proposals, text = [], request.text
        try:
            for store in tier.stores:
                proposal = request.stores[store.name].propose(text, tier.budget)
                if proposal.tokens:
                    proposals.append(proposal)
                    if not tier.merge:
                        break
            draft = self.pace.chain(proposals, room).tokens
            if draft and not 0 <= min(draft) <= max(draft) < tier.scorer.vocabulary:
                raise HierspecError("A store drafted a token id outside the model's vocabulary.")
        except Exception as error:
            self._fail(request, error)
            return
        request.proposals, request.drafted = proposals, draft

    def _score(self, group: Sequence[tuple[GuestRequest, Ask]]) -> Sequence[Answer | None]:
        group = [(request, _cut(request, ask)) for request, ask in group]
        began = perf_counter()
        try:
            answers = group[0][1].scorer.score([ask for _, ask in group])
        except Exception as error:
            for request, _ in group:
                self._fail(request, error)
            return [None] * len(group)
        seconds = perf_counter() - began
        if any(not ask.stats.calls for _, ask in group):
            self.pace.began_to_read(seconds)
        clock = PassClock(seconds, sum(request.between for request, _ in group), False)
        self._spent += clock.seconds + clock.between
        tell_times(group, answers, clock, self._spent)
        return answers

    def _advance(self, request: GuestRequest, answer: Answer | None) -> Ask | Step | None:
        """The request's next ask or step; None if it failed: the host goes on without drafts for it."""
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


def _cut(request: GuestRequest, ask: Ask) -> Ask:
    """The ask as draft models see it: of a long prompt they may read only the end. The host verifies their drafts."""
    return replace(ask, context=ask.context[request.read_from :]) if request.read_from else ask
