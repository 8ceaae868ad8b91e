"""A request: one text being written."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Extension, Hierarchy
from hierspec.core.interfaces import Answer, Ask, Block, Constraint, PassTime, Store
from hierspec.core.logprobs import TokenLogprobs
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.request_store import RequestStore
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.verify import BY_DISTRIBUTION


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass of the target wrote: tokens, and who drafted each first."""

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    seconds: float  # since the step before
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, where the request wants them
    draft: Proposal = NOTHING  # what the pass verified, without the distributions that tokens were sampled from
    accepted: tuple[int, ...] = ()  # nodes of `draft` that were written, in order: they are the first tokens


class Request:
    """One text being written. `output` grows; `ended` becomes stop, length, cancelled or error."""

    clock: Callable[[], float] = time.perf_counter

    def __init__(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: Sampling,
        hierarchy: Hierarchy,
        stop_ids: Iterable[int] = (),
        context: int | None = None,  # positions the model has
        namespace: str = "",  # whose text it is: stores never serve one namespace to another
        constraint: Constraint | None = None,  # of the sampling's grammar
    ) -> None:
        vocabulary = hierarchy.tiers[0].scorer.vocabulary
        try:
            ids = np.asarray(prompt, np.int64)
        except OverflowError:
            ids = np.array([vocabulary])  # one of them is beyond any vocabulary
        if not len(ids):
            raise HierspecError("The prompt is empty; give at least one token.")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise HierspecError(f"The prompt holds a token id outside the model's vocabulary of {vocabulary}.")
        self.prompt = ids.astype(np.int32)
        bias = sampling.logit_bias or {}
        if bias and max(bias) >= vocabulary:
            raise HierspecError(f"logit_bias names a token id outside the model's vocabulary of {vocabulary}.")
        if len(bias) == vocabulary and max(bias.values()) == -math.inf:
            raise HierspecError("logit_bias forbids every token; leave at least one that may be written.")
        if context is not None and len(self.prompt) >= context:
            raise HierspecError(
                f"The prompt has {len(self.prompt)} tokens but the model's context holds {context}; shorten the prompt."
            )
        if sampling.grammar is not None and constraint is None:
            raise HierspecError("A request with a grammar needs its constraint; make the request with a LanguageModel.")
        self.sampling, self.constraint = sampling, constraint
        self.hierarchy = hierarchy
        # A tokenizer may have ids that the model has no row for: those are never written.
        self.stop_ids = frozenset(stop for stop in (*stop_ids, *sampling.stop_ids) if 0 <= stop < vocabulary)
        self.limit = sampling.max_tokens if context is None else min(sampling.max_tokens, context - len(self.prompt))
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self.dice = Dice(self.seed)
        self.output: list[int] = []
        self.sources: list[str] = []
        self.ended: str | None = None
        self.error: HierspecError | None = None
        self.stats = hierarchy.new_stats()
        self.running_requests = 1
        self.last_pass: PassTime | None = None
        self.spent, self.pass_seconds, self.prefilled = 0.0, 0.0, True
        self.ready: list[Answer] = []
        self.between = 0.0  # seconds from its last answer to its next ask
        self.to_learn: Callable[[], None] | None = None
        self.stores: dict[str, Store] = {}
        for tier in hierarchy.tiers:
            for store in tier.stores:
                if store.name not in self.stores:
                    self.stores[store.name] = RequestStore(store, self.prompt, namespace)
        self._text = self.prompt  # an array with spare room at its end, once anything is written
        self._extension: Extension | None = None
        self._last_step = time.perf_counter()

    @property
    def text(self) -> np.ndarray:
        """The prompt and the output so far. Later tokens do not change this array."""
        return self._text[: len(self.prompt) + len(self.output)]

    def cancel(self) -> None:
        """Stop before the next pass."""
        self._end("cancelled")

    def ask(self, answer: Answer | None) -> Ask | Step:
        """Give the answer to the last ask: returns the next ask, or the step that the answer completed."""
        try:
            if self._extension is None:
                self._extension = self.hierarchy.extend(0, self.text, self.limit - len(self.output), Block(), self)
                return next(self._extension)
            assert answer is not None
            self.catch_up()
            return self._extension.send(answer)
        except StopIteration as finished:
            self._extension = None
            return self._write(finished.value)

    def _write(self, block: Block) -> Step:
        written = block.written
        tokens = tuple(position.token for position in written)
        sources = tuple(position.source for position in written)
        self.sources += sources
        self._append(tokens)
        now = time.perf_counter()
        logprobs = tuple(position.logprobs for position in written if position.logprobs is not None)
        # Drop the distributions: they are large, and many steps may be waiting for a client that reads slowly.
        draft = block.draft.fixed() if self.hierarchy.rule in BY_DISTRIBUTION else block.draft
        step = Step(tokens, sources, now - self._last_step, logprobs, draft, tuple(block.accepted))
        self._last_step = now
        return step

    def _append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output, let stores and grammar know, and end the request where it is complete."""
        length = len(self.prompt) + len(self.output)
        if length + len(tokens) > len(self._text):  # contexts are views of it: only what follows them is written
            self._text = np.concatenate((self._text, np.empty(length + len(tokens), np.int32)))
        for index, token in enumerate(tokens, length):  # there are few
            self._text[index] = token
        self.output += tokens
        for store in self.stores.values():
            store.learn(tokens)
        if self.constraint is not None:
            self.constraint.wrote(tokens)
        if tokens[-1] in self.stop_ids:
            self._end("stop")
        elif len(self.output) >= self.limit:
            self._end("length")

    def catch_up(self) -> None:
        """Learn what is left to learn from the last round."""
        if (learn := self.to_learn) is not None:
            self.to_learn = None
            learn()

    def fail(self, error: HierspecError) -> None:
        self.error = error
        self._end("error")

    def _end(self, reason: str) -> None:
        if self.ended is None:
            with ExitStack() as all_of_them:  # runs all of them, even if one fails or is interrupted
                for scorer in {id(tier.scorer): tier.scorer for tier in self.hierarchy.tiers}.values():
                    all_of_them.callback(scorer.release, self)
                for store in self.stores.values():
                    all_of_them.callback(store.end)
                if self._extension is not None:
                    all_of_them.callback(self._extension.close)
                all_of_them.callback(self.catch_up)
                self.ended = reason
