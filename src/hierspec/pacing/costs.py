"""What a forward pass costs: by its width, by the length of the text, and by how many requests share it.

After a short context a pass mostly reads weights and multiplies its rows by them. Attention comes on top: each further
token of context adds to the pass. So costs are two curves over the width: seconds after a short context, and growth per
further token of context. Costs are linear in the length of the context.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

PROBE = 64.0  # trials of what does not pay may take one second in this many


class Load(NamedTuple):
    """The conditions under which a request's passes run."""

    requests: int = 1  # that share each pass
    context: int = 0  # tokens of its text; shorter ones than the measured context count as that one


ALONE = Load()  # one request, after a short context


class Curve:
    """A non-decreasing function of the number of rows: known at some widths, linear in between and beyond.

    Costs that heal get new curves every few passes, so values are computed lazily.
    """

    def __init__(self, rows: Sequence[int], values: Iterable[float]) -> None:
        self._rows, self._rising = rows, list(accumulate(values, max))  # a wider pass is never really cheaper
        self._slope = (self._rising[-1] - self._rising[0]) / max(1, rows[-1] - rows[0])
        self._at: dict[int, float] = {}
        self._least: dict[int, list[tuple[float, float]]] = {}  # by requests, for up to 0, 1, ... nodes

    def at(self, rows: int) -> float:
        value = self._at.get(rows)
        if value is None:
            value = self._at[rows] = self._between(rows)
        return value

    def _between(self, rows: int) -> float:
        known, rising = self._rows, self._rising
        if rows <= known[0]:
            return rising[0]
        if rows >= known[-1]:
            return rising[-1] + self._slope * (rows - known[-1])
        high = bisect_left(known, rows)
        share = (rows - known[high - 1]) / (known[high] - known[high - 1])
        return rising[high - 1] + share * (rising[high] - rising[high - 1])

    def least(self, nodes: int, requests: int = 1) -> tuple[float, float]:
        """The least that any one of the first `nodes` nodes adds, and the least average over the first 1 to `nodes`.

        Each of `requests` requests has the same number of nodes.
        """
        least = self._least.setdefault(requests, [(math.inf, math.inf)])
        alone = self.at(requests)
        while len(least) <= nodes:
            count, (step, mean) = len(least), least[-1]
            wider = self.at(requests * (count + 1))
            least.append((min(step, wider - self.at(requests * count)), min(mean, (wider - alone) / count)))
        return least[nodes]


class Share:
    """One request's share of the cost of passes under a load, by its own rows.

    While width is nearly free, a share costs less than a pass alone. Once a batch fills the machine, every row has its
    price, and a draft must be nearly certain to be worth it. The cost of a long context is not shared.
    """

    def __init__(self, base: Curve, growth: Curve | None, requests: int, further: int) -> None:
        self._base, self._requests = base, requests
        self._growth, self._further = growth, further  # tokens of context beyond those at which base was measured

    def seconds(self, rows: int) -> float:
        share = self._base.at(self._requests * rows) / self._requests
        return share if self._growth is None else share + self._further * self._growth.at(rows)

    def least(self, nodes: int) -> tuple[float, float]:
        """As `Curve.least`, for this share: lower bounds, since the parts reach their least at different widths."""
        step, mean = self._base.least(nodes, self._requests)
        step, mean = step / self._requests, mean / self._requests
        if self._growth is None:
            return step, mean
        more_step, more_mean = self._growth.least(nodes)
        return step + self._further * more_step, mean + self._further * more_mean


class Prefill(NamedTuple):
    """The cost of a tier's prefill, which it needs before it can draft."""

    each: float = 0.0  # seconds per token
    growth: float = 0.0  # seconds that each token before it adds

    def seconds(self, tokens: int, context: int) -> float:
        """Time to prefill the last `tokens` tokens of a context."""
        return tokens * (self.each + self.growth * max(context - tokens / 2, 0.0))


NO_PREFILL = Prefill()


class Costs:
    """Seconds of a pass by its rows after `context` tokens, and growth per further token, measured at some widths."""

    def __init__(
        self, rows: Sequence[int], seconds: Sequence[float], growth: Sequence[float] = (), context: int = 0
    ) -> None:
        self.rows, self.measured = tuple(rows), tuple(float(each) for each in seconds)
        self.growth = tuple(float(each) for each in growth) or (0.0,) * len(self.rows)
        self.context = context
        self._measured_base = Curve(self.rows, self.measured)
        self._draw(self.measured, self.growth)

    def _draw(self, seconds: Iterable[float], growth: Iterable[float]) -> None:
        """Draw the curves through these values at the measured widths."""
        self._base, self._growth_values = Curve(self.rows, seconds), growth
        self._growth: Curve | None = None  # drawn once a text is long
        self._last: tuple[Load, Share] | None = None  # a round asks for the same load several times

    def seconds(self, rows: int) -> float:
        """Time of a pass of a single request after a short context."""
        return self._base.at(rows)

    def measured_plain(self, load: Load) -> float:
        """Time of a pass over one row of each request as measured, whatever was learnt since."""
        return self._measured_base.at(load.requests) + self._further(load.context) * self.growth[0]

    def plain_share(self, load: Load) -> float:
        """`under(load).seconds(1)`, but faster: it is needed for each request of a batch that drafts nothing."""
        share = self._base.at(load.requests) / load.requests
        further = self._further(load.context)
        return share + further * self._growth_curve().at(1) if further else share

    def under(self, load: Load) -> Share:
        """Each request's share of a batched pass in which all requests have the same width."""
        if self._last is None or self._last[0] != load:
            further = self._further(load.context)
            growth = self._growth_curve() if further else None
            self._last = load, Share(self._base, growth, load.requests, further)
        return self._last[1]

    def _growth_curve(self) -> Curve:
        if self._growth is None:
            self._growth = Curve(self.rows, self._growth_values)
        return self._growth

    def _further(self, context: float) -> int:
        """Tokens of context beyond those at which seconds were measured."""
        return max(int(context) - self.context, 0) if self.growth[-1] else 0

    def observe(self, rows: int, seconds: float, context: float = 0, requests: int = 1) -> None:
        """A pass over `rows` rows of `requests` requests took `seconds`, after `context` tokens on average.

        These costs ignore it.
        """
        return

    @property
    def heals(self) -> bool:
        """Whether timed passes correct them: only then is there a clock to go by."""
        return False

    def again(self) -> Costs:
        """A copy as measured, to be corrected by other passes."""
        return self

    def known(self, rows: int, context: int = 0) -> bool:
        """Whether there is nothing left to learn about passes of this width after `context` tokens."""
        return True


FREE = Costs((1,), (0.0,))  # where nothing was measured
