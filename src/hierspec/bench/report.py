"""What a run has shown: one document for machines, one table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hierspec.bench.run import PLAIN, Outcome
from hierspec.core.stats import Stats
from hierspec.machine import machine

_RESAMPLES = 2000


def document(found: Mapping[str, Sequence[Outcome]], peers: Sequence[str], about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document that ends a bench. `about` is what the caller knows: command, model, dtype, temperature."""
    plain = found[PLAIN]
    return {
        "machine": machine(),
        **about,
        "threads": torch.get_num_threads(),
        "plans": {name: summary(outcomes, plain) for name, outcomes in found.items() if name not in peers},
        "peers": {name: summary(found[name], plain) for name in peers},
    }


def summary(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of one plan over all prompts and for every task."""
    figures = _figures(outcomes, plain)
    if any(outcome.synthetic for outcome in outcomes):
        figures["synthetic"] = True
    figures["speedup_interval"] = _interval(outcomes, plain)
    figures["differences"] = [str(outcome.difference) for outcome in outcomes if outcome.difference is not None]
    figures["tiers"] = _all_stats(outcomes)
    figures["tasks"] = {}
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        places = [place for place, outcome in enumerate(outcomes) if outcome.task == task]
        figures["tasks"][task] = _figures([outcomes[p] for p in places], [plain[p] for p in places])
    return figures


def _figures(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> dict[str, Any]:
    tokens = sum(outcome.count for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    later = seconds - sum(outcome.first_seconds for outcome in outcomes)
    passes = sum(outcome.stats.passes for outcome in outcomes)
    figures = {
        "prompts": len(outcomes),
        "identical": sum(outcome.difference is None for outcome in outcomes),
        "ties": sum(outcome.difference is not None and outcome.difference.is_tie for outcome in outcomes),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "speedup": round(_speedup(outcomes, plain), 3),
        "tokens_per_second": round(tokens / seconds, 2),
    }
    if passes:  # peers do not tell
        figures["tokens_per_pass"] = round(tokens / passes, 3)
    if passes and all(outcome.alone for outcome in outcomes):
        judging = sum(tier.seconds for outcome in outcomes for tier in outcome.stats.tiers)
        # Stores, verification, counters and text: all that is not a pass of a model or its picks.
        figures["overhead_ms_per_pass"] = round(1e3 * (seconds - judging) / passes, 3)
    if passes and later > 0 and all(outcome.alone for outcome in outcomes):
        first = sum(outcome.first_tokens for outcome in outcomes)
        figures["decode_tokens_per_second"] = round((tokens - first) / later, 2)
    return figures


def _speedup(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> float:
    """Tokens per second over plain decoding's, on the same prompts."""
    fast = sum(outcome.count for outcome in outcomes) / sum(outcome.seconds for outcome in outcomes)
    return fast / (sum(outcome.count for outcome in plain) / sum(outcome.seconds for outcome in plain))


def _interval(outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> list[float]:
    """95% bootstrap interval of the speed-up, prompts drawn anew."""
    rng = np.random.default_rng(0)
    columns = np.array([[o.count, o.seconds, p.count, p.seconds] for o, p in zip(outcomes, plain, strict=True)])
    drawn = columns[rng.integers(len(columns), size=(_RESAMPLES, len(columns)))].sum(axis=1)
    ratios = (drawn[:, 0] / drawn[:, 1]) / (drawn[:, 2] / drawn[:, 3])
    return [round(float(edge), 3) for edge in np.quantile(ratios, [0.025, 0.975])]


def _all_stats(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    total = Stats()
    for outcome in outcomes:
        total.add(outcome.stats)
    return total.to_json()
