"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hierspec.generation import Generation, TextStep
from hierspec.serve.answers import Answers, encoded, most_tokens
from hierspec.serve.messages import template_messages
from hierspec.serve.models import check_model
from hierspec.serve.openai_schemas import ChatRequest
from hierspec.serve.reading import StrictRoute
from hierspec.serve.reports import chat_logprobs, timings, usage
from hierspec.serve.sampling import sampling_of
from hierspec.serve.sse import DONE, WAITING, event, event_stream, unless_gone

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

    def __init__(self, body: ChatRequest, name: str, answers: Answers) -> None:
        self.body, self.answers = body, answers
        self.tokenizer = answers.model.model.tokenizer
        self.about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    @classmethod
    async def of(cls, body: ChatRequest, request: Request) -> _Call:
        state = request.app.state
        name = check_model(state.settings, body.model)
        ids = await encoded(state.model, template_messages(_dumped(body)), **_template(body))
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_of(body, state.settings, most_tokens(asked, None, state.settings), logprobs)
        answers = Answers(request, [ids], sampling, n=body.n or 1, plan=body.plan, namespace=body.namespace)
        return cls(body, name, answers)

    async def whole(self) -> dict[str, Any]:
        finished = await self.answers.finish()
        choices = [self._choice(index, answer) for index, answer in enumerate(finished)]
        reply = {**self.about, "object": "chat.completion", "choices": choices, "usage": self._usage(finished)}
        return reply | ({"timings": timings(finished[0])} if self.body.timings else {})

    def _choice(self, index: int, answer: Generation) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(self.tokenizer, answer.logprobs) if self.body.logprobs else None,
            "finish_reason": answer.ended,
        }

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async for news in self.answers.events():
            if news is None:
                yield WAITING
                continue
            index, step = news
            if index not in begun:
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""})
            if isinstance(step, TextStep):
                if step.text or step.logprobs:
                    yield self._chunk(index, {"content": step.text}, step=step)
            else:
                yield self._chunk(index, {}, ended=step)
        if self.body.stream_options and self.body.stream_options.include_usage:
            finished = list(self.answers.finished.values())
            yield event({**self._head(), "choices": [], "usage": self._usage(finished)})
        yield DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], step: TextStep | None = None, ended: Generation | None = None
    ) -> bytes:
        shown = self.body.logprobs and step is not None
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(self.tokenizer, step.logprobs) if shown and step is not None else None,
            "finish_reason": None if ended is None else ended.ended,
        }
        more: dict[str, Any] = {"timings": timings(ended)} if self.body.timings and ended is not None else {}
        if self.body.stream_options and self.body.stream_options.include_usage:
            more["usage"] = None
        return event({**self._head(), "choices": [choice], **more})

    def _head(self) -> dict[str, Any]:
        return {**self.about, "object": "chat.completion.chunk"}

    def _usage(self, finished: list[Generation]) -> dict[str, Any]:
        prompts = [len(ids) for ids in self.answers.prompts]
        return usage(prompts, sum(len(answer.tokens) for answer in finished))


def _dumped(body: ChatRequest) -> list[dict[str, Any]]:
    return [message.model_dump() for message in body.messages]


def _template(body: ChatRequest) -> dict[str, Any]:
    """What the chat template is given beside the messages."""
    variables = dict(body.chat_template_kwargs or {})
    template: dict[str, Any] = {"template_variables": variables} if variables else {}
    if body.tools and body.tool_choice != "none":
        template["tools"] = body.tools
    if body.continue_final_message:
        template["continue_final_message"] = True
    return template
