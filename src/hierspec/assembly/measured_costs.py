"""What one pass of a scorer costs by its width: measured here once, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hierspec.core.errors import HierspecError
from hierspec.machine import machine
from hierspec.pacing.appraisal import Costs
from hierspec.paths import cache_folder, whole_file
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.scorers.timing import PassTimer

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 256
_ROUNDS = 3
_VERSION = 3  # count up when passes become faster or slower


class CostBook:
    """Costs of a model's scorers, measured or read when first asked for. `about` tells the model from others."""

    def __init__(self, *about: str) -> None:
        self._about = about
        self._known: dict[tuple[str, int], Costs] = {}

    def costs(self, scorer: StateScorer, standing: int = 0) -> Costs:
        """Of passes in which all tokens but one have been through `standing` layers already."""
        if (_key(scorer), standing) not in self._known:
            about = [scorer.name, scorer.kind, *self._about, scorer.decoder.products]
            self._known[_key(scorer), standing] = measured_costs(scorer, about, standing=standing)
        return self._known[_key(scorer), standing]

    def measure_anew(self, scorers: Sequence[tuple[StateScorer, int]], progress: Progress = silent) -> None:
        """Measure these in turn, several times, so that a slow minute hits all alike. For this process only."""
        for number in range(_ROUNDS):
            for scorer, standing in scorers:
                found, key = measure(scorer, standing=standing), (_key(scorer), standing)
                least = found.measured if number == 0 else np.minimum(found.measured, self._known[key].measured)
                self._known[key] = Costs(found.rows, [float(seconds) for seconds in least])
            progress("Measuring passes", number + 1, _ROUNDS)


def _key(scorer: StateScorer) -> str:
    """Scorers of one name may differ in what they run on."""
    return f"{scorer.name}, {scorer.kind}"


def measured_costs(scorer: StateScorer, about: list[Any], progress: Progress = silent, standing: int = 0) -> Costs:
    """Costs of this scorer on this machine. `about` tells it from others: model, dtype, weights."""
    identity = [machine(), torch.get_num_threads(), scorer.layers, about, _VERSION, *([standing] if standing else [])]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:20]
    path = cache_folder() / "costs" / f"{key}.json"
    with suppress(OSError, ValueError, KeyError):  # absent or damaged: measure again
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Costs([int(rows) for rows in kept["rows"]], [float(seconds) for seconds in kept["seconds"]])
    costs = measure(scorer, progress, standing)
    with suppress(HierspecError), whole_file(path) as temporary:  # a full disk must not keep anyone from writing
        kept = {"rows": costs.rows, "seconds": costs.measured, "about": identity}
        temporary.write_text(json.dumps(kept, indent=2, default=str) + "\n", encoding="utf-8")
    return costs


def read_costs(path: Path) -> Costs:
    """Costs from a document of `hierspec bench --passes`: of its shortest context."""
    try:
        passes = [item for item in json.loads(path.read_text(encoding="utf-8"))["passes"] if "ratio" in item]
        shortest = min(item["context"] for item in passes)
        milliseconds = {int(item["tokens"]): float(item["ms"]) for item in passes if item["context"] == shortest}
        if min(milliseconds) != 1:
            raise ValueError("it has no pass over one token")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HierspecError(
            f"{path} says nothing about passes ({error}); make it with: hierspec bench --passes --output FILE"
        ) from error
    widths = sorted(milliseconds)
    return Costs(widths, [milliseconds[width] / 1e3 for width in widths])


def measure(scorer: StateScorer, progress: Progress = silent, standing: int = 0) -> Costs:
    """The least of a few rounds: whatever else runs on the machine only ever adds."""
    room = scorer.decoder.config.context - max(_WIDTHS) - 1
    text = np.random.default_rng(0).integers(0, scorer.vocabulary, min(_CONTEXT, room) + max(_WIDTHS)).astype(np.int32)
    context, after = text[: -max(_WIDTHS)], text[-max(_WIDTHS) :]
    timer = PassTimer(scorer, context, standing)
    times: dict[int, list[float]] = {width: [] for width in _WIDTHS}
    for number in range(_ROUNDS):
        for width in _WIDTHS:
            times[width].append(sum(timer.run(after[:width])))
        progress("Measuring passes (once)", number + 1, _ROUNDS)
    timer.close()
    return Costs(_WIDTHS, [min(times[width]) for width in _WIDTHS])
