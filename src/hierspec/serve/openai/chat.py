"""/v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hierspec.generation import Generation, TextStep
from hierspec.serve.answering.answers import Answers
from hierspec.serve.answering.conversation import PreparedPrompt, prepared
from hierspec.serve.answering.fields import check_model, most_tokens
from hierspec.serve.answering.reports import chat_logprobs
from hierspec.serve.answering.tools import AnswerReader
from hierspec.serve.http.reading import StrictRoute
from hierspec.serve.openai.call import OpenAICall
from hierspec.serve.openai.conversation import conversation_of
from hierspec.serve.openai.sampling import sampling_of
from hierspec.serve.openai.schemas import CHAT_RESPONSES, ChatRequest
from hierspec.serve.openai.tools import chat_delta, chat_message

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post("/v1/chat/completions", responses=CHAT_RESPONSES)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, whole or (`stream`) as server-sent events that end with `data: [DONE]`."""
    state = request.app.state
    name = check_model(state.settings, body.model)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, state.settings, most_tokens(asked, None, state.settings), logprobs)
    prompt = await prepared(state.model, conversation_of(body))
    if (grammar := prompt.grammar) is not None:  # a forced call determines the form of the answer
        sampling = replace(sampling, grammar=grammar)
    answers = Answers(request, [prompt.ids], sampling, n=body.n or 1, plan=body.plan, namespace=body.namespace)
    return await ChatCall(body, name, answers, prompt).respond(request)


class ChatCall(OpenAICall):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    body: ChatRequest

    def __init__(self, body: ChatRequest, model_name: str, answers: Answers, prompt: PreparedPrompt) -> None:
        super().__init__(body, model_name, answers, bool(body.details))
        self._prompt = prompt
        self._readers: dict[int, AnswerReader] = {}  # of streamed answers

    async def whole(self) -> dict[str, Any]:
        reply = await super().whole()
        return reply | ({"prompt_token_ids": self._prompt.ids} if self.body.return_token_ids else {})

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        reader = self._prompt.reader()
        message = chat_message([*reader.add(answer.text), *reader.finish()])
        choice = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, answer.logprobs) if self.body.logprobs else None,
            "finish_reason": _finish_reason(answer, reader),
        }
        return choice | ({"token_ids": list(answer.tokens)} if self.body.return_token_ids else {})

    def opening(self, index: int) -> dict[str, Any]:
        self._readers[index] = self._prompt.reader()
        return self._part(index, {"role": "assistant", "content": None if self._prompt.tools.callable else ""})

    def piece(self, index: int, step: TextStep) -> dict[str, Any]:
        reader = self._readers[index]
        part = self._part(index, chat_delta(reader.add(step.text)))
        if reader.full:
            self.answers.stop(index)
        if self.body.logprobs:
            part["logprobs"] = chat_logprobs(self.tokenizer, step.logprobs)
        return part | ({"token_ids": list(step.tokens)} if self.body.return_token_ids else {})

    def closing(self, index: int, answer: Generation) -> dict[str, Any]:
        reader = self._readers[index]
        return self._part(index, chat_delta(reader.finish()), _finish_reason(answer, reader))

    @staticmethod
    def _part(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _finish_reason(answer: Generation, reader: AnswerReader) -> str:
    return "tool_calls" if reader.calls and answer.ended != "length" else answer.ended
