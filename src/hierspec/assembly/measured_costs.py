"""What one pass of a scorer costs by its width: measured here once, and kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_text, shown_path
from hierspec.kept import KeptFile
from hierspec.pacing.costs import Costs
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.scorers.timing import PassTimer

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 256
_ROUNDS = 3
_VERSION = 4  # count up when passes become faster or slower


class CostBook:
    """Costs of a model's scorers, measured or read when first asked for. `about` tells the model from others."""

    def __init__(self, *about: str) -> None:
        self._about = about
        self._costs: dict[tuple[str, int], Costs] = {}

    def costs(self, scorer: StateScorer, computed_layers: int = 0) -> Costs:
        """Of passes in which all tokens but one have been through so many layers already."""
        if (_key(scorer), computed_layers) not in self._costs:
            about = [scorer.name, scorer.kind, *self._about, scorer.decoder.products]
            self._costs[_key(scorer), computed_layers] = measured_costs(scorer, about, computed_layers=computed_layers)
        return self._costs[_key(scorer), computed_layers]

    def measure_again(self, scorers: Sequence[tuple[StateScorer, int]], progress: Progress = silent) -> None:
        """Measure these in turn, several times, so that a slow minute hits all of them. For this process only."""
        for number in range(_ROUNDS):
            for scorer, computed_layers in scorers:
                costs, key = measure(scorer, computed_layers=computed_layers), (_key(scorer), computed_layers)
                least = costs.measured if number == 0 else np.minimum(costs.measured, self._costs[key].measured)
                self._costs[key] = Costs(costs.rows, [float(seconds) for seconds in least])
            progress("Measuring passes", number + 1, _ROUNDS)


def _key(scorer: StateScorer) -> str:
    """Scorers of one name may differ in what they run on."""
    return f"{scorer.name}, {scorer.kind}"


def measured_costs(
    scorer: StateScorer, about: list[Any], progress: Progress = silent, computed_layers: int = 0
) -> Costs:
    """Costs of this scorer on this machine. `about` tells it from others: model, dtype, weights."""
    file = KeptFile.here("costs", scorer.layers, about, _VERSION, *([computed_layers] if computed_layers else []))
    return file.read_or_measure(
        from_json=lambda document: Costs(document["rows"], document["seconds"]),
        measure=lambda: measure(scorer, progress, computed_layers),
        to_json=lambda costs: {"rows": costs.rows, "seconds": costs.measured},
    )


def read_costs(path: Path) -> Costs:
    """Costs from a document of `hierspec bench passes`: of its shortest context."""

    def refuse(reason: str) -> HierspecError:
        return HierspecError(
            f"{shown_path(path)} says nothing about passes ({reason}); make it with: "
            "hierspec bench passes --output FILE"
        )

    text = read_text(path, refuse)
    try:
        passes = [item for item in json.loads(text)["passes"] if "ratio" in item]
        shortest = min(item["context"] for item in passes)
        milliseconds = {int(item["tokens"]): float(item["ms"]) for item in passes if item["context"] == shortest}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise refuse("it is another kind of file") from error
    if min(milliseconds) != 1:
        raise refuse("it has no pass over one token")
    widths = sorted(milliseconds)
    return Costs(widths, [milliseconds[width] / 1e3 for width in widths])


def measure(scorer: StateScorer, progress: Progress = silent, computed_layers: int = 0) -> Costs:
    """The least of a few rounds: whatever else runs on the machine only ever adds."""
    room = scorer.decoder.config.context - max(_WIDTHS) - 1
    text = np.random.default_rng(0).integers(0, scorer.vocabulary, min(_CONTEXT, room) + max(_WIDTHS)).astype(np.int32)
    context, after = text[: -max(_WIDTHS)], text[-max(_WIDTHS) :]
    timer = PassTimer(scorer, context, computed_layers)
    times: dict[int, list[float]] = {width: [] for width in _WIDTHS}
    for number in range(_ROUNDS):
        for width in _WIDTHS:
            times[width].append(sum(timer.run(after[:width])))
        progress("Measuring passes (once)", number + 1, _ROUNDS)
    timer.close()
    return Costs(_WIDTHS, [min(times[width]) for width in _WIDTHS])
