"""What one pass of a scorer costs by its width: measured here once, kept in the cache, and corrected by every pass."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_text, shown_path
from hierspec.kept import KeptFile
from hierspec.pacing.costs import Costs
from hierspec.pacing.healing import HealingCosts
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.scorers.timing import PassTimer

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 256
_ROUNDS = 3  # at least, and until the two fastest of each width agree,
_MOST_ROUNDS = 9
_AGREE = 1.03
_ENOUGH_PASSES = 100  # from so many on, what passes took says more than what was measured
_VERSION = 6  # count up when passes become faster or slower


class CostBook:
    """Costs of a model's scorers, measured or read when first asked for. `about` tells the model from others."""

    def __init__(self, *about: str) -> None:
        self._about = about
        self._costs: dict[tuple[str, int], HealingCosts] = {}
        self._files: dict[tuple[str, int], KeptFile] = {}

    def costs(self, scorer: StateScorer, computed_layers: int = 0) -> HealingCosts:
        """Of passes in which all tokens but one have been through so many layers already."""
        key = _key(scorer), computed_layers
        if key not in self._costs:
            about = [scorer.name, scorer.kind, *self._about, scorer.decoder.products]
            self._files[key] = file = _file(scorer, about, computed_layers)
            self._costs[key] = file.read_or_measure(
                from_json=_from_json,
                measure=lambda: measure(scorer, computed_layers=computed_layers),
                to_json=_to_json,
            )
        return self._costs[key]

    def apart(self) -> CostBook:
        """The same costs as they were measured: what passes show is learnt separately, and not kept."""
        return _CostsApart(self)

    def keep(self) -> None:
        """Write down what passes have shown, for the next run."""
        for key, file in self._files.items():
            costs = self._costs[key]
            if costs.passes >= _ENOUGH_PASSES:
                file.write_json({**_to_json(costs.healed()), "about": file.identity})

    def measure_again(self, scorers: Sequence[tuple[StateScorer, int]], progress: Progress = silent) -> None:
        """Measure these in turn, several times, so that a slow minute hits all of them. For this process only."""
        for number in range(_ROUNDS):
            for scorer, computed_layers in scorers:
                costs, key = measure(scorer, computed_layers=computed_layers), (_key(scorer), computed_layers)
                least = costs.measured if number == 0 else np.minimum(costs.measured, self._costs[key].measured)
                self._costs[key] = HealingCosts(costs.rows, [float(seconds) for seconds in least], costs.spread)
                self._files.pop(key, None)
            progress("Measuring passes", number + 1, _ROUNDS)


class _CostsApart(CostBook):
    def __init__(self, book: CostBook) -> None:
        super().__init__()
        self._book = book

    def costs(self, scorer: StateScorer, computed_layers: int = 0) -> HealingCosts:
        key = _key(scorer), computed_layers
        if key not in self._costs:
            costs = self._book.costs(scorer, computed_layers)
            self._costs[key] = HealingCosts(costs.rows, costs.measured, costs.spread)
        return self._costs[key]


def _key(scorer: StateScorer) -> str:
    """Scorers of one name may differ in what they run on."""
    return f"{scorer.name}, {scorer.kind}"


def _file(scorer: StateScorer, about: list[Any], computed_layers: int) -> KeptFile:
    """Where the costs of this scorer on this machine are kept. `about` tells it from others: model, dtype, weights."""
    return KeptFile.here("costs", scorer.layers, about, _VERSION, *([computed_layers] if computed_layers else []))


def _from_json(document: Any) -> HealingCosts:
    rows, seconds, spread = document["rows"], document["seconds"], document["spread"]
    if not (rows and len(rows) == len(seconds) == len(spread) and rows[0] == 1 and all(0 < s < 1e6 for s in seconds)):
        raise ValueError("these are no costs")
    return HealingCosts(rows, seconds, spread)


def _to_json(costs: HealingCosts) -> dict[str, Any]:
    return {"rows": costs.rows, "seconds": costs.measured, "spread": costs.spread}


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


def measure(scorer: StateScorer, progress: Progress = silent, computed_layers: int = 0) -> HealingCosts:
    """The least of a few rounds, since whatever else runs on the machine only ever adds, and how far they differed."""
    room = scorer.decoder.config.context - max(_WIDTHS) - 1
    text = np.random.default_rng(0).integers(0, scorer.vocabulary, min(_CONTEXT, room) + max(_WIDTHS)).astype(np.int32)
    context, after = text[: -max(_WIDTHS)], text[-max(_WIDTHS) :]
    timer = PassTimer(scorer, context, computed_layers)
    times: dict[int, list[float]] = {width: [] for width in _WIDTHS}
    for number in range(_MOST_ROUNDS):
        for width in _WIDTHS:
            times[width].append(sum(timer.run(after[:width])))
        progress("Measuring passes (once)", number + 1, _MOST_ROUNDS)
        if number + 1 >= _ROUNDS and all(sorted(taken)[1] <= _AGREE * min(taken) for taken in times.values()):
            break
    progress("Measuring passes (once)", _MOST_ROUNDS, _MOST_ROUNDS)
    timer.close()
    spread = [statistics.median(taken) / min(taken) - 1 for taken in times.values()]
    return HealingCosts(_WIDTHS, [min(taken) for taken in times.values()], spread)
