"""Content blocks of Anthropic's messages: from request blocks to chat messages and tools, and blocks of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hierspec.serve.answering.conversation import Conversation
from hierspec.serve.answering.tools import AnswerPart, IdentifiedCall, Tools, function_tool
from hierspec.serve.anthropic.schemas import AnthropicPrompt
from hierspec.serve.http.errors import ApiError
from hierspec.text.tool_calls import Reasoning, Text

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS = ("thinking", "redacted_thinking")


def conversation_of(body: AnthropicPrompt) -> Conversation:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        messages += _messages(message.role, message.content, f"message {number}")
    if not messages:
        raise ApiError(400, "The messages say nothing; give at least one with some text.", param="messages")
    # Continue an answer that the client has begun, as Anthropic's API does.
    begun = messages[-1]["role"] == "assistant" and messages[-1]["content"] and "tool_calls" not in messages[-1]
    template: dict[str, Any] = {"continue_final_message": True} if begun else {}
    if body.chat_template_kwargs:
        template["template_variables"] = body.chat_template_kwargs
    return Conversation(messages, _tools(body.tools, body.tool_choice), template)  # type: ignore[arg-type]


def _messages(role: str, content: str | list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Tool results become separate messages, before the user's text."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    calls, others = [], []
    for block in content:
        match block.get("type"):
            case "tool_result":
                result = {"role": "tool", "tool_call_id": _field(block, "tool_use_id", where)}
                yield {**result, "content": _text(block.get("content") or "", where)}
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, Mapping):
                    raise ApiError(400, f"A tool_use block of {where} needs an input.", param="messages")
                function = {"name": _field(block, "name", where), "arguments": dict(arguments)}
                calls.append({"id": _field(block, "id", where), "type": "function", "function": function})
            case kind if kind not in _THOUGHTS:
                others.append(block)
    if others or calls:
        yield {"role": role, "content": _text(others, where), **({"tool_calls": calls} if calls else {})}


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise ApiError(400, f"A {block['type']} block of {where} needs {name}.", param="messages")
    return value


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = [
        block.get("text") if isinstance(block, Mapping) and block.get("type") == "text" else None for block in content
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"Only text can be read; {where} has a block of another type.", param="messages")
    return "\n".join(text for text in texts if text is not None)


def _tools(tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> Tools:
    functions = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            raise ApiError(400, f"Tool {number} is of a type that this server does not run.", param="tools")
        described = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
        function = {"name": tool.get("name"), **described, "parameters": tool.get("input_schema")}
        functions.append(function_tool(function, f"tool {number}"))
    kind = (choice or {}).get("type", "auto")
    if kind == "tool" and isinstance(name := (choice or {}).get("name"), str):
        chosen = f":{name}"
    elif isinstance(kind, str) and kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        raise ApiError(400, "tool_choice must be of type auto, any, none, or tool with a name.", param="tool_choice")
    return Tools(tuple(functions), chosen, not (choice or {}).get("disable_parallel_tool_use"))


class Blocks:
    """The content of an answer while it is generated, and the events that report it."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._open = ""  # type of the open block

    def add(self, parts: Sequence[AnswerPart]) -> Iterator[dict[str, Any]]:
        for part in parts:
            match part:
                case Text(text):
                    yield from self._grow("text", "text", text)
                case Reasoning(text):
                    yield from self._grow("thinking", "thinking", text)
                case IdentifiedCall(call_id, _, name, arguments):
                    yield from self.close()
                    block = {"type": "tool_use", "id": f"toolu_{call_id}", "name": name}
                    yield from self._begin({**block, "input": {}})
                    yield self._delta({"type": "input_json_delta", "partial_json": arguments})
                    self.content[-1] = {**block, "input": json.loads(arguments)}
                    yield from self.close()

    def close(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _grow(self, kind: str, field: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self.close()
            yield from self._begin({"type": kind, field: "", **({"signature": ""} if kind == "thinking" else {})})
        self.content[-1] = {**self.content[-1], field: self.content[-1][field] + text}
        yield self._delta({"type": f"{kind}_delta", field: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.content.append(block)
        self._open = block["type"]
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
