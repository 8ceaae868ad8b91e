"""A model for programs with an event loop: many tasks generate at once, and their requests share forward passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Unpack

from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.generating import DEFAULT_PLAN
from hierspec.generation import Failure, Generation, TextStep
from hierspec.language_model import LanguageModel
from hierspec.options import Options, PlanLike, sampling_with, several_samplings, split
from hierspec.prompt_ids import Prompt
from hierspec.worker import Event, Job, Observer, Worker


class AsyncLanguageModel:
    """`generate` and `stream` of a loaded model as coroutines. A task that is cancelled cancels its request.

    At most `most_running` answers are written at once; further prompts wait, and namespaces take turns. If
    `most_waiting` already wait, another one is refused (`Busy`).

    `async with AsyncLanguageModel(hierspec.load()) as model: answer = await model.generate("Why?")`
    """

    def __init__(
        self,
        model: LanguageModel,
        observer: Observer | None = None,
        *,
        most_running: int = 64,
        most_waiting: int = 256,
    ) -> None:
        self.model = model
        self.worker = Worker(model, observer, most_running, most_waiting)

    async def generate(
        self,
        prompt: Prompt,
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **options: Unpack[Options],
    ) -> Generation:
        """The whole answer, as `LanguageModel.generate` gives it."""
        stream = self.stream(prompt, plan=plan, sampling=sampling, raw=raw, namespace=namespace, **options)
        async with aclosing(stream.__aiter__()) as steps:
            async for _ in steps:
                pass
        return stream.generation

    async def generate_n(
        self,
        prompt: Prompt,
        n: int,
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **options: Unpack[Options],
    ) -> list[Generation]:
        """`n` answers: the first is what the seed gives alone, the others have seeds of their own."""
        changes, template = split(options)
        samplings = several_samplings(sampling_with(sampling, changes), n)
        ids = self.model.encode(prompt, raw, **template)
        calls = [self.generate(ids, plan=plan, sampling=each, namespace=namespace) for each in samplings]
        return list(await asyncio.gather(*calls))

    def stream(
        self,
        prompt: Prompt,
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **options: Unpack[Options],
    ) -> AsyncStream:
        """The answer step by step; `.generation` holds the whole of it afterwards."""
        changes, template = split(options)
        ids = self.model.encode(prompt, raw, **template)
        return AsyncStream(self.worker, ids, plan, sampling_with(sampling, changes), namespace)

    async def close(self, finish: bool = True) -> None:
        """End the worker: after the answers that are being written, or with them cut short."""
        await asyncio.to_thread(self.worker.close, finish)
        await asyncio.to_thread(self.model.close)

    async def __aenter__(self) -> AsyncLanguageModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(finish=error is None)


class AsyncStream:
    """Iterate for the steps, once; leaving the loop cancels the request."""

    def __init__(self, worker: Worker, ids: list[int], plan: PlanLike, sampling: Sampling, namespace: str) -> None:
        self._worker = worker
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._job = Job(ids, plan, sampling, self._hear, namespace)
        self._result: Generation | Failure | None = None

    def _hear(self, event: Event) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def __aiter__(self) -> AsyncGenerator[TextStep]:
        if self._loop is not None:
            raise HierspecError("This stream was read before; call stream again for another answer.")
        self._loop = asyncio.get_running_loop()
        self._worker.submit(self._job)
        try:
            while isinstance(event := await self._events.get(), TextStep):
                yield event
            self._result = event
        finally:
            self._job.cancel()
        if isinstance(self._result, Failure):
            raise self._result.error

    def cancel(self) -> None:
        """Stop before the next pass; the loop over the steps then ends with what there is."""
        self._job.cancel()

    @property
    def generation(self) -> Generation:
        """The answer, as far as it got."""
        if isinstance(self._result, Failure):
            raise self._result.error
        if self._result is not None:
            return self._result
        if self._job.writer is None:
            raise HierspecError("Nothing was written yet; read the stream first.")
        return self._job.writer.so_far()
