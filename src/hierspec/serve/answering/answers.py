"""The answers to one call: several prompts with several answers each, all in the batches of one worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from fastapi import Request

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.core.errors import HierspecError, OutOfMemory
from hierspec.core.plan import NAMED
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats, TierStats
from hierspec.generation import Failure, Generation, TextStep
from hierspec.options import PlanLike, several_samplings
from hierspec.serve.http.errors import ApiError, failure, refusal, unavailable
from hierspec.serve.http.keys import namespace_of
from hierspec.serve.http.limits import Gate
from hierspec.serve.settings import Settings
from hierspec.worker import Event, Job

_log = logging.getLogger("hierspec.serve")
_WAITING_SECONDS = 15.0  # without a token; then a comment keeps the connection alive

PLANS = ("auto", *NAMED)


class Answers:
    """The answers to one call. Iterate over `events` once; leaving the loop cancels unfinished answers."""

    def __init__(
        self,
        request: Request,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        n: int = 1,
        plan: str | None = None,
        namespace: str | None = None,
        writes: bool = True,  # False: generate nothing, because only the prompts matter
    ) -> None:
        """Rejects everything that a client may have got wrong before anything runs."""
        state = request.app.state
        self.model: AsyncLanguageModel = state.model
        self.settings: Settings = state.settings
        self.gate: Gate = state.gate
        self.prompts, self.n, self._writes = list(prompts), n, writes
        self.count = len(prompts) * n  # answer i belongs to prompt i // n
        if self.count > self.settings.limits.call_answers:
            most = self.settings.limits.call_answers
            raise ApiError(400, f"One call may ask for at most {most} answers; make several calls.", param="n")
        for ids in self.prompts:
            self._check(ids, sampling)
        self.plan, self.namespace = self._plan(plan), namespace_of(request, namespace)
        self._samplings = several_samplings(sampling, n)
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.jobs: list[Job] = []
        self.finished: dict[int, Generation] = {}
        self._stopped: set[int] = set()

    def stop(self, index: int) -> None:
        """Ends this answer with the text it has so far."""
        self._stopped.add(index)
        self.jobs[index].cancel()

    async def events(self) -> AsyncGenerator[tuple[int, TextStep | Generation] | None, None]:
        """Yields (index of the answer, step), and a `Generation` as the last event of each answer.

        Yields None if nothing was generated for a while, so that the client can be told.
        """
        if not self._writes:
            for index, sampling in enumerate(self._samplings * len(self.prompts)):
                self.finished[index] = _nothing(len(self.prompt(index)), sampling)
                yield index, self.finished[index]
            return
        wanted = [(ids, sampling) for ids in self.prompts for sampling in self._samplings]
        with self.gate.running(len(wanted)):
            try:
                self._submit(wanted)
                async for news in self._all_news(time.monotonic() + self.settings.limits.answer_seconds):
                    yield news
            finally:
                for job in self.jobs:
                    job.cancel()

    async def finish(self) -> list[Generation]:
        """Waits for all answers and returns them."""
        async for _ in self.events():
            pass
        return self.in_order()

    def in_order(self) -> list[Generation]:
        """All answers, once they are finished."""
        return [self.finished[index] for index in range(self.count)]

    def prompt(self, index: int) -> list[int]:
        """The prompt of an answer."""
        return self.prompts[index // self.n]

    def _submit(self, wanted: list[tuple[list[int], Sampling]]) -> None:
        loop = asyncio.get_running_loop()
        if self.settings.log_prompts:
            for ids in self.prompts:
                _log.info("Prompt: %r", self.model.model.tokenizer.decode(ids, special=True))
        for index, (ids, sampling) in enumerate(wanted):

            def hear(event: Event, index: int = index) -> None:
                loop.call_soon_threadsafe(self._news.put_nowait, (index, event))

            job = Job(ids, self.plan, sampling, hear, self.namespace)
            self.jobs.append(job)
            try:
                self.model.worker.submit(job)
            except HierspecError as error:  # the prompt is not at fault
                raise unavailable(error) from error

    async def _all_news(self, end: float) -> AsyncGenerator[tuple[int, TextStep | Generation] | None, None]:
        while len(self.finished) < len(self.jobs):
            try:
                wait = min(end - time.monotonic(), _WAITING_SECONDS)
                index, event = await asyncio.wait_for(self._news.get(), wait)
            except TimeoutError:
                if time.monotonic() >= end:
                    raise self._too_long() from None
                yield None
                continue
            if isinstance(event, Failure):
                raise self._error(event)
            if isinstance(event, Generation):
                if event.ended == "cancelled" and index not in self._stopped:
                    raise ApiError(503, "The server is stopping; send the request again later.")
                self.finished[index] = event
            yield index, event

    def _error(self, event: Failure) -> ApiError:
        """The error for the client, depending on whose fault it was.

        A request that never began was rejected, unless something broke while it was being prepared. A grammar may also
        turn out to allow no token of the model.
        """
        broke = event.error.__cause__ is not None or isinstance(event.error, OutOfMemory)
        if event.partial is None:
            return failure(event.error) if event.error.__cause__ is not None else refusal(event.error)
        has_grammar = self._samplings[0].grammar is not None
        return refusal(event.error) if has_grammar and not broke else failure(event.error)

    def _too_long(self) -> ApiError:
        seconds = self.settings.limits.answer_seconds
        sentence = f"The answer was not finished after {seconds:g} s, the limit of this server; ask for fewer tokens."
        return ApiError(408, sentence, code="timeout", headers={"x-should-retry": "false"})

    def _check(self, ids: list[int], sampling: Sampling) -> None:
        config, limits = self.model.model.config, self.settings.limits
        most = min(config.context - 1, limits.prompt_tokens or config.context)
        if len(ids) > most:
            sentence = (
                f"The prompt has {len(ids)} tokens, more than the {most} that this model may be given; shorten it."
            )
            raise ApiError(400, sentence, code="context_length_exceeded")
        if not ids:
            raise ApiError(400, "The prompt is empty; give some text.")
        if max(ids) >= config.vocabulary or min(ids) < 0:
            raise ApiError(400, f"The prompt holds a token id outside the model's vocabulary of {config.vocabulary}.")
        bias = sampling.logit_bias or {}
        if bias and max(bias) >= config.vocabulary:
            sentence = f"logit_bias names a token id outside the model's vocabulary of {config.vocabulary}."
            raise ApiError(400, sentence, param="logit_bias")

    def _plan(self, name: str | None) -> PlanLike:
        """A plan by built-in name only: a client must not make the server read a file."""
        if name is None:
            return self.settings.plan
        if name not in PLANS:
            raise ApiError(400, f"There is no such plan; choose from {', '.join(PLANS)}.", param="plan")
        return name


def _nothing(prompt_tokens: int, sampling: Sampling) -> Generation:
    """An answer with no tokens."""
    seed = sampling.seed or 0
    return Generation("", (), (), (), "length", seed, prompt_tokens, Stats([TierStats("")]), 0.0, 0, 0.0)


async def encoded(model: AsyncLanguageModel, text: str, special: bool = False, begin: bool = True) -> list[int]:
    """Token ids of a raw text, computed in a thread, so that long prompts do not delay running answers."""
    return await asyncio.to_thread(model.model.tokenizer.encode, text, special, begin)
