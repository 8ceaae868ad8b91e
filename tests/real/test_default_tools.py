"""The default model calls tools where it must: valid calls, the same under every plan, through three protocols."""

import json

import anthropic
import openai
import pytest
from serving import running

import hierspec
from hierspec.serve.settings import Settings

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Paris, in celsius?"


@pytest.mark.model
def test_a_required_call_is_valid_and_the_same_by_every_protocol_and_plan():
    pytest.importorskip("llguidance")
    arguments = []
    asked = [{"role": "user", "content": QUESTION}]
    function = {"name": "get_weather", "parameters": PARAMETERS}
    with running(hierspec.load(), Settings(model_name="default")) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for plan in ("plain", "auto"):
            chat = client.chat.completions.create(
                model="default",
                messages=asked,
                tools=[{"type": "function", "function": function}],
                tool_choice="required",
                temperature=0,
                max_tokens=100,
                extra_body={"plan": plan},
            )
            arguments.append(json.loads(chat.choices[0].message.tool_calls[0].function.arguments))
        response = client.responses.create(
            model="default",
            input=QUESTION,
            tools=[{"type": "function", **function}],
            tool_choice="required",
            temperature=0,
            max_output_tokens=100,
        )
        arguments.append(json.loads(response.output[0].arguments))
        message = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages.create(
            model="default",
            max_tokens=100,
            messages=asked,
            tools=[{"name": "get_weather", "input_schema": PARAMETERS}],
            tool_choice={"type": "any"},
            extra_body={"temperature": 0},
        )
        arguments.append(message.content[0].input)
    assert arguments == [{"city": "Paris", "unit": "celsius"}] * 4
