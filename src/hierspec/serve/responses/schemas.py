"""Bodies of OpenAI's responses, with what hierspec adds. Fields that are not named here are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from hierspec.serve.http.schemas import EVENT, Body

_LARGEST = 2**63 - 1


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="Ignored.")


class ResponsesRequest(Body):
    model: str | None = Field(None, description="A name of /v1/models; left out: the model that is served.")
    input: str | list[dict[str, Any]] = Field(description="A text, or messages, function calls and their outputs.")
    instructions: str | None = Field(None, description="The system message of this response alone.")
    previous_response_id: str | None = Field(None, description="A stored response that this one goes on from.")
    store: bool | None = Field(None, description="Keep the response, so that others can go on from it; so by default.")
    stream: bool | None = None
    background: bool | None = Field(None, description="Not supported.")
    include: list[str] | None = Field(None, description='"message.output_text.logprobs"; others are ignored.')
    max_output_tokens: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextSettings | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    user: str | None = None
    # hierspec's own
    plan: str | None = Field(None, description="A plan by name; `plain` is without speculation. The text is the same.")
    namespace: Annotated[str, Field(max_length=256)] | None = None
    seed: Annotated[int, Field(ge=-_LARGEST - 1, le=_LARGEST)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_LARGEST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesReply(BaseModel):
    """A response. More fields repeat what was asked."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None
    metadata: dict[str, str]


class InputItems(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


_EVENTS = {"schema": EVENT, "example": 'event: response.output_text.delta\ndata: {"delta": "Hi"}\n\n'}
REPLIES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ResponsesReply,
        "description": "The response; with `stream`, its events as they happen.",
        "content": {"text/event-stream": _EVENTS},
    }
}
