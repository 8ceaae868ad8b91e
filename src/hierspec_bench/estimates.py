"""Ratios of two contenders on the same prompts, how sure they are, and which prompts stand out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hierspec_bench.result import Result

_RESAMPLES = 2000
_FAR = 5.0  # robust standard deviations,
_LEAST = 1.25  # and times slower or faster, that make an outlier
_ENOUGH = 5  # prompts to say what is usual


def speedup(outcomes: Sequence[Result], plain: Sequence[Result]) -> float:
    """Tokens per second over plain decoding's, on the same prompts."""
    fast = sum(outcome.count for outcome in outcomes) / sum(outcome.seconds for outcome in outcomes)
    return fast / (sum(outcome.count for outcome in plain) / sum(outcome.seconds for outcome in plain))


def interval(outcomes: Sequence[Result], plain: Sequence[Result]) -> list[float]:
    """95% bootstrap interval of the speed-up, prompts drawn anew with all their repeats."""
    pairs = zip(outcomes, plain, strict=True)
    return _interval((one.prompt, one.count, one.seconds, other.count, other.seconds) for one, other in pairs)


def interval_over(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], task: str | None = None
) -> list[float] | None:
    """The same for any two contenders of a document, from their `by_prompt`; for one task, or all prompts."""
    others = {(row["prompt"], row["repeat"]): row for row in theirs}
    rows = [
        (row["prompt"], row["tokens"], row["seconds"], other["tokens"], other["seconds"])
        for row in ours
        if task in (None, row["task"]) and (other := others.get((row["prompt"], row["repeat"]))) is not None
    ]
    return _interval(rows) if rows else None


def _interval(rows: Iterable[tuple[int, int, float, int, float]]) -> list[float]:
    """Of (prompt, tokens, seconds, the other's tokens, seconds)."""
    rng = np.random.default_rng(0)
    by_prompt: dict[int, np.ndarray] = {}
    for prompt, *row in rows:
        by_prompt[prompt] = by_prompt.get(prompt, 0) + np.array(row)
    columns = np.array(list(by_prompt.values()))
    drawn = columns[rng.integers(len(columns), size=(_RESAMPLES, len(columns)))].sum(axis=1)
    ratios = (drawn[:, 0] / drawn[:, 1]) / (drawn[:, 2] / drawn[:, 3])
    return [round(float(edge), 3) for edge in np.quantile(ratios, [0.025, 0.975])]


def outliers(outcomes: Sequence[Result]) -> list[dict[str, Any]]:
    """Prompts whose passes took far longer or shorter than this contender's usually do: the machine was disturbed.

    By seconds a pass, without reading the prompt where that is known, because prompts differ in length; a peer that
    does not tell its passes by seconds a token. They are shown, and count like all others. `usual` is the rate that
    the prompt would have had.
    """
    if len(outcomes) < _ENOUGH:
        return []
    logs = np.log([_pace(outcome) for outcome in outcomes])
    usual = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - usual)))
    bound = max(np.log(_LEAST), _FAR * deviation)
    found = []
    for outcome, log in zip(outcomes, logs, strict=True):
        if abs(log - usual) > bound:
            # As much time again as the rest took, with every later pass at the usual pace.
            apart = outcome.first_seconds if outcome.alone else 0.0
            seconds = apart + (outcome.seconds - apart) * float(np.exp(usual - log))
            found.append(
                {
                    "prompt": outcome.prompt, "repeat": outcome.repeat, "task": outcome.task,
                    "tokens_per_second": round(outcome.count / outcome.seconds, 2),
                    "usual": round(outcome.count / seconds, 2),
                }
            )  # fmt: skip
    return found


def _pace(outcome: Result) -> float:
    """Seconds a pass (a token, where passes are not known) after the first step, or over all where that is all."""
    passes = outcome.stats.passes
    if outcome.alone and outcome.first_seconds > 0:
        steps = passes - outcome.turns if passes else outcome.count - outcome.first_tokens
        if steps > 0:
            return max(outcome.seconds - outcome.first_seconds, 1e-9) / steps
    return max(outcome.seconds, 1e-9) / max(passes or outcome.count, 1)
