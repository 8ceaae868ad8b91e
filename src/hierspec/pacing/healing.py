"""Costs that correct themselves: measured once, then corrected by every timed pass.

A measurement may be wrong: made in a noisy minute, or on a cold processor. So a Kalman filter estimates the logarithms
of the true costs at the measured widths: the seconds after a short context, and the growth per further token of
context. Its prior is the measurement. Each timed pass is an observation of the widths next to its own, and of growth as
far as its context was long. By the prior, an error common to all costs (the machine is busy) is likelier than one of
all growth, and that is likelier than one of a single width. So a few passes of any width move everything, and passes
over long texts correct what long texts cost without spoiling what is known of short ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from hierspec.pacing.costs import Costs

# Standard deviations are those of logarithms.
_SCALE = 0.5  # prior standard deviation of the error common to all costs
_GROWTH = 0.4  # that of the further error common to all growth
_SHAPE = 0.2  # that of the further error of one width, if repeated measurements agreed
_REACH = 0.7  # distance of two log widths at which the correlation of their errors has fallen to 1/e
_SCALE_DRIFT, _GROWTH_DRIFT, _SHAPE_DRIFT = 0.006, 0.003, 0.0015  # drift of these errors from one pass to the next
_NOISE = 0.1  # standard deviation of one timed pass, at first; later as observed
_LEAST_NOISE = 0.02  # lower bound of the observed noise
_NOISE_MEMORY = 0.98  # weight of the noise of earlier passes after each new one
_OUTLIER = 2.0  # standard deviations beyond which a surprise counts less: something else ran meanwhile
_CHANGED = 3  # outliers in a row, of one width and sign, that mean that the machine has changed
_LONG = 0.3  # share of growth in a pass above which such a change is one of growth alone
_EAGER, _EVERY = 12, 4  # after 12 passes of a width, one in 4 is enough
_PUBLISH = 0.01  # change of a logarithm above which new curves are drawn
_KNOWN = 0.1  # a width is known if its standard deviation is less than this


class HealingCosts(Costs):
    """Costs of one scorer that timed passes correct.

    `spread` is the relative difference between repeated measurements of each width, and `growth_spread` that of growth.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        spread: Sequence[float] = (),
        growth: Sequence[float] = (),
        growth_spread: Sequence[float] = (),
        context: int = 0,
    ) -> None:
        super().__init__(rows, seconds, growth, context)
        self.spread = tuple(spread) or (0.0,) * len(self.rows)
        self.growth_spread = tuple(growth_spread) or (0.0,) * len(self.rows)
        # First the seconds of each width, then the growth, where there is any.
        parts = [(self.measured, self.spread)]
        if min(self.growth) > 0:
            parts.append((self.growth, self.growth_spread))
        widths = np.log(np.array(self.rows, float))
        near = np.exp(-np.abs(widths[:, None] - widths[None, :]) / _REACH)
        count = len(self.rows)
        self._drift = np.full((len(parts) * count,) * 2, _SCALE_DRIFT**2)
        self._prior = np.full((len(parts) * count,) * 2, _SCALE**2)
        for number, (_, part_spread) in enumerate(parts):
            shape, block = np.hypot(_SHAPE, part_spread), slice(number * count, (number + 1) * count)
            self._drift[block, block] += _SHAPE_DRIFT**2 * near + number * _GROWTH_DRIFT**2
            self._prior[block, block] += shape[:, None] * shape[None, :] * near + number * _GROWTH**2
        self._covariance = self._prior.copy()
        self._logs = np.log(np.maximum(np.concatenate([values for values, _ in parts]), 1e-12))
        self._published = self._logs.copy()
        self._noise = _NOISE**2
        # Outliers in a row, by width: first after short contexts, then after long ones. Negative: too fast.
        self._outliers = [0] * 2 * count
        self._timed = [0] * count  # passes, by width
        self._cold = True  # the first pass also uses code and memory for the first time

    @property
    def passes(self) -> int:
        """How many passes were timed."""
        return sum(self._timed)

    def observe(self, rows: int, seconds: float, context: float = 0, requests: int = 1) -> None:
        """A pass over `rows` rows of `requests` requests took `seconds`, after `context` tokens on average."""
        if not (rows >= 1 and 0 < seconds < math.inf):
            return
        if self._cold:
            self._cold = False
            return
        width = self._between(rows)[0]
        self._timed[width] += 1
        if self._timed[width] > _EAGER and self._timed[width] % _EVERY:
            return
        logs, covariance = self._logs, self._covariance
        covariance += self._drift
        expected, weights = self._expected(rows, context, requests)
        count = len(self.rows)
        long = float(weights[count:].sum()) > _LONG
        streaks = width + long * count
        towards = covariance @ weights
        variance = max(float(weights @ towards), 0.0)
        surprise = math.log(seconds) - math.log(expected)
        total = variance + self._noise
        if surprise * surprise > _OUTLIER**2 * total:
            # Probably something else ran meanwhile: treat this pass as that much noisier, unless outliers persist.
            total = surprise * surprise / _OUTLIER**2
            streak = self._outliers[streaks]
            self._outliers[streaks] = (
                streak + 1 if surprise > 0 <= streak else streak - 1 if surprise < 0 >= streak else 0
            )
        else:
            self._outliers[streaks] = 0
        gain = towards / total
        logs += gain * surprise
        covariance -= gain[:, None] * towards[None, :]
        if abs(self._outliers[streaks]) >= _CHANGED:
            # The machine has changed: doubt growth if long texts show it, and everything if short ones do.
            doubted = slice(count if long else 0, None)
            covariance[doubted, doubted] += self._prior[doubted, doubted]
            self._outliers = [0] * 2 * count
        # The part of the surprise beyond the filter's own variance is noise of passes.
        seen = min(max(surprise * surprise - variance, _LEAST_NOISE**2), _OUTLIER**2 * self._noise)
        self._noise = _NOISE_MEMORY * self._noise + (1 - _NOISE_MEMORY) * seen
        if np.abs(self._logs - self._published).max() > _PUBLISH:
            self._published = self._logs.copy()
            self._draw(*(values.tolist() for values in self._estimates()))

    def _expected(self, rows: int, context: float, requests: int) -> tuple[float, np.ndarray]:
        """Expected seconds of such a pass, and how far each estimated logarithm moves their logarithm."""
        weights = np.zeros(len(self._logs))
        low, high, share = self._between(rows)
        base = self._weigh(weights, low, high, share)
        if rows > self.rows[-1]:
            base *= self._base.at(rows) / self._base.at(self.rows[-1])
        further = self._further(context)
        if not further or len(self._logs) == len(self.rows):
            return base, weights
        # Each request's rows have a text of their own.
        each, count = max(round(rows / requests), 1), len(self.rows)
        low, high, share = self._between(each)
        longer = np.zeros(len(self._logs))
        added = requests * further * self._weigh(longer, count + low, count + high, share)
        if each > self.rows[-1]:
            added *= self._growth_curve().at(each) / self._growth_curve().at(self.rows[-1])
        return base + added, (base * weights + added * longer) / (base + added)

    def _weigh(self, weights: np.ndarray, low: int, high: int, share: float) -> float:
        """The cost interpolated between two estimates; adds the weight of each to `weights`."""
        weights[low] += 1 - share
        weights[high] += share
        return (1 - share) * math.exp(self._logs[low]) + share * math.exp(self._logs[high])

    def _estimates(self) -> tuple[np.ndarray, np.ndarray]:
        """The current estimates of seconds and growth at the measured widths."""
        count, values = len(self.rows), np.exp(self._logs)
        return values[:count], values[count:] if len(values) > count else np.array(self.growth)

    @property
    def heals(self) -> bool:
        return True

    def again(self) -> HealingCosts:
        return HealingCosts(self.rows, self.measured, self.spread, self.growth, self.growth_spread, self.context)

    def healed(self) -> HealingCosts:
        """The current estimates as measured costs, with their remaining uncertainty as the spread."""
        doubt = np.minimum(np.sqrt(np.maximum(np.diag(self._covariance) - _SCALE_DRIFT**2, 0.0)), 1.0)
        (seconds, growth), count = self._estimates(), len(self.rows)
        return HealingCosts(
            self.rows, seconds.tolist(), doubt[:count].tolist(), growth.tolist(), doubt[count:].tolist(), self.context
        )

    def known(self, rows: int, context: int = 0) -> bool:
        """Whether passes of about this width and context were timed lately.

        If not, their costs may still be as wrong as the measurement.
        """
        at_least = self.rows[min(bisect_left(self.rows, rows), len(self.rows) - 1)]
        _, weights = self._expected(at_least, context, 1)
        return bool(weights @ self._covariance @ weights < _KNOWN**2)

    def _between(self, rows: int) -> tuple[int, int, float]:
        """Indices of the measured widths around this one, and its share of the way. Beyond the last: the last twice."""
        high = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        if self.rows[high] <= rows or high == 0:
            return high, high, 0.0
        return high - 1, high, (rows - self.rows[high - 1]) / (self.rows[high] - self.rows[high - 1])
