"""Clients that speak OpenAI's or Anthropic's protocol for other programs: litellm, LangChain."""

import asyncio
import json

import pytest

ASKED = [{"role": "user", "content": "How is it in Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def alone(server):
    return server.language_model.generate(ASKED, max_tokens=16, temperature=0.8, seed=7, plan="plain")


@pytest.fixture
def says(scripted):
    def says(text):
        scripted.model.worker.text, scripted.model.worker.ended = text, "stop"
        return scripted

    return says


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet for prices
        module = pytest.importorskip("litellm")
    module.suppress_debug_info = True
    module.drop_params = False
    return module


def by_openai(server, **more):
    return {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0, **more}


def test_litellm_gets_the_text_of_the_python_api(server, litellm, alone):
    asked = by_openai(server, messages=ASKED, max_tokens=16, temperature=0.8, seed=7)
    assert litellm.completion(**asked).choices[0].message.content == alone.text
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone.text
    assert asyncio.run(litellm.acompletion(**asked)).usage.completion_tokens == len(alone.tokens)


def test_litellm_reads_calls(says, litellm):
    pytest.importorskip("mcp")  # litellm imports it as soon as there are tools, and does not install it
    server = says(CALL)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    reply = litellm.completion(**by_openai(server, messages=ASKED, tools=tools))
    [call] = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert reply.choices[0].finish_reason == "tool_calls"


def test_litellm_speaks_anthropics_protocol_too(server, litellm, alone):
    asked = {"model": "anthropic/tiny", "api_base": server.url, "api_key": "none", "num_retries": 0}
    asked |= {"messages": ASKED, "max_tokens": 16, "temperature": 0.8, "seed": 7, "allowed_openai_params": ["seed"]}
    assert litellm.completion(**asked).choices[0].message.content == alone.text


@pytest.fixture(scope="module")
def chat_model(server):
    langchain = pytest.importorskip("langchain_openai")

    def chat_model(at=server, **more):
        return langchain.ChatOpenAI(model="tiny", base_url=f"{at.url}/v1", api_key="none", max_retries=0, **more)

    return chat_model


def test_langchain_gets_the_text_of_the_python_api(chat_model, alone):
    model = chat_model(max_tokens=16, temperature=0.8, seed=7)
    assert model.invoke(ASKED).content == alone.text
    assert "".join(chunk.content for chunk in model.stream(ASKED)) == alone.text
    assert asyncio.run(model.ainvoke(ASKED)).usage_metadata["output_tokens"] == len(alone.tokens)


def test_langchain_speaks_responses_too(chat_model, alone):
    asked = {"max_tokens": 16, "temperature": 0.8, "extra_body": {"seed": 7}}
    model = chat_model(use_responses_api=True, **asked)
    assert model.invoke(ASKED).text == alone.text
    assert "".join(chunk.text for chunk in model.stream(ASKED)) == alone.text


def test_langchain_calls_tools_and_gives_back_results(says, chat_model):
    messages = pytest.importorskip("langchain_core.messages")

    def weather(city: str) -> str:
        """Of a city."""
        return f"Rain in {city}"

    server = says(CALL)
    model = chat_model(server).bind_tools([weather])
    asked = messages.HumanMessage("How is it in Paris?")
    reply = model.invoke([asked])
    [call] = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    says("It rains.")
    result = messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert model.invoke([asked, reply, result]).content == "It rains."
    assert "<tool_response>\nRain in Paris\n</tool_response>" in server.model.worker.prompt


def test_langchain_parses_structured_output(says, chat_model):
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str
        people: int

    server = says('{"name": "Paris", "people": 2000000}')
    city = chat_model(server).with_structured_output(City).invoke(ASKED)
    assert city == City(name="Paris", people=2000000)
    assert server.model.worker.jobs[-1].sampling.grammar.kind == "json_schema"
