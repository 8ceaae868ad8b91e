"""Chat completions through OpenAI's own client, compared with the Python API."""

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_an_answer_is_that_of_the_python_api(server, client):
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=0.8, seed=7)
    alone = server.language_model.generate(MESSAGES, max_tokens=24, temperature=0.8, seed=7, plan="plain")
    assert reply.choices[0].message.content == alone.text
    assert reply.choices[0].finish_reason == alone.ended
    assert reply.usage.prompt_tokens == alone.prompt_tokens
    assert reply.usage.completion_tokens == len(alone.tokens)


def test_a_stream_is_the_same_text_in_pieces(server, client):
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=24, seed=3, stream=True, stream_options={"include_usage": True}
        )
    )
    alone = server.language_model.generate(MESSAGES, max_tokens=24, temperature=1.0, seed=3, plan="plain")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alone.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == alone.ended
    assert chunks[-1].usage.completion_tokens == len(alone.tokens)


def test_a_wrong_model_name_is_a_404(client):
    with pytest.raises(openai.NotFoundError, match="There is no model of that name"):
        client.chat.completions.create(model="other", messages=MESSAGES)
