"""What whole distributions cost: the rules residual and block need one for every row; coupled only needs a pick."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.stats import TierStats
from hierspec.core.verify import RULES
from hierspec.planner.simulation.traces import scorer_key
from hierspec.scorers.base import StateScorer

_NODES = 4  # of the proposal that is timed
_ROUNDS = 5
_CONTEXT = 32


def distribution_seconds(scorers: Sequence[StateScorer], rule: str, sampling: Sampling) -> dict[str, float]:
    """By `scorer_key`: seconds that a row takes on top of its pass and pick, verification included."""
    target = scorers[0]
    text = (np.arange(_CONTEXT + _NODES, dtype=np.int32) * 7 + 5) % target.vocabulary
    request = Request(text[:_CONTEXT], sampling, Hierarchy(tuple(Tier(scorer) for scorer in scorers)))
    try:
        return {scorer_key(scorer): _of(scorer, rule, request, text) for scorer in scorers}
    finally:
        request.cancel()


def _of(scorer: StateScorer, rule: str, request: Request, text: np.ndarray) -> float:
    chain = Proposal.chain(text[_CONTEXT:])

    def asked(distributions: bool) -> Answer:
        ask = Ask(scorer, text[:_CONTEXT], chain, request, 1, distributions, TierStats(scorer.name))
        [answer] = scorer.score([ask])
        return answer

    answer = asked(True)
    picked = _least(lambda: asked(False))
    distributed = _least(lambda: asked(True))
    assert answer.distributions is not None
    rows = list(answer.distributions)
    # Drafts as a tier below hands them up, each with the distribution that it was sampled from.
    tokens = [int(np.argmax(row)) for row in rows[:_NODES]]
    plain = Proposal.chain(tokens)
    drafted = Proposal(plain.tokens, plain.parents, plain.sources, tuple(rows[:_NODES]))
    verified = _least(lambda: RULES[rule](drafted, answer, Dice(0), 1))
    return max(distributed - picked, 0.0) / (1 + _NODES) + verified / (1 + _NODES)


def _least(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
