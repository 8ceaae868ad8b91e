"""The hierarchy: ordered tiers and the one recursion that runs every plan."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hierspec.core.appraisal import Appraiser
from hierspec.core.errors import HierspecError
from hierspec.core.proposal import Law, Proposal
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.stats import Stats, TierStats
from hierspec.core.verify import RULES, Answer, Candidate


class AnyRequest(Protocol):
    """What the recursion and the scorers need to know of a request. The engine's is `Request`."""

    prompt: np.ndarray
    output: list[int]  # what the target has written so far
    sampling: Sampling
    seed: int
    dice: Dice
    stop_ids: frozenset[int]
    stats: Stats
    stores: dict[str, Store]  # by name, as this request sees them


class Scorer(Protocol):
    """Can judge tokens: a model, an exit of a model, a draft model."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        """One packed pass for all asks. What was asked before may speed it up, never change it."""

    def release(self, request: AnyRequest) -> None:
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


@dataclass(frozen=True, eq=False)
class Ask:
    """Score this proposal after this context: what a request's coroutine yields and the engine answers."""

    scorer: Scorer
    context: np.ndarray  # [length] int32, all of it, the prompt included
    proposal: Proposal
    request: AnyRequest
    candidates: int
    laws: bool  # the rule needs whole laws, not picks
    stats: TierStats


Extension = Generator[Ask, Answer, list[tuple[list[Candidate], str]]]


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

    def new_stats(self) -> Stats:
        return Stats([TierStats(tier.scorer.name) for tier in self.tiers])

    def extend(self, level: int, context: np.ndarray, gather: int, room: int, request: AnyRequest) -> Extension:
        """Tokens that this tier would itself have written: at least `gather`, at most `room`, or up to a stop id.

        Each position comes as the token and its runners-up, and the name of who guessed the token first.
        """
        tier, stats = self.tiers[level], request.stats.tiers[level]
        written: list[tuple[list[Candidate], str]] = []
        while len(written) < gather:
            here = np.concatenate((context, np.array([found[0][0] for found, _ in written], np.int32)))
            # The scorer adds a token of its own to what it accepts, so a guess fills at most one less than the room.
            asked = yield from self._asked(level, here, room - len(written) - 1, request)
            guess = _chosen(tier, asked, stats)
            answer = yield Ask(tier.scorer, here, guess, request, tier.candidates, self.rule == "residual", stats)
            verdict = RULES[self.rule](guess, answer, request.dice, tier.candidates)
            for store in tier.stores:
                own = request.stores[store.name]
                if type(own).observe is not Store.observe:
                    own.observe(guess, _own_tokens(answer))
            sources = [guess.sources[node] for node in verdict.accepted] + [tier.scorer.name]
            new = list(zip(verdict.written, sources, strict=True))
            stopped = next((i for i, (found, _) in enumerate(new) if found[0][0] in request.stop_ids), None)
            if stopped is not None:
                new = new[: stopped + 1]
            written += new
            stats.count(guess, verdict.accepted[: len(new)], len(new))
            if tier.appraiser is not None:
                tokens = [found[0][0] for found, _ in new]
                tier.appraiser.learn(asked, tokens, len(guess))
            if stopped is not None:
                break
        return written

    def _asked(
        self, level: int, here: np.ndarray, room: int, request: AnyRequest
    ) -> Generator[Ask, Answer, list[Proposal]]:
        """What the tiers below and the tier's stores say comes next, at most `room` deep; drawn tokens come first."""
        tier, stats = self.tiers[level], request.stats.tiers[level]
        asked: list[Proposal] = []
        if room < 1:
            return asked
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
            return asked
        below = yield from self.extend(level + 1, here, min(self.tiers[level + 1].gather, room), room, request)
        handed = _handed_up(below, self.tiers[level + 1].scorer.name)
        return [handed.first(tier.budget), *asked]


def _chosen(tier: Tier, asked: list[Proposal], stats: TierStats) -> Proposal:
    """One tree of all that was proposed: as much as the budget holds, or as is worth its time."""
    if tier.appraiser is None:
        together = Proposal()
        for proposal in asked:
            together = together.merge(proposal, tier.budget)
        return together
    chosen = tier.appraiser.choose(asked, tier.budget, tier.appraiser.rate(stats.written, stats.expected_seconds))
    stats.expected_seconds += tier.appraiser.costs.seconds(1 + len(chosen))
    return chosen


def _own_tokens(answer: Answer) -> np.ndarray:
    """What the scorer would write after the context and after each node: its picks, or its likeliest tokens."""
    if answer.picks is not None:
        return answer.picks[:, 0]
    assert answer.laws is not None
    return np.argmax(answer.laws, axis=1)


def _handed_up(written: list[tuple[list[Candidate], str]], tier: str) -> Proposal:
    """What a tier wrote, as a proposal to the tier above: a spine, with its own runners-up as leaves beside it."""
    nodes: list[tuple[int, int, str, Law | None]] = []
    spine = -1
    for found, source in written:
        after, spine = spine, len(nodes)
        nodes += [(token, after, tier if place else source, law) for place, (token, law) in enumerate(found)]
    return Proposal(*zip(*nodes, strict=True))
