"""Scorers on a checkpoint's states: the whole model, and any exit of it, over one pool of staircases."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.arena import is_refused
from hierspec.backends.base import Decoder, PassRows, PassWriter
from hierspec.core.errors import out_of_memory
from hierspec.core.interfaces import Answer, Ask, RequestView
from hierspec.scorers.climb import advance, joined_batch, states_after
from hierspec.scorers.masks import mask
from hierspec.scorers.pool import StaircasePool


class Head(Protocol):
    """From states to logits."""

    def logits(self, asks: Sequence[Ask], states: Tensor) -> Tensor:
        """[rows, vocabulary] from states [rows, hidden]: 1 + nodes rows for each ask. Valid until the next call."""

    def release(self, request: RequestView) -> None:
        """The request has ended."""


@dataclass(frozen=True, eq=False)
class WholeHead:
    """The decoder's own head, through its last norm or another one."""

    decoder: Decoder
    norm: Tensor | None = None

    def logits(self, asks: Sequence[Ask], states: Tensor) -> Tensor:
        return self.decoder.logits(states, self.norm)

    def release(self, request: RequestView) -> None:
        return


@dataclass(frozen=True, eq=False)
class StateScorer(ABC):
    """Scores in two steps: the states of the asked rows, and a head that turns them into logits."""

    name: str
    decoder: Decoder  # the checkpoint's
    pool: StaircasePool  # of the checkpoint's staircases
    layers: int  # of the checkpoint that it runs, or whose states it needs
    head: Head
    kind: str = ""  # distinguishes its costs from those of another scorer of the same name

    @property
    def vocabulary(self) -> int:
        return self.decoder.config.vocabulary

    @property
    def at_once(self) -> int:
        """Tokens that it writes in little more time than one."""
        return 1

    @property
    def preparing(self) -> float:
        return self.decoder.backend.preparing

    @property
    def asynchronous(self) -> bool:
        """Whether its requests may learn while it waits for its device."""
        return self.decoder.backend.asynchronous

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        for ask in asks:
            if ask.stats.known is None:  # first call: what is computed now comes from other texts
                ask.stats.known = 0 if ask.stats.calls else self.known(ask.context)
        try:
            with torch.inference_mode():
                return self._score(asks)
        except Exception as error:
            if is_refused(error):
                raise out_of_memory() from error
            raise

    def _score(self, asks: Sequence[Ask]) -> list[Answer]:
        logits = self.logits(asks)
        raw = _raw(asks, logits) if any(ask.logits for ask in asks) else None
        began = time.perf_counter()
        if any(ask.request.constraint is not None for ask in asks):
            mask(asks, logits)
        answers = self.decoder.backend.pick(asks, logits)
        spent = (time.perf_counter() - began) / len(asks)
        for ask in asks:
            ask.stats.pick_seconds += spent
        if raw is None:
            return answers
        return [replace(answer, logits=rows) for answer, rows in zip(answers, raw, strict=True)]

    def logits(self, asks: Sequence[Ask]) -> Tensor:
        """[rows, vocabulary]. For each ask: what follows the context, then what follows each node."""
        return self.head.logits(asks, self.states(asks))

    @abstractmethod
    def states(self, asks: Sequence[Ask]) -> Tensor:
        """[rows, hidden], as the head takes them: 1 + nodes rows for each ask."""

    def in_one_call(self, asks: Sequence[Ask]) -> bool:
        """Whether layers, head and picks run as one call for these, so that their logits never appear."""
        return False

    @abstractmethod
    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        """For timing alone: pretend that exactly the first `done` positions of these contexts are computed.

        The checkpoint's layers beneath a drafter's own count as computed everywhere.
        """

    @property
    def pools(self) -> tuple[StaircasePool, ...]:
        """The pools of all staircases that it runs on."""
        return (self.pool,)

    def share_of_memory(self, positions: int) -> float:
        """The share of its KV cache that a text of this many positions takes: 1 is all of it."""
        return max(pool.share(positions) for pool in self.pools)

    def known(self, context: np.ndarray) -> int:
        """Leading tokens of a new text that are in the KV cache from earlier texts."""
        return self.pool.known(context)

    def release(self, request: RequestView) -> None:
        self.pool.release(request)
        self.head.release(request)

    def forget(self) -> None:
        """Drop everything computed so far."""
        self.pool.clear()


def _raw(asks: Sequence[Ask], logits: Tensor) -> list[np.ndarray | None]:
    """A copy of each ask's logits if it wants them: masks and the next pass overwrite these."""
    parts = logits.split([1 + len(ask.proposal) for ask in asks])
    return [part.cpu().numpy().copy() if ask.logits else None for ask, part in zip(asks, parts, strict=True)]


@dataclass(frozen=True, eq=False)
class ModelScorer(StateScorer):
    """Scores with the first `layers` layers of the checkpoint."""

    writer: PassWriter | None = None  # layers, head and picks in one call, where the backend has that

    def in_one_call(self, asks: Sequence[Ask]) -> bool:
        if self.writer is None or not isinstance(self.head, WholeHead):
            return False
        if any(ask.logits or ask.request.constraint is not None for ask in asks):
            return False
        return self.writer.takes(asks, sum(1 + len(ask.proposal) for ask in asks))

    def _score(self, asks: Sequence[Ask]) -> list[Answer]:
        answers = self._written(asks) if self.in_one_call(asks) else None
        return super()._score(asks) if answers is None else answers

    def _written(self, asks: Sequence[Ask]) -> list[Answer] | None:
        """The answers in one call; None if more must be computed than the asked rows."""
        assert self.writer is not None
        assert isinstance(self.head, WholeHead)
        staircases = self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks])
        heights = [staircase.heights[staircase.chain - 1 : staircase.used] for staircase in staircases]
        start = max(int(each.max()) for each in heights)
        if start >= self.layers or any((s.heights[: s.chain - 1] < self.layers).any() for s in staircases):
            return None
        asked = [np.arange(staircase.chain - 1, staircase.used) for staircase in staircases]
        if any((each < start).any() for each in heights):  # some rows are further up, mostly because an exit ran them
            advance(self.decoder, staircases, start, among=asked)
        tokens = [staircase.tokens[staircase.chain - 1 : staircase.used] for staircase in staircases]
        alone = staircases[0] if len(staircases) == 1 and not asks[0].proposal.tokens else None
        if alone is not None and asks[0].goes_on:
            self.pool.reserve(alone, alone.chain + self.writer.room_needed)
        rows = PassRows(
            staircases[0].memory,
            joined_batch(list(zip(staircases, asked, strict=True))),
            tokens[0] if len(tokens) == 1 else np.concatenate(tokens),
            start,
            self.layers,
            self.head.norm,
            np.empty(0, np.int64) if alone is None else alone.slots[alone.chain :],
        )
        answers = self.writer.answers(asks, rows)
        if answers is None:
            return None
        for computed in heights:
            computed[:] = self.layers
        if alone is not None and answers[0].ahead:
            picked = [int(each.picks[0, 0]) for each in (answers[0], *answers[0].ahead) if each.picks is not None]
            self.pool.add_computed(alone, alone.chain - 1, picked[:-1], self.layers)
        return answers

    def states(self, asks: Sequence[Ask]) -> Tensor:
        staircases = self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks])
        advance(self.decoder, staircases, self.layers)
        return states_after(staircases, self.pool.taps.index(self.layers))

    def assume_computed(self, asks: Sequence[Ask], done: int) -> None:
        for staircase in self.pool.prepare([(ask.request, ask.context, ask.proposal) for ask in asks]):
            self.pool.assume(staircase, done, self.decoder.config.layers)
