"""Bodies of OpenAI's chat and text completions, with the fields that vLLM, llama.cpp and hierspec add."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hierspec.serve.http.schemas import EVENT, Body

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
_LARGEST = 2**63 - 1


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send a last chunk with the number of tokens.")
    continuous_usage_stats: bool | None = Field(None, description="Send them with every chunk.")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """As vLLM spells them: one of these."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(Body):
    """What both kinds of completion take."""

    model: str | None = Field(None, description="A name of /v1/models; left out: the model that is served.")
    max_tokens: Annotated[int, Field(ge=0, le=_LARGEST)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_LARGEST)] | None = Field(None, description="0 or -1: all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Annotated[int, Field(ge=-_LARGEST - 1, le=_LARGEST)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    n: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored; `namespace` keeps texts apart.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    plan: str | None = Field(None, description="A plan by name; `plain` is without speculation. The text is the same.")
    namespace: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Whose text it is: what is learnt of it never drafts for another namespace."
    )
    timings: bool | None = Field(None, description="Also give the time taken and how many drafts were accepted.")
    timings_per_token: bool | None = Field(None, description="The same, with every chunk.")
    return_token_ids: bool | None = Field(
        None, description="Also give token ids: the answer's, and whole the prompt's."
    )


class Message(BaseModel):
    """A message. Other fields, such as tool_calls, reach the model's chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class TemplateFields(Body):
    """What reaches a model's chat template."""

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(SamplingFields, TemplateFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, le=_LARGEST)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    details: bool | None = Field(None, description="With every chunk, who drafted its tokens and what was rejected.")


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = Field(None, description="Not supported.")
    best_of: int | None = Field(None, description="Not supported beyond n.")
    parse_special: bool | None = Field(None, description="Read <|im_end|> and the like in texts as control tokens.")


class TokenizeRequest(TemplateFields):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeReply(BaseModel):
    prompt: str


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: dict[str, Any] | None = None


class ChatChoice(Choice):
    message: dict[str, Any]


class CompletionChoice(Choice):
    text: str


class Reply(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    timings: dict[str, float] | None = None


class ChatReply(Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionReply(Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


def _responses(reply: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    events = {
        "schema": EVENT,
        "example": 'data: {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}\n\ndata: [DONE]\n\n',
    }
    described = "The answer; with `stream`, chunks of it as server-sent events, the last of which is `[DONE]`."
    return {200: {"model": reply, "description": described, "content": {"text/event-stream": events}}}


CHAT_RESPONSES = _responses(ChatReply)
COMPLETION_RESPONSES = _responses(CompletionReply)
