"""The OpenAPI schema says what the server does: schemathesis makes requests from it and compares the replies."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from serving import running

from hierspec.serve.settings import Limits, Settings

load_all_checks()
CHECKED = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
EVERY_PATH = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
}


@pytest.fixture(scope="module")
def brief_server(tiny_model):
    with running(tiny_model, Settings(model_name="tiny", limits=Limits(max_tokens=3))) as each:
        yield each


def test_every_path_is_described_with_its_errors(brief_server):
    document = httpx.get(f"{brief_server.url}/openapi.json").json()
    assert document["paths"].keys() >= EVERY_PATH
    for path in document["paths"].values():
        for operation in path.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
            assert "422" not in operation["responses"]
    streamed = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert streamed.keys() == {"application/json", "text/event-stream"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_streams_are_what_the_schema_says(brief_server, path, body):
    schema = schemathesis.openapi.from_url(f"{brief_server.url}/openapi.json")
    case = schema[path]["POST"].Case(body={"model": "tiny", "stream": True, **body}, media_type="application/json")
    reply = case.call(base_url=brief_server.url, timeout=60)
    assert reply.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(reply, checks=CHECKS.get_by_names(CHECKED))


def test_replies_are_what_the_schema_says(brief_server):
    checks = CHECKS.get_by_names(CHECKED)
    schema = schemathesis.openapi.from_url(f"{brief_server.url}/openapi.json")
    for operation in schema.get_all_operations():

        @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.ok().as_strategy())
        def replies_conform(case):
            reply = case.call(base_url=brief_server.url, timeout=60)
            case.validate_response(reply, checks=checks)

        replies_conform()
