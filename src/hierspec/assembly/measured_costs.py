"""What one pass of a scorer costs by its width and context.

Costs are measured once on this machine, kept in the cache, and corrected by every timed pass.
"""

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
from hierspec.pacing.costs import Costs, Prefill
from hierspec.pacing.healing import HealingCosts
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec.scorers.timing import PassTimer

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 128
_LONG, _LONG_WIDTHS = 2048, (1, 2, 4, 8, 16, 32)  # a long context, if model and memory have room, and its widths
_LONG_SHARE = 4  # the long context takes at most one part in this many of the memory
_LEAST_GROWTH = 0.002  # least growth over the long context, as a share of a pass: less is noise
_PREFILL = 64  # tokens of a pass that stands for prefill
_ROUNDS = 3  # at least; then until the two fastest passes of each width agree
_MOST_ROUNDS = 9
_AGREE = 1.03  # largest ratio of two times that agree
_ENOUGH_PASSES = 100  # timed passes after which corrected costs are better than the measurement
_VERSION = 10  # increase when passes become faster or slower


class CostBook:
    """Costs of a model's scorers, measured or read when first asked for. `about` identifies the model."""

    def __init__(self, *about: str) -> None:
        self._about = about
        self._costs: dict[tuple[str, int], HealingCosts] = {}
        self._files: dict[tuple[str, int], KeptFile] = {}
        self._prefills: dict[str, Prefill] = {}

    @property
    def times_host(self) -> bool:
        """Whether it knows the costs of a target that runs in a host."""
        return False

    def costs(self, scorer: StateScorer, computed_layers: int = 0) -> HealingCosts:
        """Costs of passes in which all tokens but one have already been through `computed_layers` layers."""
        key = _key(scorer), computed_layers
        if key not in self._costs:
            details = [computed_layers] if computed_layers else []
            self._files[key] = file = self._file(scorer, *details)
            self._costs[key] = file.read_or_measure(
                from_json=_from_json,
                measure=lambda: measure(scorer, computed_layers=computed_layers),
                to_json=_to_json,
            )
        return self._costs[key]

    def prefill(self, scorer: StateScorer) -> Prefill:
        """Cost of prefill by a scorer's own layers, with the target's layers beneath already computed."""
        key = _key(scorer)
        if key not in self._prefills:
            self._prefills[key] = self._file(scorer, "prefill").read_or_measure(
                from_json=lambda document: Prefill(float(document["each"]), float(document["growth"])),
                measure=lambda: measure_prefill(scorer),
                to_json=lambda prefill: prefill._asdict(),
            )
        return self._prefills[key]

    def _file(self, scorer: StateScorer, *details: Any) -> KeptFile:
        """The file for a measurement of this scorer on this machine."""
        about = [scorer.name, scorer.kind, *self._about, scorer.decoder.products]
        return KeptFile.here("costs", scorer.layers, about, _VERSION, *details)

    def apart(self) -> CostBook:
        """The same costs as measured; corrections by timed passes are separate, and not kept."""
        return _CostsApart(self)

    def keep(self) -> None:
        """Save the corrected costs for the next run."""
        for key, file in self._files.items():
            costs = self._costs[key]
            if costs.passes >= _ENOUGH_PASSES:
                file.write_json({**_to_json(costs.healed()), "about": file.identity})

    def measure_again(self, scorers: Sequence[tuple[StateScorer, int]], progress: Progress = silent) -> None:
        """Measure these in turn, several times, so that a slow minute affects all alike. For this process only."""
        for number in range(_ROUNDS):
            for scorer, computed_layers in scorers:
                costs, key = measure(scorer, computed_layers=computed_layers), (_key(scorer), computed_layers)
                self._costs[key] = costs if number == 0 else _least(costs, self._costs[key])
                self._files.pop(key, None)
            progress("Measuring passes", number + 1, _ROUNDS)


class _CostsApart(CostBook):
    def __init__(self, book: CostBook) -> None:
        super().__init__()
        self._book = book

    def costs(self, scorer: StateScorer, computed_layers: int = 0) -> HealingCosts:
        key = _key(scorer), computed_layers
        if key not in self._costs:
            self._costs[key] = self._book.costs(scorer, computed_layers).again()
        return self._costs[key]

    def prefill(self, scorer: StateScorer) -> Prefill:
        return self._book.prefill(scorer)


def _key(scorer: StateScorer) -> str:
    """Name and kind: scorers of the same name may run on different weights."""
    return f"{scorer.name}, {scorer.kind}"


def _from_json(document: Any) -> HealingCosts:
    rows, *curves = (document[name] for name in ("rows", "seconds", "spread", "growth", "growth_spread"))
    seconds, spread, growth, growth_spread = curves
    if not (
        rows
        and all(len(rows) == len(curve) for curve in curves)
        and rows[0] == 1
        and all(0 < each < 1e6 for each in seconds)
        and all(0 <= each < 1e3 for each in growth)
    ):
        raise ValueError("these are no costs")
    return HealingCosts(rows, seconds, spread, growth, growth_spread, int(document["context"]))


def _to_json(costs: HealingCosts) -> dict[str, Any]:
    return {
        "rows": costs.rows,
        "seconds": costs.measured,
        "spread": costs.spread,
        "context": costs.context,
        "growth": costs.growth,
        "growth_spread": costs.growth_spread,
    }


def _least(costs: HealingCosts, others: HealingCosts) -> HealingCosts:
    """The smaller values of two measurements."""
    seconds, growth = np.minimum(costs.measured, others.measured), np.minimum(costs.growth, others.growth)
    return HealingCosts(costs.rows, seconds.tolist(), costs.spread, growth.tolist(), costs.growth_spread, costs.context)


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
    """Measure the costs after a short context and, if there is room for one, what a long context adds."""
    context, long = _contexts(scorer)
    times = _times(scorer, context, _WIDTHS, computed_layers, progress)
    seconds = {width: min(taken) for width, taken in times.items()}
    spread = {width: statistics.median(taken) / min(taken) - 1 for width, taken in times.items()}
    growth, growth_spread = [], []
    if long:
        times = _times(scorer, long, _LONG_WIDTHS, computed_layers, progress)
        longer = {width: max(min(times[width]) - seconds[width], _LEAST_GROWTH * seconds[width]) for width in times}
        apart = {
            width: (statistics.median(taken) - min(taken) + spread[width] * seconds[width]) / longer[width]
            for width, taken in times.items()
        }
        growth = (np.interp(_WIDTHS, list(longer), list(longer.values())) / (long - context)).tolist()
        growth_spread = np.minimum(np.interp(_WIDTHS, list(apart), list(apart.values())), 1.0).tolist()
    return HealingCosts(_WIDTHS, list(seconds.values()), list(spread.values()), growth, growth_spread, context)


def measure_prefill(scorer: StateScorer) -> Prefill:
    """Measure the prefill seconds per token after a short and a long context, as a straight line."""
    each = []
    for context in _contexts(scorer):
        if context >= 2:
            tokens = min(_PREFILL, context // 2)
            timer = PassTimer(scorer, _text(scorer, context), compute=False)
            each.append((context - tokens / 2, min(timer.prefill(tokens) for _ in range(_ROUNDS)) / tokens))
            timer.close()
    if not each:
        return Prefill()
    (near, short), (far, long) = each[0], each[-1]
    growth = max(long - short, 0.0) / (far - near) if far > near else 0.0
    return Prefill(max(short - growth * near, 0.0), growth)


def _contexts(scorer: StateScorer) -> tuple[int, int]:
    """Tokens of a short and of a long context; 0 if there is no room for a long one."""
    room = scorer.decoder.config.context - max(_WIDTHS) - 1
    held = min(pool.pages.memory.pages * pool.pages.memory.page for pool in scorer.pools)
    short, long = min(_CONTEXT, room), min(_LONG, room, held // _LONG_SHARE)
    return short, long if long > 2 * short else 0


def _text(scorer: StateScorer, tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, scorer.vocabulary, tokens).astype(np.int32)


def _times(
    scorer: StateScorer, context: int, widths: Sequence[int], computed_layers: int, progress: Progress
) -> dict[int, list[float]]:
    """Seconds of passes of each width, over a few rounds, and over more while the two fastest differ.

    Whatever else runs on the machine only adds time, so the fastest pass is the true one.
    """
    text = _text(scorer, context + max(widths))
    timer = PassTimer(scorer, text[:context], computed_layers, compute=False)
    times: dict[int, list[float]] = {width: [] for width in widths}
    what = f"Measuring passes after {context} tokens (once)"
    for number in range(_MOST_ROUNDS):
        for width in widths:
            times[width].append(sum(timer.run(text[context : context + width])))
        progress(what, number + 1, _MOST_ROUNDS)
        if number + 1 >= _ROUNDS and all(sorted(taken)[1] <= _AGREE * min(taken) for taken in times.values()):
            break
    progress(what, _MOST_ROUNDS, _MOST_ROUNDS)
    timer.close()
    return times
