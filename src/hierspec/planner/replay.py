"""Recorded answers run through any stores with no model: acceptance in seconds.

The engine and the hierarchy are the real ones. Only the target is played: by a scorer that knows each answer and says
what stands in it. What it would have written after a wrong guess nobody knows, so a store that learns from that
(lookahead) is better measured with the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.core.engine import Engine, Request
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import AnyRequest, Ask, Hierarchy, Tier
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats
from hierspec.core.verify import Answer
from hierspec.paths import whole_file
from hierspec.progress import Progress, silent


@dataclass(frozen=True)
class Record:
    """What a model wrote after a prompt, as token ids."""

    task: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


class RecordedScorer:
    """Plays the target for one record after another: after the text of the record it writes what comes next there."""

    name = "target"

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.text = np.empty(0, np.int32)

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        return [self._answer(ask) for ask in asks]

    def release(self, request: AnyRequest) -> None:
        return

    def _answer(self, ask: Ask) -> Answer:
        start, size = len(ask.context), len(self.text)
        picks = np.zeros((1 + len(ask.proposal), 1), np.int32)  # after a token that is not there: any token
        picks[0] = self.text[start]
        standing = [False] * len(ask.proposal)
        depths = ask.proposal.depths()
        for node, (token, parent) in enumerate(zip(ask.proposal.tokens, ask.proposal.parents, strict=True)):
            place = start + depths[node]
            before = parent < 0 or standing[parent]
            standing[node] = before and place < size and token == self.text[place]
            if standing[node] and place + 1 < size:
                picks[node + 1] = self.text[place + 1]
        return Answer(picks=picks)


def replay(records: Sequence[Record], tier: Tier, vocabulary: int, progress: Progress = silent) -> dict[str, Stats]:
    """Counters by task when `tier`'s stores guess for the records, in their order. The tier's scorer is not used."""
    scorer = RecordedScorer(vocabulary)
    played = Tier(scorer, 1, tier.stores, tier.budget, tier.merge, appraiser=tier.appraiser)
    hierarchy = Hierarchy((played,))
    found: dict[str, Stats] = {}
    for number, record in enumerate(records, 1):
        if not record.output:
            continue
        scorer.text = np.array(record.prompt + record.output, np.int32)
        request = Request(record.prompt, Sampling(max_tokens=len(record.output)), hierarchy)
        for _ in Engine().run([request]):
            pass
        if request.error is not None:
            raise request.error
        found.setdefault(record.task, Stats()).add(request.stats)
        progress("Replaying", number, len(records))
    return found


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
                found = json.loads(line)
                prompt, output = ([int(token) for token in found[name]] for name in ("prompt", "output"))
                if not prompt or min(prompt + output) < 0:
                    raise ValueError("a prompt is empty or an id is negative")
                records.append(Record(str(found.get("task", "")), tuple(prompt), tuple(output)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HierspecError(
            f"{path} is not a file of records ({error}); make one with: hierspec bench --record FILE"
        ) from error
    return records
