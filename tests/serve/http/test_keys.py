"""Who may use the server, and whose texts are whose."""

import httpx
import openai
import pytest

from hierspec.core.errors import HierspecError
from hierspec.serve.http.keys import namespace_of
from hierspec.serve.settings import Key, Settings

KEYS = (Key("ann", "sk-ann"), Key("bob", "sk-bob"))
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def guarded(start):
    return start(api_keys=KEYS)


def test_each_key_opens_the_server(guarded):
    for key in KEYS:
        client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key.secret, max_retries=0)
        assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).choices
    assert httpx.get(f"{guarded.url}/v1/models", headers={"x-api-key": "sk-bob"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer sk-an"}, {"authorization": "Bearer"}, {"authorization": "Basic sk-ann"},
     {"authorization": "sk-ann"}, {"x-api-key": "sk-annn"}, {"authorization": "Bearer \u00ff"}],
)  # fmt: skip
def test_nobody_else_gets_further(guarded, headers):
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for path in ("/v1/models", "/v1/chat/completions", "/tokenize", "/nothing"):
        reply = httpx.post(f"{guarded.url}{path}", content=b"{", headers=encoded)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert "sk-" not in reply.text


def test_a_wrong_key_and_none_are_refused_in_different_words(guarded):
    wrong, none = (httpx.get(f"{guarded.url}/v1/models", headers=each) for each in ({"x-api-key": "sk-no"}, {}))
    assert "not one of this server's keys" in wrong.json()["error"]["message"]
    assert "needs an API key" in none.json()["error"]["message"]


def test_whether_it_runs_is_no_secret(guarded):
    for path in ("/health", "/ready", "/version"):
        assert httpx.get(f"{guarded.url}{path}").status_code == 200


def test_keys_have_namespaces_that_no_client_can_leave():
    class Request:
        class state:
            key = None

    seen = set()
    for key in (None, *KEYS):
        Request.state.key = key
        for asked in (None, "", "mine", "ann/", "bob/mine", "/"):
            seen.add((key, namespace_of(Request, asked)))
    owners = {}
    for key, namespace in seen:
        if key is not None:
            assert owners.setdefault(namespace, key) is key
    Request.state.key = KEYS[0]
    assert namespace_of(Request, None) == "ann/"


def test_texts_of_one_key_never_draft_for_another(guarded, monkeypatch):
    submitted = []
    submit = guarded.model.worker.submit
    monkeypatch.setattr(guarded.model.worker, "submit", lambda job: (submitted.append(job.namespace), submit(job)))
    for secret, asked in (("sk-ann", None), ("sk-ann", "x"), ("sk-bob", "x")):
        body = {"messages": MESSAGES, "max_tokens": 1} | ({"namespace": asked} if asked else {})
        headers = {"authorization": f"Bearer {secret}"}
        assert httpx.post(f"{guarded.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert submitted == ["ann/", "ann/x", "bob/x"]


@pytest.mark.parametrize(("name", "secret"), [("", "a"), ("a/b", "a"), ("a", ""), ("a", "b c"), ("a", "ü")])
def test_keys_that_cannot_be_used_are_refused(name, secret):
    with pytest.raises(HierspecError):
        Key(name, secret)


def test_two_keys_of_one_name_are_refused():
    with pytest.raises(HierspecError, match="same name"):
        Settings(api_keys=(Key("a", "1"), Key("a", "2")))
