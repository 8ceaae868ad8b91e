"""Recorded answers replayed through any stores without a model: acceptance rates in seconds.

The engine and the hierarchy are the real ones. Only the target is a `TraceScorer`: it picks the tokens of the recorded
answer. What it would write after a rejected proposal was not recorded, so a store that learns from that (lookahead) has
to be measured with the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats
from hierspec.paths import whole_file
from hierspec.planner.simulation.trace_scorer import TraceScorer
from hierspec.planner.simulation.traces import Trace
from hierspec.progress import Progress, silent


@dataclass(frozen=True)
class Record:
    """What a model wrote after a prompt, as token ids."""

    task: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


def replay(records: Sequence[Record], tier: Tier, progress: Progress = silent) -> dict[str, Stats]:
    """Counters by task when `tier`'s stores propose for the records, in their order. Its scorer is a `TraceScorer`."""
    scorer = tier.scorer
    assert isinstance(scorer, TraceScorer)
    hierarchy = Hierarchy((tier,))
    by_task: dict[str, Stats] = {}
    for number, record in enumerate(records, 1):
        if not record.output:
            continue
        request = Request(record.prompt, Sampling(max_tokens=len(record.output)), hierarchy)
        scorer.traces[request] = Trace(record.task, record.prompt, record.output)
        for _ in Engine().run([request]):
            pass
        if request.error is not None:
            raise request.error
        by_task.setdefault(record.task, Stats()).add(request.stats)
        progress("Replaying", number, len(records))
    return by_task


def write_records(path: Path, records: Iterable[Record]) -> None:
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records:
            line: dict[str, Any] = {"task": record.task, "prompt": record.prompt, "output": record.output}
            file.write(json.dumps(line) + "\n")


def read_records(path: Path) -> list[Record]:
    """Records from a file of JSON lines: task, prompt, output."""
    records = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                item = json.loads(line)
                prompt, output = ([int(token) for token in item[name]] for name in ("prompt", "output"))
                if not prompt or min(prompt + output) < 0:
                    raise ValueError("a prompt is empty or an id is negative")
                records.append(Record(str(item.get("task", "")), tuple(prompt), tuple(output)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HierspecError(
            f"{path} is not a file of records ({error}); make one with: hierspec bench --record FILE"
        ) from error
    return records
