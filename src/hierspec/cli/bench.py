"""Compare plans on prompts: equality with plain decoding first, then time.

Prompts are 36 that ship, a public set by name (spec-bench, fetched once), or those of a file with one JSON object a
line, with `task` and `turns`. Plans and peers run interleaved, prompt by prompt. With --output, a run that was stopped
goes on where it was when the same command is given again. The last line of standard output is one JSON document. Exits
with 1 where a plan that promises the same text wrote something else and no tie explains it; with 130 where it was
stopped. docs/bench.md says what is measured and how.

examples:
  hierspec bench --plans plain,lookup,layerskip
  hierspec bench --prompts spec-bench --limit 60 --max-tokens 128 --output result.json --report result.html
  hierspec bench --plans lookup --peers transformers --limit 30 --max-tokens 64 --repeats 3
  hierspec bench --plans hd+,residual.toml --temperature 0,0.8,1
  hierspec bench --install-peers
  hierspec bench --peers all --plans auto --weights int8 --report report.html
  hierspec bench --compare before.json after.json --tolerance 0.05
  hierspec bench --passes --peers transformers
  hierspec bench --store-times --output stores.json
  hierspec bench --store-soak --output soak.json
  hierspec bench --synthetic --rates token --limit 8 --max-tokens 128
  hierspec bench --phases --plans plain,lookup,draft,hd+ --max-tokens 96 --output phases.json
  hierspec bench --equality-tokens 100000 --weights int8 --max-tokens 128 --output equality.json
  hierspec bench default-ee --exits 2,4,8,12 --prompts prompts.jsonl --limit 12 --output exits.json
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli import bench_peers, options
from hierspec.cli.bench_compare import compare
from hierspec.cli.bench_equality import run_equality
from hierspec.cli.bench_exits import pairs_of_exits, synthetic_setting
from hierspec.cli.bench_passes import passes
from hierspec.cli.bench_phases import run_phases
from hierspec.cli.bench_stores import store_soak, store_times
from hierspec.cli.bench_table import about_model, show
from hierspec.cli.console import hand_out, note, progress_bars
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec_bench.journal import Journal
    from hierspec_bench.run import SideBySide


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--prompts", metavar="SET", help="own (default: 36 that ship), spec-bench, or a file of JSON lines: task, turns"
    )
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"),
        help="run nothing: what changed between two documents; exits with 1 where B is slower or lost equality",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="X",
        help="--compare: slower by less is let pass (default 0.05)",
    )
    parser.add_argument(
        "--passes", action="store_true", help="measure single passes instead: by width, context and part"
    )
    parser.add_argument(
        "--store-times", action="store_true",
        help="measure guessing and learning of stores by size instead, with no model; --output writes a chart too",
    )  # fmt: skip
    parser.add_argument(
        "--store-soak", action="store_true",
        help="let a history learn 200,000 requests and be killed 100 times instead: are limits kept, is text lost?",
    )  # fmt: skip
    parser.add_argument("--largest", type=int, metavar="N", help="--store-times: no store larger than N tokens")
    parser.add_argument(
        "--synthetic", action="store_true", help="HiSpec's setting on a random model of 32 layers: who agrees is played"
    )
    parser.add_argument(
        "--rates", choices=("block", "token"), default="block",
        help="synthetic: what the paper's rates are shares of (all drafted tokens, or those whose predecessors stood)",
    )  # fmt: skip
    parser.add_argument(
        "--exits", default="", metavar="N,N,…",
        help="every pair of these exits as draft and verifier, and each alone, beside what the formula predicts",
    )  # fmt: skip
    parser.add_argument(
        "--phases", action="store_true",
        help="text from code to prose and back, then 1, 4, 16 and 1 requests side by side: auto against --plans",
    )  # fmt: skip
    parser.add_argument(
        "--equality-tokens", type=int, metavar="N",
        help="compare N tokens of a plan with plain decoding's instead, sampled too, alone and in batches; --output "
        "is written on the way and gone on from",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the tasks")
    parser.add_argument("--plans", default="auto", help="plans or TOML files, separated by commas (default: auto)")
    bench_peers.add_arguments(parser)
    parser.add_argument(
        "--batch", default="", metavar="N,…", help="run every plan also with so many prompts side by side"
    )
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="run it all N times, stores as at first")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what plain decoding wrote, for store replay")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the JSON document to a file too; keeps a stopped run"
    )
    parser.add_argument("--restart", action="store_true", help="begin anew, whatever a stopped run has left")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page with plots too, such as report.html")
    parser.add_argument("--json", action="store_true", help="only the JSON document, no table")
    options.add_sampling(parser, several=True)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        return compare(arguments)
    samplings = options.chosen_samplings(arguments)
    peers = [name for name in arguments.peers.split(",") if name]
    if arguments.install_peers is not None:
        return bench_peers.install(arguments)
    if arguments.passes:
        return passes(arguments, peers)
    if arguments.store_times:
        return store_times(arguments)
    if arguments.store_soak:
        return store_soak(arguments)
    if len(samplings) > 1 and (arguments.synthetic or arguments.exits or arguments.phases):
        raise HierspecError("--synthetic, --exits and --phases take one temperature.")
    if arguments.synthetic:
        return synthetic_setting(arguments)
    from hierspec.prompt_sets import find_prompts
    from hierspec.prompts import spread

    for option, least in (("limit", 1), ("repeats", 1)):
        if (number := getattr(arguments, option)) is not None and number < least:
            raise HierspecError(f"--{option} must be at least {least}, not {number}.")
    with progress_bars() as progress:
        name, prompts = find_prompts(arguments.prompts, progress)
    if arguments.limit is not None:
        prompts = spread(prompts, arguments.limit)
    batches = _batches(arguments.batch)
    model = options.load_model(arguments)
    if arguments.exits:
        return pairs_of_exits(arguments, model, name, prompts)
    if arguments.phases:
        return run_phases(arguments, model, prompts)
    if arguments.equality_tokens is not None:
        return run_equality(arguments, model, prompts)
    plans = {name: model.plan(name) for name in arguments.plans.split(",") if name}
    for plan in plans.values():
        model.hierarchy(plan)  # a plan that cannot run is told before anything is measured

    from hierspec_bench.provenance import bandwidth, prompt_set, provenance
    from hierspec_bench.run import SideBySide

    with progress_bars() as progress, bench_peers.opened(arguments, model, prompts, samplings, progress) as ready:
        about = about_model(model) | provenance(model, plans.values(), progress)
        about |= {"prompts": prompt_set(name, prompts), "bandwidth": bandwidth(model)}
        bench = SideBySide(model, prompts, plans, samplings, ready.peers, batches, arguments.repeats)
        journal = _journal(arguments, bench, about)
        with _stoppable(), suppress(KeyboardInterrupt):
            bench.run(progress, journal)
    return _finish(arguments, bench, about, ready.absent, journal)


def _finish(
    arguments: argparse.Namespace,
    bench: SideBySide,
    about: Mapping[str, Any],
    absent: Mapping[str, str],
    journal: Journal | None,
) -> int:
    """Hands out what there is, all of it or as far as a stopped run has come."""
    from hierspec.planner.simulation.replay import write_records
    from hierspec_bench.document import document_of
    from hierspec_bench.run import PLAIN, records

    complete = bench.done == bench.total
    result = document_of(bench, about, absent)
    if arguments.record is not None and complete:
        write_records(arguments.record, records(bench.found[0][PLAIN]))
    if arguments.report is not None and result["plans"]:
        from hierspec_bench.page import write_report

        write_report(result, arguments.report)
    if not arguments.json:
        show(result)
    hand_out(result, arguments.output if bench.done else None)  # what an earlier run left is worth more than nothing
    if journal is not None:
        journal.close(finished=complete)
    if not complete:
        if journal is not None:
            note("The same command goes on from here.")
        return 130
    promised = [
        figures
        for part in (result, *result["other_temperatures"])
        for figures in part["plans"].values()
        if figures["promises_text"]
    ]
    return 1 if any(plan["identical"] + plan["ties"] < plan["prompts"] for plan in promised) else 0


def _journal(arguments: argparse.Namespace, bench: SideBySide, about: Mapping[str, Any]) -> Journal | None:
    """Where the run is kept as it goes, with all that must be the same for going on with it."""
    if arguments.output is None:
        return None
    import torch

    from hierspec.machine import machine
    from hierspec_bench.journal import Journal, journal_path

    setting = {
        "model": [about["model"], about["files"]],
        "dtype": [about["dtype"], about["weights"], about["products"]],
        "machine": [machine(), torch.get_num_threads(), about["affinity"], about["versions"], about["decoder"]],
        "plans": {name: plan.to_toml() for name, plan in bench.plans.items()},
        "stores": about["stores"],
        "prompts": about["prompts"],
        "sampling": [vars(sampling) for sampling in bench.samplings],
        "batch and repeats": [list(bench.batches), bench.repeats],
        "peers": [[peer.name, *(peer.about.get(key) for key in ("version", "setting"))] for peer in bench.peers],
    }
    journal = Journal(journal_path(arguments.output), setting, arguments.restart)
    if journal.entries:
        note(f"Going on with the run that {journal.path} keeps.")
    return journal


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does, so that what was measured is not lost."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _batches(text: str) -> list[int]:
    try:
        found = [int(number) for number in text.split(",") if number]
    except ValueError as error:
        raise HierspecError(f"--batch must be numbers separated by commas, not {text!r}.") from error
    if any(number < 1 for number in found):
        raise HierspecError(f"--batch must be at least 1, not {text}.")
    return [number for number in found if number > 1]
