"""The load test itself: what it measures, what it notices, and a short soak."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import socket
import sys
import time

import pytest
from soak.serve_load import load, record_of

from hierspec.core.errors import HierspecError
from hierspec.prompts import BenchPrompt
from hierspec_bench.cli import main as bench
from hierspec_bench.serving.client import Address, Reply
from hierspec_bench.serving.load import Load, LoadTest, Way, _error_of_median, calls_of, served_name, summary
from hierspec_bench.serving.pauses import PauseWatch
from hierspec_bench.serving.process import ServerProcess, server_process

PROMPTS = [BenchPrompt("qa", ("abc abc",)), BenchPrompt("qa", ("the dog",))]


def ways(url: str) -> list[Way]:
    address = Address(url)
    return [
        Way("plain", address, {"plan": "plain"}, True),
        Way("auto", address, {"plan": "auto"}, True, "plain"),
    ]


def test_a_load_counts_every_token_and_finds_no_other_text(server):
    calls = calls_of(PROMPTS, 8, 12)
    loads = list(LoadTest(ways(server.url), calls, 8).run([1, 4], rounds=2))
    assert [(each.way, each.clients) for each in loads] == [
        ("plain", 1), ("auto", 1), ("plain", 4), ("auto", 4), ("auto", 1), ("plain", 1), ("auto", 4), ("plain", 4),
    ]  # fmt: skip
    expected = sum(
        len(server.language_model.generate(call["messages"], plan="plain", **options(call)).tokens) for call in calls
    )
    for each in loads:
        figures = each.figures()
        assert figures["tokens"] == expected
        assert (figures["errors"], figures["different_texts"]) == ([], 0)
    rows = summary(loads, "plain")
    assert len(rows) == 4
    assert all(row["over_baseline"] == 1 for row in rows if row["way"] == "plain")


def test_each_client_may_make_several_calls(server):
    calls = calls_of(PROMPTS, 12, 2)
    loads = list(LoadTest(ways(server.url), calls, 5, of_each_client=3).run([1, 4], rounds=1))
    assert [len(each.replies) for each in loads] == [5, 5, 12, 12]


def options(call: dict) -> dict:
    return {name: call[name] for name in ("max_tokens", "temperature", "seed")}


def test_another_text_is_noticed(server):
    test = LoadTest(ways(server.url), calls_of(PROMPTS, 8, 12), 8)
    list(test.run([1], rounds=1))
    test._alone["plain"][3] += "!"
    assert test.one(test.ways[1], 4).different == [3]


@pytest.mark.parametrize("count", [2, 6, 8])
def test_every_call_is_made_and_each_way_is_first_with_it(server, count):
    test, first = LoadTest(ways(server.url), calls_of(PROMPTS, count, 1), 2), {}

    def one(way, clients, round):
        size = max(clients, 2)
        for number in range(round * size, (round + 1) * size):
            first.setdefault((clients, number % count, round), way.name)
        return Load(way.name, clients, 1.0, [], [])

    test.one = one
    list(test.run([1, 2], rounds=8))
    assert all(
        {first[clients, number, round] for round in range(8) if (clients, number, round) in first} == {"plain", "auto"}
        for clients in (1, 2)
        for number in range(count)
    )


def test_the_error_of_a_median_ignores_few_disturbed_values():
    ratios = [0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.01, 0.99, 1.0]
    assert 0 < _error_of_median(ratios) < 0.02
    assert _error_of_median([*ratios, 0.3]) < 0.02
    assert _error_of_median([]) == 0
    assert _error_of_median([1.0]) == 0


def test_figures_by_hand():
    reply = Reply("abc", "stop", 3, began=0.0, pieces=[1.0, 1.5, 3.5], finished=4.0)
    figures = Load("plain", 1, 2.0, [reply], []).figures()
    assert figures["tokens_per_second"] == 1.5
    assert figures["first_ms"]["median"] == 1000
    assert figures["gap_ms"] == {"median": 1250, "p99": 2000, "longest": 2000, "longest_over_median": 1.6}


def test_who_comes_first_in_a_round_has_no_advantage():
    """The first way of a round computes prompts that the second finds in the cache. Left-over rounds do not count."""
    seconds = {"plain": [4.0, 3.0, 4.0, 3.0, 9.0], "auto": [3.0, 4.0, 3.0, 4.0, 1.0]}
    replies = [Reply("abc", "stop", 12)]
    loads = [Load(way, 1, each, replies, []) for way, times in seconds.items() for each in times]
    assert [row["over_baseline"] for row in summary(loads, "plain")] == [1.0, 1.0]
    few = summary([loads[0], loads[5]], "plain")
    assert [(row["over_baseline"], row["over_baseline_error"]) for row in few] == [(1.0, None), (1.333, None)]


_FAILS_LATER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("Traceback: the cause", flush=True)
if sys.argv[2] == "starts":
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_log_of_a_server_that_failed_is_shown(capsys):
    with server_process([sys.executable, "-c", _FAILS_LATER, "{port}", "starts"]):
        pass
    assert "the cause" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why_once(capsys):
    command = [sys.executable, "-c", _FAILS_LATER, "{port}", "ends"]
    with pytest.raises(HierspecError, match="the cause"), server_process(command):
        pass
    assert capsys.readouterr().err == ""


def test_time_within_pauses_of_the_machine():
    watch = PauseWatch()
    watch.pauses = [(1.0, 2.0), (5.0, 5.5)]
    assert watch.within(0.0, 0.5) == 0
    assert watch.within(1.5, 5.25) == 0.75
    assert watch.within(0.0, 9.0) == 1.5


def test_a_late_timer_is_a_pause():
    """A stopped process wakes up late, as all do on a machine that stands still."""
    with PauseWatch() as watch:
        while not watch.pauses:  # it may not have begun to sleep yet, so it is stopped again and again
            assert watch._process.poll() is None
            os.kill(watch._process.pid, signal.SIGSTOP)
            time.sleep(0.15)
            os.kill(watch._process.pid, signal.SIGCONT)
            time.sleep(0.15)
        assert watch.within(0.0, math.inf) > 0
    assert watch._process.returncode is not None


def test_a_client_that_vanishes_leaves_nothing_behind(server):
    address = Address(server.url)
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 300, "seed": 1, "temperature": 1.0}

    async def vanish() -> list[Reply]:
        return await asyncio.gather(*(address.chat(body, stop_after=1) for _ in range(8)))

    assert all(not reply.error for reply in asyncio.run(vanish()))


def test_a_short_soak_has_no_failure(server):
    process = ServerProcess(Address(server.url), os.getpid())
    soak = asyncio.run(load(process, random.Random(5), clients=8, seconds=3, distinct=12))
    assert soak.failures == []
    assert soak.answered > 0
    assert record_of(soak)["memory_bytes"][-1] > 0


def test_the_command_measures_a_server_that_runs(server, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"task": "qa", "turns": ["abc abc"]}\n')
    arguments = ["serve", server.url, "--clients", "2", "--rounds", "1", "--max-tokens", "6"]
    others = ["--prompts", str(prompts), "--others", f"same={server.url}", "--json"]
    assert bench.main([*arguments, *others]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ways"] == ["plain", "auto", "same"]
    assert document["command"].startswith("hierspec")
    assert [row["clients"] for row in document["summary"]] == [2, 2, 2]


@pytest.mark.parametrize(
    "arguments", [["--clients", "0"], ["--clients", "a"], ["ftp://x"], ["--others", "nothing"], ["--rounds", "0"]]
)
def test_wrong_arguments_are_refused_in_a_sentence(arguments, server):
    given = arguments if arguments[0].startswith("ftp") else [server.url, *arguments]
    with pytest.raises(HierspecError):
        bench.main(["serve", *given])


@pytest.mark.parametrize("others", ["nothing", "vllm=ftp://127.0.0.1", "vllm="])
def test_a_wrong_address_is_refused_before_a_server_is_started(others, monkeypatch):
    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("hierspec_bench.serving.process.our_server", start)
    with pytest.raises(HierspecError):
        bench.main(["serve", "--others", others])


def test_an_address_without_a_server_is_named():
    with socket.socket() as bound:  # takes a port, and does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(HierspecError, match=f"No server answers at {url}"):
            asyncio.run(served_name(Address(url)))
