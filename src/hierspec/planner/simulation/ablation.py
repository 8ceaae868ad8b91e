"""What each store is worth: recorded answers replayed with every store alone, with every pair, and with all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from hierspec.core.hierarchy import FIXED, Tier
from hierspec.core.interfaces import Store
from hierspec.core.stats import Stats
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.costs import Costs
from hierspec.pacing.pace import AdaptivePace
from hierspec.planner.simulation.played import PlayedScorer
from hierspec.planner.simulation.replay import Record, replay
from hierspec.progress import Progress, silent

_BEGINNING = 24  # tokens by which an answer is known again


@dataclass(frozen=True)
class Replayed:
    """What a set of stores did for recorded answers, over all of them and by task."""

    stores: tuple[str, ...]
    tasks: dict[str, Stats]
    costs: Costs | None = None  # by which guesses were chosen; None: all within the budget were verified

    def everything(self) -> Stats:
        total = Stats()
        for stats in self.tasks.values():
            total.add(stats)
        return total

    def figures(self) -> dict[str, Any]:
        everything = self.everything()
        return self._of(everything) | {"tasks": {task: self._of(stats) for task, stats in self.tasks.items()}}

    def _of(self, stats: Stats) -> dict[str, Any]:
        target, passes = stats.tiers[0], max(1, stats.passes)
        figures = {
            "tokens_per_pass": round(stats.tokens_per_pass, 3),
            "nodes_per_pass": round(target.proposed.total() / passes, 2),
            "drafting_us_per_pass": round(1e6 * target.store_seconds / passes, 1),
        }
        if self.costs is not None:
            plain = target.written * self.costs.seconds(1)
            figures["predicted_speedup"] = round(plain / (target.expected_seconds + target.store_seconds), 3)
        return figures


def replay_with(
    records: Sequence[Record],
    stores: Sequence[Store],
    budget: int,
    vocabulary: int,
    merge: bool = True,
    costs: Costs | None = None,
    progress: Progress = silent,
) -> Replayed:
    """The stores guess for the records, in their order; with `costs` only what is worth its time is verified."""
    pace = FIXED if costs is None else AdaptivePace(costs, Appraiser(costs))
    tier = Tier(PlayedScorer("target", vocabulary), 1, tuple(stores), budget, merge, pace=pace)
    return Replayed(tuple(store.name for store in stores), replay(records, tier, progress), costs)


def ablation(
    records: Sequence[Record],
    names: Sequence[str],
    open_store: Callable[[str], Store | None],
    budget: int,
    vocabulary: int,
    costs: Costs | None = None,
    progress: Progress = silent,
) -> list[Replayed]:
    """Every store alone, every pair, and all: each time with stores that `open_store` opens anew.

    So none of them knows what another combination has learnt, and a history learns only from earlier records. Stores
    that are not there (None) are left out.
    """
    there = [name for name in dict.fromkeys(names) if open_store(name) is not None]
    wanted = [*combinations(there, 1), *combinations(there, 2), *([tuple(there)] if len(there) > 2 else [])]
    found = []
    for number, combination in enumerate(wanted):
        opened = [store for store in map(open_store, combination) if store is not None]

        def within(what: str, done: int, total: int, before: int = number) -> None:
            progress(what, before * total + done, len(wanted) * total)

        found.append(replay_with(records, opened, budget, vocabulary, costs=costs, progress=within))
    return found


def distinct(records: Iterable[Record]) -> list[Record]:
    """Each prompt once: a history must not have learnt the answer to a prompt before it comes."""
    first: dict[tuple[int, ...], Record] = {}
    for record in records:
        first.setdefault(record.prompt, record)
    return list(first.values())


def answered_before(records: Sequence[Record], documents: Iterable[np.ndarray]) -> int:
    """To how many records the documents hold the answer: a history that was built on their prompts peeks."""
    beginnings = {record.output[:_BEGINNING] for record in records}
    known = set()
    for document in documents:
        tokens = document.tolist()
        for start in range(min(len(tokens), 2 * _BEGINNING)):  # before the answer stands the end of its prompt
            beginning = tuple(tokens[start : start + _BEGINNING])
            if beginning in beginnings:
                known.add(beginning)
    return sum(record.output[:_BEGINNING] in known for record in records if record.output)
