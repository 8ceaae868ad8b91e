"""What a run has shown: one document for machines. docs/bench.md says what each key means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from hierspec.core.stats import Stats
from hierspec.machine import machine
from hierspec_bench.estimates import interval, outliers, speedup
from hierspec_bench.permutation_test import same_distribution
from hierspec_bench.result import Result
from hierspec_bench.run import PLAIN, SideBySide


def document(
    found: Mapping[str, Sequence[Result]],
    peers: Sequence[str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON document that ends a bench. `about` is what the caller knows: command, model, dtype, temperature."""
    weights = about.get("bandwidth", {}).get("weights_bytes")
    return {
        "kind": "bench",
        "version": 1,
        "complete": True,
        "machine": machine(),
        **about,
        "threads": torch.get_num_threads(),
        **_summaries(found, peers, about.get("temperature", 0.0), weights),
    }


def document_of(run: SideBySide, about: Mapping[str, Any], absent: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The document of a run as far as it has come, over all its temperatures."""
    peers = [peer.name for peer in run.peers]
    sampling = run.samplings[0]
    first = {
        **about,
        "temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "seed": sampling.seed,
        "repeats": run.repeats, "prompts_done": run.done, "prompts_total": run.total,
        "batches": list(run.batches), "absent_peers": {**(absent or {}), **run.failed},
    }  # fmt: skip
    result = document(run.found[0], peers, first) | {"complete": run.done == run.total}
    weights = about.get("bandwidth", {}).get("weights_bytes")
    result["other_temperatures"] = [
        {"temperature": own.temperature, **_summaries(found, peers, own.temperature, weights)}
        for own, found in zip(run.samplings[1:], run.found[1:], strict=True)
    ]
    for part in (result, *result["other_temperatures"]):
        for peer in run.peers:
            if peer.name in part["peers"]:
                part["peers"][peer.name]["about"] = dict(peer.about)
        for name, figures in part["plans"].items():
            # Sampling under a rule that draws gives other tokens of the same law: only coupled promises the text.
            rule = run.plans[name.split(", batch of")[0]].rule
            figures["rule"], figures["promises_text"] = rule, rule == "coupled" or part["temperature"] == 0
    result["texts"] = _texts(run)
    return result


def _summaries(
    found: Mapping[str, Sequence[Result]], peers: Sequence[str], temperature: float, weights: int | None
) -> dict[str, Any]:
    plain = found[PLAIN]
    told = {
        name: summary(outcomes, plain, temperature, weights)
        for name, outcomes in found.items()
        if outcomes  # stopped before the first prompt was done
    }
    return {
        "plans": {name: figures for name, figures in told.items() if name not in peers},
        "peers": {name: told[name] for name in peers if name in told},
    }


def summary(
    outcomes: Sequence[Result], plain: Sequence[Result], temperature: float = 0.0, weights: int | None = None
) -> dict[str, Any]:
    """Figures of one plan over all prompts and for every task."""
    figures = _figures(outcomes, plain)
    if any(outcome.synthetic for outcome in outcomes):
        figures["synthetic"] = True
    figures["differences"] = [str(outcome.difference) for outcome in outcomes if outcome.difference is not None]
    figures["first_differences"] = [_difference(outcome) for outcome in outcomes if outcome.difference is not None]
    if temperature > 0 and outcomes is not plain:
        figures["law"] = same_distribution([one.text for one in plain], [one.text for one in outcomes])
    figures["outliers"] = outliers(outcomes)
    if figures.get("tokens_per_pass"):
        figures["time"] = _time(outcomes)
    decoding = figures.get("decode_seconds")
    later = sum(outcome.stats.passes - outcome.turns for outcome in outcomes)  # passes after the first of each turn
    if weights and decoding and later > 0:
        figures["gigabytes_per_second"] = round(later * weights / decoding / 1e9, 2)
    figures["tiers"] = _all_stats(outcomes).to_json()
    figures["tasks"] = {}
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        places = [place for place, outcome in enumerate(outcomes) if outcome.task == task]
        figures["tasks"][task] = _figures([outcomes[p] for p in places], [plain[p] for p in places])
    figures["by_prompt"] = [_one(outcome) for outcome in outcomes]
    return figures


def _figures(outcomes: Sequence[Result], plain: Sequence[Result]) -> dict[str, Any]:
    tokens = sum(outcome.count for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    first = sum(outcome.first_seconds for outcome in outcomes)
    passes = sum(outcome.stats.passes for outcome in outcomes)
    rates = sorted(outcome.count / outcome.seconds for outcome in outcomes)
    middle = len(rates) // 2
    different: dict[int, list[bool]] = {}  # prompts that came out otherwise in some repeat: was each a tie?
    for outcome in outcomes:
        if outcome.difference is not None:
            different.setdefault(outcome.prompt, []).append(outcome.difference.is_tie)
    prompts = len({outcome.prompt for outcome in outcomes})
    figures: dict[str, Any] = {
        "prompts": prompts,
        "turns": sum(outcome.turns for outcome in outcomes),
        "identical": prompts - len(different),
        "ties": sum(all(ties) for ties in different.values()),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "speedup": round(speedup(outcomes, plain), 3),
        "speedup_interval": interval(outcomes, plain),
        "tokens_per_second": round(tokens / seconds, 2),
        "median_tokens_per_second": round((rates[middle] + rates[-1 - middle]) / 2, 2),
    }
    alone = all(outcome.alone for outcome in outcomes)
    if passes:  # peers do not tell
        figures["tokens_per_pass"] = round(tokens / passes, 3)
    if passes and alone:
        judging = sum(tier.seconds for outcome in outcomes for tier in outcome.stats.tiers)
        # Stores, verification, counters and text: all that is not a pass of a model or its picks.
        figures["overhead_ms_per_pass"] = round(1e3 * (seconds - judging) / passes, 3)
    if first > 0 and alone:
        figures["prefill_seconds"], figures["decode_seconds"] = round(first, 3), round(seconds - first, 3)
        if seconds > first:
            later = tokens - sum(outcome.first_tokens for outcome in outcomes)
            figures["decode_tokens_per_second"] = round(later / (seconds - first), 2)
    return figures


def _difference(outcome: Result) -> dict[str, Any]:
    found = outcome.difference
    assert found is not None
    return {
        "prompt": outcome.prompt, "repeat": outcome.repeat, "task": outcome.task, "position": found.position,
        "tokens": list(found.tokens), "gap": found.gap, "tie": found.is_tie,
    }  # fmt: skip


def _time(outcomes: Sequence[Result]) -> dict[str, float]:
    """Where a plan's seconds went. Reading prompts is part of verifying; `other` is what is left: the recursion,
    verification rules, appraisal, counters and text."""
    total = sum(outcome.seconds for outcome in outcomes)
    tiers = _all_stats(outcomes).tiers
    picking = sum(tier.pick_seconds for tier in tiers)
    parts = {
        "drafting": sum(tier.seconds - tier.pick_seconds for tier in tiers[1:]),
        "verifying": tiers[0].seconds - tiers[0].pick_seconds,
        **({"picking": picking} if picking else {}),
        "stores": sum(tier.store_seconds for tier in tiers),
    }
    parts["other"] = max(0.0, total - sum(parts.values()))
    return {name: round(value, 4) for name, value in parts.items()}


def _one(outcome: Result) -> dict[str, Any]:
    told: dict[str, Any] = {
        "prompt": outcome.prompt, "repeat": outcome.repeat, "task": outcome.task, "turns": outcome.turns,
        "tokens": outcome.count, "seconds": round(outcome.seconds, 4),
    }  # fmt: skip
    if outcome.alone and outcome.first_seconds > 0:
        told["first_seconds"] = round(outcome.first_seconds, 4)
    if outcome.stats.passes:
        told["passes"] = outcome.stats.passes
    return told


def _texts(run: SideBySide) -> list[dict[str, Any]]:
    """The first answer to every prompt under the first temperature, by every plan: what a source guessed in a row,
    and how many tokens that is."""
    told = []
    for place, outcome in enumerate(run.found[0][PLAIN]):
        if outcome.repeat == 0:
            answers = {name: _in_a_row(own[place].pieces) for name, own in run.found[0].items() if own[place].pieces}
            asked = run.prompts[outcome.prompt].turns[0]
            told.append({"prompt": outcome.prompt, "task": outcome.task, "asked": asked, "answers": answers})
    return told


def _in_a_row(pieces: Sequence[Sequence[str]]) -> list[tuple[str, str, int]]:
    rows = [(source, [text for text, _ in row]) for source, row in groupby(pieces, key=lambda piece: piece[1])]
    return [("".join(texts), source, len(texts)) for source, texts in rows]


def _all_stats(outcomes: Sequence[Result]) -> Stats:
    total = Stats()
    for outcome in outcomes:
        total.add(outcome.stats)
    return total
