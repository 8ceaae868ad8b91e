"""How often drafts are accepted: learnt by class, from every verification.

It also learns about drafts that were not verified: what the scorer wrote in their place shows whether they would have
been accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hierspec.core.proposal import CERTAIN, Proposal

_DEEPEST = 8  # deeper drafts are counted together
_PRIOR_TRIALS = 16.0  # trials after which a class weighs as much as the wider class it belongs to
_PRIOR = 0.4  # rate of a source of which nothing is known
_HALF_LIFE = 4000.0  # trials after which older ones count half: texts change
_MOST_PRIOR = 128.0  # most trials that the counts of earlier runs may weigh
_NEW = 0.01  # rates are worked out again once new trials exceed this share of all: that takes longer than counting
_UNSEEN = (0.0, 0.0)

Class = tuple[str, int, int]  # source, evidence, depth; -1 for all of them


class AcceptanceRates:
    """How often a draft was accepted, given that the one before it was: by source, evidence and depth."""

    def __init__(self) -> None:
        self._counts: dict[Class, list[float]] = {}  # trials, accepted
        self._rates: dict[Class, float] = {}  # cached until enough is new
        self._trials = self._new = 0.0  # trials, and those since the cached rates were dropped

    def rate(self, source: str, evidence: int, depth: int) -> float:
        key = source, evidence, depth if depth < _DEEPEST else _DEEPEST
        return self._rates[key] if key in self._rates else self._work_out(key)

    def _work_out(self, key: Class) -> float:
        """The rate of a class from its counts, with the rate of the next wider class as the prior."""
        rates, (source, evidence, depth) = self._rates, key
        if evidence == CERTAIN:
            return rates.setdefault(key, 1.0)
        if evidence < 0:
            prior = _PRIOR
        else:
            wider = (source, -1, -1) if depth < 0 else (source, evidence, -1)
            prior = rates[wider] if wider in rates else self._work_out(wider)
        trials, accepted = self._counts.get(key, _UNSEEN)
        rates[key] = rate = (accepted + _PRIOR_TRIALS * prior) / (trials + _PRIOR_TRIALS)
        return rate

    def counts(self) -> list[tuple[str, int, int, float, float]]:
        """All counts: source, evidence, depth, trials, accepted."""
        return [(*key, counts[0], counts[1]) for key, counts in self._counts.items()]

    def begin_with(self, counts: Iterable[tuple[str, int, int, float, float]]) -> None:
        """Take the counts of other texts or runs as a prior, which the current text soon outweighs."""
        for source, evidence, depth, trials, accepted in counts:
            if trials > 0:
                weight = min(trials, _MOST_PRIOR) / trials
                self._counts[source, evidence, depth] = [weight * trials, weight * min(accepted, trials)]
                self._trials += weight * trials if evidence < 0 else 0.0
        self._rates.clear()

    def learn(self, proposal: Proposal, written: Sequence[int]) -> None:
        """Learn from what was written where this was proposed. A node is a trial if all before it on its path were."""
        depths = {-1: 0}  # depth of what comes after each node on the written path
        all_counts, trials = self._counts, 0
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            depth = depths.get(parent, len(written))
            if depth == len(written):
                continue
            source, evidence = proposal.sources[node], proposal.evidence[node]
            accepted = token == written[depth]
            if accepted:
                depths[node] = depth + 1
            if evidence == CERTAIN:  # nothing to learn, and it says nothing about other tokens of its source
                continue
            trials += 1
            for key in ((source, -1, -1), (source, evidence, -1), (source, evidence, min(depth, _DEEPEST))):
                counts = all_counts.get(key)
                if counts is None:
                    counts = all_counts[key] = [0.0, 0.0]
                counts[0] += 1
                counts[1] += accepted
                if counts[0] > _HALF_LIFE:
                    counts[0] /= 2
                    counts[1] /= 2
        self._new += trials
        if self._new > _NEW * self._trials:
            self._trials, self._new = min(self._trials + self._new, _HALF_LIFE), 0.0
            self._rates.clear()
