"""/v1/responses through OpenAI's own client: texts, events, calls, and responses that go on from others."""

import json

import openai
import pytest

from hierspec.serve.http.errors import ApiError
from hierspec.serve.responses.store import StoredResponses
from hierspec.serve.settings import Key

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
JSON = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>\n{JSON}\n</tool_call>"


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


@pytest.fixture
def scripted_client(scripted):
    scripted.model.worker.text, scripted.model.worker.ended = "", "stop"
    return client_of(scripted)


def test_a_response_is_the_text_of_the_python_api(server, client):
    asked = {"max_output_tokens": 24, "temperature": 0.8, "extra_body": {"seed": 7}}
    reply = client.responses.create(model="tiny", input="Why?", instructions="Be brief.", **asked)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    alone = server.language_model.generate(messages, max_tokens=24, temperature=0.8, seed=7, plan="plain")
    assert reply.output_text == alone.text
    assert reply.status == ("incomplete" if alone.ended == "length" else "completed")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (alone.prompt_tokens, len(alone.tokens))
    streamed = client.responses.create(model="tiny", input="Why?", instructions="Be brief.", stream=True, **asked)
    events = list(streamed)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == alone.text
    assert events[-1].response.output_text == alone.text
    assert events[-1].response.usage.output_tokens == len(alone.tokens)


def test_the_events_of_a_text_come_in_order(scripted, scripted_client):
    scripted.model.worker.text = "Hello."
    events = list(scripted_client.responses.create(model="tiny", input="Hi", stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert events[-1].response.output[0].content[0].text == "Hello."


def test_the_events_of_a_call_come_in_order(scripted, scripted_client):
    scripted.model.worker.text = f"I look. {CALL}"
    with scripted_client.responses.stream(model="tiny", input="Paris?", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type.removeprefix("response.") for event in events][-7:] == [
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    text, call = final.output
    assert text.content[0].text == "I look. "
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Paris"})


def test_a_length_that_ends_it_is_told(scripted, scripted_client):
    scripted.model.worker.text, scripted.model.worker.ended = "Hel", "length"
    reply = scripted_client.responses.create(model="tiny", input="Hi")
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(scripted_client.responses.create(model="tiny", input="Hi", stream=True))
    assert events[-1].type == "response.incomplete"


def test_results_of_calls_are_given_back_by_items_or_by_a_previous_response(scripted, scripted_client):
    scripted.model.worker.text = CALL
    question = {"role": "user", "content": [{"type": "input_text", "text": "Paris?"}]}
    first = scripted_client.responses.create(model="tiny", input=[question], tools=[TOOL])
    [call] = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    scripted.model.worker.text = "It rains."
    whole = [question, call.model_dump(), result]
    by_items = scripted_client.responses.create(model="tiny", input=whole, tools=[TOOL])
    prompt = scripted.model.worker.prompt
    assert "<tool_response>\nRain\n</tool_response>" in prompt
    asked = {"model": "tiny", "tools": [TOOL], "previous_response_id": first.id}
    by_previous = scripted_client.responses.create(input=[result], **asked)
    assert scripted.model.worker.prompt == prompt
    assert by_previous.output_text == by_items.output_text == "It rains."
    third = scripted_client.responses.create(model="tiny", input="Thanks", previous_response_id=by_previous.id)
    assert "It rains.<|im_end|>\n<|im_start|>user\nThanks" in scripted.model.worker.prompt
    assert third.previous_response_id == by_previous.id


def test_a_required_call_is_held_to_its_schema(scripted, scripted_client):
    scripted.model.worker.text = JSON
    for choice in ("required", {"type": "function", "name": "weather"}):
        reply = scripted_client.responses.create(model="tiny", input="Paris?", tools=[TOOL], tool_choice=choice)
        assert reply.output[0].type == "function_call"
        assert scripted.model.worker.jobs[-1].sampling.grammar.kind == "lark"


def test_a_format_is_the_grammar_of_the_answer_and_the_client_parses_it(scripted, scripted_client):
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str
        people: int

    scripted.model.worker.text = '{"name": "Paris", "people": 2000000}'
    reply = scripted_client.responses.parse(model="tiny", input="Which?", text_format=City)
    assert reply.output_parsed == City(name="Paris", people=2000000)
    grammar = scripted.model.worker.jobs[-1].sampling.grammar
    assert (grammar.kind, json.loads(grammar.text)["properties"]["people"]["type"]) == ("json_schema", "integer")


def test_stored_responses_are_found_listed_and_deleted(scripted, scripted_client):
    scripted.model.worker.text = "Hello."
    reply = scripted_client.responses.create(model="tiny", input="Hi", metadata={"a": "b"})
    again = scripted_client.responses.retrieve(reply.id)
    assert (again.output_text, again.metadata, again.store) == ("Hello.", {"a": "b"}, True)
    [item] = scripted_client.responses.input_items.list(reply.id)
    assert item.content[0].text == "Hi"
    scripted_client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        scripted_client.responses.retrieve(reply.id)
    unstored = scripted_client.responses.create(model="tiny", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        scripted_client.responses.create(model="tiny", input="Hi", previous_response_id=unstored.id)


def test_another_key_sees_nothing_of_it(start):
    server = start(api_keys=(Key("a", "secret-a"), Key("b", "secret-b")))
    reply = client_of(server, "secret-a").responses.create(model="tiny", input="Hi", max_output_tokens=2)
    assert client_of(server, "secret-a").responses.retrieve(reply.id).id == reply.id
    for call in ("retrieve", "delete"):
        with pytest.raises(openai.NotFoundError, match="no stored response"):
            getattr(client_of(server, "secret-b").responses, call)(reply.id)


def test_the_oldest_responses_make_room():
    stored = StoredResponses(most=2, most_bytes=1000)
    for name in ("a", "b", "c"):
        stored.add("me", {"id": name, "output": []}, [], [])
    assert stored.get("me", "c").response["id"] == "c"
    with pytest.raises(ApiError, match="no stored response"):
        stored.get("me", "a")
    stored.add("me", {"id": "d", "output": ["x" * 950]}, [], [])
    with pytest.raises(ApiError, match="no stored response"):
        stored.get("me", "c")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": []}, "The input is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "Item 0 of the input cannot be read"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "Only parts of text"),
        ({"background": True}, "in the background"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "none of type function"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(client, fields, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.responses.create(**{"model": "tiny", "input": "Hi", **fields})
