"""How long the planner's search takes, by the number of tiers that it may stack.

It made docs/results/plan-search.json and docs/pictures/plan-search.svg; --draw makes the chart of a record again.

examples:
  python experiments/search_growth.py --output plan-search.json
  python experiments/search_growth.py --draw docs/results/plan-search.json --output docs/pictures/plan-search.svg
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hierspec.cli.console import progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.machine import machine
from hierspec.pacing.costs import Costs
from hierspec.paths import whole_file
from hierspec.planner.formula.figures import AcceptanceRates, Figures, StoreFigures, TierFigures
from hierspec.planner.formula.search import USUAL, search, shortest
from hierspec.plot import Axis, Chart, Line
from hierspec.progress import Progress, silent

TIERS = (2, 5, 10, 20, 35, 50, 100)


def synthetic_figures(tiers: int, seed: int = 0) -> Figures:
    """A target and ever cheaper and worse tiers, each of which may draft for any above it; each may ask a store."""
    dice = random.Random(seed)
    costs = sorted((20e-3 * dice.uniform(0.005, 1.0) for _ in range(tiers)), reverse=True)
    listed = tuple(
        TierFigures(f"tier {level}", Costs((1, 64), (cost, cost * dice.uniform(1.1, 4.0))))
        for level, cost in enumerate(costs)
    )
    survivals = {}
    for level, above in enumerate(listed):
        for lower in range(level + 1, tiers):
            nearness = (costs[lower] / costs[level]) ** 0.3
            rate = min(0.98, max(0.05, nearness * dice.uniform(0.8, 1.1)))
            fading = tuple(rate * 0.98**depth for depth in range(4))
            survivals[above.name, listed[lower].name] = AcceptanceRates(
                fading, tuple(min(1.0, 1.08 * share) for share in fading), tuple(0.7 * share for share in fading)
            )
    stores = {tier.name: (StoreFigures("copy", (0.2, 0.08, 0.06, 0.06), 4, 3e-5),) for tier in listed}
    return Figures(listed, survivals, stores)


def growth(counts: Sequence[int] = TIERS, rounds: int = 3, progress: Progress = silent) -> list[dict[str, Any]]:
    """CPU seconds of the shortest path alone and of the whole search, the minimum of a few rounds."""
    rows = []
    for number, count in enumerate(counts):
        progress("Searching", number, len(counts))
        figures = synthetic_figures(count)
        path, whole = [], []
        for _ in range(rounds):
            start = time.process_time()
            shortest(figures, USUAL)
            middle = time.process_time()
            search(figures)
            path.append(middle - start)
            whole.append(time.process_time() - middle)
        rows.append({"tiers": count, "path_seconds": round(min(path), 5), "search_seconds": round(min(whole), 5)})
    progress("Searching", len(counts), len(counts))
    return rows


def chart(measured: Sequence[dict[str, Any]]) -> Chart:
    return Chart(
        "The search by the number of tiers",
        Axis("tiers", logarithmic=True),
        Axis("processor seconds", logarithmic=True),
        [
            Line("whole search", [(row["tiers"], row["search_seconds"]) for row in measured]),
            Line("shortest path alone", [(row["tiers"], row["path_seconds"]) for row in measured]),
        ],
        f"blocks of up to {USUAL.longest}, stacks of up to {USUAL.deepest} tiers, a store at every tier",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON document, with a chart beside it")
    parser.add_argument("--draw", type=Path, metavar="RECORD", help="only write the chart of a record to --output")


def run(arguments: argparse.Namespace) -> int:
    if arguments.draw is not None:
        _draw(json.loads(arguments.draw.read_text(encoding="utf-8"))["growth"], arguments.output or Path("search.svg"))
        return 0
    with progress_bars() as progress:
        measured = growth(progress=progress)
    if arguments.output is not None:
        _draw(measured, arguments.output.with_suffix(".svg"))
    hand_out({"machine": machine(), "command": command_line(), "growth": measured}, arguments.output)
    return 0


def _draw(measured: Sequence[dict[str, Any]], path: Path) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(chart(measured).svg(), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
