"""Bodies of Anthropic's messages, with what hierspec adds. Fields that are not named here are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from hierspec.serve.http.schemas import EVENT, Body

_LARGEST = 2**63 - 1


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicPrompt(Body):
    model: str | None = Field(None, description="A name of /v1/models; left out: the model that is served.")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None


class AnthropicRequest(AnthropicPrompt):
    max_tokens: Annotated[int, Field(ge=1, le=_LARGEST)]
    metadata: dict[str, Any] | None = Field(None, description="Ignored.")
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_LARGEST)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # hierspec's own
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    plan: str | None = Field(None, description="A plan by name; `plain` is without speculation. The text is the same.")
    namespace: Annotated[str, Field(max_length=256)] | None = None
    seed: Annotated[int, Field(ge=-_LARGEST - 1, le=_LARGEST)] | None = None


class AnthropicReply(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetails(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """What every refusal and failure of these paths looks like."""

    type: Literal["error"]
    error: AnthropicErrorDetails


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicError, "description": "What is wrong with the request, in one sentence."},
    "5XX": {"model": AnthropicError, "description": "The server failed."},
}
_EVENTS = {"schema": EVENT, "example": 'event: message_stop\ndata: {"type": "message_stop"}\n\n'}
REPLIES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": AnthropicReply,
        "description": "The message; with `stream`, its events as they happen.",
        "content": {"text/event-stream": _EVENTS},
    },
    **ERRORS,
}
