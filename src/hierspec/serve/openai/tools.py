"""`tools` and `tool_choice` in OpenAI's formats, and calls in the format of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hierspec.serve.answering.tools import AnswerPart, IdentifiedCall, Tools, function_tool
from hierspec.serve.http.errors import ApiError
from hierspec.text.tool_calls import Reasoning, Text

_CHOICES = ("none", "auto", "required")


def openai_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools:
    """The tools of a request. Chat completions nest a function in its tool, responses put it beside the type: reads
    both."""
    functions = []
    for number, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise ApiError(400, f"Tool {number} is none of type function; this server runs no others.", param="tools")
        flat = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
        functions.append(function_tool(tool.get("function", flat), f"tool {number}"))
    return Tools(tuple(functions), _choice(choice, bool(functions)), parallel is not False)


def _choice(choice: Any, with_tools: bool) -> str:
    if choice is None:
        return "auto" if with_tools else "none"
    if isinstance(choice, str) and choice in _CHOICES:
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str) and name:
            return f":{name}"
    sentence = 'tool_choice must be "none", "auto", "required" or name a function of the tools.'
    raise ApiError(400, sentence, param="tool_choice")


def chat_message(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """The message of a whole answer. Its content is null if there are only calls."""
    delta = chat_delta(parts)
    calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls", ())]
    message = {"role": "assistant", "content": delta.get("content", None if calls else ""), "refusal": None}
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    return message | ({"tool_calls": calls} if calls else {})


def chat_delta(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """What these parts add to a message."""
    delta: dict[str, Any] = {}
    for part in parts:
        match part:
            case Text(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case IdentifiedCall(call_id, index, name, arguments):
                function = {"name": name, "arguments": arguments}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                delta.setdefault("tool_calls", []).append(call)
    return delta
