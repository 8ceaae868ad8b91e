"""How long the planner's search takes, by the number of tiers that it may stack.

python -m hierspec_bench.planning FOLDER     writes plan-search.json and its chart there
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hierspec.machine import machine
from hierspec.pacing.costs import Costs
from hierspec.paths import whole_file
from hierspec.planner.formula.figures import AcceptanceRates, Figures, StoreFigures, TierFigures
from hierspec.planner.formula.search import USUAL, search, shortest
from hierspec.plot import Axis, Chart, Line
from hierspec.progress import Progress, silent

TIERS = (2, 5, 10, 20, 35, 50, 100)


def synthetic_figures(tiers: int, seed: int = 0) -> Figures:
    """A target and ever cheaper and worse tiers below it, any of which may stand under any above it; each asks a store
    if told to."""
    dice = random.Random(seed)
    costs = sorted((20e-3 * dice.uniform(0.005, 1.0) for _ in range(tiers)), reverse=True)
    listed = tuple(
        TierFigures(f"tier {place}", Costs((1, 64), (cost, cost * dice.uniform(1.1, 4.0))))
        for place, cost in enumerate(costs)
    )
    survivals = {}
    for place, above in enumerate(listed):
        for lower in range(place + 1, tiers):
            nearness = (costs[lower] / costs[place]) ** 0.3
            rate = min(0.98, max(0.05, nearness * dice.uniform(0.8, 1.1)))
            fading = tuple(rate * 0.98**depth for depth in range(4))
            survivals[above.name, listed[lower].name] = AcceptanceRates(
                fading, tuple(min(1.0, 1.08 * one) for one in fading), tuple(0.7 * one for one in fading)
            )
    stores = {tier.name: (StoreFigures("copy", (0.2, 0.08, 0.06, 0.06), 4, 3e-5),) for tier in listed}
    return Figures(listed, survivals, stores)


def growth(counts: Sequence[int] = TIERS, rounds: int = 3, progress: Progress = silent) -> list[dict[str, Any]]:
    """Processor seconds of the shortest path alone and of the whole search, the least of a few rounds."""
    found = []
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
        found.append({"tiers": count, "path_seconds": round(min(path), 5), "search_seconds": round(min(whole), 5)})
    progress("Searching", len(counts), len(counts))
    return found


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


def main(folder: Path) -> None:
    measured = growth()
    document = {"machine": machine(), "command": "python -m hierspec_bench.planning", "growth": measured}
    for name, text in (
        ("plan-search.json", json.dumps(document, indent=1) + "\n"),
        ("plan-search.svg", chart(measured).svg()),
    ):
        with whole_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
