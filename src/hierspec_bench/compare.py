"""Two documents of the bench beside each other: what got faster or slower, and is it more than chance?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError

_SETTING = (
    "model", "dtype", "weights", "max_tokens", "prompts", "repeats", "seed", "batches", "threads", "machine", "files",
)  # fmt: skip


def read_document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        plain = found["plans"]["plain"]
        if not {"speedup", "identical", "prompts"} <= set(plain):
            raise ValueError("it has no figures of plain")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HierspecError(
            f"{path} is not a document of the bench ({reason}); make one with: hierspec bench --output FILE"
        ) from error
    return dict(found)


def compare_documents(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float = 0.05) -> dict[str, Any]:
    """Changes of every plan and peer that both have, over all prompts and by task.

    Compared are speed-ups over each run's own plain decoding: machines and hours differ, ratios should not. A change
    is `outside` where neither figure lies within the other's interval; `slower` where it is also beyond `tolerance`.
    A run that was stopped has seen other prompts than a whole one, so with it nothing passes.
    """
    old, new = dict(_contenders(before)), dict(_contenders(after))
    rows = [_row(key, old[key], new[key], tolerance) for key in old if key in new]
    ratios = {row["name"]: abs(math.log(row["change"])) for row in rows if row["name"] != "plain"}
    farthest = max(ratios, key=lambda name: ratios[name], default=None)
    lost = [row["name"] for row in rows if row["lost_equality"]]
    slower = [row["name"] for row in rows if row["slower"] and row["kind"] == "plan"]
    stopped = [which for which, one in (("before", before), ("after", after)) if not one.get("complete", True)]
    return {
        "kind": "bench comparison",
        "version": 1,
        "tolerance": tolerance,
        "other_settings": [name for name in _SETTING if before.get(name) != after.get(name)],
        "incomplete": stopped,
        "rows": rows,
        "only_before": [_named(key) for key in old if key not in new],
        "only_after": [_named(key) for key in new if key not in old],
        "farthest_apart": None
        if farthest is None
        else {"name": farthest, "percent": round(100 * math.expm1(ratios[farthest]), 2)},
        "lost_equality": lost,
        "slower": slower,
        "passed": not lost and not slower and not stopped,
    }


_Key = tuple[float, str, str]  # temperature, plan or peer, name


def _contenders(document: Mapping[str, Any]) -> Iterator[tuple[_Key, Mapping[str, Any]]]:
    for part in (document, *document.get("other_temperatures", ())):
        for kind in ("plan", "peer"):
            for name, figures in part.get(f"{kind}s", {}).items():
                yield (float(part.get("temperature", 0.0)), kind, name), figures


def _named(key: _Key) -> str:
    temperature, _, name = key
    return f"{name} at {temperature:g}" if temperature else name


def _row(key: _Key, old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    temperature, kind, _ = key
    promised = kind == "plan" and bool(new.get("promises_text", True))
    row = {"name": _named(key), "kind": kind, "temperature": temperature, **_change(old, new, tolerance)}
    row["rates"] = [old["tokens_per_second"], new["tokens_per_second"]]
    row["lost_equality"] = promised and _different(new) > _different(old)
    tasks = old.get("tasks", {})
    row["tasks"] = {
        task: _change(tasks[task], figures, tolerance)
        for task, figures in new.get("tasks", {}).items()
        if task in tasks
    }
    return row


def _change(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    change = new["speedup"] / old["speedup"]
    intervals = [old.get("speedup_interval"), new.get("speedup_interval")]
    outside = None  # older documents have no intervals by task
    if intervals[0] is not None and intervals[1] is not None:
        outside = not _within(new["speedup"], intervals[0]) and not _within(old["speedup"], intervals[1])
    return {
        "speedups": [old["speedup"], new["speedup"]],
        "intervals": intervals,
        "change": round(change, 4),
        "outside": outside,
        "slower": bool(outside) and change < 1 - tolerance,
        "identical": [f"{one['identical']} of {one['prompts']}" for one in (old, new)],
    }


def _within(value: float, interval: list[float]) -> bool:
    return interval[0] <= value <= interval[1]


def _different(figures: Mapping[str, Any]) -> float:
    """The share of prompts with another text than plain's that no tie explains."""
    return 1 - (figures["identical"] + figures["ties"]) / figures["prompts"]
