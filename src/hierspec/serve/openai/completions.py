"""/v1/completions: raw prompts, as text or token ids, several in one call."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.core.errors import HierspecError
from hierspec.core.logprobs import TokenLogprobs
from hierspec.generation import Generation, TextStep
from hierspec.serve.answering.answers import Answers, encoded
from hierspec.serve.answering.fields import check_model, most_tokens
from hierspec.serve.answering.reports import TextLogprobs, joined
from hierspec.serve.http.errors import ApiError, failure
from hierspec.serve.http.reading import StrictRoute
from hierspec.serve.http.sse import unless_gone
from hierspec.serve.openai.call import OpenAICall
from hierspec.serve.openai.sampling import sampling_of
from hierspec.serve.openai.schemas import COMPLETION_RESPONSES, CompletionRequest

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)
_DEFAULT_TOKENS = 16  # as in OpenAI's API


@router.post("/v1/completions", responses=COMPLETION_RESPONSES)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several texts, whole or (`stream`) as server-sent events that end with `data: [DONE]`."""
    state = request.app.state
    name = check_model(state.settings, body.model)
    if body.suffix:
        raise ApiError(400, "Text cannot be put before a suffix; leave suffix out.", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of is not supported; ask for n answers and choose among them.", param="best_of")
    longest = most_tokens(body.max_tokens, _DEFAULT_TOKENS, state.settings, least=0 if body.echo else 1)
    sampling = sampling_of(body, state.settings, max(1, longest), body.logprobs)
    texts, prompts = await _prompts(state.model, body)
    answers = Answers(
        request, prompts, sampling, n=body.n or 1, plan=body.plan, namespace=body.namespace, writes=longest > 0
    )
    call = CompletionCall(body, name, answers)
    if body.echo:
        call.texts = texts
        if body.logprobs is not None:
            call.scores = await unless_gone(request, _scores(answers, body.logprobs))
    return await call.respond(request)


class CompletionCall(OpenAICall):
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"
    body: CompletionRequest
    texts: list[str] | None = None  # texts of the prompts, if they are echoed
    scores: list[list[TokenLogprobs]] | None = None  # log-probabilities of the prompts' tokens, if requested

    def __init__(self, body: CompletionRequest, model_name: str, answers: Answers) -> None:
        super().__init__(body, model_name, answers)
        self._logprobs = [TextLogprobs(self.tokenizer) for _ in range(answers.count)]

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        echoed = self._echoed(index)
        text, before = ("", []) if echoed is None else echoed
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = joined([*before, self._logprobs[index].of(answer.logprobs)])
        return self._part(index, text + answer.text, logprobs, answer.ended, list(answer.tokens), whole=True)

    def opening(self, index: int) -> dict[str, Any] | None:
        echoed = self._echoed(index)
        if echoed is None:
            return None
        text, logprobs = echoed
        return self._part(index, text, joined(logprobs) if logprobs else None)

    def piece(self, index: int, step: TextStep) -> dict[str, Any]:
        logprobs = None if self.body.logprobs is None else self._logprobs[index].of(step.logprobs)
        return self._part(index, step.text, logprobs, tokens=list(step.tokens))

    def closing(self, index: int, answer: Generation) -> dict[str, Any]:
        return self._part(index, "", None, answer.ended)

    def _echoed(self, index: int) -> tuple[str, list[dict[str, Any]]] | None:
        if self.texts is None:
            return None
        number = index // self.answers.n
        lists = []
        if self.scores is not None:
            writer = self._logprobs[index]
            lists = [writer.first(self.answers.prompts[number][0]), writer.of(self.scores[number])]
        return self.texts[number], lists

    def _part(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None = None,
        tokens: list[int] | None = None,
        whole: bool = False,
    ) -> dict[str, Any]:
        part = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.body.return_token_ids and tokens is not None:
            part["token_ids"] = tokens
            if whole:
                part["prompt_token_ids"] = self.answers.prompt(index)
        return part


async def _prompts(model: AsyncLanguageModel, body: CompletionRequest) -> tuple[list[str], list[list[int]]]:
    """The prompts of a body, as texts and as token ids."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "There is no prompt; give a text.", param="prompt")
    special = bool(body.parse_special)
    texts, ids = [], []
    for prompt in given:
        is_text = isinstance(prompt, str)
        ids.append(await encoded(model, prompt, special=special) if is_text else prompt)
        texts.append(prompt if is_text else model.model.tokenizer.decode(prompt, special=True))
    return texts, ids


async def _scores(answers: Answers, top: int) -> list[list[TokenLogprobs]]:
    """Log-probabilities of each prompt's tokens. The worker's passes run between these passes."""
    with answers.gate.running(1):
        try:
            return [await asyncio.to_thread(answers.model.model.score, ids, top) for ids in answers.prompts]
        except HierspecError as error:
            raise failure(error) from error
