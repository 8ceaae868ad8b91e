"""Parses a model's answer while it is generated: text, reasoning and tool calls.

Text is passed on at once, except for the few characters that may begin a marker. A call is passed on whole; what only
looks like a call is text, and is passed on at the first character that shows it. The parts do not depend on how the
answer is split into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hierspec.text.call_readers import ToolCall, Tools, call_reader
from hierspec.text.json_reader import NotJson, Reader
from hierspec.text.tool_formats import AUTO, CLOSINGS, THOUGHTS, ToolFormat

__all__ = ["Answer", "AnswerParser", "Part", "Reasoning", "Text", "ToolCall", "parse"]

_BETWEEN_CALLS = " \t\r\n;"  # Llama separates calls by semicolons


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


Part = Text | Reasoning | ToolCall


@dataclass(frozen=True)
class Answer:
    """A whole answer, parsed."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Answer:
        parts = list(parts)
        return cls(
            "".join(part.text for part in parts if isinstance(part, Text)),
            "".join(part.text for part in parts if isinstance(part, Reasoning)),
            tuple(part for part in parts if isinstance(part, ToolCall)),
        )


def parse(text: str, form: ToolFormat = AUTO, tools: Tools | None = None, begin: str = "") -> Answer:
    """A whole answer; see `AnswerParser`."""
    parser = AnswerParser(form, tools, begin)
    return Answer.of([*parser.add(text), *parser.finish()])


class AnswerParser:
    """Parses one answer.

    tools: the functions that may be called, with the schemas of their arguments; None: calls are not parsed.
    begin: the start of the answer that the prompt already contains: the marker of a forced call or of reasoning.
    """

    def __init__(self, form: ToolFormat, tools: Tools | None = None, begin: str = "") -> None:
        self._tools = tools or {}
        self._markers = form.markers if tools is not None else ()
        self._bare = form.bare and tools is not None
        self._thoughts: tuple[str, ...] = form.thoughts  # until something else was read
        self._held = ""
        self._state = self._at_start
        self._marker = ""  # of the open call or reasoning
        self._reader: Reader[list[ToolCall]] | None = None
        self._fed = 0  # characters of `_held` that were sent to the reader
        self._parts: list[Part] = []
        self._spaces = ""  # before a possible call: dropped with it
        self._drop_spaces = False  # spaces between parts
        self._called = False  # a call was read
        self.add(begin)

    def add(self, text: str) -> list[Part]:
        """The parts that this text completes."""
        self._held += text
        return self._run(last=False)

    def finish(self) -> list[Part]:
        """What was held back: an incomplete call is text."""
        return self._run(last=True)

    def _run(self, last: bool) -> list[Part]:
        while (self._held or (last and self._state == self._in_call)) and self._state(last):
            pass
        parts, self._parts = self._parts, []
        return parts

    # Each state consumes some of `_held` and returns whether the next state should run at once.

    def _at_start(self, last: bool) -> bool:
        """At the beginning, or after a call or reasoning: spaces or a closing marker may follow."""
        rest = self._held.lstrip(_BETWEEN_CALLS if self._called and self._bare else None)
        closing = CLOSINGS.get(self._marker, "") if self._called else ""
        expected = [*self._thoughts, *self._markers, *([closing] if closing else [])]
        if not last and (not rest or any(len(rest) < len(marker) and marker.startswith(rest) for marker in expected)):
            return False
        if closing and rest.startswith(closing):
            self._marker, self._held = "", rest[len(closing) :]
            return True
        self._spaces = "" if self._drop_spaces else self._held[: len(self._held) - len(rest)]
        thought = next((marker for marker in self._thoughts if rest.startswith(marker)), None)
        marker = next((marker for marker in self._markers if rest.startswith(marker)), None)
        self._thoughts = ()
        if thought:
            self._marker, self._held = thought, rest[len(thought) :]
            self._drop_spaces, self._state = True, self._in_reasoning
        elif marker:
            self._begin_call(marker, rest[len(marker) :])
        elif self._bare and rest[:1] in ("{", "["):
            self._begin_call("", rest)
        else:
            self._held, self._state = self._spaces + rest, self._in_text
        return True

    def _in_reasoning(self, last: bool) -> bool:
        if self._drop_spaces:
            self._held = self._held.lstrip()
            self._drop_spaces = not self._held
        closing = THOUGHTS[self._marker]
        before, found, after = self._held.partition(closing)
        if found:
            self._give(Reasoning(before.rstrip()))
            self._held, self._marker, self._drop_spaces, self._state = after, "", True, self._at_start
            return True
        safe = len(before) if last else len(before) - _unsafe(before, [closing])
        if not last:
            safe = len(before[:safe].rstrip())  # trailing spaces are not part of it
        self._give(Reasoning(before[:safe]))
        self._held = before[safe:]
        return False

    def _in_text(self, last: bool) -> bool:
        found = [(start, marker) for marker in self._markers if (start := self._held.find(marker)) >= 0]
        if found:
            start, marker = min(found)
            self._spaces = ""
            self._give(Text(self._held[:start]))
            self._begin_call(marker, self._held[start + len(marker) :])
            return True
        safe = len(self._held) - (0 if last else _unsafe(self._held, self._markers))
        self._give(Text(self._held[:safe]))
        self._held = self._held[safe:]
        return False

    def _begin_call(self, marker: str, rest: str) -> None:
        self._marker, self._held, self._fed, self._state = marker, rest, 0, self._in_call
        self._reader = call_reader(marker, self._tools)
        next(self._reader)

    def _in_call(self, last: bool) -> bool:
        assert self._reader is not None
        try:
            while self._fed < len(self._held):
                self._fed += 1
                self._reader.send(self._held[self._fed - 1])
        except StopIteration as end:
            self._parts += end.value
            self._held, self._state = self._held[self._fed :], self._at_start
            self._drop_spaces = self._called = True
            return True
        except NotJson:
            return self._no_call()
        return self._no_call() if last else False

    def _no_call(self) -> bool:
        """What began like a call is text; the rest of it may contain a call."""
        begun = self._marker or self._held[:1]
        self._held = self._held[len(begun) - len(self._marker) :]
        self._give(Text(self._spaces + begun))
        self._spaces, self._state = "", self._in_text
        return True

    def _give(self, part: Text | Reasoning) -> None:
        if part.text:
            self._parts.append(part)


def _unsafe(text: str, markers: Sequence[str]) -> int:
    """Length of the longest ending of the text that begins a marker."""
    longest = max(map(len, markers), default=1)
    return next(
        (n for n in range(min(longest - 1, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0
    )
