"""Costs that correct themselves: what was measured once, and since then every pass as it was timed.

A measurement may be wrong: made in a noisy minute, on a cold processor, after a short context. So the logarithms of
the true costs are estimated at the measured widths by a Kalman filter. Its prior is the measurement; each timed pass is
an observation of the widths beside it. An error common to all widths (the machine is busy, or the context is long) is
thought likelier than one of a single width, so a few passes of any width move the whole curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hierspec.pacing.costs import Costs

_SCALE = 0.5  # how far off all widths together may be to begin with (standard deviation of the logarithm),
_SHAPE = 0.2  # and one width beside the others, where it was measured without any spread
_REACH = 0.7  # distance of the logarithms of two widths over which their errors part
_SCALE_DRIFT, _SHAPE_DRIFT = 0.006, 0.0015  # of both from one pass to the next
_NOISE = 0.1  # of one timed pass to begin with; then as it is seen to be, at least
_LEAST_NOISE = 0.02
_NOISE_MEMORY = 0.98  # what the noise of a pass counts for after the next
_OUTLIER = 2.0  # standard deviations from which on a surprise counts less: something else ran meanwhile,
_CHANGED = 3  # unless so many of one width and sign follow each other: then the machine has changed
_EAGER, _EVERY = 256, 3  # after so many passes one in so many is enough
_PUBLISH = 0.01  # a change by which the curve is drawn anew
_KNOWN = 0.1  # a width is known when its standard deviation is less


class HealingCosts(Costs):
    """Costs of one scorer. `spread` is by how much repeated measurements of each width differed, as a share."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], spread: Sequence[float] = ()) -> None:
        super().__init__(rows, seconds)
        self.spread = tuple(spread) or (0.0,) * len(self.rows)
        widths = np.log(np.array(self.rows, float))
        near = np.exp(-np.abs(widths[:, None] - widths[None, :]) / _REACH)
        shape = np.hypot(_SHAPE, self.spread)
        self._drift = _SCALE_DRIFT**2 + _SHAPE_DRIFT**2 * near
        self._prior = _SCALE**2 + shape[:, None] * shape[None, :] * near
        self._covariance = self._prior.copy()
        self._logs = np.log(np.maximum(seconds, 1e-12))
        self._published = self._logs.copy()
        self._noise = _NOISE**2
        self._outliers = [0] * len(self.rows)  # in a row, by width; below zero: passes that were too fast
        self.passes = 0  # that were timed

    def observe(self, rows: int, seconds: float) -> None:
        """A pass over so many rows took so long."""
        if not (rows >= 1 and 0 < seconds < math.inf):
            return
        self.passes += 1
        if self.passes > _EAGER and self.passes % _EVERY:
            return
        low, high, share = self._between(rows)
        logs, covariance = self._logs, self._covariance
        covariance += self._drift
        towards = (1 - share) * covariance[low] + share * covariance[high]
        variance = max(float((1 - share) * towards[low] + share * towards[high]), 0.0)
        expected = (1 - share) * math.exp(logs[low]) + share * math.exp(logs[high])
        if rows > self.rows[-1]:
            expected *= self.seconds(rows) / self.seconds(self.rows[-1])
        surprise = math.log(seconds) - math.log(expected)
        total = variance + self._noise
        if surprise * surprise > _OUTLIER**2 * total:
            # Likely something else ran meanwhile: it counts as if it had been that much noisier, unless it stays so.
            total = surprise * surprise / _OUTLIER**2
            streak = self._outliers[low]
            self._outliers[low] = streak + 1 if surprise > 0 <= streak else streak - 1 if surprise < 0 >= streak else 0
        else:
            self._outliers[low] = 0
        gain = towards / total
        logs += gain * surprise
        covariance -= gain[:, None] * towards[None, :]
        if abs(self._outliers[low]) >= _CHANGED:
            covariance += self._prior  # what was known is true no longer
            self._outliers = [0] * len(self.rows)
        # What the filter did not expect beyond its own doubt is the noise of passes.
        seen = min(max(surprise * surprise - variance, _LEAST_NOISE**2), _OUTLIER**2 * self._noise)
        self._noise = _NOISE_MEMORY * self._noise + (1 - _NOISE_MEMORY) * seen
        if np.abs(self._logs - self._published).max() > _PUBLISH:
            self._published = self._logs.copy()
            self._draw(np.exp(self._logs))

    @property
    def heals(self) -> bool:
        return True

    def again(self) -> HealingCosts:
        return HealingCosts(self.rows, self.measured, self.spread)

    def healed(self) -> HealingCosts:
        """As they are now, with the doubt that is left as their spread."""
        doubt = np.sqrt(np.maximum(np.diag(self._covariance) - _SCALE_DRIFT**2, 0.0))
        return HealingCosts(self.rows, np.exp(self._logs).tolist(), np.minimum(doubt, 1.0).tolist())

    def known(self, rows: int) -> bool:
        """Whether passes of about this width were seen lately: else its costs may still be as wrong as measured."""
        index = min(int(np.searchsorted(self.rows, rows)), len(self.rows) - 1)
        return bool(self._covariance[index, index] < _KNOWN**2)

    def _between(self, rows: int) -> tuple[int, int, float]:
        """The measured widths beside this one, and its share of the way. Beyond the last it tells of the last."""
        high = min(int(np.searchsorted(self.rows, rows)), len(self.rows) - 1)
        if self.rows[high] <= rows or high == 0:
            return high, high, 0.0
        return high - 1, high, (rows - self.rows[high - 1]) / (self.rows[high] - self.rows[high - 1])
