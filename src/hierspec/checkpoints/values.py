"""Reads numbers from untrusted configurations: valid and of the right type, or an error in one sentence."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown

LARGEST = 2**31 - 1  # for sizes, counts and ids: fits every type that they are computed and stored with


def integer(source: Mapping[str, Any], key: str) -> int:
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise HierspecError(f"The model's config is damaged: {key} must be a whole number, not {shown(value)}.")
    check(abs(value) <= LARGEST, f"{key} must lie between -{LARGEST} and {LARGEST}", value)
    return value


def number(source: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = source.get(key)
    value = default if value is None else value
    if not isinstance(value, bool) and isinstance(value, int | float):
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:  # an integer with hundreds of digits
            pass
    raise HierspecError(f"The model's config is damaged: {key} must be a number, not {shown(value)}.")


def check(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise HierspecError(f"The model's configuration is not sane: {rule}, not {shown(value)}.")


def listed(names: Iterable[str]) -> str:
    """a, b and c"""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
