"""`hierspec serve` as a process: it says where it listens, answers, and stops when it is told to."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from hierspec.cli.main import main, make_parser
from hierspec.cli.serve import _keys
from hierspec.hosts import vllm_options
from hierspec.serve import listening


def test_it_serves_until_it_is_told_to_stop(tiny):
    command = [sys.executable, "-m", "hierspec", "serve", tiny, "--port", "0", "--plan", "plain", "--api-key", "sk-1"]
    environment = {**os.environ, "HIERSPEC_LEARNT": "off"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = ""
            while not (address := re.search(r"http://127\.0\.0\.1:\d+", said)):
                line = process.stderr.readline()
                assert line, f"it ended: {said}"
                said += line
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            url = f"{address[0]}/v1/chat/completions"
            assert httpx.post(url, json=body, timeout=60).status_code == 401
            reply = httpx.post(url, json=body, timeout=60, headers={"authorization": "Bearer sk-1"})
            assert reply.json()["usage"]["completion_tokens"] <= 3
        finally:
            process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait() == 0
    assert "Stopped." in said
    assert "Traceback" not in said


def test_who_knows_the_address_can_connect():
    """Before anything is answered: a client that was told where need not try again."""
    with listening.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=10):
        pass


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    """A mistake that is not noticed fails its test at once."""

    def runs(*_, **__):
        raise AssertionError("the server was started")

    monkeypatch.setattr(listening.Server, "run", runs)


def refused(arguments, capsys):
    assert main(["serve", *arguments]) == 2
    [*_, sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith("hierspec: ")
    return sentence


def test_a_port_that_is_taken_is_named(tiny, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refused([tiny, "--port", str(port), "--plan", "plain"], capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "-1"],
        ["--port", "70000"],
        ["--max-body", "much"],
        ["--api-key", "two words three"],
        ["--api-keys", "no-such-file"],
        ["--max-running", "0"],
        ["--max-seconds", "-1"],
        ["--temperature", "-1"],
        ["--plan", "nothing"],
        ["--host", "no such host", "--api-key", "sk-1"],
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(tiny, capsys, arguments):
    refused([tiny, "--plan", "plain", *arguments], capsys)


def test_without_its_packages_it_says_what_to_install(tiny, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'hierspec[serve]'" in refused([tiny], capsys)


def test_keys_come_from_options_the_environment_and_a_file(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("# ours\nann sk-a==\n\nsk-nameless\n", encoding="utf-8")
    monkeypatch.setenv("HIERSPEC_API_KEY", "sk-env")
    arguments = ["serve", "--api-key", "sk-1=", "--api-keys", str(tmp_path / "keys")]
    keys = _keys(make_parser().parse_args(arguments))
    assert [(key.name, key.secret) for key in keys] == [
        ("key1", "sk-1="),
        ("key2", "sk-env"),
        ("ann", "sk-a=="),
        ("key4", "sk-nameless"),
    ]


@pytest.mark.parametrize(
    ("version", "arguments", "told"),
    [
        (None, [], "vLLM is not installed here; install it with: pip install vllm"),
        ("0.21.0", [], "runs inside vLLM 0.22 to 0.32, not 0.21.0"),
        ("0.32.0", ["--plan", "hispec"], "Tier 1 is an exit of the target"),
        ("0.32.0", ["--plan", "hsd-residual"], "a host compares tokens"),
        ("0.32.0", ["--draft", "small"], "write a plan file"),
        ("0.32.0", ["--speculative-tokens", "0"], "must be at least 1"),
        ("0.32.0", ["--api-key", "sk-1", "--api-key", "sk-2"], "takes one API key"),
    ],
)
def test_what_vllm_cannot_do_is_a_sentence_before_it_is_started(version, arguments, told, tiny, capsys, monkeypatch):
    monkeypatch.setattr(vllm_options, "vllm_version", lambda: version)
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("vLLM was started"))
    assert told in refused([tiny, "--engine", "vllm", *arguments], capsys)


def test_vllm_is_started_with_the_plan_and_the_key_where_nobody_reads_it(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vllm_options, "vllm_version", lambda: "0.32.0")
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))
    plan = tmp_path / "mine.toml"
    plan.write_text('stores = ["context"]\n[[tier]]\ndraft = "small"\n')
    options = ["--plan", str(plan), "--api-key", "sk-1", "--served-name", "mine", "--vllm-option=--max-num-seqs=4"]
    assert main(["serve", tiny, "--engine", "vllm", *options]) == 0
    [(_, command, environment)] = started
    assert tiny in command
    assert command[-3:] == ["--served-model-name", "mine", "--max-num-seqs=4"]
    asked = {name: json.loads(command[command.index(f"--{name}-config") + 1]) for name in ("speculative", "additional")}
    assert asked["speculative"]["model"] == "hierspec.hosts.vllm.Proposer"
    assert asked["additional"] == {"hierspec": {"plan": str(plan)}}
    assert environment["VLLM_API_KEY"] == "sk-1"
    assert "sk-1" not in " ".join(command)
