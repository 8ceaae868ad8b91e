"""Run recorded answers through stores, with no model: how many tokens a pass would have brought.

examples:
  hierspec store replay answers.jsonl --use context,history
  hierspec store replay ./my-model answers.jsonl --ablation context,history,corpus --costs passes.json
"""

from __future__ import annotations

import argparse
from typing import Any

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.files import InputFile, OutputFile
from hierspec.cli.report import Report, command_line
from hierspec.core.errors import HierspecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("record", type=InputFile, metavar="RECORD", help="made by: hierspec bench run --record FILE")
    parser.add_argument("--use", default="context", metavar="STORES", help="names, separated by commas, asked in turn")
    parser.add_argument(
        "--ablation",
        nargs="?",
        const="context,history,corpus?",
        metavar="STORES",
        help="each of these alone, every pair, and all (default: context, history and, where there is one, corpus)",
    )
    parser.add_argument("--budget", type=int, default=7, metavar="N", help="nodes of a proposal (default 7)")
    parser.add_argument(
        "--costs",
        type=InputFile,
        metavar="FILE",
        help="made by bench passes --output FILE: verify only what is worth its time, and predict the speed-up",
    )
    parser.add_argument("--output", type=OutputFile, metavar="FILE", help="write the JSON document to a file too")
    parser.add_argument("--first-only", action="store_true", help="the first store with a proposal, not all merged")
    options.add_stores_folder(parser)
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.ablation is not None and arguments.first_only:
        raise HierspecError("An ablation merges what all stores propose; leave out --first-only.")
    options.at_least_one(arguments, "budget")
    from hierspec.assembly.measured_costs import read_costs
    from hierspec.planner.simulation.ablation import ablation, answered_before, distinct, replay_with
    from hierspec.planner.simulation.replay import read_records
    from hierspec.stores import open_store
    from hierspec.stores.history import SHARED

    recorded = read_records(arguments.record)
    if not recorded:
        raise HierspecError(f"{arguments.record} holds no records; make some with: hierspec bench run --record FILE")
    records = distinct(recorded)
    costs = None if arguments.costs is None else read_costs(arguments.costs)
    _, vocabulary, home = options.load_home(arguments)
    about: dict[str, Any] = {
        "command": command_line(),
        "records": len(records),
        "repeats_left_out": len(recorded) - len(records),
        "budget": arguments.budget,
        "adapt": costs is not None,
        "stores": home.beginning(),
        "answers_known_before": 0,
    }
    if home.has_history():
        with home.open_history() as built:
            about["answers_known_before"] = answered_before(records, built.documents(SHARED))
    if about["answers_known_before"]:
        note(f"The history was built on {about['answers_known_before']} of these prompts: it knows their answers.")

    names = options.names(arguments.ablation or arguments.use)
    with progress_bars() as progress:
        if arguments.ablation is None:
            opened = [open_store(name, home, lasting=False) for name in names]
            stores = [store for store in opened if store is not None]
            merge = not arguments.first_only
            replays = [replay_with(records, stores, arguments.budget, vocabulary, merge, costs, progress)]
        else:
            replays = ablation(
                records,
                names,
                lambda name: open_store(name, home, lasting=False),
                arguments.budget,
                vocabulary,
                costs,
                progress,
            )
    report = Report.of(arguments)
    combinations = {" + ".join(replay.stores): replay.figures() for replay in replays}
    _show(report, combinations)
    if arguments.ablation is None:
        document = about | replays[0].figures() | {"tiers": replays[0].everything().to_json()}
    else:
        document = about | {"combinations": combinations}
    report.document(document, arguments.output)
    return 0


def _show(report: Report, combinations: dict[str, dict[str, Any]]) -> None:
    report.table(
        "",
        ("stores", "tokens/pass", "nodes/pass", "us drafting/pass", "predicted\nspeed-up"),
        [
            (
                name,
                f"{figures['tokens_per_pass']:.2f}",
                f"{figures['nodes_per_pass']:.1f}",
                f"{figures['drafting_us_per_pass']:.0f}",
                f"{figures['predicted_speedup']:.2f}x" if "predicted_speedup" in figures else "",
            )
            for name, figures in combinations.items()
        ],
    )
