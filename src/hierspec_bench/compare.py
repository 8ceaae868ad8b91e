"""Compares two bench records: what got faster or slower, and whether the change is larger than noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hierspec_bench.record import PEER, Entry, Figures, Record

_SETTING = (
    *("model", "dtype", "weights", "max_tokens", "prompts", "repeats"),
    *("seed", "batches", "threads", "machine", "files"),
)


def compare_records(before: Record, after: Record, tolerance: float = 0.05) -> dict[str, Any]:
    """Changes of every plan and engine that both records have, over all prompts and by task.

    Compares speed-ups over each run's own plain decoding: machines and hours differ, ratios should not. A change is
    `outside` if neither figure lies within the other's interval, and `slower` if it also exceeds `tolerance`. A stopped
    run has other prompts than a complete one, so a comparison with it never passes.
    """
    _ = before.plain, after.plain  # raises HierspecError if a record has no plain decoding
    old, new = dict(_entries(before)), dict(_entries(after))
    rows = [_row(key, old[key], new[key], tolerance) for key in old if key in new]
    changes = {row["name"]: abs(math.log(row["change"])) for row in rows if row["name"] != "plain"}
    farthest = max(changes, key=lambda name: changes[name], default=None)
    lost = [row["name"] for row in rows if row["lost_equality"]]
    slower = [row["name"] for row in rows if row["slower"] and row["kind"] == "plan"]
    stopped = [which for which, record in (("before", before), ("after", after)) if not record.complete]
    return {
        "kind": "bench comparison",
        "version": 1,
        "tolerance": tolerance,
        "other_settings": [name for name in _SETTING if before.document.get(name) != after.document.get(name)],
        "incomplete": stopped,
        "rows": rows,
        "only_before": [_title(key) for key in old if key not in new],
        "only_after": [_title(key) for key in new if key not in old],
        "farthest_apart": None
        if farthest is None
        else {"name": farthest, "percent": round(100 * math.expm1(changes[farthest]), 2)},
        "lost_equality": lost,
        "slower": slower,
        "passed": not lost and not slower and not stopped,
    }


_Key = tuple[float, str, str]  # temperature, plan or peer, name


def _entries(record: Record) -> Iterator[tuple[_Key, Entry]]:
    for setting in record.settings:
        for entry in setting.entries:
            if entry.figures.speedup:
                yield (setting.temperature or 0.0, PEER if entry.kind == PEER else "plan", entry.name), entry


def _title(key: _Key) -> str:
    temperature, _, name = key
    return f"{name} at {temperature:g}" if temperature else name


def _row(key: _Key, old: Entry, new: Entry, tolerance: float) -> dict[str, Any]:
    temperature, kind, _ = key
    return {
        "name": _title(key),
        "kind": kind,
        "temperature": temperature,
        **_change(old.figures, new.figures, tolerance),
        "rates": [old.figures.tokens_per_second or 0.0, new.figures.tokens_per_second or 0.0],
        "lost_equality": kind == "plan" and new.promises_text and _different(new.figures) > _different(old.figures),
        "tasks": {
            task: _change(old.tasks[task], figures, tolerance)
            for task, figures in new.tasks.items()
            if task in old.tasks and figures.speedup and old.tasks[task].speedup
        },
    }


def _change(old: Figures, new: Figures, tolerance: float) -> dict[str, Any]:
    assert old.speedup
    assert new.speedup
    change = new.speedup / old.speedup
    intervals = (old.speedup_interval, new.speedup_interval)
    outside = None  # older records have no intervals by task
    if intervals[0] is not None and intervals[1] is not None:
        outside = not _within(new.speedup, intervals[0]) and not _within(old.speedup, intervals[1])
    return {
        "speedups": [old.speedup, new.speedup],
        "intervals": [None if interval is None else list(interval) for interval in intervals],
        "change": round(change, 4),
        "outside": outside,
        "slower": bool(outside) and change < 1 - tolerance,
        "identical": [f"{figures.identical} of {figures.prompts}" for figures in (old, new)],
    }


def _within(value: float, interval: tuple[float, float]) -> bool:
    return interval[0] <= value <= interval[1]


def _different(figures: Figures) -> float:
    """The share of prompts with another text than plain's that no tie explains."""
    return figures.different / (figures.prompts or 1)
