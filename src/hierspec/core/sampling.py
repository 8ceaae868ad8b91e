"""Sampling settings, the distribution of the next token that they give, and the keyed noise that samples from it.

This is the reference, one row at a time in float64. The backends' `pick.py` do the same for many rows on the model's
device; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.grammar import Grammar
from hierspec.core.proposal import Distribution

_MASK64 = (1 << 64) - 1
_WHOLE_NUMBERS = ("max_tokens", "top_k")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

NO_TOKEN = -1  # the pick of a row whose logits are not numbers; where distributions are asked for, its row is all NaN


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens and when to stop. Temperature 0 is greedy."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of the prompt and the output
    presence_penalty: float = 0.0  # on tokens of the output
    frequency_penalty: float = 0.0  # on tokens of the output, per occurrence
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: a new one for every request
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # besides the model's own
    logprobs: int | None = None  # also return log-probabilities: each token's, and those of this many most likely ones
    grammar: Grammar | None = None  # what the text must look like

    def __post_init__(self) -> None:
        def check(valid: bool, name: str, rule: str) -> None:
            if not valid:
                raise HierspecError(f"{name} must be {rule}, not {_shown(getattr(self, name))}.")

        for name in (*_WHOLE_NUMBERS, *_NUMBERS, "seed", "logprobs"):
            object.__setattr__(self, name, _unboxed(getattr(self, name)))
        for name in ("stop", "stop_ids"):
            value = getattr(self, name)
            one = isinstance(value, str | bytes) or not isinstance(value, Iterable)
            object.__setattr__(self, name, tuple(_unboxed(item) for item in ((value,) if one else value)))
        for name in _WHOLE_NUMBERS:
            check(_is_whole(getattr(self, name)), name, "a whole number")
        for name in _NUMBERS:
            check(_is_number(getattr(self, name)), name, "a number")
        check(self.seed is None or _is_whole(self.seed), "seed", "a whole number or None")
        counted = self.logprobs is None or (_is_whole(self.logprobs) and self.logprobs >= 0)
        check(counted, "logprobs", "None or a whole number from 0 up")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= self.temperature < math.inf, "temperature", "a finite number from 0 up")
        check(self.top_k >= 0, "top_k", "0 (all) or more")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        check(0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0 (1 is none)")
        check(math.isfinite(self.presence_penalty), "presence_penalty", "a finite number")
        check(math.isfinite(self.frequency_penalty), "frequency_penalty", "a finite number")
        check(all(isinstance(text, str) and text for text in self.stop), "stop", "strings that are not empty")
        check(all(_is_whole(token) for token in self.stop_ids), "stop_ids", "token ids, which are whole numbers")
        check(isinstance(self.grammar, Grammar | None), "grammar", "a Grammar or None")
        table = "None or a table from token ids to numbers, of which minus infinity forbids a token"
        if self.logit_bias is not None:
            check(isinstance(self.logit_bias, Mapping), "logit_bias", table)
            bias = {_unboxed(token): _unboxed(value) for token, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)
            check(all(_is_whole(token) and token >= 0 for token in bias), "logit_bias", table)
            check(all(_is_number(value) and value < math.inf for value in bias.values()), "logit_bias", table)

    @property
    def penalised(self) -> bool:
        """Whether the distribution depends on which tokens the text holds already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _shown(value: object) -> str:
    """A value for an error message, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of many thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unboxed(value: Any) -> Any:
    """A numpy scalar as a Python number: Python's integers never overflow."""
    return value.item() if isinstance(value, np.generic) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether it is a float, or an integer small enough to become one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 1023
    return isinstance(value, float)


def adjust(
    logits: np.ndarray, text: np.ndarray, prompt_length: int, sampling: Sampling, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Logits of the token after `text`, with penalties, bias, temperature and filters. [vocabulary] float64.

    `allowed` is the bit mask of a `Constraint`: all other tokens are masked out first.
    """
    z = np.array(logits, np.float64)
    if allowed is not None:
        z[np.unpackbits(allowed, count=len(z), bitorder="little") == 0] = -np.inf
    if sampling.penalised:
        seen = np.bincount(text, minlength=len(z)) > 0
        written = np.bincount(text[prompt_length:], minlength=len(z))
        penalised = np.where(z > 0, z / sampling.repetition_penalty, z * sampling.repetition_penalty)
        z = np.where(seen, penalised, z)
        z -= sampling.frequency_penalty * written + sampling.presence_penalty * (written > 0)
    for token, bias in (sampling.logit_bias or {}).items():
        z[token] += bias
    if sampling.temperature == 0:
        return z
    z /= sampling.temperature
    if 0 < sampling.top_k < len(z):
        z = np.where(z < np.partition(z, -sampling.top_k)[-sampling.top_k], -np.inf, z)
    if sampling.top_p < 1:
        order = np.argsort(-z, kind="stable")
        probabilities = softmax(z)[order]
        before = np.cumsum(probabilities) - probabilities  # the most likely token always stays
        z[order[before >= sampling.top_p]] = -np.inf
    if sampling.min_p > 0:
        z = np.where(z < z.max() + math.log(sampling.min_p), -np.inf, z)
    return z


def softmax(z: np.ndarray) -> Distribution:
    e = np.exp(z - z.max())
    return e / e.sum()


def distribution(z: np.ndarray, sampling: Sampling) -> Distribution:
    """The distribution of adjusted logits; at temperature 0 all of it is on the best token."""
    if not np.isfinite(z.max()):
        return np.full(len(z), np.nan)
    if sampling.temperature > 0:
        return softmax(z)
    one_hot = np.zeros(len(z))
    one_hot[int(np.argmax(z))] = 1.0
    return one_hot


def picks(z: np.ndarray, sampling: Sampling, seed: int, position: int, count: int = 1) -> list[int]:
    """The coupled rule's pick for `position` from adjusted logits, and its `count` - 1 runners-up.

    Gumbel-max: the largest of logit + noise has the distribution softmax(logit). The noise depends on seed, position
    and token alone, so every tier samples with the same noise and every hierarchy writes the same text.
    """
    if not np.isfinite(z.max()):
        return [NO_TOKEN] * count
    if sampling.temperature > 0:
        z = z + gumbel(seed, position, len(z))
    if count == 1:
        return [int(np.argmax(z))]
    return [int(token) for token in np.argsort(-z, kind="stable")[:count]]


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words hashed from seed and position (splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    x ^= x >> 31
    return x & 0xFFFFFFFF, x >> 32


def gumbel(seed: int, position: int, vocabulary: int) -> np.ndarray:
    """Gumbel noise of every token, from 31 hashed bits each. float64."""
    low, high = noise_keys(seed, position)
    h = np.arange(vocabulary, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(low)
    h = _mix(_mix(h) ^ np.uint32(high))
    uniform = ((h >> np.uint32(1)).astype(np.float64) + 0.5) / 2**31
    return -np.log(-np.log1p(-uniform))


def _mix(h: np.ndarray) -> np.ndarray:
    """A 32-bit integer hash with little bias (Wellons' lowbias32 constants)."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


class Dice:
    """A request's random numbers for the rules that sample. Tests replace it by an enumerator of all outcomes."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed & _MASK64))

    def accept(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)

    def choose(self, distribution: Distribution) -> int:
        cumulative = np.cumsum(distribution)
        token = int(np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right"))
        return min(token, int(np.flatnonzero(distribution)[-1]))  # rounding must not pick a token of probability 0
