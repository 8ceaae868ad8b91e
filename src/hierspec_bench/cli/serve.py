"""Put a server under load: throughput, time to the first token and gaps at several numbers of clients, with speculation
and without it in the same server, and other engines' servers beside it. Every text is compared with that of the same
call alone.

examples:
  hierspec bench serve
  hierspec bench serve ./my-model --clients 1,16 --unbatched --output serve.json
  hierspec bench serve http://127.0.0.1:8000 --others llama.cpp=http://127.0.0.1:8080,vllm=http://127.0.0.1:8001
  hierspec bench serve --baselines llama.cpp
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.options import names
from hierspec.cli.parser import text
from hierspec.cli.report import Report, command_line
from hierspec.cli.status import DIFFERENT
from hierspec.core.errors import HierspecError
from hierspec_bench.cli import common

if TYPE_CHECKING:
    from hierspec_bench.serving.load import Load, Way

_PLAIN = "plain"
_COLUMNS = ("clients", "way", "tokens/s", "over\nplain", "first\nms", "gap\nms", "gap p99\nms", "longest\n/ median")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    common.add_load(parser, rounds=3)
    parser.add_argument("--unbatched", action="store_true", help="also a server that answers one call after another")
    parser.add_argument(
        "--others", type=text, default="", metavar="NAME=URL,…", help="other engines' servers that run already"
    )
    parser.add_argument("--key", type=text, default="", help="API key of the server, where URL needs one")
    common.add_plans(parser)
    common.add_baselines(parser, "other engines whose servers are started on the same file: llama.cpp")
    common.add_prompts(parser)
    parser.add_argument("--serve-options", type=text, default="", metavar="…", help="more options of hierspec serve")
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    clients = common.chosen_clients(arguments)
    title, prompts = common.chosen_prompts(arguments)
    from hierspec.machine import machine
    from hierspec_bench.serving.load import LoadTest, calls_of, summary

    report = Report.of(arguments)
    calls = calls_of(prompts, max(arguments.each * max(clients), arguments.calls), arguments.max_tokens)
    loads: list[Load] = []
    with ExitStack() as servers, progress_bars() as progress:
        progress("Starting servers", 0, 0)
        ways = _ways(arguments, servers)
        test = LoadTest(ways, calls, arguments.calls, progress, arguments.each)
        for load in test.run(clients, arguments.rounds):
            loads.append(load)
    rows = summary(loads, _PLAIN)
    report.table("", (*_COLUMNS, "other\ntexts", "errors"), [_row(row) for row in rows])
    document = {
        "command": command_line(),
        "machine": machine(),
        "prompts": title,
        "max_tokens": arguments.max_tokens,
        "rounds": arguments.rounds,
        "calls": arguments.calls,
        "calls_of_each_client": arguments.each,
        "ways": [way.name for way in ways],
        "summary": rows,
        "loads": [load.figures() for load in loads],
    }
    report.document(document, arguments.output)
    ours = {way.name for way in ways if way.apart}
    wrong = [row for row in rows if row["errors"] or (row["different_texts"] and row["way"] in ours)]
    return DIFFERENT if wrong else 0


def _ways(arguments: argparse.Namespace, servers: ExitStack) -> list[Way]:
    """What to measure: plans in our server, the same unbatched, and other servers."""
    from hierspec_bench.serving.client import Address
    from hierspec_bench.serving.load import Way
    from hierspec_bench.serving.others import start_other
    from hierspec_bench.serving.process import our_server

    source, more = arguments.model, arguments.serve_options.split()
    others = [_other(entry) for entry in names(arguments.others)]  # refused before any server is started
    if source and "://" in str(source):
        if arguments.unbatched or arguments.peers:
            raise HierspecError(
                "--unbatched and --baselines start servers for a model: name that instead of an address."
            )
        ours = Address(str(source), arguments.key)
    else:
        ours = servers.enter_context(our_server([str(source)] if source else [], more)).address
    plans = [_PLAIN, *(plan for plan in names(arguments.plans) if plan != _PLAIN)]
    ways = [Way(plan, ours, {"plan": plan}, True, "" if plan == _PLAIN else _PLAIN) for plan in plans]
    if arguments.unbatched:
        alone = servers.enter_context(our_server([str(source)] if source else [], [*more, "--most-running", "1"]))
        ways.append(Way("unbatched plain", alone.address, {"plan": _PLAIN}, True, _PLAIN))
    for name in names(arguments.peers):
        ways.append(Way(name, servers.enter_context(start_other(name, source)).address))
    return [*ways, *others]


def _other(entry: str) -> Way:
    from hierspec_bench.serving.client import Address
    from hierspec_bench.serving.load import Way

    name, equals, url = entry.partition("=")
    if not equals:
        raise HierspecError(f"--others takes NAME=URL, not {entry!r}.")
    return Way(name, Address(url))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = "" if row["over_baseline"] is None else f"{row['over_baseline']:.2f}x"
    if row["over_baseline_error"]:
        ratio += f" ± {row['over_baseline_error']:.2f}"
    figures = [f"{row[key]:.1f}" for key in ("first_ms", "gap_ms", "gap_p99_ms", "longest_over_median")]
    speed = f"{row['tokens_per_second']:.1f}"
    return (str(row["clients"]), row["way"], speed, ratio, *figures, str(row["different_texts"]), str(row["errors"]))
