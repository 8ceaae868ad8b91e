"""What sequential access saves: microseconds of stores a pass where all are asked, and where the next is asked only
while it pays. Recorded answers are replayed, so no model is loaded.

Under a fixed plan the next store is asked while the draft has room: that changes no draft. Under an adaptive plan it is
asked while what it adds is worth its time, so that depends on how long a pass takes: two machines' costs are tried, and
the speed-up over plain decoding after prefill is worked out for each. Both ways run in turn, several times.

It made docs/results/store-access.json.

examples:
  hierspec bench run --prompts prompts.jsonl --plans plain --record answers.jsonl
  python experiments/store_access.py answers.jsonl --output store-access.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.hierarchy import FixedPace, Tier
from hierspec.core.interfaces import Round
from hierspec.machine import machine
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.costs import Costs
from hierspec.pacing.pace import AdaptivePace
from hierspec.planner.simulation.ablation import Replayed, distinct
from hierspec.planner.simulation.replay import Record, read_records, replay
from hierspec.planner.simulation.trace_scorer import TraceScorer
from hierspec.progress import Progress, silent
from hierspec.stores import Home, open_store

# Seconds of the default model's passes by rows: one H200, and two Neoverse-N1 cores in int8.
MACHINES = {
    "gpu": Costs((1, 16, 64), (0.66e-3, 0.73e-3, 0.97e-3)),
    "cpu": Costs((1, 4, 8, 16, 64), (5.9e-3, 9.4e-3, 17.2e-3, 32.0e-3, 128e-3)),
}
FIXED_BUDGETS = (7, 24, 55)
ADAPTIVE_BUDGET = 24


class AllAsked(FixedPace):
    def asks(self, round: Round, store: str) -> bool:
        return True


class AllAskedAdaptive(AdaptivePace):
    def asks(self, round: Round, store: str) -> bool:
        return True


def settings() -> list[tuple[str, int, Costs | None]]:
    """Name, budget, and costs if the plan adapts."""
    fixed: list[tuple[str, int, Costs | None]] = [(f"fixed, {budget} nodes", budget, None) for budget in FIXED_BUDGETS]
    return fixed + [(f"adaptive, {name}", ADAPTIVE_BUDGET, costs) for name, costs in MACHINES.items()]


def paces(costs: Costs | None) -> dict[str, FixedPace]:
    """New paces, which have learnt nothing."""
    if costs is None:
        return {"all": AllAsked(), "in turn": FixedPace()}
    return {"all": AllAskedAdaptive(costs, Appraiser(costs)), "in turn": AdaptivePace(costs, Appraiser(costs))}


def measure(
    records: Sequence[Record],
    stores: Sequence[str],
    home: Home,
    vocabulary: int,
    repeats: int = 3,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Every setting with all stores asked and with stores asked in turn; times are medians over repeats."""
    rows = []
    for number, (name, budget, costs) in enumerate(settings()):
        runs: dict[str, list[dict[str, Any]]] = {"all": [], "in turn": []}
        for repeat in range(repeats):
            for asked, pace in list(paces(costs).items())[:: 1 if repeat % 2 else -1]:
                opened = tuple(store for store in (open_store(each, home, False) for each in stores) if store)
                tier = Tier(TraceScorer("target", vocabulary), 1, opened, budget, merge=True)
                replayed = replay(records, replace(tier, pace=pace))
                runs[asked].append(Replayed(tuple(stores), replayed, costs).figures())
            progress("Replaying", number * repeats + repeat + 1, len(settings()) * repeats)
        rows.append({"setting": name} | {asked: _medians(figures) for asked, figures in runs.items()})
    return rows


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: round(median(run[name] for run in runs), 3) for name in runs[0] if name != "tasks"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("record", type=Path, metavar="RECORD", help="made by: hierspec bench run --record FILE")
    parser.add_argument("--use", default="context,history,corpus?", metavar="STORES", help="in the order of asking")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every setting (default 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON document to a file too")
    options.add_stores_folder(parser)


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "repeats")
    records, stores = distinct(read_records(arguments.record)), options.names(arguments.use)
    _, vocabulary, home = options.load_home(arguments)
    with progress_bars() as progress:
        rows = measure(records, stores, home, vocabulary, arguments.repeats, progress)
    for row in rows:
        before, after = row["all"], row["in turn"]
        speedups = ""
        if "predicted_speedup" in after:
            speedups = f"; speed-up {before['predicted_speedup']}x -> {after['predicted_speedup']}x"
        note(
            f"{row['setting']}: {before['drafting_us_per_pass']} -> {after['drafting_us_per_pass']} us a pass, tokens "
            f"a pass {before['tokens_per_pass']} -> {after['tokens_per_pass']}{speedups}"
        )
    about = {"machine": machine(), "command": command_line(), "records": len(records), "repeats": arguments.repeats}
    hand_out(about | {"use": stores, "stores": home.beginning(), "settings": rows}, arguments.output)
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
