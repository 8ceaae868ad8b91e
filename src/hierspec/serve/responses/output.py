"""The output of a response while it is generated: its items, and the events that report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hierspec.serve.answering.tools import AnswerPart, IdentifiedCall
from hierspec.serve.responses.items import call_item, message_item, new_id, reasoning_item, text_part
from hierspec.text.tool_calls import Reasoning, Text

Event = dict[str, Any]
_DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class Output:
    """Items so far. At most the last one is still open: a message or reasoning, whose text grows."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = ""  # type of the open item
        self._text = ""

    def add(self, parts: Sequence[AnswerPart]) -> Iterator[Event]:
        for part in parts:
            match part:
                case Text(text):
                    yield from self._grow("message", text)
                case Reasoning(text):
                    yield from self._grow("reasoning", text)
                case IdentifiedCall():
                    yield from self._call(part)

    def close(self, status: str = "completed", logprobs: list[Any] | None = None) -> Iterator[Event]:
        """Closes the open item, if there is one."""
        if not self._open:
            return
        kind, place = self._open, self._place()
        item_id = place["item_id"]
        item = message_item(item_id, self._text, status, logprobs)
        if kind == "reasoning":
            item = reasoning_item(item_id, self._text, status)
        self.items[-1], self._open = item, ""
        more = {"logprobs": logprobs or []} if kind == "message" else {}
        yield {"type": f"{_DELTAS[kind]}.done", **place, "content_index": 0, "text": self._text, **more}
        yield {"type": "response.content_part.done", **place, "content_index": 0, "part": item["content"][0]}
        yield self._item_event("done", item)

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            yield from self.close()
            yield from self._begin(kind)
        self._text += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield {"type": f"{_DELTAS[kind]}.delta", **self._place(), "content_index": 0, "delta": text, **more}

    def _begin(self, kind: str) -> Iterator[Event]:
        self._open, self._text = kind, ""
        if kind == "message":
            item, part = message_item(new_id("msg"), "", "in_progress"), text_part("")
        else:
            item = reasoning_item(new_id("rs"), "", "in_progress")
            part = item["content"][0]
        self.items.append({**item, "content": []})
        yield self._item_event("added", self.items[-1])
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": part}

    def _call(self, call: IdentifiedCall) -> Iterator[Event]:
        yield from self.close()
        item = call_item(new_id("fc"), call.id, call.name, call.arguments, "completed")
        self.items.append(item)
        place = self._place()
        yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        arguments = {**place, "arguments": call.arguments, "name": call.name}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": call.arguments}
        yield {"type": "response.function_call_arguments.done", **arguments}
        yield self._item_event("done", item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_event(self, what: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": len(self.items) - 1, "item": item}
