"""Rotary positions: scalings as configurations write them, and the resulting frequencies."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hierspec.checkpoints.values import check, integer, listed, number
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown

SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rotary:
    """How positions become angles. Fields that a scaling does not use have their defaults."""

    theta: float
    scaling: str = "none"  # one of SCALINGS
    factor: float = 1.0  # by which the context was stretched (linear, llama3, yarn)
    original_context: int = 0  # context length before stretching (llama3, yarn)
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines; mscale is included

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise HierspecError(
                f"The rotary scaling {shown(self.scaling)} is not supported: hierspec supports {listed(SCALINGS)}."
            )
        check(self.theta > 1, "the rotary base (rope_theta) must be greater than 1", self.theta)
        for name in ("factor", "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow"):
            _check_factor(f"the rotary scaling's {name}", getattr(self, name))
        _check_factor("the rotary attention factor", self.attention_factor)
        if self.scaling in ("llama3", "yarn"):
            check(self.original_context > 0, "the original context length must be positive", self.original_context)
        if self.scaling == "llama3":
            low, high = self.low_frequency_factor, self.high_frequency_factor
            check(0 < low < high, "the low frequency factor must be positive and below the high one", (low, high))


def _check_factor(what: str, value: float) -> None:
    # Far beyond every real model; further out, logarithms and quotients overflow.
    check(1e-6 <= value <= 1e6, f"{what} must lie between 0.000001 and 1,000,000", value)


def inverse_frequencies(rotary: Rotary, head_size: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of dimensions, float32 [head_size / 2], and the factor on cosine and sine.

    Does the same operations in the same order as transformers, in torch, because its power function rounds differently.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(torch.float32) / head_size
    wavelengths = rotary.theta**exponents
    frequencies = 1.0 / wavelengths
    if rotary.scaling == "linear":
        frequencies /= rotary.factor
    elif rotary.scaling == "llama3":
        frequencies = _llama3(frequencies, rotary)
    elif rotary.scaling == "yarn":
        low, high = _yarn_borders(rotary, head_size)
        ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        unscaled = 1 - ramp
        frequencies = 1.0 / (rotary.factor * wavelengths) * (1 - unscaled) + frequencies * unscaled
    return frequencies.numpy(), rotary.attention_factor


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all: float | None = None) -> float:
    """The factor of yarn on cosines and sines when a context is stretched `factor` times."""

    def attention_factor(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all:
        return attention_factor(mscale) / attention_factor(mscale_all)
    return attention_factor(1.0)


def _llama3(frequencies: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    longest = rotary.original_context / rotary.low_frequency_factor
    shortest = rotary.original_context / rotary.high_frequency_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rotary.factor, frequencies)
    band = rotary.high_frequency_factor - rotary.low_frequency_factor
    smooth = (rotary.original_context / wavelengths - rotary.low_frequency_factor) / band
    smoothed = (1 - smooth) * stretched / rotary.factor + smooth * stretched
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(between, smoothed, stretched)


def _yarn_borders(rotary: Rotary, head_size: int) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        ratio = rotary.original_context / (rotations * 2 * math.pi)
        return (head_size * math.log(ratio)) / (2 * math.log(rotary.theta))

    low, high = dimension(rotary.beta_fast), dimension(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    return low, high + 0.001 if low == high else high


def rotary_from_huggingface(config: dict[str, Any]) -> Rotary:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise HierspecError("The model's config is damaged: rope_scaling must be an object.")
    per_layer_type = [value for value in scaling.values() if isinstance(value, dict)]
    if per_layer_type:
        if any(value != per_layer_type[0] for value in per_layer_type):
            raise HierspecError("Rotary parameters that differ between types of layers are not supported.")
        scaling = per_layer_type[0]
    theta = number(scaling, "rope_theta", number(config, "rope_theta"))
    if number({**config, **scaling}, "partial_rotary_factor", 1.0) != 1.0:
        raise HierspecError("Models that rotate only a part of each head (partial_rotary_factor) are not supported.")
    name = scaling.get("rope_type", scaling.get("type", "default"))
    if name in ("default", "none", None):
        return Rotary(theta)
    if name not in SCALINGS:
        raise HierspecError(f"The rotary scaling {shown(name)} is not supported: hierspec supports {listed(SCALINGS)}.")
    if name == "linear":
        return Rotary(theta, "linear", factor=number(scaling, "factor"))
    # A length beside the rotary parameters overrides one inside them, as in transformers.
    key = "original_max_position_embeddings"
    original = integer({key: config["max_position_embeddings"], **scaling, **_present(config, key)}, key)
    if name == "llama3":
        low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
        return Rotary(theta, "llama3", number(scaling, "factor"), original, low, high)
    check(original > 0, "the original context length must be positive", original)
    factor = number(scaling, "factor", integer(config, "max_position_embeddings") / original)
    mscale, mscale_all = (number(scaling, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    check(min(mscale, mscale_all) >= 0, "mscale and mscale_all_dim cannot be negative", (mscale, mscale_all))
    _check_factor("the rotary scaling's factor", factor)
    return Rotary(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=number(scaling, "beta_fast", 32.0) or 32.0,
        beta_slow=number(scaling, "beta_slow", 1.0) or 1.0,
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=number(scaling, "attention_factor", yarn_attention_factor(factor, mscale, mscale_all)),
    )


def scaling_to_huggingface(rotary: Rotary) -> dict[str, Any] | None:
    if rotary.scaling == "none":
        return None
    written: dict[str, Any] = {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling in ("llama3", "yarn"):
        written["original_max_position_embeddings"] = rotary.original_context
    if rotary.scaling == "llama3":
        written["low_freq_factor"] = rotary.low_frequency_factor
        written["high_freq_factor"] = rotary.high_frequency_factor
    if rotary.scaling == "yarn":
        written["beta_fast"], written["beta_slow"] = rotary.beta_fast, rotary.beta_slow
        written["attention_factor"], written["truncate"] = rotary.attention_factor, rotary.truncate
    return written


def _present(source: dict[str, Any], key: str) -> dict[str, Any]:
    return {key: source[key]} if source.get(key) is not None else {}


def rotary_table(rotary: Rotary, head_size: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the first `positions` positions, [positions, head_size / 2] float32 each.

    Angles are rounded to float32, as in transformers. Cosines are computed in float64: torch's float32 cosines on x86
    differ in the last bit between processes, which can flip a near tie. Rounding from float64 removes the difference.
    """
    frequencies, factor = inverse_frequencies(rotary, head_size)
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.asarray(frequencies, np.float32)
    exact = angles.astype(np.float64)
    cos, sin = (np.float32(factor) * f(exact).astype(np.float32) for f in (np.cos, np.sin))
    return cos, sin
