"""`hierspec serve` as a process: it says where it listens, answers, and stops when it is told to."""

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
