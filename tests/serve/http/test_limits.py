"""Too much, too slow, too many: each ends with its own status, and what it held is free again.

Tests take the model's turn where an answer must not go on: then nothing depends on how fast it is written.
"""

import json
import logging
import signal
import socket
import threading

import httpx
import openai
import pytest
from serving import until

from hierspec.scorers.base import ModelScorer
from hierspec.serve.settings import Limits

MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS = {"messages": MESSAGES, "temperature": 0, "logit_bias": {"0": -100, "1": -100, "2": -100}}  # no end-of-text


def chat(server, body, **options):
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, **options)


def held(model):
    """Texts in the model's KV cache that running requests have."""
    return len(model.scorer(model.config.layers).pool._running)


def stream(server, body):
    return httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_vanishes_is_cancelled_and_its_memory_free(server, streams):
    model = server.language_model
    body = json.dumps({**ENDLESS, "stream": streams, "n": 4}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with model.turn():  # nothing is written, so it cannot have ended by itself
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: server.answers == 4)
        until(lambda: server.answers == 0)
    until(lambda: held(model) == 0)


def test_a_client_that_vanishes_amid_a_stream_is_cancelled(server):
    model = server.language_model
    with stream(server, ENDLESS) as reply:
        lines = reply.iter_lines()
        next(lines)
        with model.turn():
            reply.close()
            until(lambda: server.answers == 0)
    until(lambda: held(model) == 0)


def test_a_client_that_does_not_read_is_cancelled(start, caplog):
    server = start(Limits(send_seconds=0.2))
    body = json.dumps({**ENDLESS, "stream": True, "n": 64, "logprobs": True, "top_logprobs": 20}).encode()
    with caplog.at_level(logging.WARNING), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: server.answers == 64)
        until(lambda: server.answers == 0)
    assert "read nothing" in caplog.text


def test_who_comes_when_all_places_are_taken_is_told_to_come_back(start):
    server = start(Limits(running_answers=2))
    with server.language_model.turn():
        first = threading.Thread(target=chat, args=(server, {**ENDLESS, "n": 2, "max_tokens": 2}))
        first.start()
        until(lambda: server.answers == 2)
        reply = chat(server, ENDLESS)
    first.join()
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert chat(server, {**ENDLESS, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_takes_too_long_is_cancelled(start, streams):
    server = start(Limits(answer_seconds=0.2))
    with server.language_model.turn():
        reply = chat(server, {**ENDLESS, "stream": streams})
    assert reply.status_code == 408
    assert "not finished after 0.2 s" in reply.json()["error"]["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert server.answers == 0


def test_a_body_that_does_not_come_is_given_up(start):
    server = start(Limits(body_seconds=0.2))
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 50\r\n\r\n{")
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_tokens_are_limited(start):
    server = start(Limits(prompt_tokens=40, max_tokens=5))
    assert chat(server, {**ENDLESS, "max_tokens": 6}).status_code == 400
    assert chat(server, ENDLESS).json()["usage"]["completion_tokens"] == 5
    long = chat(server, {**ENDLESS, "messages": [{"role": "user", "content": "x" * 100}]})
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_a_failing_model_is_a_500_in_shape(server, monkeypatch):
    def broken(*_):
        raise RuntimeError("a broken kernel")

    monkeypatch.setattr(ModelScorer, "states", broken)
    reply = chat(server, {**ENDLESS, "max_tokens": 2})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "please report this defect" in reply.json()["error"]["message"]
    monkeypatch.undo()
    assert chat(server, {**ENDLESS, "max_tokens": 2}).status_code == 200


def test_a_model_that_fails_amid_a_stream_ends_it_with_the_error(server, monkeypatch):
    states, calls = ModelScorer.states, []

    def breaks(self, asks):
        calls.append(asks)
        if len(calls) > 3:
            raise RuntimeError("a broken kernel")
        return states(self, asks)

    monkeypatch.setattr(ModelScorer, "states", breaks)
    monkeypatch.setattr(ModelScorer, "in_one_call", lambda *given: False)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options = {name: value for name, value in ENDLESS.items() if name != "logit_bias"}
    chunks = []
    with pytest.raises(openai.APIError, match="please report this defect"):
        chunks += list(
            client.chat.completions.create(model="tiny", stream=True, **options, extra_body={"plan": "plain"})
        )


def test_a_stop_lets_running_answers_finish_and_takes_no_new_ones(start):
    server = start()
    with server.language_model.turn():
        replies = []
        asking = threading.Thread(target=lambda: replies.append(chat(server, {**ENDLESS, "max_tokens": 30})))
        asking.start()
        until(lambda: server.answers == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: not can_connect(server))
    asking.join()
    assert replies[0].status_code == 200
    assert replies[0].json()["usage"]["completion_tokens"] == 30


def test_a_stop_has_a_deadline(start):
    server = start(Limits(drain_seconds=1))
    with server.language_model.turn():
        failures = []

        def ask():
            try:
                failures.append(chat(server, ENDLESS).status_code)
            except httpx.HTTPError as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: server.answers == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        asking.join()
        until(lambda: server.answers == 0)
    assert failures[0] != 200


def can_connect(server):
    try:
        with socket.create_connection(("127.0.0.1", server.port)):
            return True
    except OSError:
        return False


def test_other_pages_may_not_call_it_unless_allowed(server, start):
    headers = {"origin": "http://other.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(f"{server.url}/v1/models", headers=headers).headers
    allowing = start(cors_origins=("http://other.example",))
    reply = httpx.options(f"{allowing.url}/v1/models", headers=headers)
    assert reply.headers["access-control-allow-origin"] == "http://other.example"


def test_no_prompt_is_logged_unless_asked_for(start, caplog):
    with caplog.at_level(logging.DEBUG):
        for server in (start(), start(log_prompts=True)):
            chat(server, {**ENDLESS, "messages": [{"role": "user", "content": "A SECRET"}], "max_tokens": 1})
            chat(server, {"messages": "A SECRET"})
            assert ("A SECRET" in caplog.text) == server.settings.log_prompts
