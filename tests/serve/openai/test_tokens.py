"""/tokenize and /detokenize are each other's inverse, and agree with the model's own tokenizer."""

import httpx
import pytest


def post(server, path, body):
    return httpx.post(f"{server.url}{path}", json=body)


@pytest.mark.parametrize("text", ["The sky", "Grüße, 世界 🙂", "<|im_end|>"])
def test_a_text_comes_back(server, text):
    reply = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert reply["tokens"] == server.language_model.encode(text, raw=True)
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == server.language_model.config.context
    assert post(server, "/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}


def test_messages_are_put_into_the_template(server):
    messages = [{"role": "user", "content": "Hello"}]
    reply = post(server, "/tokenize", {"messages": messages}).json()
    assert reply["tokens"] == server.language_model.encode(messages)
    without = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert without["count"] < reply["count"]


def test_control_tokens_where_asked_for(server):
    [token] = post(server, "/tokenize", {"prompt": "<|im_end|>", "parse_special": True}).json()["tokens"]
    assert token in server.language_model.stop_ids


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": 1}, {"messages": []}]
)
def test_what_is_neither_is_refused(server, body):
    reply = post(server, "/tokenize", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith(".")


def test_an_id_outside_the_vocabulary_is_refused(server):
    assert post(server, "/detokenize", {"tokens": [10**6]}).status_code == 400


def test_want_of_memory_is_one_sentence(server, monkeypatch):
    def refuse(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(server.language_model.tokenizer, "decode", refuse)
    reply = post(server, "/detokenize", {"tokens": [65]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "out_of_memory")
    assert reply.json()["error"]["message"].startswith("There is not enough memory left for this request;")
