"""What a forward pass costs by its width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PROBE = 64.0  # what does not pay: seconds without it for each second of trying again


class Costs:
    """Seconds of one pass by its rows: measured for some widths, straight lines in between and beyond."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        self.rows, self.measured = tuple(rows), tuple(float(each) for each in seconds)
        self._draw(seconds)

    def _draw(self, seconds: Sequence[float] | np.ndarray) -> None:
        """Let the curve go through these seconds at the measured widths."""
        rows = self.rows
        rising = np.maximum.accumulate(seconds)  # a wider pass is never really cheaper
        self._slope = float(rising[-1] - rising[0]) / max(1, rows[-1] - rows[0])
        widths = np.arange(4 * rows[-1] + 1)
        inside = np.interp(widths, rows, rising)
        self._seconds: list[float] = np.where(
            widths > rows[-1], rising[-1] + self._slope * (widths - rows[-1]), inside
        ).tolist()
        self._least_steps: list[float] = np.minimum.accumulate(np.diff(self._seconds[1:])).tolist()
        self._shared: dict[int, Costs] = {1: self}

    def seconds(self, rows: int) -> float:
        if rows < len(self._seconds):
            return self._seconds[rows]
        return self._seconds[-1] + self._slope * (rows - len(self._seconds) + 1)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass over so many rows took so long. These costs stay as they are."""
        return

    @property
    def heals(self) -> bool:
        """Whether passes correct them."""
        return False

    def again(self) -> Costs:
        """As they were measured, to be corrected by other passes."""
        return self

    def known(self, rows: int) -> bool:
        """Whether there is nothing to learn about passes of this width."""
        return True

    def shared(self, requests: int) -> Costs:
        """The part of each of so many requests whose passes, all of one width, run as one batch.

        Where width is nearly free it is less than the pass alone. Where a batch fills the machine every row has its
        price, and a draft must be nearly certain to be worth it.
        """
        if requests not in self._shared:
            # By single rows where drafts begin, so that no kink of the wide pass is lost.
            rows = sorted({*range(1, 9), *self.rows})
            self._shared[requests] = Costs(rows, [self.seconds(requests * count) / requests for count in rows])
        return self._shared[requests]

    def least_step(self, nodes: int) -> float:
        """The least that one of up to `nodes` nodes adds to a pass."""
        return self._least_steps[nodes - 1] if nodes <= len(self._least_steps) else 0.0


FREE = Costs((1,), (0.0,))  # where nothing was measured
