"""Answer prompts under several plans and compare each with plain decoding: the same text first, then the time.

Prompts are 36 that ship, a public set by name (spec-bench, fetched once), or those of a file with one JSON object a
line, with `task` and `turns`. Plans and other engines run interleaved, prompt by prompt. With --output, a run that was
stopped is resumed when the same command is given again. The last line of standard output is one JSON document. Exits
with 1 where a plan that promises the same text wrote something else and no tie explains it; with 130 where it was
stopped. docs/bench.md says what is measured and how.

examples:
  hierspec bench run --plans plain,lookup,layerskip
  hierspec bench run --prompts spec-bench --limit 60 --max-tokens 128 --output result.json --report result.html
  hierspec bench run --plans lookup --baselines transformers --limit 30 --max-tokens 64 --repeats 3
  hierspec bench run --plans hd+,residual.toml --temperature 0,0.8,1
  hierspec bench run --baselines all --plans auto --weights int8 --report report.html
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.files import OutputFile
from hierspec.cli.report import Report
from hierspec.cli.status import DIFFERENT, INTERRUPTED
from hierspec_bench.cli import common, engines

if TYPE_CHECKING:
    from hierspec.core.sampling import Sampling
    from hierspec.language_model import LanguageModel
    from hierspec.progress import Progress
    from hierspec.prompts import BenchPrompt
    from hierspec_bench.journal import Journal
    from hierspec_bench.peers import Peer
    from hierspec_bench.run import SideBySide


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    common.add_prompts(parser)
    common.add_plans(parser)
    common.add_baselines(
        parser,
        "other engines to compare with: transformers, openvino, llama.cpp, llama.cpp-native, vllm and their variants "
        "such as openvino:lookup (docs/peers.md), separated by commas, or all",
    )
    parser.add_argument(
        "--peer-settings",
        "--baseline-settings",
        choices=("best", "again", "default"),
        default="best",
        help="search the best setting of each engine on a few prompts, once (best, the default) or once more (again); "
        "default: take its first that runs",
    )
    engines.add_allow_missing(parser)
    parser.add_argument("--batch", default="", metavar="N,…", help="run every plan also with so many prompts at once")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="run it all N times, stores as at first")
    parser.add_argument(
        "--record", type=OutputFile, metavar="FILE", help="keep plain decoding's answers, for store replay"
    )
    common.add_output(parser, "; a stopped run resumes from it")
    parser.add_argument("--restart", action="store_true", help="start over, whatever a stopped run has left")
    parser.add_argument(
        "--report", type=OutputFile, metavar="FILE", help="write a page with plots too, such as report.html"
    )
    options.add_sampling(parser, several=True)


def run(arguments: argparse.Namespace) -> int:
    samplings = options.chosen_samplings(arguments)
    options.at_least_one(arguments, "repeats")
    batches = [size for size in common.batch_sizes("--batch", arguments.batch) if size > 1]
    listed = common.chosen_plans(arguments)
    engines.check(arguments, samplings)
    name, prompts = common.chosen_prompts(arguments)
    model = options.load_model(arguments, plans=listed)
    plans = {name: model.plan(name) for name in listed}
    for plan in plans.values():
        model.hierarchy(plan)  # raises for a plan that cannot run, before anything is measured

    from hierspec_bench.provenance import bandwidth, prompt_set, provenance
    from hierspec_bench.run import SideBySide

    with progress_bars() as progress, _baselines(arguments, model, prompts, samplings, progress) as baselines:
        about = common.about_model(model) | provenance(model, plans.values(), progress)
        about |= {"prompts": prompt_set(name, prompts), "bandwidth": bandwidth(model)}
        bench = SideBySide(model, prompts, plans, samplings, baselines.peers, batches, arguments.repeats)
        journal = _journal(arguments, bench, about)
        with _stoppable(), suppress(KeyboardInterrupt):
            bench.run(progress, journal)
    return _finish(arguments, bench, about, baselines.absent, journal)


@dataclass(frozen=True)
class _Baselines:
    """Other engines that run, and why others do not."""

    peers: Sequence[Peer]
    absent: dict[str, str]


@contextmanager
def _baselines(
    arguments: argparse.Namespace,
    model: LanguageModel,
    prompts: Sequence[BenchPrompt],
    samplings: Sequence[Sampling],
    progress: Progress,
) -> Iterator[_Baselines]:
    """The requested engines, loaded; always closed at the end."""
    if not arguments.peers:
        yield _Baselines((), {})
        return
    from hierspec.prompts import spread
    from hierspec_bench.peers import open_peers
    from hierspec_bench.peers.search import PROMPTS

    most = samplings[0].max_tokens
    longest = max(sum(len(model.encode(turn)) + most for turn in prompt.turns) for prompt in prompts)
    peers, absent = open_peers(
        arguments.peers,
        model,
        [model.encode(prompt.turns[0]) for prompt in spread(list(prompts), PROMPTS)],
        progress,
        settings=arguments.peer_settings,
        source=Path(arguments.model) if arguments.model else None,
        temperature=min(sampling.temperature for sampling in samplings),
        context=longest,
    )
    try:
        for name, reason in absent.items():
            engines.miss(name, reason, arguments)
        yield _Baselines(peers, absent)
    finally:
        for peer in peers:
            peer.close()


def _finish(
    arguments: argparse.Namespace,
    bench: SideBySide,
    about: Mapping[str, Any],
    absent: Mapping[str, str],
    journal: Journal | None,
) -> int:
    """Writes the results: all of them, or those of a stopped run."""
    from hierspec.planner.simulation.replay import write_records
    from hierspec_bench.cli.table import show
    from hierspec_bench.document import document_of
    from hierspec_bench.page import write_report
    from hierspec_bench.record import PEER, Record
    from hierspec_bench.run import PLAIN, records

    complete = bench.done == bench.total
    document = document_of(bench, about, absent)
    record = Record.of(document)
    if arguments.record is not None and complete:
        write_records(arguments.record, records(bench.results[0][PLAIN]))
    if arguments.report is not None and document["plans"]:
        write_report(record, arguments.report)
    report = Report.of(arguments)
    show(record, report)
    # A run that stopped before its first prompt was done must not overwrite an earlier run's file.
    report.document(document, arguments.output if bench.done else None)
    if journal is not None:
        journal.close(finished=complete)
    if not complete:
        if journal is not None:
            note("The same command resumes from here.")
        return INTERRUPTED
    plans = [entry for setting in record.settings for entry in setting.entries if entry.kind != PEER]
    return DIFFERENT if any(plan.promises_text and plan.figures.different for plan in plans) else 0


def _journal(arguments: argparse.Namespace, bench: SideBySide, about: Mapping[str, Any]) -> Journal | None:
    """The journal of the run, with every setting that must be unchanged to resume it."""
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
        note(f"Resuming the run that {journal.path} keeps.")
    return journal


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does, so that what was measured is not lost."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
