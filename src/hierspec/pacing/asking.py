"""Which stores are asked after the first: what each adds to those before it, against the time that asking it takes.

A later store is worth little if those before it already have a good draft, so its worth is learnt separately by how
good that draft is. Every decision is made before a token is sampled, from earlier rounds: it changes what is drafted,
never what is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from hierspec.core.proposal import Proposal
from hierspec.pacing.acceptance import AcceptanceRates

_PROMISES = (0.01, 0.3, 0.6)  # bounds of the classes: acceptance rate of the best draft of earlier stores
_MEMORY = 0.99  # weight of earlier asks after each new one
_PRIOR_ASKS, _PRIOR_GAIN = 8.0, 0.2  # prior: as if asked this often, with this many tokens gained each time
_TRIAL = 8  # asks after a rest, so that a store that has become better comes back
_RESTS = (32, 512)  # times that a store is skipped: the first rest and the longest; each doubles the last
_OUTLIER = 3.0  # an ask counts as at most this many times the average


class _Worth:
    """What one store gains where the stores before it have a draft of one class."""

    def __init__(self) -> None:
        self.asks, self.gained = _PRIOR_ASKS, _PRIOR_ASKS * _PRIOR_GAIN  # older ones decayed
        self._resting = self._trial = 0
        self._rest = _RESTS[0]

    def asked(self, price: float) -> bool:
        """Whether to ask it this time, if the time of asking is worth `price` tokens."""
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
    """Chooses which of a tier's stores are asked. Shared by all requests of a model."""

    def __init__(self) -> None:
        self._worth: dict[tuple[str, int], _Worth] = {}  # by store, and the class of what those before it have
        self._seconds: dict[str, tuple[float, float]] = {}  # store -> asks and seconds, older ones decayed

    def asks(self, store: str, promise: int, speed: float) -> bool:
        """Whether to ask this store too, if a second is worth `speed` tokens."""
        asks, seconds = self._seconds.get(store, (0.0, 0.0))
        return not asks or self._of(store, promise).asked(speed * seconds / asks)

    def learn(self, store: str, promise: int, gained: float, seconds: float) -> None:
        """An ask took `seconds` and gained this many tokens that no earlier store had drafted.

        The price of verifying its drafts is subtracted already.
        """
        asks, spent = self._seconds.get(store, (0.0, 0.0))
        if asks >= 1:
            seconds = min(seconds, _OUTLIER * spent / asks)
        self._seconds[store] = _MEMORY * asks + 1.0, _MEMORY * spent + seconds
        self._of(store, promise).learn(gained)

    def _of(self, store: str, promise: int) -> _Worth:
        return self._worth.setdefault((store, promise), _Worth())


def promise(acceptance: AcceptanceRates, proposals: Iterable[Proposal]) -> int:
    """The class of the drafts so far, by how often such first tokens are accepted."""
    best = 0.0
    for proposal in proposals:
        if proposal.tokens:
            best = max(best, acceptance.rate(proposal.sources[0], proposal.evidence[0], 0))
    return bisect_right(_PROMISES, best)
