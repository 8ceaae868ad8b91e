"""What one pass of a scorer costs by its width: measured here once, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from hierspec.core.appraisal import Costs
from hierspec.core.engine import Request
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Ask, Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Sampling
from hierspec.core.stats import TierStats
from hierspec.machine import machine
from hierspec.models.pick import answer
from hierspec.models.scorer import StateScorer
from hierspec.paths import cache_folder, whole_file
from hierspec.progress import Progress, silent

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 256
_ROUNDS = 3
_VERSION = 1  # count up when passes become faster or slower


class PassTimer:
    """Passes of a scorer after one context, taken apart."""

    def __init__(self, scorer: StateScorer, context: np.ndarray) -> None:
        self._scorer, self._context, self._runs = scorer, context, 0
        self._request = Request(context, Sampling(), Hierarchy((Tier(scorer),)))
        scorer.forget()
        self.run(context[:1])  # reads the context

    def run(self, tokens: np.ndarray) -> list[float]:
        """Seconds of the layers, the head and the picks of a pass over so many tokens as these."""
        scorer, clock = self._scorer, time.perf_counter
        self._runs += 1
        tokens = ((tokens + self._runs) % scorer.vocabulary).astype(np.int32)  # never seen here, so nothing is known
        context = np.append(self._context, tokens[:1]).astype(np.int32)
        ask = Ask(scorer, context, Proposal.chain(tokens[1:]), self._request, 1, False, TierStats(scorer.name))
        with torch.inference_mode():
            start = clock()
            states = scorer.states([ask])
            layers = clock()
            [logits] = scorer.head.logits([ask], states)
            head = clock()
            answer(ask, logits, scorer.decoder.team)  # copies the picks to the host, so a GPU has finished here
            return [layers - start, head - layers, clock() - head]

    def close(self) -> None:
        self._request.cancel()
        self._scorer.forget()


def measured_costs(scorer: StateScorer, about: list[Any], progress: Progress = silent) -> Costs:
    """Costs of this scorer on this machine. `about` tells it from others: model, dtype, weights."""
    identity = [machine(), torch.get_num_threads(), scorer.layers, about, _VERSION]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:20]
    path = cache_folder() / "costs" / f"{key}.json"
    with suppress(OSError, ValueError, KeyError):  # absent or damaged: measure again
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Costs([int(rows) for rows in kept["rows"]], [float(seconds) for seconds in kept["seconds"]])
    costs = measure(scorer, progress)
    with suppress(HierspecError), whole_file(path) as temporary:  # a full disk must not keep anyone from writing
        kept = {"rows": costs.rows, "seconds": costs.measured, "about": identity}
        temporary.write_text(json.dumps(kept, indent=2, default=str) + "\n", encoding="utf-8")
    return costs


def measure(scorer: StateScorer, progress: Progress = silent) -> Costs:
    """The least of a few rounds: whatever else runs on the machine only ever adds."""
    room = scorer.decoder.config.context - max(_WIDTHS) - 1
    text = np.random.default_rng(0).integers(0, scorer.vocabulary, min(_CONTEXT, room) + max(_WIDTHS)).astype(np.int32)
    context, after = text[: -max(_WIDTHS)], text[-max(_WIDTHS) :]
    timer = PassTimer(scorer, context)
    times: dict[int, list[float]] = {width: [] for width in _WIDTHS}
    for number in range(_ROUNDS):
        for width in _WIDTHS:
            times[width].append(sum(timer.run(after[:width])))
        progress("Measuring passes (once)", number + 1, _ROUNDS)
    timer.close()
    return Costs(_WIDTHS, [min(times[width]) for width in _WIDTHS])
