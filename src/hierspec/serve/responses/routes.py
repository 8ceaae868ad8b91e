"""/v1/responses, OpenAI's responses API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from hierspec.core.grammar import Grammar
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation
from hierspec.options import TemplateOptions
from hierspec.serve.answering.answers import Answers
from hierspec.serve.answering.conversation import Conversation, PreparedPrompt, prepared
from hierspec.serve.answering.fields import check_model, most_tokens
from hierspec.serve.answering.one_answer import one_answer
from hierspec.serve.answering.reports import chat_logprobs, usage
from hierspec.serve.http.errors import ApiError
from hierspec.serve.http.keys import namespace_of
from hierspec.serve.http.reading import StrictRoute
from hierspec.serve.http.sse import WAITING, event, event_stream, unless_gone
from hierspec.serve.openai.tools import openai_tools
from hierspec.serve.responses.items import input_items, messages_of, new_id
from hierspec.serve.responses.output import Event, Output
from hierspec.serve.responses.schemas import REPLIES, Deleted, InputItems, ResponsesReply, ResponsesRequest
from hierspec.serve.responses.store import StoredResponses
from hierspec.serve.settings import Settings

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=StrictRoute)

_LOGPROBS = "message.output_text.logprobs"


@router.post("", responses=REPLIES)
async def create(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input, whole or (`stream`) with the events of the response as they happen."""
    if body.background:
        raise ApiError(400, "Responses are not made in the background here; leave it out.", param="background")
    call = await _Call.of(body, request)
    if body.stream:
        return await event_stream(request, call.stream(), request.app.state.settings.limits.send_seconds)
    return JSONResponse(await unless_gone(request, call.whole()))


@router.get("/{response_id}")
async def retrieve(response_id: str, request: Request) -> ResponsesReply:
    """A stored response."""
    stored: StoredResponses = request.app.state.responses
    return JSONResponse(stored.get(namespace_of(request, None), response_id).response)  # type: ignore[return-value]


@router.delete("/{response_id}")
async def delete(response_id: str, request: Request) -> Deleted:
    stored: StoredResponses = request.app.state.responses
    stored.delete(namespace_of(request, None), response_id)
    return Deleted(id=response_id, object="response", deleted=True)


@router.get("/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> InputItems:
    """What a stored response answered, without what came before it."""
    stored: StoredResponses = request.app.state.responses
    items = stored.get(namespace_of(request, None), response_id).items
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    page = items[start : start + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = start + limit < len(items)
    return InputItems(object="list", data=page, first_id=first, last_id=last, has_more=more)


class _Call:
    """One request, and its response so far."""

    def __init__(self, body: ResponsesRequest, name: str, answers: Answers, prompt: PreparedPrompt) -> None:
        self._body, self._answers, self._prompt = body, answers, prompt
        self._output = Output()
        self._status = "in_progress"
        self._finished: Generation | None = None
        self._error: dict[str, Any] | None = None
        self._about = {"id": new_id("resp"), "object": "response", "created_at": int(time.time()), "model": name}
        self._keep: tuple[StoredResponses, str, list[dict[str, Any]], list[dict[str, Any]]] | None = None

    @classmethod
    async def of(cls, body: ResponsesRequest, request: Request) -> _Call:
        state, owner = request.app.state, namespace_of(request, None)
        name = check_model(state.settings, body.model)
        stored: StoredResponses = state.responses
        before = stored.get(owner, body.previous_response_id).history if body.previous_response_id else []
        items = input_items(body.input)
        prompt = await prepared(state.model, _conversation(body, [*before, *items]))
        sampling = _sampling(body, prompt, state.settings)
        answers = Answers(request, [prompt.ids], sampling, plan=body.plan, namespace=body.namespace)
        call = cls(body, name, answers, prompt)
        if body.store is not False:
            call._keep = stored, owner, items, before
        return call

    async def whole(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self.response()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The numbered events. The first comes with the first token, so that an earlier error can have its own
        status."""
        number = 0
        async for each in self._until_failure():
            if each is None:
                yield WAITING
                continue
            yield event({**each, "sequence_number": number}, each["type"])
            number += 1

    async def _until_failure(self) -> AsyncGenerator[Event | None, None]:
        begun = False
        try:
            async for each in self._events():
                if not begun and each is not None:
                    begun = True
                    for opening in ("response.created", "response.in_progress"):
                        yield {"type": opening, "response": self.response(begin=True)}
                yield each
        except ApiError as error:
            if not begun:
                raise
            code = error.code or ("server_error" if error.status_code >= 500 else "invalid_prompt")
            self._status, self._error = "failed", {"code": code, "message": error.message}
            yield {"type": "response.failed", "response": self.response()}

    async def _events(self) -> AsyncGenerator[Event | None, None]:
        async for news in one_answer(self._answers, self._prompt.reader()):
            if isinstance(news, Generation):
                self._finished = news
                self._status = "incomplete" if news.ended == "length" else "completed"
                logprobs = chat_logprobs(self._answers.model.model.tokenizer, news.logprobs)["content"]
                for each in self._output.close(self._status, logprobs):
                    yield each
                if self._keep is not None:
                    stored, owner, items, before = self._keep
                    stored.add(owner, self.response(), items, before)
                yield {"type": f"response.{self._status}", "response": self.response()}
            elif news is None:
                yield None
            else:
                for each in self._output.add(news):
                    yield each

    def response(self, begin: bool = False) -> dict[str, Any]:
        """The response as it is now, or as it was at its start."""
        body, tools = self._body, self._prompt.tools
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        text = {"format": {"type": "text"}}
        if body.text and body.text.format:
            text = {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        choice = {"type": "function", "name": tools.named} if tools.named else tools.choice
        return {
            **self._about,
            "status": self._status,
            "error": self._error,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [] if begin else list(self._output.items),
            "parallel_tool_calls": tools.parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": self._keep is not None,
            "temperature": self._answers.settings.temperature if body.temperature is None else body.temperature,
            "text": text,
            "tool_choice": choice if tools.functions else "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage(),
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any] | None:
        if self._finished is None:
            return None
        counted = usage([len(self._prompt.ids)], len(self._finished.tokens), [self._finished])
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }


def _conversation(body: ResponsesRequest, items: Sequence[dict[str, Any]]) -> Conversation:
    messages = messages_of(items)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    template: TemplateOptions = {}
    if body.chat_template_kwargs:
        template["template_variables"] = body.chat_template_kwargs
    return Conversation(messages, openai_tools(body.tools, body.tool_choice, body.parallel_tool_calls), template)


def _sampling(body: ResponsesRequest, prompt: PreparedPrompt, settings: Settings) -> Sampling:
    wants_logprobs = _LOGPROBS in (body.include or ()) or body.top_logprobs
    return Sampling(
        max_tokens=most_tokens(body.max_output_tokens, None, settings),
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        grammar=prompt.grammar or _grammar(body),
    )


def _grammar(body: ResponsesRequest) -> Grammar | None:
    """The grammar that `text.format` imposes on the answer."""
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_object")
    if wanted.schema_ is None:
        raise ApiError(400, "text.format of type json_schema needs a schema.", param="text.format.schema")
    return Grammar.json_schema(wanted.schema_)
