"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hierspec.core.grammar import Grammar
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation
from hierspec.serve.answering.answers import Answers
from hierspec.serve.answering.conversation import PreparedPrompt, prepared
from hierspec.serve.answering.fields import check_model, most_tokens
from hierspec.serve.answering.one_answer import one_answer
from hierspec.serve.answering.reports import cached_tokens
from hierspec.serve.answering.tools import AnswerReader
from hierspec.serve.anthropic.blocks import Blocks, conversation_of
from hierspec.serve.anthropic.schemas import ERRORS, REPLIES, AnthropicPrompt, AnthropicRequest, TokenCount
from hierspec.serve.http.errors import SHAPES, ApiError
from hierspec.serve.http.reading import StrictRoute
from hierspec.serve.http.sse import event, event_stream, unless_gone
from hierspec.serve.settings import Settings

_PATH = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

router = APIRouter(prefix=_PATH, tags=["Anthropic"], route_class=StrictRoute)


def anthropic_shape(error: ApiError) -> dict[str, Any]:
    kind = _KINDS.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


SHAPES[_PATH] = anthropic_shape


@router.post("", responses=REPLIES)
async def messages(body: AnthropicRequest, request: Request) -> Response:
    """Answer a conversation, whole or (`stream`) with the events of the message as they happen."""
    state = request.app.state
    name = check_model(state.settings, body.model)
    prompt = await prepared(state.model, conversation_of(body))
    sampling = _sampling(body, prompt, state.settings)
    answers = Answers(request, [prompt.ids], sampling, plan=body.plan, namespace=body.namespace)
    call = _Call(body, name, answers, prompt)
    if body.stream:
        return await event_stream(request, call.stream(), state.settings.limits.send_seconds)
    return JSONResponse(await unless_gone(request, call.whole()))


@router.post("/count_tokens", responses=ERRORS)
async def count_tokens(body: AnthropicPrompt, request: Request) -> TokenCount:
    """How many tokens the prompt of such a conversation has."""
    state = request.app.state
    check_model(state.settings, body.model)
    prompt = await prepared(state.model, conversation_of(body))
    return TokenCount(input_tokens=len(prompt.ids))


class _Call:
    """One request, and its message so far."""

    def __init__(self, body: AnthropicRequest, name: str, answers: Answers, prompt: PreparedPrompt) -> None:
        self._body, self._answers, self._prompt = body, answers, prompt
        self._blocks, self._reader = Blocks(), prompt.reader()
        self._about = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": name}

    async def whole(self) -> dict[str, Any]:
        [finished] = [news async for news in self._events() if isinstance(news, Generation)]
        stop = self._stop(finished, self._reader)
        return {**self._about, "content": self._blocks.content, **stop, "usage": self._usage(finished)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The first event comes with the first token, so that an earlier error can have its own status."""
        begun = False
        try:
            async for news in self._events():
                if news is None:
                    yield _named({"type": "ping"})
                    continue
                if not begun:
                    begun = True
                    yield _named({"type": "message_start", "message": self._beginning()})
                    yield _named({"type": "ping"})
                if isinstance(news, Generation):
                    usage = self._usage(news)
                    yield _named({"type": "message_delta", "delta": self._stop(news, self._reader), "usage": usage})
                    yield _named({"type": "message_stop"})
                else:
                    yield _named(news)
        except ApiError as error:
            if not begun:
                raise
            yield _named(anthropic_shape(error))

    async def _events(self) -> AsyncGenerator[dict[str, Any] | Generation | None, None]:
        """Events of the content, then the `Generation`; None if nothing was generated for a while."""
        async for news in one_answer(self._answers, self._reader):
            if news is None:
                yield None
            elif isinstance(news, Generation):
                for each in self._blocks.close():
                    yield each
                yield news
            else:
                for each in self._blocks.add(news):
                    yield each

    def _beginning(self) -> dict[str, Any]:
        usage = {"input_tokens": len(self._prompt.ids), "output_tokens": 0}
        return {**self._about, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self, answer: Generation, reader: AnswerReader) -> dict[str, Any]:
        sequence = self._stop_sequence(answer)
        if sequence is not None:
            reason = "stop_sequence"
        elif answer.ended == "length":
            reason = "max_tokens"
        else:
            reason = "tool_use" if reader.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _stop_sequence(self, answer: Generation) -> str | None:
        """The stop sequence that ended the answer: the one that its tokens continue with after its text."""
        whole = self._answers.model.model.tokenizer.decode(answer.tokens)
        rest = whole[len(answer.text) :]
        met = [stop for stop in self._body.stop_sequences or () if rest.startswith(stop)]
        return min(met, key=len) if met and answer.ended == "stop" else None

    def _usage(self, answer: Generation) -> dict[str, Any]:
        """Token counts; Anthropic counts cached prompt tokens separately."""
        cached = cached_tokens(answer)
        return {
            "input_tokens": answer.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(answer.tokens),
        }


def _named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def _sampling(body: AnthropicRequest, prompt: PreparedPrompt, settings: Settings) -> Sampling:
    wanted = body.output_config.format if body.output_config else None
    return Sampling(
        max_tokens=most_tokens(body.max_tokens, None, settings),
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        stop=tuple(body.stop_sequences or ()),
        seed=body.seed,
        grammar=prompt.grammar or (Grammar.json_schema(wanted.schema_) if wanted else None),
    )
