"""The JSON document of a run. docs/bench.md says what each key means; `record.py` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from hierspec.core.stats import Stats
from hierspec.machine import machine
from hierspec_bench.estimates import outliers, speedup, speedup_interval
from hierspec_bench.permutation_test import same_distribution
from hierspec_bench.result import Result
from hierspec_bench.run import PLAIN, SideBySide


def document(
    results: Mapping[str, Sequence[Result]],
    peers: Sequence[str],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The document of one temperature. `about` is what the caller knows: command, model, dtype, temperature."""
    weights = about.get("bandwidth", {}).get("weights_bytes")
    return {
        "kind": "bench",
        "version": 1,
        "complete": True,
        "machine": machine(),
        **about,
        "threads": torch.get_num_threads(),
        **_summaries(results, peers, about.get("temperature", 0.0), weights),
    }


def document_of(run: SideBySide, about: Mapping[str, Any], absent: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The document of a run so far, over all its temperatures."""
    peers = [peer.name for peer in run.peers]
    sampling = run.samplings[0]
    first = {
        **about,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "repeats": run.repeats,
        "prompts_done": run.done,
        "prompts_total": run.total,
        "batches": list(run.batches),
        "absent_peers": {**(absent or {}), **run.failed},
    }
    whole = document(run.results[0], peers, first) | {"complete": run.done == run.total}
    weights = about.get("bandwidth", {}).get("weights_bytes")
    whole["other_temperatures"] = [
        {"temperature": sampling.temperature, **_summaries(results, peers, sampling.temperature, weights)}
        for sampling, results in zip(run.samplings[1:], run.results[1:], strict=True)
    ]
    for part in (whole, *whole["other_temperatures"]):
        for peer in run.peers:
            if peer.name in part["peers"]:
                part["peers"][peer.name]["about"] = dict(peer.about)
        for name, figures in part["plans"].items():
            # Other rules sample other tokens of the same distribution: only `coupled` promises the same text.
            rule = run.plans[name.split(", batch of")[0]].rule
            figures["rule"], figures["promises_text"] = rule, rule == "coupled" or part["temperature"] == 0
    whole["texts"] = _texts(run)
    return whole


def _summaries(
    results: Mapping[str, Sequence[Result]], peers: Sequence[str], temperature: float, weights: int | None
) -> dict[str, Any]:
    summaries = {
        name: summary(answered, results[PLAIN], temperature, weights)
        for name, answered in results.items()
        if answered  # empty if the run was stopped before the first prompt was done
    }
    return {
        "plans": {name: figures for name, figures in summaries.items() if name not in peers},
        "peers": {name: summaries[name] for name in peers if name in summaries},
    }


def summary(
    results: Sequence[Result], plain: Sequence[Result], temperature: float = 0.0, weights: int | None = None
) -> dict[str, Any]:
    """Figures of one plan over all prompts and for every task."""
    figures = _figures(results, plain)
    if any(result.synthetic for result in results):
        figures["synthetic"] = True
    figures["differences"] = [str(result.difference) for result in results if result.difference is not None]
    figures["first_differences"] = [_difference(result) for result in results if result.difference is not None]
    if temperature > 0 and results is not plain:
        figures["law"] = same_distribution([result.text for result in plain], [result.text for result in results])
    figures["outliers"] = outliers(results)
    if figures.get("tokens_per_pass"):
        figures["time"] = _time(results)
    decoding = figures.get("decode_seconds")
    later = sum(result.stats.passes - result.turns for result in results)  # passes after the first of each turn
    if weights and decoding and later > 0:
        figures["gigabytes_per_second"] = round(later * weights / decoding / 1e9, 2)
    figures["tiers"] = _all_stats(results).to_json()
    figures["tasks"] = {}
    for task in dict.fromkeys(result.task for result in results):
        indices = [index for index, result in enumerate(results) if result.task == task]
        figures["tasks"][task] = _figures([results[index] for index in indices], [plain[index] for index in indices])
    figures["by_prompt"] = [_by_prompt(result) for result in results]
    return figures


def _figures(results: Sequence[Result], plain: Sequence[Result]) -> dict[str, Any]:
    tokens = sum(result.count for result in results)
    seconds = sum(result.seconds for result in results)
    first = sum(result.first_seconds for result in results)
    passes = sum(result.stats.passes for result in results)
    rates = sorted(result.count / result.seconds for result in results)
    middle = len(rates) // 2
    different: dict[int, list[bool]] = {}  # prompts that differ in some repeat: was each difference a tie?
    for result in results:
        if result.difference is not None:
            different.setdefault(result.prompt, []).append(result.difference.is_tie)
    prompts = len({result.prompt for result in results})
    figures: dict[str, Any] = {
        "prompts": prompts,
        "turns": sum(result.turns for result in results),
        "identical": prompts - len(different),
        "ties": sum(all(ties) for ties in different.values()),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "speedup": round(speedup(results, plain), 3),
        "speedup_interval": speedup_interval(results, plain),
        "tokens_per_second": round(tokens / seconds, 2),
        "median_tokens_per_second": round((rates[middle] + rates[-1 - middle]) / 2, 2),
    }
    alone = all(result.alone for result in results)
    if passes:  # other engines do not report passes
        figures["tokens_per_pass"] = round(tokens / passes, 3)
    if passes and alone:
        scoring = sum(tier.seconds for result in results for tier in result.stats.tiers)
        # Stores, verification, counters and text: everything but a model's forward passes and picks.
        figures["overhead_ms_per_pass"] = round(1e3 * (seconds - scoring) / passes, 3)
    if first > 0 and alone:
        figures["prefill_seconds"], figures["decode_seconds"] = round(first, 3), round(seconds - first, 3)
        if seconds > first:
            later = tokens - sum(result.first_tokens for result in results)
            figures["decode_tokens_per_second"] = round(later / (seconds - first), 2)
    return figures


def _difference(result: Result) -> dict[str, Any]:
    difference = result.difference
    assert difference is not None
    where = {"prompt": result.prompt, "repeat": result.repeat, "task": result.task, "position": difference.position}
    return where | {"tokens": list(difference.tokens), "gap": difference.gap, "tie": difference.is_tie}


def _time(results: Sequence[Result]) -> dict[str, float]:
    """Where a plan's seconds went.

    Prefill is part of verifying; `other` is the rest: the recursion, verification rules, appraisal, counters and text.
    """
    total = sum(result.seconds for result in results)
    tiers = _all_stats(results).tiers
    picking = sum(tier.pick_seconds for tier in tiers)
    parts = {
        "drafting": sum(tier.seconds - tier.pick_seconds for tier in tiers[1:]),
        "verifying": tiers[0].seconds - tiers[0].pick_seconds,
        **({"picking": picking} if picking else {}),
        "stores": sum(tier.store_seconds for tier in tiers),
    }
    parts["other"] = max(0.0, total - sum(parts.values()))
    return {name: round(value, 4) for name, value in parts.items()}


def _by_prompt(result: Result) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": result.prompt, "repeat": result.repeat, "task": result.task}
    row |= {"turns": result.turns, "tokens": result.count, "seconds": round(result.seconds, 4)}
    if result.alone and result.first_seconds > 0:
        row["first_seconds"] = round(result.first_seconds, 4)
    if result.stats.passes:
        row["passes"] = result.stats.passes
    return row


def _texts(run: SideBySide) -> list[dict[str, Any]]:
    """Every plan's first answer to every prompt at the first temperature, in runs of tokens drafted by the same source,
    with the number of tokens in each."""
    texts = []
    for index, result in enumerate(run.results[0][PLAIN]):
        if result.repeat == 0:
            pieces = {name: results[index].pieces for name, results in run.results[0].items()}
            answers = {name: _in_a_row(parts) for name, parts in pieces.items() if parts}
            asked = run.prompts[result.prompt].turns[0]
            texts.append({"prompt": result.prompt, "task": result.task, "asked": asked, "answers": answers})
    return texts


def _in_a_row(pieces: Sequence[Sequence[str]]) -> list[tuple[str, str, int]]:
    rows = [(source, [text for text, _ in row]) for source, row in groupby(pieces, key=lambda piece: piece[1])]
    return [("".join(texts), source, len(texts)) for source, texts in rows]


def _all_stats(results: Sequence[Result]) -> Stats:
    total = Stats()
    for result in results:
        total.add(result.stats)
    return total
