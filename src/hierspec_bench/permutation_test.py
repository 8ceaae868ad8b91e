"""Do two programs sample from the same distribution? A permutation test over pairs of texts for the same prompts.

Tokens of one text depend on each other, so the unit is a pair of texts, not a token. Under the same distribution, the
two texts of any pair can be swapped without changing the joint distribution. So a statistic is compared with its values
after random swaps. That is valid for any statistic and any number of pairs; few pairs reduce the power. Several
statistics are computed, each for another kind of fault; the most extreme one counts, against the most extreme one of
every swapping. The seeds of pairs must differ, and the two texts of a pair must not share their noise: if they do (the
coupled rule), the texts are the same, and nothing is left to test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

SWAPS = 4999
_OWN_BINS = 48  # for the most frequent tokens
_SHARED_BINS = 16  # for all other tokens
_RUNS = 600  # of two and of three tokens: the most frequent
_ORDERS = (0, 1, 2)  # tokens of context that surprise is computed from
METHOD = (
    f"pairs of texts of one prompt swapped at random {SWAPS} times; the most striking of: counts of tokens, pairs "
    "and triples, first tokens, length, different tokens, surprise given the 0, 1 or 2 tokens before; "
    "statistic: -log10 of its own p"
)
SAME = "the same texts under the same seeds: nothing to test"

_Texts = Sequence[Sequence[int]]


def same_distribution(first: _Texts, second: _Texts, seed: int = 0) -> dict[str, Any]:
    """`first[i]` and `second[i]` are two programs' texts for prompt i. p is small if the distributions differ."""
    sizes: dict[str, Any] = {"tokens": sum(map(len, first)) + sum(map(len, second)), "pairs": len(first)}
    if all(list(one) == list(other) for one, other in zip(first, second, strict=True)):
        return {"statistic": 0.0, "p": 1.0, **sizes, "method": SAME}
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(SWAPS + 1, len(first)))
    signs[0] = 1.0  # row 0 is unswapped
    names, columns = [], []
    for name, counted in _figures([*first, *second]).items():
        differences = counted[: len(first)] - counted[len(first) :]
        spread = (differences**2).sum(axis=0)  # invariant: swapping only changes signs
        if spread.any():
            scaled = differences[:, spread > 0] / np.sqrt(spread[spread > 0])
            names.append(name)
            columns.append(_shares(((signs @ scaled) ** 2).sum(axis=1)))
    if not columns:  # the texts do not differ in any statistic
        return {"statistic": 0.0, "p": 1.0, **sizes, "method": METHOD}
    least = np.min(columns, axis=0)  # for each swapping, the p-value of its most extreme statistic
    p = float((least <= least[0]).mean())
    striking = names[int(np.argmin([column[0] for column in columns]))]
    statistic = round(-math.log10(least[0]), 3)
    return {"statistic": statistic, "p": round(p, 4), **sizes, "striking": striking, "method": METHOD}


def _shares(values: np.ndarray) -> np.ndarray:
    """For each value, the share of all values that are at least as large, itself included; tolerates rounding."""
    values = np.round(values, 9)
    rising = np.sort(values)
    return (len(values) - np.searchsorted(rising, values, side="left")) / len(values)


def _figures(texts: _Texts) -> dict[str, np.ndarray]:
    """Statistics of every text, [texts, statistics] each.

    Their reference (which tokens are frequent, what follows what) comes from both programs' texts together, which
    swapping does not change.
    """
    often = Counter(token for text in texts for token in text)
    bins = {token: column for column, (token, _) in enumerate(_most(often, _OWN_BINS))}
    begin = {token: column for column, (token, _) in enumerate(_most(Counter(text[0] for text in texts if text), 16))}
    tokens, first = np.zeros((len(texts), len(bins) + _SHARED_BINS)), np.zeros((len(texts), len(begin) + 1))
    for row, text in enumerate(texts):
        for token in text:
            tokens[row, bins[token] if token in bins else len(bins) + token % _SHARED_BINS] += 1
        if text:
            first[row, begin.get(text[0], len(begin))] = 1
    figures = {
        "tokens": tokens,
        "first tokens": first,
        "length": np.array([[len(text)] for text in texts], float),
        "different tokens": np.array([[len(set(text))] for text in texts], float),
    }
    figures |= {"pairs": _runs(texts, 2), "triples": _runs(texts, 3)}
    return figures | {f"surprise {order}": _surprise(texts, order) for order in _ORDERS}


def _runs(texts: _Texts, length: int) -> np.ndarray:
    """How often each text contains the most frequent runs of `length` tokens. [texts, runs]"""
    runs = [Counter(zip(*(text[start:] for start in range(length)), strict=False)) for text in texts]
    often = Counter(run for text in runs for run in text.elements())
    columns = {run: column for column, (run, count) in enumerate(_most(often, _RUNS)) if count > 1}
    counts = np.zeros((len(texts), len(columns)))
    for row, text in enumerate(runs):
        for run, count in text.items():
            if run in columns:
                counts[row, columns[run]] = count
    return counts


def _most(counts: Counter[Any], number: int) -> list[tuple[Any, int]]:
    """The largest counts; equal ones in the order of tokens, not of texts, which swapping changes."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number]


def _surprise(texts: _Texts, order: int) -> np.ndarray:
    """The mean surprise of each text's tokens, given the `order` tokens before them. [texts, 1], nats."""
    runs = [[tuple(text[max(0, at - order) : at + 1]) for at in range(len(text))] for text in texts]
    whole = Counter(run for text in runs for run in text)
    before = Counter(run[:-1] for text in runs for run in text)
    return np.array(
        [[sum(math.log(before[run[:-1]] / whole[run]) for run in text) / max(1, len(text))] for text in runs]
    )
