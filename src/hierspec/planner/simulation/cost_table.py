"""What passes cost, in parts: layers by rows, context and batch, heads by rows; medians, with their spread.

`planner.costs` has what online decisions go by: one curve a scorer, at one context. A table is for planning. It keeps
the parts of a pass apart, because plans put them together differently: a draft reads several tokens and asks about
one, an exit has run the first layers of what the target verifies.
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
_CONTEXT_STEP = 8  # tokens of context that are not told apart


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
    """Seconds by rows, context and batch: straight lines between what was measured, and beyond."""

    cells: tuple[Cell, ...]

    def seconds(self, rows: int, context: int = 0, batch: int = 1) -> float:
        """Of so many rows in all, after contexts of this length. Batches beyond the largest count as that."""
        if rows < 1:
            return 0.0
        key = rows, context // _CONTEXT_STEP, batch
        if key not in self._known:
            grids = self._grids
            batch = min(max(batch, min(grids)), max(grids))
            by_batch = [
                (size, _line(context, [(at, _line(rows, points)) for at, points in grid.items()]))
                for size, grid in grids.items()
            ]
            self._known[key] = _line(batch, by_batch)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], float]:
        return {}

    @cached_property
    def _grids(self) -> dict[int, dict[int, list[tuple[int, float]]]]:
        """Batch -> context -> (rows, seconds), all rising; a wider pass is never really cheaper."""
        grids: dict[int, dict[int, list[tuple[int, float]]]] = {}
        for batch, context in sorted({(cell.batch, cell.context) for cell in self.cells}):
            here = sorted((c for c in self.cells if (c.batch, c.context) == (batch, context)), key=lambda c: c.rows)
            rising = np.maximum.accumulate([cell.seconds for cell in here]).tolist()
            points = [(cell.rows, value) for cell, value in zip(here, rising, strict=True)]
            grids.setdefault(batch, {})[context] = points
        return grids


def _line(at: int, points: Sequence[tuple[int, float]]) -> float:
    """The value at `at` of the lines through these points; before the first as there, after the last straight on."""
    place = bisect_right(points, at, key=lambda point: point[0])
    if place == 0 or len(points) == 1:
        return points[0][1]
    (low, one), (high, two) = points[place - 1 : place + 1] if place < len(points) else points[-2:]
    return max(one + (two - one) * (at - low) / (high - low), 0.0)


@dataclass(frozen=True)
class Parts:
    """A scorer's costs: of the checkpoint's first `layers` layers, of layers of its own, of head and picks.

    A drafter on the target's states joins features before its layers, and its own ones more cheaply: `later` is for
    those. It may go through its layers several times in a pass, so that what a pass costs anyway is in `head`.
    """

    name: str
    layers: int
    base: Curve | None
    own: Curve | None
    head: Curve
    later: Curve | None = None

    def seconds(self, rows: int, context: int = 256, batch: int = 1) -> float:
        """Of a pass in which every row goes through all layers and the head. All rows of a packed pass together."""
        layers = sum(curve.seconds(rows, context, batch) for curve in (self.base, self.own) if curve is not None)
        return layers + self.head.seconds(rows)

    def spread(self) -> float:
        """The median over all that was measured of spread over seconds."""
        cells = [cell for curve in (self.base, self.own, self.head) if curve is not None for cell in curve.cells]
        return float(np.median([cell.spread / cell.seconds for cell in cells if cell.seconds > 0]))

    def costs(self, context: int = 256, batch: int = 1) -> Costs:
        """The same as a curve over rows, for whoever weighs plain passes."""
        return Costs(WIDTHS, [self.seconds(width * batch, context, batch) for width in WIDTHS])


@dataclass(frozen=True)
class CostTable:
    """By `scorer_key`."""

    scorers: Mapping[str, Parts]
    sampled: bool = False  # whether picks were made under a temperature

    def of(self, scorer: StateScorer) -> Parts:
        try:
            return self.scorers[scorer_key(scorer)]
        except KeyError:
            raise HierspecError(
                f"Nobody has measured what passes of {scorer.name} cost; name its tier when the table is made."
            ) from None

    def joined(self, other: CostTable) -> CostTable:
        return CostTable({**self.scorers, **other.scorers}, self.sampled)

    def to_json(self) -> dict[str, Any]:
        return {"sampled": self.sampled, "scorers": {key: asdict(parts) for key, parts in self.scorers.items()}}

    @staticmethod
    def from_json(kept: Mapping[str, Any]) -> CostTable:
        """Raises KeyError, TypeError or ValueError where it is not one."""

        def curve(found: Mapping[str, Any] | None) -> Curve | None:
            if found is None:
                return None
            cells = [Cell(int(c["rows"]), int(c["context"]), int(c["batch"]), float(c["seconds"]), float(c["spread"]))
                     for c in found["cells"]]  # fmt: skip
            if not cells:
                raise ValueError("nothing was measured")
            return Curve(tuple(cells))

        scorers = {}
        for key, parts in kept["scorers"].items():
            head = curve(parts["head"])
            if head is None:
                raise ValueError(f"{key} has no head")
            base, own = curve(parts["base"]), curve(parts["own"])
            later = curve(parts["later"])
            scorers[str(key)] = Parts(str(parts["name"]), int(parts["layers"]), base, own, head, later)
        return CostTable(scorers, bool(kept["sampled"]))

    def rows(self, contexts: Sequence[int] = CONTEXTS, widths: Sequence[int] = (1, 4, 8, 16)) -> list[list[str]]:
        """A table for people, its heading first: milliseconds of a pass at batch 1."""
        heading = ["scorer", *(f"{width} at {context}" for context in contexts for width in widths), "spread"]
        lines = [heading]
        for parts in self.scorers.values():
            found = [f"{1e3 * parts.seconds(width, context):.2f}" for context in contexts for width in widths]
            lines.append([parts.name, *found, f"{parts.spread():.0%}"])
        return lines
