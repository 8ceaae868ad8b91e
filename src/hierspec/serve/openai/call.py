"""What chat and text completions share: answers as one reply, or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from hierspec.generation import Generation, TextStep
from hierspec.serve.answering.answers import Answers
from hierspec.serve.answering.reports import Timings, usage
from hierspec.serve.http.sse import DONE, WAITING, event, event_stream, unless_gone
from hierspec.serve.openai.schemas import SamplingFields
from hierspec.serve.page.details import details


class OpenAICall(ABC):
    """One request and its answers. The methods below get what is generated, in order of arrival."""

    kind: str  # the "object" field of a reply
    chunk_kind: str
    id_prefix: str

    def __init__(self, body: SamplingFields, model_name: str, answers: Answers, details: bool = False) -> None:
        self.body, self.answers, self.details = body, answers, details
        self.tokenizer = answers.model.model.tokenizer
        self.about = {"id": f"{self.id_prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}
        self._timings = {index: Timings(len(answers.prompt(index))) for index in range(answers.count)}
        options = body.stream_options
        self._usage_last = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    @abstractmethod
    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says about an answer before any of it is generated."""

    @abstractmethod
    def piece(self, index: int, step: TextStep) -> dict[str, Any]:
        """A part of an answer in a stream."""

    @abstractmethod
    def closing(self, index: int, answer: Generation) -> dict[str, Any]:
        """The end of an answer in a stream."""

    async def respond(self, request: Request) -> Response:
        if self.body.stream:
            return await event_stream(request, self.chunks(), self.answers.settings.limits.send_seconds)
        return JSONResponse(await unless_gone(request, self.whole()))

    async def whole(self) -> dict[str, Any]:
        async for news in self.answers.events():
            if news is not None and isinstance(news[1], TextStep):
                self._timings[news[0]].add(news[1])
        finished = self.answers.in_order()
        choices = [self.choice(index, answer) for index, answer in enumerate(finished)]
        reply = {**self.about, "object": self.kind, "choices": choices, "usage": self._usage()}
        if self.body.timings or self.body.timings_per_token:
            reply["timings"] = self._timings[0].to_json()
        return reply

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async for news in self.answers.events():
            if news is None:
                yield WAITING
                continue
            index, step = news
            if index not in begun:
                begun.add(index)
                if (opening := self.opening(index)) is not None:
                    yield self._chunk(opening)
            if isinstance(step, Generation):
                yield self._chunk(self.closing(index, step), self._timings[index] if self.body.timings else None)
                continue
            self._timings[index].add(step)
            if step.text or step.logprobs or self.details or self.body.return_token_ids:
                shown = self._timings[index] if self.body.timings_per_token else None
                yield self._chunk(self.piece(index, step), shown, step if self.details else None)
        if self._usage_last:
            yield event({**self.about, "object": self.chunk_kind, "choices": [], "usage": self._usage()})
        yield DONE

    def _chunk(self, choice: dict[str, Any], timings: Timings | None = None, step: TextStep | None = None) -> bytes:
        chunk: dict[str, Any] = {**self.about, "object": self.chunk_kind, "choices": [choice]}
        if self._usage_last or self._usage_always:
            chunk["usage"] = self._usage() if self._usage_always else None
        if timings is not None:
            chunk["timings"] = timings.to_json()
        if step is not None:
            chunk["hierspec"] = details(step, self.tokenizer)
        return event(chunk)

    def _usage(self) -> dict[str, Any]:
        written = sum(timings.tokens for timings in self._timings.values())
        return usage([len(ids) for ids in self.answers.prompts], written, list(self.answers.finished.values()))
