"""The engine: answers what all running requests ask with one forward pass a scorer. It knows no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Answer, Ask, PassTime, Scorer
from hierspec.core.request import Request, Step


class Engine:
    """Runs requests together. `step` is one round: collect the asks, answer them, return what was written."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._asking: list[tuple[Request, Ask]] = []
        self._new: list[Request] = []

    def submit(self, request: Request) -> None:
        self._new.append(request)

    @property
    def busy(self) -> bool:
        return bool(self._asking or self._new)

    def step(self) -> list[tuple[Request, Step]]:
        steps: list[tuple[Request, Step]] = []
        running = [*self._new, *(request for request, _ in self._asking if request.ended is None)]
        for request in running:
            request.running_requests = len(running)
        for request in self._new:
            self._advance(request, None, steps)
        self._new = []
        asking, self._asking = [(request, ask) for request, ask in self._asking if request.ended is None], []
        groups: dict[int, list[tuple[Request, Ask]]] = {}
        for request, ask in asking:
            groups.setdefault(id(ask.scorer), []).append((request, ask))
        for group in groups.values():
            for (request, _), answer in zip(group, self._answers(group), strict=True):
                if answer is not None:
                    self._advance(request, answer, steps)
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
        began = self._clock()
        try:
            answers = scorer.score([ask for _, ask in group])
        except Exception as error:
            if len(group) > 1:  # one by one, so that only a request that cannot be answered fails
                return [answer for pair in group for answer in self._answers([pair])]
            group[0][0].fail(error if isinstance(error, HierspecError) else _defect(scorer, error))
            return [None]
        seconds = self._clock() - began
        self._note(group, seconds)
        return answers

    def _note(self, group: list[tuple[Request, Ask]], seconds: float) -> None:
        """Tell the requests of a pass its time, which they share."""
        rows, usual = 0, True
        for request, ask in group:
            stats = ask.stats
            stats.seconds += seconds / len(group)
            request.last_pass = None
            # Prefill, also of what a drafter was not asked about for a while, says nothing about the rows asked for.
            # Of a drafter's block its last token is new to it, and the token that was written after the block.
            usual = usual and len(ask.context) <= stats.reach + 2
            stats.reach = len(ask.context) + len(ask.proposal)
            rows += 1 + len(ask.proposal)
        if usual:  # told once, whoever else was in it
            group[0][0].last_pass = PassTime(rows, seconds)

    def _advance(self, request: Request, answer: Answer | None, steps: list[tuple[Request, Step]]) -> None:
        """Give the request its answer and go on to its next ask; every step on the way is added to `steps`."""
        while request.ended is None:
            try:
                outcome = request.ask(answer)
            except HierspecError as error:  # a store's: only its request fails
                request.fail(error)
                return
            if isinstance(outcome, Ask):
                self._asking.append((request, outcome))
                return
            steps.append((request, outcome))
            answer = None


def _defect(scorer: Scorer, error: Exception) -> HierspecError:
    """What a request fails with where a scorer raised something unexpected, which is its cause."""
    failure = HierspecError(f"The scorer {scorer.name} failed ({error!r}); please report this defect.")
    failure.__cause__ = error
    return failure
