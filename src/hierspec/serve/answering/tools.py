"""Tools of a request: what the chat template gets, which form an answer must have, and how it is parsed."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hierspec.core.grammar import Grammar
from hierspec.serve.http.errors import ApiError
from hierspec.text.tool_calls import AnswerParser, Reasoning, Text, ToolCall
from hierspec.text.tool_formats import ToolFormat

_MOST_FORCED_CALLS = 8  # per answer: a model that is forced into a list must not go on for ever
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LETTERS = string.ascii_letters + string.digits
_NAME_LENGTH = 256


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call, and whether it must call one."""

    functions: tuple[Mapping[str, Any], ...] = ()  # name, description, parameters
    choice: str = "auto"  # none, auto, required, or the name of a function after a colon, as ":name"
    parallel: bool = True

    def __post_init__(self) -> None:
        names = [function["name"] for function in self.functions]
        if len(set(names)) < len(names):
            raise ApiError(400, "Two tools have the same name; give each a name of its own.", param="tools")
        if self.named and self.named not in names:
            raise ApiError(400, "tool_choice names a function that is not among the tools.", param="tool_choice")
        if self.forced and not names:
            raise ApiError(400, "tool_choice asks for a call, and there are no tools.", param="tool_choice")

    @property
    def named(self) -> str:
        return self.choice[1:] if self.choice.startswith(":") else ""

    @property
    def forced(self) -> bool:
        return bool(self.named) or self.choice == "required"

    @property
    def callable(self) -> tuple[Mapping[str, Any], ...]:
        """The functions that this answer may call."""
        if self.choice == "none":
            return ()
        return tuple(each for each in self.functions if not self.named or each["name"] == self.named)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {function["name"]: function.get("parameters") or {} for function in self.callable}

    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": dict(function)} for function in self.callable]

    def grammar(self, form: ToolFormat) -> Grammar | None:
        """The grammar after `form.forced` in an answer that must be a call: JSON that fits the function's schema."""
        if not self.forced:
            return None
        rules = []
        for number, function in enumerate(self.callable):
            head = json.dumps({"name": function["name"], form.arguments: {}}, ensure_ascii=False)[:-3]
            schema = {**_parameters(function), "x-guidance": _SPACING}
            rules.append(f"call_{number}: {_quoted(head)} %json {json.dumps(schema)} {_quoted('}')}")
        one = " | ".join(f"call_{number}" for number in range(len(rules)))
        several = f' (", " call){{0,{_MOST_FORCED_CALLS - 1}}}' if self.parallel and not self.named else ""
        start = f'"[" call{several} "]"' if form.listed else "call"
        return Grammar("lark", "\n".join([f"start: {start}", f"call: {one}", *rules]))


def function_tool(function: Any, where: str) -> dict[str, Any]:
    """A client's description of one function, validated."""
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
        raise ApiError(400, f"{where} needs a name.", param="tools")
    if len(name) > _NAME_LENGTH or not all(letter.isalnum() or letter in "_-.:" for letter in name):
        sentence = f"The name of {where} may have at most {_NAME_LENGTH} letters, digits and the signs _ - . and :."
        raise ApiError(400, sentence, param="tools")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None) or (parameters or {}).get("type", "object") != "object":
        raise ApiError(400, f"The parameters of {where} must be a JSON schema of an object.", param="tools")
    return dict(function)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    return {"type": "object", **parameters} if parameters else {"type": "object", "additionalProperties": False}


def _quoted(text: str) -> str:
    """A string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class IdentifiedCall:
    """A call with the id that a client needs to reply to it."""

    id: str
    index: int  # among the calls of its answer
    name: str
    arguments: str  # a JSON object


AnswerPart = Text | Reasoning | IdentifiedCall


class AnswerReader:
    """Parses one answer and gives its calls ids."""

    def __init__(self, tools: Tools, form: ToolFormat, begin: str = "") -> None:
        self._parser = AnswerParser(form, tools.schemas if tools.callable else None, begin)
        self._most = None if tools.parallel else 1
        self.calls: list[IdentifiedCall] = []

    @property
    def full(self) -> bool:
        """Whether the answer has all the calls that it may have."""
        return self._most is not None and len(self.calls) >= self._most

    def add(self, text: str) -> list[AnswerPart]:
        return self._identified(self._parser.add(text))

    def finish(self) -> list[AnswerPart]:
        return self._identified(self._parser.finish())

    def _identified(self, parts: Sequence[Text | Reasoning | ToolCall]) -> list[AnswerPart]:
        read: list[AnswerPart] = []
        for part in parts:
            if self.full:
                break
            if isinstance(part, ToolCall):
                self.calls.append(IdentifiedCall(_call_id(), len(self.calls), part.name, part.arguments))
                read.append(self.calls[-1])
            else:
                read.append(part)
        return read


def _call_id() -> str:
    """Nine letters and digits: some models' templates reject any other id."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
