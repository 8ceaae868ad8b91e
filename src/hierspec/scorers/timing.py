"""How long a forward pass of a scorer takes, part by part: its layers, its head, its picks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hierspec.core.foresight import SUREST
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.scorers.base import StateScorer


def time_layers(scorer: StateScorer, asks: Sequence[Ask]) -> tuple[float, Tensor]:
    """Seconds until the states of these asks are computed, and the states."""
    with torch.inference_mode():
        began = time.perf_counter()
        states = scorer.states(asks)
        scorer.decoder.backend.synchronize()
        return time.perf_counter() - began, states


def time_head(scorer: StateScorer, asks: Sequence[Ask], states: Tensor) -> tuple[float, float]:
    """Seconds of the head, and of the picks from its logits."""
    backend = scorer.decoder.backend
    with torch.inference_mode():
        began = time.perf_counter()
        logits = scorer.head.logits(asks, states)
        backend.synchronize()
        scored = time.perf_counter()
        backend.pick(asks, logits)  # copies the picks to the host, so it is finished here
        return scored - began, time.perf_counter() - scored


class PassTimer:
    """Times passes of a scorer after one context.

    The context is computed once, or not at all: its values do not matter for the time. With `computed_layers`, all
    tokens of a pass but the first have been through that many layers, as if a lower tier that shares them had run.
    """

    def __init__(
        self, scorer: StateScorer, context: np.ndarray, computed_layers: int = 0, compute: bool = True
    ) -> None:
        self._scorer, self._context, self._computed_layers, self._runs = scorer, context, computed_layers, 0
        self._request = Request(context, Sampling(), Hierarchy((Tier(scorer),)))
        scorer.forget()
        if not compute:
            with torch.inference_mode():
                self._assume_context()
        self.run(context[:1])  # the prefill

    def run(self, tokens: np.ndarray) -> list[float]:
        """Seconds of the layers, the head and the picks of a pass over as many tokens as these.

        A pass that is one call counts as layers. If a scorer writes several tokens per call, the seconds are per token.
        """
        scorer = self._scorer
        self._runs += 1
        tokens = ((tokens + self._runs) % scorer.vocabulary).astype(np.int32)  # new ones, so nothing is computed yet
        context = np.append(self._context, tokens[:1]).astype(np.int32)
        ask = self._ask(context, Proposal.chain(tokens[1:]))
        if self._computed_layers:
            [staircase] = scorer.pool.prepare([(self._request, context, ask.proposal)])
            scorer.pool.assume(staircase, staircase.used, self._computed_layers, len(context))
        if scorer.in_one_call([ask]):
            if len(tokens) == 1 < scorer.at_once:
                ask = replace(ask, ahead=np.ones((scorer.at_once - 1, SUREST + 1), bool))
            began = time.perf_counter()
            [answer] = scorer.score([ask])
            return [(time.perf_counter() - began) / (1 + len(answer.ahead)), 0.0, 0.0]
        layers, states = time_layers(scorer, [ask])
        return [layers, *time_head(scorer, [ask], states)]

    def prefill(self, tokens: int) -> float:
        """Seconds of the scorer's layers for the last `tokens` tokens of the context."""
        ask = self._ask(self._context, NOTHING)
        with torch.inference_mode():
            self._scorer.assume_computed([ask], len(self._context) - tokens)
        return time_layers(self._scorer, [ask])[0]

    def _assume_context(self) -> None:
        self._scorer.assume_computed([self._ask(self._context, NOTHING)], len(self._context))
        for pool in self._scorer.pools:
            for staircase in pool.staircases():
                # Memory that was never written to reads too fast: the system maps all of it to one page of zeros.
                staircase.memory.copy(staircase.slots, staircase.slots)

    def _ask(self, context: np.ndarray, proposal: Proposal) -> Ask:
        return Ask(self._scorer, context, proposal, self._request, 1, False, TierStats(self._scorer.name))

    def close(self) -> None:
        self._request.cancel()
        self._scorer.forget()
