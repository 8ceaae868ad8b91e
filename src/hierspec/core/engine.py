"""The engine: answers the asks of all running requests with one forward pass per scorer. It knows no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from hierspec.core.errors import HierspecError, OutOfMemory, out_of_memory
from hierspec.core.interfaces import Answer, Ask, Scorer
from hierspec.core.pass_times import PassClock, tell_times
from hierspec.core.prompt_reader import PromptReader
from hierspec.core.request import Request, Step
from hierspec.core.room import fits_for, room_taken
from hierspec.core.text_files import shown
from hierspec.core.together import Together

_STEPS = 16  # for which room is looked for at once


class Engine:
    """Runs requests together. `step` is one round: collect the asks, answer them, return what was written.

    If memory is too small for all of them, the latest wait until another one ends. A step that is interrupted (Ctrl-C)
    cancels at most the request that it was advancing; the next step returns what was already written.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, serving: bool = False) -> None:
        self._clock = clock
        self._spent = 0.0  # seconds of all passes so far and of the time between them
        self._timed = 0.0  # seconds of all passes and requests so far, each timed apart
        self._overhead = 0.0  # seconds of steps since the last pass that were neither
        # A server prefills long prompts in pieces, and runs only as many requests as the KV cache holds.
        self._reader = PromptReader() if serving else None
        self._together = Together()
        self._asks: dict[Request, Ask | None] = {}  # in the order of submission; None: it has not asked yet
        self._waiting: set[Request] = set()  # no memory for them beside the running ones
        self._roomy = 0  # steps for which the running requests certainly have room: looking takes a while
        self._steps: list[tuple[Request, Step]] = []  # not returned yet

    def submit(self, request: Request) -> None:
        self._asks[request] = None
        self._roomy = 0

    @property
    def busy(self) -> bool:
        return bool(self._steps) or any(request.ended is None for request in self._asks)

    def step(self) -> list[tuple[Request, Step]]:
        began, timed = self._clock(), self._timed
        try:
            return self._step()
        finally:
            self._overhead += self._clock() - began - (self._timed - timed)

    def _step(self) -> list[tuple[Request, Step]]:
        running = self._running()
        writing = sum(bool(request.output) for request in running) if self._reader else 0
        for request in running:
            request.running_requests = len(running) if self._reader is None else writing + (not request.output)
        for request in running:
            if self._asks[request] is None:
                self._go_on(request, None)
        if self._steps:  # the caller may end these requests before their next pass
            return self._taken()
        asks = {
            request: ask for request in running if (ask := self._asks[request]) is not None and request.ended is None
        }
        chosen = self._together.choose(asks)
        if self._reader is not None:
            chosen = self._reader.choose(chosen)
        groups: dict[int, list[tuple[Request, Ask]]] = {}
        for request, ask in chosen.items():
            groups.setdefault(id(ask.scorer), []).append((request, ask))
        for group in groups.values():
            for (request, ask), answer in zip(group, self._answers(group), strict=True):
                if answer is not None and ask is asks[request]:  # else only a piece of its prompt was prefilled
                    self._go_on(request, answer)
        return self._taken()

    def _taken(self) -> list[tuple[Request, Step]]:
        steps, self._steps = self._steps, []
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

    def _running(self) -> list[Request]:
        """Requests that do not wait for memory. Once one has ended, all may try again, the earliest first."""
        unended = {request: ask for request, ask in self._asks.items() if request.ended is None}
        if len(unended) < len(self._asks):
            if self._waiting:
                self._waiting.clear()
                self._roomy = 0
            self._asks = unended
        running = [request for request in unended if request not in self._waiting]
        if self._reader is None:
            return running
        if not self._roomy and not fits_for(running, _STEPS):
            return _with_room(running)
        self._roomy = (self._roomy or _STEPS) - 1
        return running

    def _answers(self, group: list[tuple[Request, Ask]]) -> Sequence[Answer | None]:
        scorer: Scorer = group[0][1].scorer
        asks = [ask for _, ask in group]
        reading = None if self._reader is None else self._reader.reading(asks)
        began, prepared = self._clock(), _preparing(scorer)
        try:
            answers = scorer.score(asks)
        except Exception as error:
            failure = failure_of(f"The scorer {scorer.name}", error)
            if len(group) == 1:
                group[0][0].fail(failure)
                return [None]
            if isinstance(failure, OutOfMemory):
                half = len(group) // 2
                answered = self._answers(group[:half])
                self._waiting.update(request for request, _ in group[half:])
                return [*answered, *[None] * (len(group) - half)]
            # Score them one by one, so that only a request that cannot be answered fails.
            return [answer for pair in group for answer in self._answers([pair])]
        for request, _ in group:  # before anything of this pass is noted
            try:
                request.catch_up()
            except Exception as error:  # only this request fails
                request.fail(failure_of("The request", error))
        preparing, seconds = _preparing(scorer) - prepared, self._clock() - began
        self._timed += seconds
        seconds = max(seconds - preparing, 0.0)
        if self._reader is not None and reading is not None:
            self._reader.learn(scorer, reading, seconds)
        # A round with drafts takes more steps than a plain one, so what steps cost counts too.
        between = sum(request.between for request, _ in group) + self._overhead
        self._overhead = 0.0
        self._note(group, answers, PassClock(seconds, between, preparing > 0))
        return answers

    def _note(self, group: list[tuple[Request, Ask]], answers: Sequence[Answer], clock: PassClock) -> None:
        self._together.learn(group[0][1].scorer, clock.seconds)
        self._spent += clock.between + clock.seconds
        tell_times(group, answers, clock, self._spent)

    def _go_on(self, request: Request, answer: Answer | None) -> None:
        """`_advance`, timed."""
        began = self._clock()
        self._advance(request, answer)
        request.between = self._clock() - began
        self._timed += request.between

    def _advance(self, request: Request, answer: Answer | None) -> None:
        """Give the request its answer and run it to its next ask; a step completed on the way is added to the steps.

        An answer for several steps gives one step per call: the caller may end the request after each.
        """
        while request.ended is None:
            try:
                outcome = request.ask(answer)
                if isinstance(outcome, Ask):
                    self._asks[request] = outcome
                    return
                self._steps.append((request, outcome))
                answer = None
                if request.ready:
                    self._asks[request] = None
                    return
            except Exception as error:  # only this request fails
                request.fail(failure_of("The request", error))
            except BaseException:  # interrupted between two asks: the coroutine cannot resume
                request.cancel()
                raise


def _preparing(scorer: Scorer) -> float:
    """Seconds that a scorer has spent so far on one-off work (compiling kernels, recording graphs).

    They are no cost of the pass that needed it first.
    """
    return getattr(scorer, "preparing", 0.0)


def _with_room(requests: list[Request]) -> list[Request]:
    """The earliest of these, as many as the KV cache holds: more would evict each other's entries."""
    taken = 0.0
    for count, request in enumerate(requests):
        taken += room_taken(request)
        if count and taken > 1:
            return requests[:count]
    return requests


def failure_of(who: str, error: Exception) -> HierspecError:
    """What a request fails with. The cause of an unexpected error is kept."""
    if isinstance(error, HierspecError):
        return error
    if isinstance(error, MemoryError):
        failure: HierspecError = out_of_memory()
    else:
        failure = HierspecError(
            f"{who} failed ({type(error).__name__}: {shown(str(error))}); please report this defect."
        )
    failure.__cause__ = error
    return failure
