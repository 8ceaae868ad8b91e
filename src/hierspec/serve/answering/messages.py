"""From messages as clients send them to messages as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hierspec.serve.http.errors import ApiError

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with content as one text, call arguments as objects, and roles that templates know."""
    return [_template_message(message, index) for index, message in enumerate(messages)]


def _template_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    read = {name: value for name, value in message.items() if value is not None or name == "content"}
    if read["role"] == "developer":  # OpenAI's newer name for it
        read["role"] = "system"
    read["content"] = content_text(read.get("content"), index)
    if isinstance(calls := read.get("tool_calls"), list):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def content_text(content: object, index: int, param: str = "messages") -> str:
    """The text of a message's content, which is a text or a list of parts."""
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
                param=param,
            )
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any) -> Any:
    """A call with its arguments as an object: clients send JSON text, but templates serialise the arguments
    themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        read = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call
