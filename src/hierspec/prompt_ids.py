"""What callers give as a prompt, as token ids: text, chat messages, or ids in any of the usual containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Protocol

from hierspec.core.errors import HierspecError
from hierspec.options import TemplateOptions
from hierspec.text.tokenizer import Tokenizer

# Appended to the last message to find where it ends. The space tells whether the template strips what it writes.
_END_OF_MESSAGE = "HIERSPEC_END_OF_MESSAGE "


class IdArray(Protocol):
    """An array of token ids: numpy's, torch's."""

    def tolist(self) -> Any: ...


Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int] | IdArray | Mapping[str, Any]  # the last as transformers returns it


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt, raw: bool, options: TemplateOptions) -> list[int]:
    """The ids of one prompt. A text is put into the chat template where there is one, unless `raw`."""
    if isinstance(prompt, str):
        if raw or not tokenizer.has_chat_template:
            _no_template(options, "raw text" if raw else "a model without a chat template")
            ids = tokenizer.encode(prompt)
            if not ids:
                raise HierspecError("The prompt is empty; give some text.")
            return ids
        if not prompt:
            raise HierspecError("The prompt is empty; give some text.")
        prompt = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Mapping) and "input_ids" in prompt:  # what a tokenizer of transformers returns
        prompt = prompt["input_ids"]
    elif isinstance(prompt, Mapping) and "role" in prompt:
        raise HierspecError("Chat messages are given as a list, also a single one: [message].")
    items = _items(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return tokenizer.encode(rendered(tokenizer, items, options), special=True, begin=False)
    _no_template(options, "token ids")
    return _checked_ids(items)


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], options: TemplateOptions) -> str:
    """The text of a conversation, up to where the model goes on."""
    variables = template_variables(options)
    if not options.get("continue_final_message"):
        return tokenizer.render_chat(messages, variables=variables)
    *before, last = messages
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise HierspecError(
            "continue_final_message needs a last message of the assistant: the beginning of its answer."
        )
    marked = [*before, {**last, "content": last["content"] + _END_OF_MESSAGE}]
    text = tokenizer.render_chat(marked, False, variables)
    end = text.rfind(_END_OF_MESSAGE.strip())
    if end < 0:
        raise HierspecError("The model's chat template leaves out the last message, so it cannot be continued.")
    strips = not text.startswith(_END_OF_MESSAGE, end)
    return text[:end].rstrip() if strips else text[:end]


def template_variables(options: TemplateOptions) -> dict[str, Any]:
    """The names that the options give to a chat template."""
    tools = options.get("tools")
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise HierspecError('tools must be a list of JSON schemas, such as {"type": "function", "function": {…}}.')
    more = options.get("template_variables") or {}
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        raise HierspecError("template_variables must be a table from names to values.")
    named = {name: value for name, value in options.items() if name in ("tools", "enable_thinking")}
    return {**more, **named}


def _no_template(options: TemplateOptions, instead: str) -> None:
    for name, value in options.items():
        if value or name == "enable_thinking":
            raise HierspecError(f"{name} is for a chat template, and this prompt is {instead}; leave it out.")


def _items(prompt: Any) -> list[Any]:
    """What a list or array holds; of an array with one row, that row."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, list | tuple | range):
        what = "and this is something else"
        if prompt is None or isinstance(prompt, int | float):
            what = f"not {prompt}"
        elif isinstance(prompt, bytes | bytearray):
            what = "not bytes: decode them first"
        raise HierspecError(f"A prompt is a text, a list of chat messages or a list of token ids, {what}.")
    if len(prompt) == 1 and isinstance(prompt[0], list | tuple):
        return list(prompt[0])
    if prompt and all(isinstance(item, str | list | tuple) for item in prompt):
        raise HierspecError("These are several prompts; give one, or call generate_many for all of them.")
    return list(prompt)


def _checked_ids(items: list[Any]) -> list[int]:
    ids: list[int] = []
    for item in items:
        try:
            ids.append(index(item))  # also of a number of numpy's or torch's
        except TypeError:
            item = True
        if isinstance(item, bool):
            raise HierspecError("A prompt of token ids must hold whole numbers and nothing else.")
    return ids
