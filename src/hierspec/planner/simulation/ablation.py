"""What each store contributes: recorded answers replayed with every store alone, with every pair, and with all."""

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
from hierspec.planner.simulation.replay import Record, replay
from hierspec.planner.simulation.trace_scorer import TraceScorer
from hierspec.progress import Progress, silent

_PREFIX = 24  # tokens by which an answer is recognised


@dataclass(frozen=True)
class Replayed:
    """What a set of stores did for recorded answers, by task and in total."""

    stores: tuple[str, ...]
    tasks: dict[str, Stats]
    costs: Costs | None = None  # by which drafts were chosen; None: all within the budget were verified

    def everything(self) -> Stats:
        total = Stats()
        for stats in self.tasks.values():
            total.add(stats)
        return total

    def figures(self) -> dict[str, Any]:
        by_task = {task: self._figures(stats) for task, stats in self.tasks.items()}
        return self._figures(self.everything()) | {"tasks": by_task}

    def _figures(self, stats: Stats) -> dict[str, Any]:
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
    """The stores propose for the records, in their order; with `costs` only tokens worth their time are verified."""
    pace = FIXED if costs is None else AdaptivePace(costs, Appraiser(costs))
    tier = Tier(TraceScorer("target", vocabulary), 1, tuple(stores), budget, merge, pace=pace)
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
    """Every store alone, every pair, and all: each time with fresh stores from `open_store`.

    So nothing carries over from another combination, and a history learns only from earlier records. Stores that do not
    exist (None) are left out.
    """
    existing = [name for name in dict.fromkeys(names) if open_store(name) is not None]
    sets = [*combinations(existing, 1), *combinations(existing, 2)]
    sets += [tuple(existing)] if len(existing) > 2 else []
    results = []
    for number, combination in enumerate(sets):
        opened = [store for store in map(open_store, combination) if store is not None]

        def within(what: str, done: int, total: int, before: int = number) -> None:
            progress(what, before * total + done, len(sets) * total)

        results.append(replay_with(records, opened, budget, vocabulary, costs=costs, progress=within))
    return results


def distinct(records: Iterable[Record]) -> list[Record]:
    """Each prompt once: a history must not have seen the answer to a prompt before."""
    first: dict[tuple[int, ...], Record] = {}
    for record in records:
        first.setdefault(record.prompt, record)
    return list(first.values())


def answered_before(records: Sequence[Record], documents: Iterable[np.ndarray]) -> int:
    """For how many records the documents contain the answer: a history built on their prompts has seen it."""
    prefixes = {record.output[:_PREFIX] for record in records}
    answered = set()
    for document in documents:
        tokens = document.tolist()
        for start in range(min(len(tokens), 2 * _PREFIX)):  # the end of the prompt comes before the answer
            prefix = tuple(tokens[start : start + _PREFIX])
            if prefix in prefixes:
                answered.add(prefix)
    return sum(record.output[:_PREFIX] in answered for record in records if record.output)
