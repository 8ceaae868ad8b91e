"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from hierspec.serve.answering.answers import encoded
from hierspec.serve.answering.conversation import prepared
from hierspec.serve.answering.fields import check_model
from hierspec.serve.http.errors import ApiError
from hierspec.serve.http.reading import StrictRoute
from hierspec.serve.openai.conversation import conversation_of
from hierspec.serve.openai.schemas import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

router = APIRouter(tags=["tokens"], route_class=StrictRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeReply:
    """Token ids of a text (`prompt`), or of a conversation as the chat template writes it (`messages`)."""
    state = request.app.state
    check_model(state.settings, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give prompt or messages, one of them.", param="prompt")
    if body.prompt is not None:
        begin = body.add_special_tokens is not False
        ids = await encoded(state.model, body.prompt, special=bool(body.parse_special), begin=begin)
    else:
        ids = (await prepared(state.model, conversation_of(body))).ids
    tokenizer = state.model.model.tokenizer
    pieces = [tokenizer.piece(each, special=True).decode("utf-8", "replace") for each in ids]
    strings: dict[str, Any] = {"token_strs": pieces} if body.return_token_strs else {}
    return TokenizeReply(count=len(ids), max_model_len=state.model.model.config.context, tokens=ids, **strings)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeReply:
    """The text of token ids, control tokens included."""
    state = request.app.state
    check_model(state.settings, body.model)
    vocabulary = state.model.model.config.vocabulary
    if body.tokens and max(body.tokens) >= vocabulary:
        raise ApiError(400, f"A token id is outside the model's vocabulary of {vocabulary}.", param="tokens")
    return DetokenizeReply(prompt=state.model.model.tokenizer.decode(body.tokens, special=True))
