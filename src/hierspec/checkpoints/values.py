"""Numbers out of configurations that strangers wrote: right kind and sane, or one sentence."""

import math
from typing import Any

from hierspec.core.errors import HierspecError


def integer(source: dict[str, Any], key: str) -> int:
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise HierspecError(f"The model's config is damaged: {key} must be a whole number, not {value!r}.")
    return value


def number(source: dict[str, Any], key: str, otherwise: float | None = None) -> float:
    value = source.get(key)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HierspecError(f"The model's config is damaged: {key} must be a number, not {value!r}.")
    return float(value)


def check(fine: bool, rule: str, found: object) -> None:
    if not fine:
        raise HierspecError(f"The model's configuration is not sane: {rule}, not {found}.")


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]
