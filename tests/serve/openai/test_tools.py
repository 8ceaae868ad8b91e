"""Tools through OpenAI's own client: what the model is told of them, and its calls as the client reads them."""

import json

import openai
import pytest
from scripted_worker import ScriptedWorker
from serving import running

import hierspec
from hierspec.serve.http.errors import ApiError
from hierspec.serve.openai.tools import openai_tools
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.text.tool_formats import FORMATS

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
JSON = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>\n{JSON}\n</tool_call>"
ASKED = [{"role": "user", "content": "How is it in Paris?"}]


@pytest.fixture
def client(scripted):
    scripted.model.worker.text, scripted.model.worker.ended = "", "stop"
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


def ask(client, stream=False, **more):
    """The message and the finish reason, whole or put together from chunks as the client's own helper does."""
    asked = {"model": "tiny", "messages": ASKED, "tools": TOOLS, **more}
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
    else:
        with client.chat.completions.stream(**asked) as chunks:
            choice = chunks.get_final_completion().choices[0]
    return choice.message, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_the_text_is_a_call_for_the_client(scripted, client, stream):
    scripted.model.worker.text = CALL
    message, reason = ask(client, stream)
    [call] = message.tool_calls
    assert (message.content, reason, call.type) == (None, "tool_calls", "function")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert len(call.id) == 9


@pytest.mark.parametrize("stream", [False, True])
def test_text_stays_text_and_several_calls_have_ids_of_their_own(scripted, client, stream):
    scripted.model.worker.text = f"I look.\n{CALL}\n{CALL}"
    message, _ = ask(client, stream)
    assert message.content == "I look.\n"
    assert len({call.id for call in message.tool_calls}) == 2
    scripted.model.worker.text = "The <tool_call> tag"
    message, reason = ask(client, stream)
    assert (message.content, message.tool_calls or None, reason) == ("The <tool_call> tag", None, "stop")


def test_one_call_alone_where_the_client_wants_no_more(scripted, client):
    scripted.model.worker.text = f"{CALL}\n{CALL}"
    for stream in (False, True):
        assert len(ask(client, stream, parallel_tool_calls=False)[0].tool_calls) == 1


def test_no_call_is_looked_for_where_none_is_wanted(scripted, client):
    scripted.model.worker.text = CALL
    message, reason = ask(client, tool_choice="none")
    assert (message.content, reason) == (CALL, "stop")
    assert "weather" not in scripted.model.worker.prompt
    assert client.chat.completions.create(model="tiny", messages=ASKED).choices[0].message.content == CALL


def test_a_template_without_tools_is_told_of_them_in_the_system_message(scripted, client):
    ask(client, messages=[{"role": "system", "content": "Be brief."}, *ASKED])
    prompt = scripted.model.worker.prompt
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert json.dumps(TOOLS[0]) in prompt


TEMPLATE = """\
{% if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


def test_a_template_that_knows_tools_is_given_them_and_may_begin_reasoning(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", context=8192)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"at": 3}'}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Noon"},
    ]
    with running(hierspec.load(folder)) as server:
        server.model.worker.close()
        worker = server.model.worker = ScriptedWorker(server.language_model.tokenizer)
        worker.text = f"Let me see.\n</think>\n\n{CALL}"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        for stream in (False, True):
            message, _ = ask(client, stream, messages=history, **thinking)
            assert (message.reasoning_content, len(message.tool_calls)) == ("Let me see.", 1)
        assert worker.prompt.startswith(f"<tools>{json.dumps(TOOLS)}</tools>\n")
        called = '<tool_call>\n{"name": "now", "arguments": {"at": 3}}\n</tool_call>'
        assert f"{called}<|im_end|>\n<|im_start|>tool\nNoon<|im_end|>" in worker.prompt
        worker.text = JSON
        message, _ = ask(client, tool_choice="required", **thinking)
        assert len(message.tool_calls) == 1
        assert worker.prompt.endswith("<think>\n\n</think>\n\n<tool_call>\n")
        ask(client, tool_choice="none")
        assert "<tools>" not in worker.prompt


def test_calls_and_results_of_the_history_reach_the_model(scripted, client):
    scripted.model.worker.text = CALL
    message, _ = ask(client)
    results = [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": text} for text in ("Rain", "Sun")]
    ask(client, messages=[*ASKED, message.model_dump(), *results])
    assert (
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nRain\n</tool_response>\n"
        "<tool_response>\nSun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ) in scripted.model.worker.prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_is_begun_and_held_to_its_schema(scripted, client, choice):
    scripted.model.worker.text = JSON
    for stream in (False, True):
        message, _ = ask(client, stream, tool_choice=choice)
        assert message.tool_calls[0].function.name == "weather"
    assert scripted.model.worker.prompt.endswith("<|im_start|>assistant\n<tool_call>\n")
    grammar = scripted.model.worker.jobs[-1].sampling.grammar
    assert grammar.kind == "lark"
    assert ("now" in grammar.text) == (choice == "required")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [{"type": "web_search"}]}, "Tool 0 is none of type function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tool 0 needs a name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "The name of tool 0 may have"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "Two tools have the same name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "JSON schema"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "not among the tools"),
        ({"tool_choice": "always"}, "tool_choice must be"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
    ],
)
def test_wrong_tools_are_refused_in_one_sentence(client, fields, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        ask(client, **fields)


def test_images_are_refused_in_one_sentence(client):
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    with pytest.raises(openai.BadRequestError, match="Only parts of text can be read"):
        ask(client, messages=[{"role": "user", "content": image}])


def accepts(grammar, text):
    """Whether a grammar lets this text through, as llguidance sees it."""
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar.text))
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_the_grammar_of_a_required_call_lets_calls_through_and_nothing_else():
    required = openai_tools(TOOLS, "required", None)
    assert accepts(required.grammar(FORMATS["hermes"]), JSON)
    assert accepts(required.grammar(FORMATS["hermes"]), '{"name": "now", "arguments": {}}')
    assert accepts(required.grammar(FORMATS["llama"]), JSON.replace("arguments", "parameters"))
    for wrong in (
        "",
        "Hello",
        f"{JSON} ",
        '{"name": "weather", "arguments": {}}',
        '{"name": "other", "arguments": {}}',
    ):
        assert not accepts(required.grammar(FORMATS["hermes"]), wrong)
    assert accepts(required.grammar(FORMATS["mistral"]), f"[{JSON}, {JSON}]")
    assert not accepts(required.grammar(FORMATS["mistral"]), "[]")
    one = openai_tools(TOOLS, "required", False).grammar(FORMATS["mistral"])
    assert (accepts(one, f"[{JSON}]"), accepts(one, f"[{JSON}, {JSON}]")) == (True, False)
    named = openai_tools(TOOLS, {"type": "function", "function": {"name": "now"}}, None).grammar(FORMATS["phi"])
    assert (accepts(named, '[{"name": "now", "arguments": {}}]'), accepts(named, f"[{JSON}]")) == (True, False)


def test_schemas_of_several_tools_keep_their_definitions_apart():
    def tool(name, kind):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}
        return {"type": "function", "name": name, "parameters": {**schema, "required": ["a"]}}  # as responses write it

    grammar = openai_tools([tool("f", "integer"), tool("g", "boolean")], "required", None).grammar(FORMATS["hermes"])
    assert accepts(grammar, '{"name": "f", "arguments": {"a": 1}}')
    assert accepts(grammar, '{"name": "g", "arguments": {"a": true}}')
    assert not accepts(grammar, '{"name": "g", "arguments": {"a": 1}}')


def test_no_choice_without_tools_is_none():
    assert openai_tools(None, None, None).callable == ()
    with pytest.raises(ApiError, match="tool_choice must be"):
        openai_tools(TOOLS, {"type": "other"}, None)


CITIES = ["Paris", "Rome"]
CHOOSING = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_knows_nothing_makes_valid_calls_where_it_must(roomy, choice, stream):
    pytest.importorskip("llguidance")
    client = openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0)
    for seed in range(3):
        calls = []
        for plan in ("plain", "auto"):
            asked = {"tools": [CHOOSING], "tool_choice": choice, "seed": seed, "max_tokens": 100}
            message, reason = ask(client, stream, **asked, extra_body={"plan": plan})
            assert (message.content, reason) == (None, "tool_calls")
            calls.append([(call.function.name, call.function.arguments) for call in message.tool_calls])
        assert calls[0] == calls[1]
        [(name, arguments)] = calls[0]
        read = json.loads(arguments)
        assert (name, read["city"] in CITIES, 1 <= read["days"] <= 9) == ("weather", True, True)
