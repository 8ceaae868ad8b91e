"""What a host's steps cost by their rows: nothing is measured beforehand, every step is timed."""

from __future__ import annotations

import math

from hierspec.assembly.host import HostTarget
from hierspec.assembly.measured_costs import CostBook
from hierspec.pacing.healing import HealingCosts
from hierspec.scorers.base import StateScorer

_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a step whose costs are told apart
# Prior: what doubling the rows adds to a step, as a share of a one-row step. It is low on purpose: wide steps that are
# tried show what they cost, but those that are thought too expensive are never tried.
_DOUBLED = 1 / 16
_FIRST_STEPS = 3  # steps timed before the costs count as known; the fastest counts
_UNKNOWN = 0.03  # placeholder for the seconds of a step until then; nothing is drafted by it


class HostCosts(HealingCosts):
    """Begins with the times of the first steps. One object for all who weigh the host's time."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._begin(_UNKNOWN)

    @property
    def timed(self) -> bool:
        """Whether the cost of a host's step is known."""
        return len(self._first) >= _FIRST_STEPS

    def observe(self, rows: int, seconds: float, context: float = 0, requests: int = 1) -> None:
        if self.timed:
            super().observe(rows, seconds, context, requests)
            return
        self._first.append(seconds / _times(rows))
        if self.timed:
            self._begin(max(min(self._first), 1e-6))

    def again(self) -> HostCosts:
        """Itself: a host does not know who drafted, and all of its steps are timed alike."""
        return self

    def _begin(self, alone: float) -> None:
        super().__init__(_WIDTHS, [alone * _times(rows) for rows in _WIDTHS])


def _times(rows: int) -> float:
    """Prior time of a step of this many rows, relative to one of one row."""
    return 1 + _DOUBLED * math.log2(rows)


class HostCostBook(CostBook):
    """Costs of draft models as usual, and of the target's passes as timed in its host."""

    def __init__(self, host: HostCosts, *about: str) -> None:
        super().__init__(*about)
        self._host = host

    @property
    def times_host(self) -> bool:
        return True

    def costs(self, scorer: StateScorer, computed_layers: int = 0) -> HealingCosts:
        return self._host if isinstance(scorer, HostTarget) else super().costs(scorer, computed_layers)
