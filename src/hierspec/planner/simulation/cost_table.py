"""What passes cost, in parts: layers by rows, context and batch, heads by rows; medians, with their spread.

Decisions while writing use `assembly.measured_costs`: two curves per scorer, by rows. This table is for planning.
It keeps the parts of a pass apart, because plans combine them differently: a draft model may run several tokens through
its layers and one through its head; an exit has already run the first layers of what the target verifies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.pacing.costs import Costs
from hierspec.planner.simulation.traces import scorer_key
from hierspec.scorers.base import StateScorer

CONTEXTS = (64, 512, 2048)
BATCHES = (1, 4, 16)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # tokens of one request
_CONTEXT_STEP = 8  # tokens: contexts are rounded down to this


@dataclass(frozen=True)
class Cell:
    """Seconds of one part of a pass: the median of some rounds, and half the range of their middle half."""

    rows: int  # of all requests together
    context: int
    batch: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Curve:
    """Seconds by rows, context and batch: linear between the measured cells, and beyond them."""

    cells: tuple[Cell, ...]

    def seconds(self, rows: int, context: int = 0, batch: int = 1) -> float:
        """Seconds of `rows` rows in all, after contexts of this length. Larger batches count as the largest one."""
        if rows < 1:
            return 0.0
        key = rows, context // _CONTEXT_STEP, batch
        if key not in self._memo:
            grids = self._grids
            batch = min(max(batch, min(grids)), max(grids))
            by_batch = [
                (size, _interpolate(context, [(length, _interpolate(rows, points)) for length, points in grid.items()]))
                for size, grid in grids.items()
            ]
            self._memo[key] = _interpolate(batch, by_batch)
        return self._memo[key]

    @cached_property
    def _memo(self) -> dict[tuple[int, int, int], float]:
        return {}

    @cached_property
    def _grids(self) -> dict[int, dict[int, list[tuple[int, float]]]]:
        """Batch -> context -> (rows, seconds), non-decreasing: if a wider pass measured cheaper, that was noise."""
        grids: dict[int, dict[int, list[tuple[int, float]]]] = {}
        for batch, context in sorted({(cell.batch, cell.context) for cell in self.cells}):
            cells = sorted((c for c in self.cells if (c.batch, c.context) == (batch, context)), key=lambda c: c.rows)
            rising = np.maximum.accumulate([cell.seconds for cell in cells]).tolist()
            points = [(cell.rows, value) for cell, value in zip(cells, rising, strict=True)]
            grids.setdefault(batch, {})[context] = points
        return grids


def _interpolate(x: int, points: Sequence[tuple[int, float]]) -> float:
    """Linear between these points; constant before the first, extrapolated after the last."""
    index = bisect_right(points, x, key=lambda point: point[0])
    if index == 0 or len(points) == 1:
        return points[0][1]
    (low, low_value), (high, high_value) = points[index - 1 : index + 1] if index < len(points) else points[-2:]
    return max(low_value + (high_value - low_value) * (x - low) / (high - low), 0.0)


@dataclass(frozen=True)
class Parts:
    """A scorer's costs: `base` of the checkpoint's first `layers` layers, `own` of its own layers, `head` with picks.

    A feature drafter joins features before its layers. That is cheaper on later steps, whose features are its own:
    `later` is for those. It may run its layers several times in a pass, so the fixed cost of a pass is in `head`.
    """

    name: str
    layers: int
    base: Curve | None
    own: Curve | None
    head: Curve
    later: Curve | None = None

    def seconds(self, rows: int, context: int = 256, batch: int = 1) -> float:
        """Seconds of a pass in which every row runs through all layers and the head. Rows of all requests together."""
        layers = sum(curve.seconds(rows, context, batch) for curve in (self.base, self.own) if curve is not None)
        return layers + self.head.seconds(rows)

    def spread(self) -> float:
        """The median of spread over seconds, over all cells."""
        cells = [cell for curve in (self.base, self.own, self.head) if curve is not None for cell in curve.cells]
        return float(np.median([cell.spread / cell.seconds for cell in cells if cell.seconds > 0]))

    def costs(self, context: int = 256, batch: int = 1) -> Costs:
        """The same as a curve over rows."""
        return Costs(WIDTHS, [self.seconds(width * batch, context, batch) for width in WIDTHS])


@dataclass(frozen=True)
class CostTable:
    """The costs of several scorers."""

    scorers: Mapping[str, Parts]  # by `scorer_key`
    sampled: bool = False  # whether picks were timed with a temperature

    def of(self, scorer: StateScorer) -> Parts:
        try:
            return self.scorers[scorer_key(scorer)]
        except KeyError:
            raise HierspecError(
                f"The cost of passes of {scorer.name} was not measured; name its tier when the table is made."
            ) from None

    def joined(self, other: CostTable) -> CostTable:
        return CostTable({**self.scorers, **other.scorers}, self.sampled)

    def to_json(self) -> dict[str, Any]:
        return {"sampled": self.sampled, "scorers": {key: asdict(parts) for key, parts in self.scorers.items()}}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> CostTable:
        """Raises KeyError, TypeError or ValueError if the document is not a table."""

        def cell(item: Mapping[str, Any]) -> Cell:
            rows, context, batch = (int(item[name]) for name in ("rows", "context", "batch"))
            return Cell(rows, context, batch, float(item["seconds"]), float(item["spread"]))

        def curve(item: Mapping[str, Any] | None) -> Curve | None:
            if item is None:
                return None
            cells = tuple(map(cell, item["cells"]))
            if not cells:
                raise ValueError("nothing was measured")
            return Curve(cells)

        scorers = {}
        for key, parts in document["scorers"].items():
            head = curve(parts["head"])
            if head is None:
                raise ValueError(f"{key} has no head")
            base, own = curve(parts["base"]), curve(parts["own"])
            later = curve(parts["later"])
            scorers[str(key)] = Parts(str(parts["name"]), int(parts["layers"]), base, own, head, later)
        return CostTable(scorers, bool(document["sampled"]))

    def rows(self, contexts: Sequence[int] = CONTEXTS, widths: Sequence[int] = (1, 4, 8, 16)) -> list[list[str]]:
        """A table for people, its heading first: milliseconds of a pass at batch 1."""
        heading = ["scorer", *(f"{width} at {context}" for context in contexts for width in widths), "spread"]
        lines = [heading]
        for parts in self.scorers.values():
            values = [f"{1e3 * parts.seconds(width, context):.2f}" for context in contexts for width in widths]
            lines.append([parts.name, *values, f"{parts.spread():.0%}"])
        return lines
