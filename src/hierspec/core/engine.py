"""Requests, and the engine that answers what all of them ask with one packed pass a scorer. It knows no text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Ask, Extension, Hierarchy, Scorer, Store
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.verify import Answer
from hierspec.pacing.blocks import Written


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass of the target brought: tokens, and who guessed each first."""

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    seconds: float  # since the step before


class Request:
    """One text being written. `output` grows; `ended` becomes stop, length, cancelled or error."""

    def __init__(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampling: Sampling,
        hierarchy: Hierarchy,
        stop_ids: Iterable[int] = (),
        context: int | None = None,  # positions the model has
        namespace: str = "",  # whose text it is: stores never serve one namespace to another
    ) -> None:
        ids = np.asarray(prompt, np.int64)
        vocabulary = hierarchy.tiers[0].scorer.vocabulary
        if not len(ids):
            raise HierspecError("The prompt is empty; give at least one token.")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise HierspecError(f"The prompt holds a token id outside the model's vocabulary of {vocabulary}.")
        self.prompt = ids.astype(np.int32)
        if sampling.logit_bias and max(sampling.logit_bias) >= vocabulary:
            raise HierspecError(f"logit_bias names a token id outside the model's vocabulary of {vocabulary}.")
        if context is not None and len(self.prompt) >= context:
            raise HierspecError(
                f"The prompt has {len(self.prompt)} tokens but the model's context holds {context}; shorten the prompt."
            )
        self.sampling = sampling
        self.hierarchy = hierarchy
        self.stop_ids = frozenset(stop_ids) | frozenset(sampling.stop_ids)
        self.limit = sampling.max_tokens if context is None else min(sampling.max_tokens, context - len(self.prompt))
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self.dice = Dice(self.seed)
        self.output: list[int] = []
        self.sources: list[str] = []
        self.ended: str | None = None
        self.error: HierspecError | None = None
        self.stats = hierarchy.new_stats()
        self.running_requests = 1
        self.stores: dict[str, Store] = {}
        for tier in hierarchy.tiers:
            for store in tier.stores:
                if store.name not in self.stores:
                    self.stores[store.name] = store.begin(self.prompt, namespace)
        self._room = self.prompt  # where the text stands, with room to grow once there is more than the prompt
        self._extension: Extension | None = None
        self._last = time.perf_counter()

    def cancel(self) -> None:
        """Stop before the next pass."""
        self._end("cancelled")

    def ask(self, answer: Answer | None) -> Ask | Step:
        """Go on with what was asked last: the next ask, or the step that the answer completed."""
        try:
            if self._extension is None:
                room = self.limit - len(self.output)
                text = self._room[: len(self.prompt) + len(self.output)]
                self._extension = self.hierarchy.extend(0, text, 1, room, self)
                return next(self._extension)
            assert answer is not None
            return self._extension.send(answer)
        except StopIteration as finished:
            self._extension = None
            return self._write(finished.value)

    def _write(self, written: list[Written]) -> Step:
        tokens = tuple(one.token for one in written)
        sources = tuple(one.source for one in written)
        before = len(self.prompt) + len(self.output)
        if before + len(tokens) > len(self._room):  # what was handed out stays as it is: only the end is written to
            self._room = np.concatenate((self._room, np.empty(before + len(tokens), np.int32)))
        for place, token in enumerate(tokens, before):  # there are few
            self._room[place] = token
        self.output += tokens
        self.sources += sources
        for store in self.stores.values():
            store.learn(tokens)
        if tokens[-1] in self.stop_ids:
            self._end("stop")
        elif len(self.output) >= self.limit:
            self._end("length")
        now = time.perf_counter()
        step = Step(tokens, sources, now - self._last)
        self._last = now
        return step

    def fail(self, error: HierspecError) -> None:
        self.error = error
        self._end("error")

    def _end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            if self._extension is not None:
                self._extension.close()
            for store in self.stores.values():
                store.end()
            for scorer in {id(tier.scorer): tier.scorer for tier in self.hierarchy.tiers}.values():
                scorer.release(self)


class Engine:
    """Runs requests side by side. `step` is one round: gather what is asked, answer it, hand out what was written."""

    def __init__(self) -> None:
        self._asking: list[tuple[Request, Ask]] = []
        self._fresh: list[Request] = []

    def submit(self, request: Request) -> None:
        self._fresh.append(request)

    @property
    def busy(self) -> bool:
        return bool(self._asking or self._fresh)

    def step(self) -> list[tuple[Request, Step]]:
        steps: list[tuple[Request, Step]] = []
        running = [*self._fresh, *(request for request, _ in self._asking if request.ended is None)]
        for request in running:
            request.running_requests = len(running)
        for request in self._fresh:
            self._go_on(request, None, steps)
        self._fresh = []
        asking, self._asking = [(request, ask) for request, ask in self._asking if request.ended is None], []
        groups: dict[int, list[tuple[Request, Ask]]] = {}
        for request, ask in asking:
            groups.setdefault(id(ask.scorer), []).append((request, ask))
        for group in groups.values():
            for (request, _), answer in zip(group, self._answers(group), strict=True):
                if answer is not None:
                    self._go_on(request, answer, steps)
        return steps

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Step]]:
        """Run these to their ends. Leaving the loop early cancels them."""
        for request in requests:
            self.submit(request)
        try:
            while any(request.ended is None for request in requests):
                yield from self.step()
        finally:
            for request in requests:
                request.cancel()

    def _answers(self, group: list[tuple[Request, Ask]]) -> Sequence[Answer | None]:
        scorer: Scorer = group[0][1].scorer
        began = time.perf_counter()
        try:
            answers = scorer.score([ask for _, ask in group])
        except HierspecError as error:
            for request, _ in group:
                request.fail(error)
            return [None] * len(group)
        except Exception:  # a defect of the scorer: whoever asked ends too, so that no caller waits for ever
            for request, _ in group:
                request.fail(HierspecError(f"The scorer {scorer.name} failed; this is a defect, please report it."))
            raise
        seconds = (time.perf_counter() - began) / len(group)  # a packed pass is shared by all who asked
        for _, ask in group:
            ask.stats.seconds += seconds
        return answers

    def _go_on(self, request: Request, answer: Answer | None, steps: list[tuple[Request, Step]]) -> None:
        """Feed the answer and go on to the next ask; every step on the way is handed out."""
        while request.ended is None:
            try:
                found = request.ask(answer)
            except HierspecError as error:  # a store's: its own request fails, the others go on
                request.fail(error)
                return
            if isinstance(found, Ask):
                self._asking.append((request, found))
                return
            steps.append((request, found))
            answer = None
