"""Messages as clients send them, as chat templates read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.options import TemplateOptions
from hierspec.prompt_ids import template_variables
from hierspec.serve.errors import ApiError
from hierspec.serve.openai_schemas import TemplateFields

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


async def chat_ids(model: AsyncLanguageModel, body: TemplateFields) -> list[int]:
    """Token ids of a conversation, as the model's chat template writes it."""
    messages = template_messages([message.model_dump() for message in body.messages or ()])
    options: TemplateOptions = {}
    if body.chat_template_kwargs:
        options["template_variables"] = body.chat_template_kwargs
    if body.tools and body.tool_choice != "none":
        options["tools"] = body.tools
    if body.continue_final_message:
        options["continue_final_message"] = True
    elif body.add_generation_prompt is False:
        variables = template_variables(options)
        return await asyncio.to_thread(model.model.tokenizer.encode_chat, messages, False, variables)
    return await asyncio.to_thread(model.model.encode, messages, **options)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Content as one text, arguments of calls as objects, and roles that templates know."""
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    read = {name: value for name, value in message.items() if value is not None or name == "content"}
    if read["role"] == "developer":  # OpenAI's newer name; templates know the older one
        read["role"] = "system"
    read["content"] = _content(read.get("content"), index)
    if isinstance(calls := read.get("tool_calls"), list):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _content(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ApiError(
                400,
                f'Only parts of text can be read, as {{"type": "text", "text": "…"}}; message {index} has another.',
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any) -> Any:
    """Clients send a call's arguments as a JSON text; templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        read = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call
