"""Whatever is sent, the reply is a sentence in OpenAI's shape, and the server goes on."""

import json
import socket

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import running

from hierspec.serve.settings import Limits, Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def send(server, path, body, **headers):
    return httpx.post(f"{server.url}{path}", content=body, headers={"content-type": "application/json", **headers})


def refused(reply, status=400):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    assert "\n" not in error["message"]
    return error["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "body"),
        (b"{", "not valid JSON"),
        (b'{"messages": "\xff\xfe"}', "not valid UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b"[" * 100_000, "deep"),
        (b"[" * 50_000 + b"]" * 50_000, "deep"),
        (b'{"messages": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}", "nests lists and objects more than 100 deep"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"temperature": -Infinity}', "-Infinity is not JSON"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "number that cannot be read"),
        (b"null", "body"),
        (b"[1, 2]", "body"),
        (b'"text"', "body"),
    ],
)
def test_bodies_that_are_no_request(server, body, sentence):
    assert sentence in refused(send(server, CHAT, body))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", "9"),
        ("max_tokens", 10**40),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", 1e300),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("temperature", 1e-300),
        ("repetition_penalty", 0),
        ("repetition_penalty", 5e-324),
        ("seed", 2**70),
        ("seed", "one"),
        ("n", 0),
        ("n", 10**9),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["a"] * 100),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 1000}),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", []),
        ("logprobs", 3),
        ("top_logprobs", 21),
        ("stream", "yes"),
        ("plan", "fastest"),
        ("plan", "/etc/passwd"),
        ("plan", "a.toml"),
        ("plan", {}),
        ("namespace", 3),
        ("namespace", "x" * 1000),
        ("messages", []),
        ("messages", [{}]),
        ("messages", [{"role": 1, "content": "x"}]),
        ("messages", "Hi"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("tools", [1]),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": [1]}}),
        ("guided_choice", []),
        ("guided_regex", ""),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("chat_template_kwargs", {"a": [] * 3, "tools": 3}),
        ("continue_final_message", True),
    ],
)
def test_values_that_make_no_sense(server, field, value):
    body = {"messages": MESSAGES, "max_tokens": 1, field: value}
    if field == "chat_template_kwargs":  # a template takes what it likes
        assert send(server, CHAT, json.dumps(body)).status_code in (200, 400)
    else:
        refused(send(server, CHAT, json.dumps(body)))


def test_unknown_fields_are_ignored(server):
    body = {"messages": MESSAGES, "max_tokens": 1, "metadata": {"a": 1}, "store": True, "no_such_field": [1]}
    assert send(server, CHAT, json.dumps(body)).status_code == 200


def test_a_body_that_is_not_called_json_is_refused(server):
    reply = httpx.post(f"{server.url}{CHAT}", content=b"a=b", headers={"content-type": "text/plain"})
    refused(reply)


def test_paths_and_methods_that_do_not_exist(server):
    assert "/docs" in refused(httpx.get(f"{server.url}/v1/nothing"), 404)
    assert "does not take GET" in refused(httpx.get(f"{server.url}{CHAT}"), 405)


@pytest.mark.parametrize("chunked", [False, True])
def test_ten_megabytes_are_refused_without_being_kept(server, chunked):
    body = json.dumps({"prompt": "x" * (10 << 20)}).encode()
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    reply = send(server, COMPLETIONS, pieces if chunked else body)
    assert "longer than" in refused(reply, 413)


def exchange(server, data, close=False):
    """What comes back for these bytes, and nothing after them."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        if close:
            return b""
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\x16\x03\x01 not HTTP\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Content-Length: -5\r\n\r\n{}",
        HEAD + b"Content-Length: many\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
def test_broken_http_never_gets_a_5xx_and_leaves_the_server_well(server, data, close):
    received = exchange(server, data, close)
    assert not received.startswith(b"HTTP/1.1 5")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.answers == 0


def test_a_body_longer_than_it_says_is_cut_there(server):
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GARBAGE")
        assert connection.recv(12) == b"HTTP/1.1 200"


names = st.sampled_from(
    ["messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stream", "logprobs",
     "top_logprobs", "logit_bias", "plan", "namespace", "echo", "tools", "response_format", "stream_options", "tokens",
     "structured_outputs", "guided_choice", "chat_template_kwargs", "model", "details", "timings"]
)  # fmt: skip
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["plain", "user", "json_object", "text", "tiny", 1, 2])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=3,
)
sensible = {
    "messages": messages,
    "prompt": st.text(min_size=1, max_size=20),
    "tokens": st.lists(st.integers(0, 319), max_size=5),
}
bodies = st.dictionaries(names, values, max_size=6) | st.builds(
    lambda one, other: {**one, **other, "max_tokens": 2},
    st.fixed_dictionaries(sensible),
    st.dictionaries(names, values, max_size=3),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]), body=bodies)
def test_no_body_makes_the_server_fail(brief_server, client, path, body):
    headers = {"content-type": "application/json"}
    reply = client.post(f"{brief_server.url}{path}", content=json.dumps(body), headers=headers)
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"].endswith(".")


@pytest.fixture(scope="module")
def brief_server(tiny_model):
    """Whose answers are short, so that many fit into a test."""
    with running(tiny_model, Settings(model_name="tiny", limits=Limits(max_tokens=4))) as each:
        yield each


@pytest.fixture(scope="module")
def client():
    with httpx.Client(timeout=60) as each:
        yield each
