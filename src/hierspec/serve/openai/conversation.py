"""The conversation in a body of chat completions or /tokenize."""

from __future__ import annotations

from hierspec.options import TemplateOptions
from hierspec.serve.answering.conversation import Conversation
from hierspec.serve.openai.schemas import TemplateFields
from hierspec.serve.openai.tools import openai_tools


def conversation_of(body: TemplateFields) -> Conversation:
    tools = openai_tools(body.tools, body.tool_choice, getattr(body, "parallel_tool_calls", None))
    template: TemplateOptions = {}
    if body.chat_template_kwargs:
        template["template_variables"] = body.chat_template_kwargs
    if body.continue_final_message:
        template["continue_final_message"] = True
    ends = body.add_generation_prompt is False and not body.continue_final_message
    return Conversation([message.model_dump() for message in body.messages or ()], tools, template, ends)
