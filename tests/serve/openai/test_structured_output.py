"""Structured output, in OpenAI's words and in vLLM's: the text is plain decoding's under the same grammar."""

import json
import re

import openai
import pytest

from hierspec.core.grammar import Grammar

MESSAGES = [{"role": "user", "content": "Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


@pytest.mark.parametrize("plan", ["plain", "auto"])
@pytest.mark.parametrize(
    ("options", "grammar", "valid"),
    [
        (
            {"response_format": schema_format(SCHEMA)},
            Grammar.json_schema(SCHEMA),
            lambda text: json.loads(text)["age"] < 100,
        ),
        ({"extra_body": {"guided_json": SCHEMA}}, Grammar.json_schema(SCHEMA), json.loads),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, Grammar.json_schema(SCHEMA), json.loads),
        (
            {"extra_body": {"guided_regex": "[a-c]{3}-[0-9]{2}"}},
            Grammar("regex", "[a-c]{3}-[0-9]{2}"),
            re.compile("[a-c]{3}-[0-9]{2}").fullmatch,
        ),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, Grammar.choice(["yes", "no"]), ("yes", "no").__contains__),
        (
            {"extra_body": {"guided_grammar": 'start: "a" | "bc"'}},
            Grammar("lark", 'start: "a" | "bc"'),
            ("a", "bc").__contains__,
        ),
    ],
)
def test_answers_are_valid_and_plain_decodings(server, client, options, grammar, valid, plan):
    body = {**options.get("extra_body", {}), "plan": plan}
    options = {**options, "extra_body": body, "max_tokens": 80, "seed": 4, "temperature": 0.9}
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    alone = server.language_model.generate(
        MESSAGES, max_tokens=80, seed=4, temperature=0.9, grammar=grammar, plan="plain"
    )
    assert reply.choices[0].message.content == alone.text
    assert valid(alone.text)
    assert reply.choices[0].finish_reason == "stop"


def test_a_json_object_begins_as_one(client):
    form = {"type": "json_object"}
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, response_format=form)
    assert reply.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": schema_format({"type": "no such type"})},
        {"extra_body": {"guided_regex": "("}},
        {"extra_body": {"guided_grammar": "start: nothing"}},
        {"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_compiled_is_refused(client, options, stream):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream, **options)
