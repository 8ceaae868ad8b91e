"""From the fields of a body to `Sampling`."""

from __future__ import annotations

from typing import Any

from hierspec.core.grammar import Grammar
from hierspec.core.sampling import Sampling
from hierspec.serve.http.errors import ApiError
from hierspec.serve.openai.schemas import ResponseFormat, SamplingFields, StructuredOutputs
from hierspec.serve.settings import Settings

_AS_THEY_ARE = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")

_LEAST_TEMPERATURE = 1e-6  # dividing logits by a smaller temperature may overflow


def sampling_of(body: SamplingFields, settings: Settings, max_tokens: int, logprobs: int | None) -> Sampling:
    """The sampling of a request; HierspecError if a value is invalid."""
    if body.temperature is not None and 0 < body.temperature < _LEAST_TEMPERATURE:
        sentence = f"temperature must be 0, which is greedy, or at least {_LEAST_TEMPERATURE}."
        raise ApiError(400, sentence, param="temperature")
    chosen: dict[str, Any] = {name: getattr(body, name) for name in _AS_THEY_ARE if getattr(body, name) is not None}
    return Sampling(
        max_tokens=max_tokens,
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()} if body.logit_bias else None,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        grammar=grammar_of(body),
        **chosen,
    )


def grammar_of(body: SamplingFields) -> Grammar | None:
    """The grammar of the answer, in OpenAI's fields or in vLLM's; at most one of them."""
    guided = StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    asked = [*_of_format(body.response_format), *_of_outputs(guided), *_of_outputs(body.structured_outputs)]
    if len(asked) > 1:
        raise ApiError(400, "The answer may have one form: give response_format or one of the structured outputs.")
    return asked[0] if asked else None


def _of_format(format: ResponseFormat | None) -> list[Grammar]:
    if format is None or format.type == "text":
        return []
    if format.type == "json_object":
        return [Grammar("json_object")]
    schema = None if format.json_schema is None else format.json_schema.schema_
    if schema is None:
        sentence = "response_format of type json_schema needs json_schema with a schema in it."
        raise ApiError(400, sentence, param="response_format")
    return [Grammar.json_schema(schema)]


def _of_outputs(outputs: StructuredOutputs | None) -> list[Grammar]:
    if outputs is None:
        return []
    asked = [Grammar("json_object")] if outputs.json_object else []
    if outputs.json_ is not None:
        asked.append(Grammar.json_schema(outputs.json_))
    if outputs.regex is not None:
        asked.append(Grammar("regex", outputs.regex))
    if outputs.choice is not None:
        asked.append(Grammar.choice(outputs.choice))
    if outputs.grammar is not None:
        asked.append(Grammar("lark", outputs.grammar))
    return asked
