"""The page's files and what it is told: no outside requests, nothing sent twice, numbers that add up."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Sampling
from hierspec.generation import TextStep, Writer
from hierspec.plot import COLOURS, DARK_COLOURS
from hierspec.serve.page.activity import Activity, Observers
from hierspec.serve.page.routes import _files
from hierspec.serve.page.state import State
from hierspec.serve.settings import Key
from hierspec.worker import Job


def get(url: str, **headers: str):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_every_file_comes_with_a_policy_and_only_once(server):
    for path in ["/", *(f"/page/{name}" for name in _files())]:
        status, headers, content = get(server.url + path)
        assert (status, bool(content)) == (200, True), path
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        status, headers, content = get(server.url + path, **{"If-None-Match": headers["ETag"]})
        assert (status, content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/..%2fpage.py", "/page/%2e%2e/settings.py"])
def test_no_other_file_is_sent(server, path):
    status, _, content = get(server.url + path)
    assert status == 404
    assert "error" in json.loads(content)


def test_the_page_names_nothing_outside():
    for name, file in _files().items():
        addresses = re.findall(r"https?://[^\s\"'`)]+", file.content.decode())
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name  # a name, not an address


def test_no_text_becomes_markup():
    for name, file in _files().items():
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", file.content.decode()
        )
        assert not found, name


def test_colours_are_those_of_the_project():
    rules = _files()["colours.css"].content.decode()
    for light, dark in zip(COLOURS, DARK_COLOURS, strict=True):
        assert f"light-dark({light}, {dark})" in rules


def test_state_tells_model_plans_and_load(server):
    _, _, content = get(server.url + "/hierspec/state")
    state = json.loads(content)
    assert state["model"]["layers"] == server.language_model.config.layers
    plans = {plan["name"]: plan for plan in state["plans"]}
    assert state["default_plan"] in plans
    assert [tier["name"] for tier in plans["plain"]["tiers"]] == ["target"]
    assert len(plans["hispec"]["tiers"]) == 3
    assert plans["lookup"]["tiers"][0]["stores"] == ["copy"]
    assert plans["rest"]["refused"]
    assert not re.search(r"/\w+/", plans["rest"]["refused"])  # no paths of the server
    assert state["load"] == {"running": 0, "waiting": 0}
    assert state["plain_tokens_per_second"] > 0
    assert "estimate" in state["plain_is"]


def test_state_counts_what_was_drafted(server):
    body = {"messages": [{"role": "user", "content": "ab ab ab ab"}], "plan": "lookup", "max_tokens": 30, "seed": 1}
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    before = json.loads(get(server.url + "/hierspec/state")[2])
    urllib.request.urlopen(request).read()
    after = json.loads(get(server.url + "/hierspec/state")[2])

    def written(state):
        return sum(second["tokens"] for second in state["history"])

    assert written(after) - written(before) == 30
    copied = after["acceptance"][0]["sources"]["copy"]
    assert copied["drafted"] >= copied["accepted"] >= 0


def test_state_needs_the_key_and_the_page_does_not(start):
    locked = start(api_keys=(Key("me", "secret"),))
    assert get(locked.url + "/")[0] == 200
    assert get(locked.url + "/page/main.js")[0] == 200
    assert get(locked.url + "/hierspec/state")[0] == 401
    assert get(locked.url + "/hierspec/state", Authorization="Bearer secret")[0] == 200


def step(tokens: int, draft: Proposal, accepted: tuple[int, ...], seconds: float = 0.1) -> TextStep:
    return TextStep((1,) * tokens, (), seconds, (), draft, accepted)


def test_activity_forgets_what_is_a_minute_old():
    now = [100.0]
    activity = Activity(lambda: now[0])
    job = Job([1], "plain", Sampling(), print)
    activity.on_submit(job)
    activity.on_step(job, step(3, Proposal.chain([1, 2, 3], "copy"), (0, 1)))
    now[0] = 101.0
    activity.on_step(job, step(1, Proposal(), ()))
    now[0] = 102.0
    assert activity.tokens_per_second() == pytest.approx(4 / 3)
    assert activity.acceptance() == [{"tier": "target", "sources": {"copy": {"drafted": 3, "accepted": 2}}}]
    assert [(second["seconds_ago"], second["tokens"], second["passes"]) for second in activity.history()] == [
        (2, 3, 1),
        (1, 1, 1),
    ]
    now[0] = 170.0
    assert activity.history() == []
    assert activity.tokens_per_second() == 0
    assert activity.jobs == [job]


def test_one_observer_that_fails_does_not_blind_the_others():
    class Broken(Activity):
        def on_submit(self, job):
            raise RuntimeError("no")

    activity = Activity()
    job = Job([1], "plain", Sampling(), print)
    with pytest.raises(RuntimeError):
        Observers(Broken(), activity).on_submit(job)
    assert activity.jobs == [job]


def test_the_estimate_of_plain_follows_the_passes(tiny_model):
    """A machine that is ten times slower makes plain ten times slower too; a wide pass counts for less than it took."""
    now = [100.0]
    activity = Activity(lambda: now[0])
    worker = SimpleNamespace(running=1, waiting=0)
    state = State(SimpleNamespace(model=tiny_model, worker=worker), "plain", activity)
    first = asyncio.run(state.document())["plain_tokens_per_second"]
    costs = tiny_model.costs.costs(tiny_model.scorer(tiny_model.config.layers))
    assert first == pytest.approx(1 / costs.seconds(1), rel=0.01)
    job = Job([1], "plain", Sampling(), print)
    job.writer = Writer(tiny_model.request([1, 2], "plain", Sampling()), tiny_model.tokenizer)
    tier = job.writer.request.stats.tiers[0]
    for _ in range(3):
        tier.seconds += 10 * costs.seconds(4)
        activity.on_step(job, step(1, Proposal.chain([1, 2, 3], "copy"), (), seconds=10 * costs.seconds(4)))
    slow = asyncio.run(state.document())["plain_tokens_per_second"]
    assert slow == pytest.approx(first / 10, rel=0.01)
    now[0] = 200.0
    assert asyncio.run(state.document())["plain_tokens_per_second"] == first
    job.writer.request.cancel()
