"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hierspec.generation import Generation, TextStep
from hierspec.serve.answers import Answers, most_tokens
from hierspec.serve.conversation import Conversation, PreparedPrompt, prepared
from hierspec.serve.models import check_model
from hierspec.serve.openai_schemas import ChatRequest
from hierspec.serve.openai_tools import chat_delta, chat_message, openai_tools
from hierspec.serve.reading import StrictRoute
from hierspec.serve.reports import chat_logprobs, timings, usage
from hierspec.serve.sampling import sampling_of
from hierspec.serve.sse import DONE, WAITING, event, event_stream, unless_gone
from hierspec.serve.tools import AnswerReader

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, whole or (`stream`) as server-sent events."""
    call = await _Call.of(body, request)
    if body.stream:
        limits = request.app.state.settings.limits
        return await event_stream(request, call.chunks(), limits.send_seconds)
    return JSONResponse(await unless_gone(request, call.whole()))


class _Call:
    """One request, and its answers as the protocol writes them."""

    def __init__(self, body: ChatRequest, name: str, answers: Answers, prompt: PreparedPrompt) -> None:
        self.body, self.answers, self.prompt = body, answers, prompt
        self.tokenizer = answers.model.model.tokenizer
        self.about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    @classmethod
    async def of(cls, body: ChatRequest, request: Request) -> _Call:
        state = request.app.state
        name = check_model(state.settings, body.model)
        tools = openai_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        prompt = await prepared(state.model, Conversation(_dumped(body), tools, _template(body)))
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_of(body, state.settings, most_tokens(asked, None, state.settings), logprobs)
        if (grammar := prompt.grammar) is not None:
            sampling = replace(sampling, grammar=grammar)
        answers = Answers(request, [prompt.ids], sampling, n=body.n or 1, plan=body.plan, namespace=body.namespace)
        return cls(body, name, answers, prompt)

    async def whole(self) -> dict[str, Any]:
        finished = await self.answers.finish()
        choices = [self._choice(index, answer) for index, answer in enumerate(finished)]
        reply = {**self.about, "object": "chat.completion", "choices": choices, "usage": self._usage(finished)}
        return reply | ({"timings": timings(finished[0])} if self.body.timings else {})

    def _choice(self, index: int, answer: Generation) -> dict[str, Any]:
        reader = self.prompt.reader()
        message = chat_message([*reader.add(answer.text), *reader.finish()])
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, answer.logprobs) if self.body.logprobs else None,
            "finish_reason": finish_reason(answer, reader),
        }

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        readers: dict[int, AnswerReader] = {}
        async for news in self.answers.events():
            if news is None:
                yield WAITING
                continue
            index, step = news
            if index not in readers:
                readers[index] = self.prompt.reader()
                yield self._chunk(index, {"role": "assistant", "content": ""})
            if isinstance(step, TextStep):
                delta = chat_delta(readers[index].add(step.text))
                if readers[index].full:
                    self.answers.stop(index)
                if delta or step.logprobs:
                    yield self._chunk(index, delta, step=step)
            else:
                if delta := chat_delta(readers[index].finish()):
                    yield self._chunk(index, delta)
                yield self._chunk(index, {}, ended=(step, finish_reason(step, readers[index])))
        if self.body.stream_options and self.body.stream_options.include_usage:
            finished = list(self.answers.finished.values())
            yield event({**self._head(), "choices": [], "usage": self._usage(finished)})
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        step: TextStep | None = None,
        ended: tuple[Generation, str] | None = None,
    ) -> bytes:
        shown = self.body.logprobs and step is not None
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(self.tokenizer, step.logprobs) if shown and step is not None else None,
            "finish_reason": None if ended is None else ended[1],
        }
        more: dict[str, Any] = {"timings": timings(ended[0])} if self.body.timings and ended is not None else {}
        if self.body.stream_options and self.body.stream_options.include_usage:
            more["usage"] = None
        return event({**self._head(), "choices": [choice], **more})

    def _head(self) -> dict[str, Any]:
        return {**self.about, "object": "chat.completion.chunk"}

    def _usage(self, finished: list[Generation]) -> dict[str, Any]:
        prompts = [len(ids) for ids in self.answers.prompts]
        return usage(prompts, sum(len(answer.tokens) for answer in finished))


def finish_reason(answer: Generation, reader: AnswerReader) -> str:
    return "tool_calls" if reader.calls and answer.ended != "length" else answer.ended


def _dumped(body: ChatRequest) -> list[dict[str, Any]]:
    return [message.model_dump() for message in body.messages]


def _template(body: ChatRequest) -> dict[str, Any]:
    """What the chat template is given beside the messages."""
    variables = dict(body.chat_template_kwargs or {})
    template: dict[str, Any] = {"template_variables": variables} if variables else {}
    if body.continue_final_message:
        template["continue_final_message"] = True
    return template
