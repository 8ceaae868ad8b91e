"""Tools through OpenAI's own client: what the model is told of them, and its calls as the client reads them."""

import json

import openai
import pytest
from scripted_worker import ScriptedWorker

import hierspec
from hierspec.core.grammar import Grammar
from hierspec.serve.openai_tools import openai_tools
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.text.tool_formats import FORMATS

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED = [{"role": "user", "content": "How is it in Paris?"}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A server whose model says what it is told to."""
    from conftest_serve import running_scripted  # noqa: PLC0415

    yield from running_scripted(tmp_path_factory)
