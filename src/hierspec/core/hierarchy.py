"""The hierarchy: ordered tiers and the one recursion that runs every plan."""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.proposal import NOTHING, Distribution, Proposal
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.stats import Stats, TierStats
from hierspec.core.verify import BY_DISTRIBUTION, RULES, Answer, Candidate
from hierspec.pacing.appraisal import Appraiser, Costs
from hierspec.pacing.blocks import CORRECTED, OWN, RUNNER_UP, STOOD, Policy, Written
from hierspec.pacing.routing import Router

_LEADS = (0.25, 0.5, 1.0, 1.75, 2.75, 4.0, 6.0)  # bounds of the classes of leads, in nats


class RequestView(Protocol):
    """What the recursion and the scorers need to know of a request. The engine's is `Request`."""

    prompt: np.ndarray
    output: list[int]  # what the target has written so far
    sampling: Sampling
    seed: int
    dice: Dice
    stop_ids: frozenset[int]
    stats: Stats
    stores: dict[str, Store]  # by name, as this request sees them
    running_requests: int  # requests that are run together now, this one included


class Scorer(Protocol):
    """Can judge tokens: a model, an exit of a model, a draft model."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        """One packed pass for all asks. What was asked before may speed it up, never change it."""

    def release(self, request: RequestView) -> None:
        """The request has ended; what was kept for it may go."""
        return


class Store(Protocol):
    """Can only guess: a token database."""

    name: str

    def begin(self, prompt: np.ndarray, namespace: str = "") -> Store:
        """The store as one request sees it: itself, or a new one for what belongs to this request alone.

        What one namespace (a user, a tenant) wrote is never served to another.
        """
        return self

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        """At most `budget` nodes to follow `context`; nothing where nothing is known."""

    def learn(self, tokens: Sequence[int]) -> None:
        """Tokens that were written after what was learnt before. Called once a step."""

    def observe(self, proposal: Proposal, picks: np.ndarray) -> None:
        """What the scorer would itself write after the context (picks[0]) and after each node (picks[node + 1])."""
        return

    def end(self) -> None:
        """The request has ended; what it wrote may now be learnt for others."""
        return

    def flush(self) -> None:
        """Whoever keeps anything on disk writes now what is not there yet."""
        return


@dataclass(frozen=True)
class Tier:
    """A scorer, the stores it may ask, and what it hands up."""

    scorer: Scorer
    gather: int = 1  # tokens to have written before they are handed up
    stores: tuple[Store, ...] = ()
    budget: int = 7  # nodes of one proposal to this tier's scorer, whoever guessed them
    merge: bool = False  # ask all stores and the tiers below, not the first that has a guess
    candidates: int = 1  # tokens handed up a position: the one written, then runners-up
    appraiser: Appraiser | None = None  # leaves out guesses that are not worth their time; None: nothing is left out
    policy: Policy | None = None  # may hand up before `gather` tokens, or have nothing drafted; None: never
    costs: Costs | None = None  # of this tier's passes, where something weighs time; default: the appraiser's
    ways: Router | None = None  # the tiers below that it may have drafted by; None: the next one alone

    def seconds(self, nodes: int, requests: int = 1, taken: int | None = None) -> float:
        """What a pass over so many nodes should take each of so many requests, where this way was taken; 0 where nobody
        asked for costs."""
        costs = self.costs or (self.appraiser.costs if self.appraiser is not None else None)
        if self.ways is not None and taken is not None:
            costs = self.ways.ways[taken].costs
        return 0.0 if costs is None else costs.shared(requests).seconds(1 + nodes)


@dataclass(frozen=True, eq=False, slots=True)
class Ask:
    """Score this proposal after this context: what a request's coroutine yields and the engine answers."""

    scorer: Scorer
    context: np.ndarray  # [length] int32, all of it, the prompt included
    proposal: Proposal
    request: RequestView
    candidates: int
    distributions: bool  # the rule needs whole laws, not picks
    stats: TierStats
    leads: bool = False  # whoever is handed the picks may learn how sure they were


Extension = Generator[Ask, Answer, list[Written]]


@dataclass(frozen=True)
class Hierarchy:
    tiers: tuple[Tier, ...]
    rule: str = "coupled"

    def __post_init__(self) -> None:
        by_name: dict[str, Store] = {}
        for tier in self.tiers:
            for store in tier.stores:
                if by_name.setdefault(store.name, store) is not store:
                    raise HierspecError(f"Two stores of one hierarchy are named {store.name!r}; give them two names.")

        if getattr(self.tiers[0].scorer, "synthetic", False):
            raise HierspecError("The target cannot be synthetic: what it writes is the text.")

    @property
    def synthetic(self) -> bool:
        """Whether some tier only plays how often it agrees."""
        return any(getattr(tier.scorer, "synthetic", False) for tier in self.tiers)

    def new_stats(self) -> Stats:
        return Stats([TierStats(tier.scorer.name) for tier in self.tiers])

    def extend(
        self,
        level: int,
        context: np.ndarray,
        gather: int,
        room: int,
        request: RequestView,
        policy: Policy | None = None,
    ) -> Extension:
        """Tokens that this tier would itself have written: `gather` of them, fewer where the policy says so or a stop
        id comes, more where the last round brings more; at most `room`.
        """
        tier, stats = self.tiers[level], request.stats.tiers[level]
        below = self.tiers[level + 1].policy if level + 1 < len(self.tiers) else None
        weighed = below is not None or policy is not None
        at_least = gather if policy is None else policy.at_least()
        written: list[Written] = []
        while True:
            here = context
            if written:
                here = np.concatenate((context, np.array([one.token for one in written], np.int32)))
            before = _expected(request, level) if weighed else 0.0
            # The scorer adds a token of its own to what it accepts, so a guess fills at most one less than the room.
            asked, block, guess, taken = yield from self._asked(level, here, room - len(written) - 1, request)
            if guess is None:
                guess = _chosen(tier, asked, stats, request.running_requests)
            distributions = self.rule in BY_DISTRIBUTION
            answer = yield Ask(
                tier.scorer,
                here,
                guess,
                request,
                tier.candidates,
                distributions,
                stats,
                leads=level > 0 and not distributions,
            )
            verdict = RULES[self.rule](guess, answer, request.dice, tier.candidates)
            for store in tier.stores:
                own = request.stores[store.name]
                if type(own).observe is not Store.observe:
                    own.observe(guess, _own_tokens(answer))
            tokens = [found[0][0] for found in verdict.written]
            stopped = not request.stop_ids.isdisjoint(tokens)
            if stopped:
                del tokens[1 + next(place for place, token in enumerate(tokens) if token in request.stop_ids) :]
            accepted = verdict.accepted[: len(tokens)]
            row = 0  # of the answer, where a token comes from
            for found, node in zip(verdict.written, accepted, strict=False):
                written.append(Written(found, guess.sources[node], STOOD, _sure(answer, row, found) if level else 0))
                row = node + 1
            if len(accepted) < len(tokens):  # the scorer's own token is not beyond the end
                found, how = verdict.written[len(accepted)], CORRECTED if row - 1 in guess.parents else OWN
                written.append(Written(found, tier.scorer.name, how, _sure(answer, row, found) if level else 0))
            stats.count(guess, accepted, len(tokens))
            stats.expected_seconds += tier.seconds(len(guess), request.running_requests, taken)
            if tier.appraiser is not None:
                tier.appraiser.learn(asked, tokens, len(guess), request.running_requests)
            if weighed:
                seconds = _expected(request, level) - before
                if tier.ways is not None:
                    tier.ways.verified(taken, block, tokens, seconds, len(asked) > 1, request.running_requests)
                elif below is not None:
                    below.verified(block, tokens, seconds, len(asked) > 1, request.running_requests)
                if policy is not None:
                    policy.wrote(len(tokens), seconds, request.running_requests)
            if stopped or len(written) >= gather:
                return written
            # Decided from what is written, before the next token is drawn: so no law is bent (METHODS 5.1).
            if policy is not None and len(written) >= at_least and not policy.go_on(written, request.running_requests):
                return written

    def _asked(
        self, level: int, here: np.ndarray, room: int, request: RequestView
    ) -> Generator[Ask, Answer, tuple[list[Proposal], list[Written], Proposal | None, int | None]]:
        """What the tiers below and the tier's stores say comes next, at most `room` deep; drawn tokens come first.

        With it what a tier below has written, as it stood there, the best tree where that was worked out already, and
        the way taken to that tier (0: to the next).
        """
        tier, stats = self.tiers[level], request.stats.tiers[level]
        asked: list[Proposal] = []
        chosen: Proposal | None = None
        if room < 1:
            return asked, [], chosen, None
        began = time.perf_counter()
        for store in tier.stores:
            found = request.stores[store.name].propose(here, tier.budget).cut(room)
            if not found.tokens:
                continue
            if not 0 <= min(found.tokens) <= max(found.tokens) < tier.scorer.vocabulary:
                raise HierspecError(f"The store {store.name!r} guessed a token id outside the model's vocabulary.")
            asked.append(found)
            if not tier.merge:
                break
        stats.store_seconds += time.perf_counter() - began
        if level + 1 == len(self.tiers) or (asked and not tier.merge):
            return asked, [], chosen, None
        taken: int | None = 0
        policy = self.tiers[level + 1].policy
        if policy is not None:
            instead = 0.0
            if asked and tier.appraiser is not None:
                rate = tier.appraiser.rate(stats.written, stats.expected_seconds, request.running_requests)
                instead, chosen = tier.appraiser.weighed(asked, tier.budget, rate, request.running_requests)
            # Whoever was asked before has read the text; what was written since is little.
            unread = [0 if lower.calls else len(here) for lower in request.stats.tiers[level + 1 :]]
            if tier.ways is not None:
                taken = tier.ways.choose(instead, request.running_requests, unread, room)
                policy = policy if taken is None else tier.ways.ways[taken].policy
            elif not policy.pays(instead, request.running_requests, unread[0], room):
                taken = None
        if taken is None:
            return asked, [], chosen, None
        lower = level + 1 + taken
        below = self.tiers[lower]
        block = yield from self.extend(lower, here, min(below.gather, room), room, request, policy)
        handed = _handed_up(block, below.scorer.name)
        return [handed.first(tier.budget), *asked], block, None, taken


def _expected(request: RequestView, level: int) -> float:
    """Seconds that the passes of this tier and those below it should have taken so far."""
    return sum(tier.expected_seconds for tier in request.stats.tiers[level:])


def _chosen(tier: Tier, asked: list[Proposal], stats: TierStats, requests: int) -> Proposal:
    """One tree of all that was proposed: as much as the budget holds, or as is worth its time."""
    if tier.appraiser is None:
        together = NOTHING
        for proposal in asked:
            together = together.merge(proposal, tier.budget)
        return together
    rate = tier.appraiser.rate(stats.written, stats.expected_seconds, requests)
    return tier.appraiser.choose(asked, tier.budget, rate, requests)


def _own_tokens(answer: Answer) -> np.ndarray:
    """What the scorer would write after the context and after each node: its picks, or its likeliest tokens."""
    if answer.picks is not None:
        return answer.picks[:, 0]
    assert answer.distributions is not None
    return np.argmax(answer.distributions, axis=1)


def _sure(answer: Answer, row: int, found: Sequence[Candidate]) -> int:
    """A class for how far the written token was ahead of all others, from 0 (hardly) up."""
    if answer.leads is not None:
        return bisect(_LEADS, float(answer.leads[row]))
    token, distribution = found[0]
    if distribution is None:
        return 0
    chance = min(float(distribution[token]), 1 - 1e-9)
    return bisect(_LEADS, math.log(max(chance, 1e-9) / (1 - chance)))


def _handed_up(written: list[Written], tier: str) -> Proposal:
    """What a tier wrote, as a proposal to the tier above: a spine, with its own runners-up as leaves beside it.

    How a token came to be written, and how sure its tier was, is its evidence: the tier above may learn what that is
    worth.
    """
    nodes: list[tuple[int, int, str, Distribution | None, int]] = []
    spine = -1
    for one in written:
        after, spine = spine, len(nodes)
        beside = one._replace(how=RUNNER_UP)
        nodes += [
            (token, after, tier if place else one.source, distribution, beside.evidence if place else one.evidence)
            for place, (token, distribution) in enumerate(one.candidates)
        ]
    return Proposal(*zip(*nodes, strict=True))
