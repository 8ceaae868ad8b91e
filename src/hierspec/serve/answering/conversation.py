"""From a conversation with tools to a prompt: what all protocols share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hierspec.async_language_model import AsyncLanguageModel
from hierspec.core.grammar import Grammar
from hierspec.language_model import LanguageModel
from hierspec.options import TemplateOptions
from hierspec.prompt_ids import template_variables
from hierspec.serve.answering.messages import template_messages
from hierspec.serve.answering.tools import AnswerReader, Tools
from hierspec.text.tokenizer import Tokenizer
from hierspec.text.tool_formats import AUTO, THOUGHTS, ToolFormat, tool_format, writes_tools

_LAST_TOKENS = 16  # of the prompt, which may contain the marker that begins an answer
_TOOL_PROMPT = """You may call functions to help with the request. They are, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with nothing but its name and arguments as JSON between these tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Conversation:
    """A client's request, in the terms of chat completions."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = field(default_factory=Tools)
    template: TemplateOptions = field(default_factory=lambda: TemplateOptions())  # other options for the chat template
    ends: bool = False  # the prompt ends with the last message, without the start of an answer


@dataclass(frozen=True)
class PreparedPrompt:
    """Token ids of a conversation, and how to parse its answers."""

    ids: list[int]
    tools: Tools
    form: ToolFormat
    begin: str  # the start of the answer that the prompt already contains

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that tool_choice imposes on an answer."""
        return self.tools.grammar(self.form)

    def reader(self) -> AnswerReader:
        return AnswerReader(self.tools, self.form, self.begin)


async def prepared(model: AsyncLanguageModel, conversation: Conversation) -> PreparedPrompt:
    """Prepares the prompt in a thread, so that long prompts do not delay running answers."""
    return await asyncio.to_thread(_prepared, model.model, conversation)


def _prepared(model: LanguageModel, conversation: Conversation) -> PreparedPrompt:
    tokenizer, tools = model.tokenizer, conversation.tools
    messages, template = template_messages(conversation.messages), conversation.template
    form = tool_format(tokenizer.chat_template)
    if writes_tools(tokenizer.chat_template):
        if tools.callable:
            template = {**template, "tools": tools.for_template()}
    elif tools.callable or any(_about_tools(message) for message in messages):
        messages = _as_text(messages, tools)
    if conversation.ends:
        ids = tokenizer.encode_chat(messages, False, template_variables(template))
    else:
        ids = model.encode(messages, **template)
    thought = _open_thought(tokenizer, ids, form)
    if not tools.forced:
        return PreparedPrompt(ids, tools, form, thought)
    closing = f"\n{THOUGHTS[thought]}\n\n" if thought else ""
    ids = ids + tokenizer.encode(closing + form.forced, special=True, begin=False)
    return PreparedPrompt(ids, tools, form, form.forced)


def _open_thought(tokenizer: Tokenizer, ids: list[int], form: ToolFormat) -> str:
    """The reasoning marker at the end of a prompt, which some templates add; "" if there is none."""
    end = tokenizer.decode(ids[-_LAST_TOKENS:], special=True).rstrip()
    return next((marker for marker in form.thoughts if end.endswith(marker)), "")


def _about_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _as_text(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """For templates without tool support: tools, calls and results as text of ordinary messages."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1].get("holds_results"):
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result, "holds_results": True})
        elif message.get("tool_calls"):
            texts = [message["content"], *map(_call_text, message["tool_calls"])]
            written.append({"role": "assistant", "content": "\n".join(filter(None, texts))})
        else:
            written.append(dict(message))
    for message in written:
        message.pop("holds_results", None)
    if not tools.callable:
        return written
    prompt = _TOOL_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.for_template()))
    if written and written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{prompt}"}, *written[1:]]
    return [{"role": "system", "content": prompt}, *written]


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    written = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{AUTO.forced}{json.dumps(written, ensure_ascii=False)}\n</tool_call>"
