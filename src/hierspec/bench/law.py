"""Do two writers draw from the same law? A test over pairs of texts that answered the same prompts.

Tokens of one text depend on each other, so no token counts as an observation: a pair of texts does. Under the same law
the two texts of a pair may change places without changing the law of the whole, each pair by itself; so the statistic
is compared with what it is when pairs are swapped at random. That holds for any statistic and any number of pairs;
what a small number costs is power. The seeds of pairs must differ, and the two of a pair must not share their noise:
where they do (the coupled rule) the texts are the same, and nothing is left to test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

SWAPS = 4999
_OWN_BINS = 48  # for the tokens that are written most,
_SHARED_BINS = 16  # and for all others together
METHOD = (
    f"pairs of texts of one prompt swapped at random {SWAPS} times; statistic: the sum of squared standardised "
    "differences of counts (frequent tokens, bins of all others, first tokens, length, different tokens)"
)
SAME = "the same texts under the same seeds: nothing to test"


def same_law(one: Sequence[Sequence[int]], two: Sequence[Sequence[int]], seed: int = 0) -> dict[str, Any]:
    """`one[i]` and `two[i]` are tokens that two writers gave to prompt i. p is small where the laws differ."""
    tokens = sum(map(len, one)) + sum(map(len, two))
    if all(list(first) == list(second) for first, second in zip(one, two, strict=True)):
        return {"statistic": 0.0, "p": 1.0, "tokens": tokens, "pairs": len(one), "method": SAME}
    differences = _features(one, two)
    spread = (differences**2).sum(axis=0)  # swapping changes signs alone, so this stays
    scaled = differences[:, spread > 0] / np.sqrt(spread[spread > 0])
    statistic = float((scaled.sum(axis=0) ** 2).sum())
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(SWAPS, len(one)))
    swapped = ((signs @ scaled) ** 2).sum(axis=1)
    p = (1 + int((swapped >= statistic * (1 - 1e-9)).sum())) / (1 + SWAPS)
    return {
        "statistic": round(statistic, 3), "p": round(p, 4), "tokens": tokens, "pairs": len(one), "method": METHOD,
    }  # fmt: skip


def _features(one: Sequence[Sequence[int]], two: Sequence[Sequence[int]]) -> np.ndarray:
    """For each pair the difference of counts. [pairs, features] float64.

    Which tokens get bins of their own follows from both writers' texts together, which swapping does not change.
    """
    often = Counter(token for texts in (one, two) for text in texts for token in text)
    first = Counter(text[0] for texts in (one, two) for text in texts if len(text))
    own = {token: place for place, (token, _) in enumerate(sorted(often.most_common(_OWN_BINS)))}
    begin = {token: place for place, (token, _) in enumerate(sorted(first.most_common(_SHARED_BINS)))}
    bins, beginnings = len(own) + _SHARED_BINS, len(begin)

    def counts(text: Sequence[int]) -> np.ndarray:
        found = np.zeros(bins + beginnings + 2)
        for token in text:
            found[own[token] if token in own else len(own) + token % _SHARED_BINS] += 1
        if len(text) and text[0] in begin:
            found[bins + begin[text[0]]] = 1
        found[-2:] = len(text), len(set(text))
        return found

    return np.array([counts(first) - counts(second) for first, second in zip(one, two, strict=True)])
