"""Reads what follows a marker: one or several tool calls, or text that is no call.

A reader is sent characters (see `json_reader`). It returns the calls at the character that completes them and raises
`NotJson` at the first character that rules out a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hierspec.text.json_reader import NotJson, Reader, first_character, read_container
from hierspec.text.tool_formats import CLOSINGS, MISTRAL, MISTRAL_ARGUMENTS, MISTRAL_ID, QUOTES

Tools = Mapping[str, Mapping[str, Any]]  # JSON schemas of arguments, by the names of functions

_KEYS = ("name", "arguments", "parameters", "type", "function", "id", "index")
_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[\w.:-]{1,256}\Z")
_MISTRAL_HEAD = re.compile(r"([\w.:-]+)\s*(?:\[CALL_ID\][\w.:-]+)?(?:\[ARGS\])?\s*\{\Z")
_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str  # a JSON object


def call_reader(marker: str, tools: Tools) -> Reader[list[ToolCall]]:
    """The reader for what follows a marker; "" is the beginning of an answer."""
    if marker == MISTRAL:
        return _mistral()
    if marker in QUOTES:
        return _gemma(CLOSINGS[marker], QUOTES[marker])
    return _json_or_function(tools) if marker else _bare(tools)


def _json_or_function(tools: Tools) -> Reader[list[ToolCall]]:
    first = yield from first_character()
    if first == "<":
        return [(yield from _function(tools))]
    return _calls((yield from _call_json(first)))


def _bare(names: Collection[str]) -> Reader[list[ToolCall]]:
    """Unmarked JSON is a call only if the function exists and there are arguments."""
    first = yield from first_character()
    text = yield from _call_json(first)
    calls = _calls(text, with_arguments=True)
    if not all(call.name in names for call in calls):
        raise NotJson
    return calls


def _call_json(first: str) -> Reader[str]:
    if first not in "{[":
        raise NotJson
    return (yield from read_container(first, lambda key: key in _KEYS))


def _mistral() -> Reader[list[ToolCall]]:
    """A JSON list, or the newer name[CALL_ID]id[ARGS]{…}, in which only name and arguments are required."""
    first = yield from first_character()
    if first in "{[":
        return _calls((yield from _call_json(first)))
    head = first
    while not head.endswith("{"):
        head += yield
        if not _can_be_head(head):
            raise NotJson
    whole = _MISTRAL_HEAD.match(head)
    if whole is None:
        raise NotJson
    arguments = yield from read_container("{")
    return [_call(whole[1], _loaded(arguments))]


def _can_be_head(head: str) -> bool:
    name, bracket, rest = head.rstrip("{").partition("[")
    if not _NAME.match(name.strip()):
        return False
    rest = bracket + rest
    if rest.startswith(MISTRAL_ID):
        call_id, bracket, rest = rest.removeprefix(MISTRAL_ID).partition("[")
        rest = bracket + rest
        return (call_id == "" or bool(_NAME.match(call_id))) and MISTRAL_ARGUMENTS.startswith(rest.strip())
    return MISTRAL_ID.startswith(rest) or MISTRAL_ARGUMENTS.startswith(rest.strip())


def _function(tools: Tools) -> Reader[ToolCall]:
    """<function=name><parameter=key>value</parameter></function>, after its first character."""
    text = yield from _until("<", _FUNCTION, _END_OF_FUNCTION)
    name, _, body = text.partition(">")
    properties = (tools.get(name.strip()) or {}).get("properties")
    arguments, position = {}, 0
    for match in _PARAMETER.finditer(body):
        if match.start() != position:
            raise NotJson
        key, value = match[1].strip(), match[2]
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        arguments[key] = value if is_text else _json_or_text(value)
        position = match.end()
    if body[position:].strip():
        raise NotJson
    return _call(name.strip(), arguments)


def _gemma(closing: str, quote: str) -> Reader[list[ToolCall]]:
    """call:name{key:<escape>text<escape>,other:1}"""
    first = yield from first_character()
    text = yield from _until(first, "call:", closing)
    name, brace, body = text.rstrip().partition("{")
    parts = (brace + body).split(quote)
    written = (json.dumps(part) if number % 2 else _BARE_KEY.sub(r'\1"\2":', part) for number, part in enumerate(parts))
    return [_call(name.strip(), _loaded("".join(written)))]


def _until(text: str, opening: str, closing: str) -> Reader[str]:
    """Text from `opening` to `closing`; `text` was already read."""
    while not text.endswith(closing):
        text += yield
        if not text.startswith(opening[: len(text)]):
            raise NotJson
    return text[len(opening) : -len(closing)]


def _json_or_text(value: str) -> Any:
    try:
        return _loaded(value)
    except NotJson:
        return value


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise NotJson from None


def _no_number(_: str) -> Any:
    raise NotJson  # NaN and the like are Python's, not JSON


def _calls(text: str, with_arguments: bool = False) -> list[ToolCall]:
    """Calls of a JSON object or list."""
    value = _loaded(text)
    entries = value if isinstance(value, list) else [value]
    if with_arguments and not entries:  # after a marker, an empty list means that no call is needed
        raise NotJson
    return [_call_of(entry, with_arguments) for entry in entries]


def _call_of(entry: Any, with_arguments: bool) -> ToolCall:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict):
        raise NotJson
    name = entry.get("name") or entry.get("function")
    present = [key for key in _ARGUMENTS if key in entry]
    if with_arguments and not present:
        raise NotJson
    arguments = entry[present[0]] if present else {}
    if isinstance(arguments, str):
        arguments = _loaded(arguments or "{}")
    return _call(name, {} if arguments is None else arguments)


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not _NAME.match(name) or not isinstance(arguments, dict):
        raise NotJson
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which cannot be sent to a client
        raise NotJson from None
    return ToolCall(name, text)
