"""Chat templates: the Jinja program inside a checkpoint that writes a conversation as one text.

A template comes with a model from anywhere, so it is untrusted code: `template_sandbox` keeps it from reaching Python,
and its budget from hanging the machine. Within the budget the text equals what `transformers` renders, which the tests
compare.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from hierspec.core.errors import HierspecError
from hierspec.text.template_budget import too_much
from hierspec.text.template_sandbox import SandboxedEnvironment

_LONGEST_SOURCE = 1 << 18  # characters; the longest real templates have 30,000
_LONGEST_TEXT, _LONGEST_SHARE = 500_000, 8  # characters of the result, and more per character given
_LONGEST_REASON = 300  # characters of a template's own error message


class ChatTemplate:
    """One compiled template. `render` may be called from several threads."""

    def __init__(self, source: str) -> None:
        if len(source) > _LONGEST_SOURCE:
            raise HierspecError(
                f"The model's chat template cannot be read: it has {len(source):,} characters, and at most "
                f"{_LONGEST_SOURCE:,} are read."
            )
        self.source = source
        self._environment = SandboxedEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except (RecursionError, MemoryError) as error:
            raise HierspecError("The model's chat template cannot be read: it is nested too deeply.") from error
        except (TemplateError, SyntaxError, OverflowError, ValueError) as error:
            raise HierspecError(f"The model's chat template cannot be read: {_sentence(error)}") from error
        self._lock = threading.Lock()  # one budget per environment

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. `variables` are other names the template may read, such as bos_token."""
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise HierspecError('Every chat message needs a "role" and usually a "content".')
        names: dict[str, Any] = {"tools": None, "documents": None, **(variables or {})}
        names |= {"messages": [_with_reasoning(message) for message in messages]}
        names |= {"add_generation_prompt": add_generation_prompt}
        with self._lock:
            try:
                given = _plain(names)
                characters = _characters(given)
                self._environment.budget.reset(len(messages), characters)
                text = self._template.render(given)
            except HierspecError:
                raise
            except (RecursionError, MemoryError) as error:
                raise too_much() from error
            except Exception as error:  # a template can fail in any way a program can
                raise HierspecError(f"The model's chat template refused these messages: {_sentence(error)}") from error
        if len(text) > _LONGEST_TEXT + _LONGEST_SHARE * characters:
            raise too_much()
        return text


def _plain(value: Any) -> Any:
    """A copy in plain JSON types: a template could misuse the methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for json_type in (str, int, float):
        if isinstance(value, json_type):
            return json_type(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _characters(value: Any) -> int:
    """The number of characters of all texts in a value made by `_plain`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(str(key)) + _characters(item) for key, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copies reasoning to the names that templates read; clients use three."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _sentence(error: Exception) -> str:
    """The first line of an error, ended as a sentence."""
    text = (str(error).strip() or "it fails without a reason").splitlines()[0][:_LONGEST_REASON]
    return text if text[-1] in ".!?" else text + "."
