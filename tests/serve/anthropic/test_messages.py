"""/v1/messages through Anthropic's own client, sync, async and streaming."""

import asyncio
import json

import anthropic
import pytest

from hierspec.serve.settings import Key

TOOL = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
JSON = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>\n{JSON}\n</tool_call>"
ASKED = [{"role": "user", "content": "How is it in Paris?"}]


def client_of(server, key="none", kind=anthropic.Anthropic):
    return kind(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


@pytest.fixture
def scripted_client(scripted):
    scripted.model.worker.text, scripted.model.worker.ended = "", "stop"
    return client_of(scripted)


def alone(server, messages, **options):
    return server.language_model.generate(messages, max_tokens=24, temperature=0.8, seed=7, plan="plain", **options)


# Newer clients have no argument for the temperature; servers still read it.
SAME = {"model": "tiny", "max_tokens": 24, "extra_body": {"temperature": 0.8, "seed": 7}}


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_message_is_the_text_of_the_python_api(server, client, system):
    reply = client.messages.create(messages=ASKED, system=system, **SAME)
    expected = alone(server, [{"role": "system", "content": "Be brief."}, *ASKED])
    assert reply.content[0].text == expected.text
    assert reply.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected.ended]
    read = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert (read, reply.usage.output_tokens) == (expected.prompt_tokens, len(expected.tokens))


def test_a_stream_is_the_same_text_sync_and_async(server, client):
    expected = alone(server, ASKED).text
    with client.messages.stream(messages=ASKED, **SAME) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().content[0].text == expected

    async def several():
        async with client_of(server, kind=anthropic.AsyncAnthropic) as talker:

            async def streamed():
                async with talker.messages.stream(messages=ASKED, **SAME) as stream:
                    return "".join([text async for text in stream.text_stream])

            whole = talker.messages.create(messages=ASKED, **SAME)
            replies = await asyncio.gather(whole, *(streamed() for _ in range(4)))
            return [replies[0].content[0].text, *replies[1:]]

    assert asyncio.run(several()) == [expected] * 5


def test_the_events_come_in_order(scripted, scripted_client):
    scripted.model.worker.text = f"Look. {CALL}"
    asked = {"model": "tiny", "max_tokens": 50, "messages": ASKED, "tools": [TOOL]}
    events = [event.type for event in scripted_client.messages.create(stream=True, **asked)]
    assert events == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    with scripted_client.messages.stream(**asked) as stream:
        message = stream.get_final_message()
    text, call = message.content
    assert (text.text, call.type, call.name, call.input) == ("Look. ", "tool_use", "weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    assert scripted_client.messages.create(**asked).content[1].input == {"city": "Paris"}


def test_results_of_tools_reach_the_model(scripted, scripted_client):
    scripted.model.worker.text = CALL
    asked = {"model": "tiny", "max_tokens": 50, "tools": [TOOL]}
    reply = scripted_client.messages.create(messages=ASKED, **asked)
    [call] = reply.content
    for content in ("Rain", [{"type": "text", "text": "Rain"}]):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        said = {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}
        history = [*ASKED, {"role": "assistant", "content": [call.model_dump()]}, said]
        scripted_client.messages.create(messages=history, **asked)
        assert (
            f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nRain\n</tool_response>"
            "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>"
        ) in scripted.model.worker.prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_required_call_is_held_to_its_schema(scripted, scripted_client, choice):
    scripted.model.worker.text = JSON
    asked = {"model": "tiny", "max_tokens": 50, "messages": ASKED, "tools": [TOOL], "tool_choice": choice}
    assert scripted_client.messages.create(**asked).content[0].type == "tool_use"
    assert scripted.model.worker.jobs[-1].sampling.grammar.kind == "lark"


def test_an_output_format_is_the_grammar_of_the_answer(scripted, scripted_client):
    scripted.model.worker.text = '{"city": "Paris"}'
    wanted = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
    asked = {"model": "tiny", "max_tokens": 50, "messages": ASKED, "extra_body": {"output_config": wanted}}
    assert scripted_client.messages.create(**asked).content[0].text == '{"city": "Paris"}'
    assert json.loads(scripted.model.worker.jobs[-1].sampling.grammar.text) == TOOL["input_schema"]


def test_no_or_one_call_where_the_client_wants_it(scripted, scripted_client):
    scripted.model.worker.text = f"{CALL}{CALL}"
    asked = {"model": "tiny", "max_tokens": 50, "messages": ASKED, "tools": [TOOL]}
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(scripted_client.messages.create(tool_choice=one, **asked).content) == 1
    none = scripted_client.messages.create(tool_choice={"type": "none"}, **asked)
    assert none.content[0].text == f"{CALL}{CALL}"


def test_a_stop_sequence_is_named(server, client):
    whole = alone(server, ASKED).text
    stop = whole[5:7]
    reply = client.messages.create(messages=ASKED, stop_sequences=["never so", stop], **SAME)
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == whole[: whole.index(stop)]


def test_an_answer_that_the_client_began_is_gone_on_with(scripted, scripted_client):
    scripted.model.worker.text = "rains."
    history = [*ASKED, {"role": "assistant", "content": "It"}]
    scripted_client.messages.create(model="tiny", max_tokens=50, messages=history)
    assert scripted.model.worker.prompt.endswith("<|im_start|>assistant\nIt")


def test_tokens_are_counted_as_they_are_used(server, client):
    asked = {"model": "tiny", "messages": ASKED, "system": "Be brief."}
    counted = client.messages.count_tokens(**asked).input_tokens
    used = client.messages.create(max_tokens=1, **asked).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens
    assert client.messages.count_tokens(tools=[TOOL], **asked).input_tokens > counted


def test_errors_have_the_shape_that_the_client_reads(server, client, start):
    with pytest.raises(anthropic.NotFoundError, match="no model of that name") as refused:
        client.messages.create(**{**SAME, "model": "other"}, messages=ASKED)
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="Only text can be read"):
        client.messages.create(messages=[{"role": "user", "content": [{"type": "image"}]}], **SAME)
    locked = start(api_keys=(Key("a", "secret"),))
    with pytest.raises(anthropic.AuthenticationError):
        client_of(locked).messages.create(messages=ASKED, **SAME)
    assert client_of(locked, "secret").messages.create(messages=ASKED, **SAME).content


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "a type that this server does not run"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "JSON schema of an object"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "other"}}, "tool_choice must be"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs tool_use_id"),
        ({"messages": [{"role": "user", "content": []}]}, "say nothing"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(client, fields, sentence):
    with pytest.raises(anthropic.BadRequestError, match=sentence):
        client.messages.create(**{"model": "tiny", "max_tokens": 4, "messages": ASKED, **fields})


def test_arguments_of_streamed_calls_join_to_json(scripted, scripted_client):
    scripted.model.worker.text = CALL
    asked = {"model": "tiny", "max_tokens": 50, "messages": ASKED, "tools": [TOOL], "stream": True}
    events = scripted_client.messages.create(**asked)
    pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"city": "Paris"}
