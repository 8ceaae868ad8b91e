"""Which stores are asked after the first: what each adds to those before it, against the time that asking it takes.

A store further down is worth little where those before it already have a good draft, so its worth is learnt by how good
that is. Every decision is made before a token is sampled, from what earlier rounds have shown: it changes what is
drafted, never what is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from hierspec.core.proposal import Proposal
from hierspec.pacing.acceptance import AcceptanceRates

_PROMISES = (0.01, 0.3, 0.6)  # where classes begin of how probable the best draft of the stores before it is
_MEMORY = 0.99  # what an ask counts for after the next
_PRIOR_ASKS, _PRIOR_GAIN = 8.0, 0.2  # as if it had been asked so often and brought so many tokens each time
_TRIAL = 8  # asks after a rest, so that a store that has become better comes back
_RESTS = (32, 512)  # times that it is left out: at first, and at most, twice as many each time
_OUTLIER = 3.0  # times the usual: an ask that took longer counts as this


class _Worth:
    """Of one store where those before it have a draft of one class."""

    def __init__(self) -> None:
        self.asks, self.gained = _PRIOR_ASKS, _PRIOR_ASKS * _PRIOR_GAIN  # older ones decayed
        self._resting = self._trial = 0
        self._rest = _RESTS[0]

    def asked(self, price: float) -> bool:
        """Whether it is asked this time, where asking it costs so many tokens."""
        if self._resting:
            self._resting -= 1
            self._trial = _TRIAL
            return False
        if self._trial:
            self._trial -= 1
            return True
        if self.gained >= price * self.asks:
            self._rest = _RESTS[0]
            return True
        self._resting, self._rest = self._rest - 1, min(2 * self._rest, _RESTS[1])
        return False

    def learn(self, gained: float) -> None:
        self.asks, self.gained = _MEMORY * self.asks + 1.0, _MEMORY * self.gained + gained


class StoreChoice:
    """Of one tier and its stores in their order. Shared by all requests of a model."""

    def __init__(self) -> None:
        self._worth: dict[tuple[str, int], _Worth] = {}  # by store, and the class of what those before it have
        self._seconds: dict[str, tuple[float, float]] = {}  # store -> asks and seconds, older ones decayed

    def asks(self, store: str, promise: int, speed: float) -> bool:
        """Whether to ask this store too, where a second is worth `speed` tokens."""
        asks, seconds = self._seconds.get(store, (0.0, 0.0))
        return not asks or self._of(store, promise).asked(speed * seconds / asks)

    def learn(self, store: str, promise: int, gained: float, seconds: float) -> None:
        """An ask that took so long brought so many tokens that no store before it had drafted, less what it took to
        verify its drafts."""
        asks, spent = self._seconds.get(store, (0.0, 0.0))
        if asks >= 1:
            seconds = min(seconds, _OUTLIER * spent / asks)
        self._seconds[store] = _MEMORY * asks + 1.0, _MEMORY * spent + seconds
        self._of(store, promise).learn(gained)

    def _of(self, store: str, promise: int) -> _Worth:
        return self._worth.setdefault((store, promise), _Worth())


def promise(acceptance: AcceptanceRates, proposals: Iterable[Proposal]) -> int:
    """The class of what is drafted so far: by how often such first tokens are accepted."""
    best = 0.0
    for proposal in proposals:
        if proposal.tokens:
            best = max(best, acceptance.rate(proposal.sources[0], proposal.evidence[0], 0))
    return bisect_right(_PROMISES, best)
