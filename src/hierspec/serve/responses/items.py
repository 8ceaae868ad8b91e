"""Items of OpenAI's responses: from input items to chat messages, and items of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from hierspec.serve.answering.messages import content_text
from hierspec.serve.http.errors import ApiError

_MESSAGE_ROLES = ("user", "assistant", "system", "developer")


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input, each with an id. A plain text is one user message."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise ApiError(400, "The input is empty; give some text.", param="input")
    items = []
    for item in given:
        kind = item.get("type", "message")
        read = {"type": kind, **item}
        if not isinstance(read.get("id"), str):
            read["id"] = new_id("msg" if kind == "message" else "item")
        if kind == "message" and isinstance(read.get("content"), str):
            part = "output_text" if read.get("role") == "assistant" else "input_text"
            read["content"] = [{"type": part, "text": read["content"]}]
        items.append(read)
    return items


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat messages: the calls of one turn become one assistant message, after its text."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        match item.get("type"):
            case "message" if item.get("role") in _MESSAGE_ROLES:
                messages.append({"role": item["role"], "content": content_text(item.get("content"), number, "input")})
            case "function_call" if isinstance(item.get("name"), str) and isinstance(item.get("call_id"), str):
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
                call = {"id": item["call_id"], "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output" if isinstance(item.get("call_id"), str):
                text = content_text(item.get("output"), number, "input")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            case "reasoning":  # from an earlier answer; models do not see it again
                pass
            case _:
                sentence = (
                    f"Item {number} of the input cannot be read: it must be a message with a role, a function_call or "
                    "a function_call_output."
                )
                raise ApiError(400, sentence, param="input")
    return messages


def message_item(item_id: str, text: str, status: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    part = text_part(text, logprobs)
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def text_part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **call}
