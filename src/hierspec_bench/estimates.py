"""Speed ratios on the same prompts, their intervals, and prompts with outlying times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hierspec_bench.result import Result

_RESAMPLES = 2000
_FAR = 5.0  # robust standard deviations
_LEAST = 1.25  # both make an outlier: far from the median, and this many times slower or faster
_ENOUGH = 5  # prompts that are enough for a median


@dataclass(frozen=True)
class PromptTime:
    """The time of one prompt in one repeat."""

    prompt: int
    repeat: int
    task: str
    tokens: int
    seconds: float


def speedup(results: Sequence[Result], plain: Sequence[Result]) -> float:
    """Tokens per second relative to plain decoding's, on the same prompts."""
    return _rate(results) / _rate(plain)


def _rate(results: Sequence[Result]) -> float:
    return sum(result.count for result in results) / sum(result.seconds for result in results)


def speedup_interval(results: Sequence[Result], plain: Sequence[Result]) -> list[float]:
    """95% bootstrap interval of the speed-up. Both have the same prompts in the same order."""
    return list(_bootstrap(zip(map(_time, results), map(_time, plain), strict=True)))


def _time(result: Result) -> PromptTime:
    return PromptTime(result.prompt, result.repeat, result.task, result.count, result.seconds)


def ratio_interval(
    ours: Iterable[PromptTime], theirs: Iterable[PromptTime], task: str | None = None
) -> tuple[float, float] | None:
    """95% bootstrap interval of a ratio of tokens/s, for one task or all; None if they share no prompt."""
    others = {(time.prompt, time.repeat): time for time in theirs}
    pairs = [
        (time, other)
        for time in ours
        if task in (None, time.task) and (other := others.get((time.prompt, time.repeat))) is not None
    ]
    return _bootstrap(pairs) if pairs else None


def _bootstrap(pairs: Iterable[tuple[PromptTime, PromptTime]]) -> tuple[float, float]:
    """Resamples prompts with replacement, each with all its repeats."""
    rng = np.random.default_rng(0)
    by_prompt: dict[int, np.ndarray] = {}
    for ours, theirs in pairs:
        row = np.array([ours.tokens, ours.seconds, theirs.tokens, theirs.seconds])
        by_prompt[ours.prompt] = by_prompt.get(ours.prompt, 0) + row
    columns = np.array(list(by_prompt.values()))
    drawn = columns[rng.integers(len(columns), size=(_RESAMPLES, len(columns)))].sum(axis=1)
    ratios = (drawn[:, 0] / drawn[:, 1]) / (drawn[:, 2] / drawn[:, 3])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return round(float(low), 3), round(float(high), 3)


def outliers(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Prompts whose passes took far longer or shorter than usual here: the machine was disturbed.

    Compares seconds per pass, without prefill if that is known, because prompts differ in length; seconds per token for
    an engine that does not report passes. Outliers are shown and still count. `usual` is the rate that the prompt would
    have had.
    """
    if len(results) < _ENOUGH:
        return []
    logs = np.log([_pace(result) for result in results])
    usual = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - usual)))
    bound = max(np.log(_LEAST), _FAR * deviation)
    rows = []
    for result, log in zip(results, logs, strict=True):
        if abs(log - usual) > bound:
            # The time it would have taken, had every pass after the first had the usual pace.
            prefill = result.first_seconds if result.alone else 0.0
            seconds = prefill + (result.seconds - prefill) * float(np.exp(usual - log))
            row = {"prompt": result.prompt, "repeat": result.repeat, "task": result.task}
            row |= {"tokens_per_second": round(result.count / result.seconds, 2)}
            rows.append(row | {"usual": round(result.count / seconds, 2)})
    return rows


def _pace(result: Result) -> float:
    """Seconds per pass (per token if passes are unknown) after the first step, or over all if there is only one
    step."""
    passes = result.stats.passes
    if result.alone and result.first_seconds > 0:
        steps = passes - result.turns if passes else result.count - result.first_tokens
        if steps > 0:
            return max(result.seconds - result.first_seconds, 1e-9) / steps
    return max(result.seconds, 1e-9) / max(passes or result.count, 1)
