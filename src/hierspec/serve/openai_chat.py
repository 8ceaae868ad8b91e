"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hierspec.generation import Generation, TextStep
from hierspec.serve.answers import Answers, most_tokens
from hierspec.serve.messages import chat_ids
from hierspec.serve.models import check_model
from hierspec.serve.openai_call import OpenAICall
from hierspec.serve.openai_schemas import CHAT_RESPONSES, ChatRequest
from hierspec.serve.reading import StrictRoute
from hierspec.serve.reports import chat_logprobs
from hierspec.serve.sampling import sampling_of

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post("/v1/chat/completions", responses=CHAT_RESPONSES)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, whole or (`stream`) as server-sent events that end with `data: [DONE]`."""
    state = request.app.state
    name = check_model(state.settings, body.model)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, state.settings, most_tokens(asked, None, state.settings), logprobs)
    ids = await chat_ids(state.model, body)
    answers = Answers(request, [ids], sampling, n=body.n or 1, plan=body.plan, namespace=body.namespace)
    return await ChatCall(body, name, answers, bool(body.details)).respond(request)


class ChatCall(OpenAICall):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    body: ChatRequest

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(self.tokenizer, answer.logprobs) if self.body.logprobs else None,
            "finish_reason": answer.ended,
        }
        return choice | ({"token_ids": list(answer.tokens)} if self.body.return_token_ids else {})

    def opening(self, index: int) -> dict[str, Any]:
        return self._part(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, step: TextStep) -> dict[str, Any]:
        part = self._part(index, {"content": step.text})
        if self.body.logprobs:
            part["logprobs"] = chat_logprobs(self.tokenizer, step.logprobs)
        return part | ({"token_ids": list(step.tokens)} if self.body.return_token_ids else {})

    def closing(self, index: int, answer: Generation) -> dict[str, Any]:
        return self._part(index, {}, answer.ended)

    @staticmethod
    def _part(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
