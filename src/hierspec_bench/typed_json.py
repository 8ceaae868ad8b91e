"""Dataclasses from untrusted JSON: a value of a wrong type becomes None, "" or empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def count(value: object) -> int | None:
    whole = number(value)
    return int(whole) if whole is not None and whole.is_integer() else None


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def mappings(value: object) -> list[Mapping[str, Any]]:
    return [item for item in items(value) if isinstance(item, Mapping)]


def texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in items(value))


def _sizes(value: object) -> tuple[float, ...]:
    return tuple(number(item) or 0.0 for item in items(value))


def _sizes_by_name(value: object) -> dict[str, float]:
    return {str(name): number(size) or 0.0 for name, size in mapping(value).items()}


def _interval(value: object) -> tuple[float, float] | None:
    edges = [edge for edge in map(number, items(value)) if edge is not None]
    return (edges[0], edges[1]) if len(edges) == 2 else None


_READERS: dict[Any, Callable[[object], Any]] = {
    "str": lambda value: "" if value is None else str(value),
    "bool": bool,
    "int": lambda value: count(value) or 0,
    "int | None": count,
    "float": lambda value: number(value) or 0.0,
    "float | None": number,
    "tuple[str, ...]": texts,
    "tuple[float, ...]": _sizes,
    "tuple[float, float] | None": _interval,
    "Mapping[str, float]": _sizes_by_name,
    "Any": lambda value: value,
}
_T = TypeVar("_T")


def read_as(kind: type[_T], source: Mapping[str, Any]) -> _T:
    """A dataclass whose fields have the names of JSON keys, each read according to its type."""
    return kind(**{item.name: _READERS[item.type](source.get(item.name)) for item in fields(kind)})  # type: ignore[arg-type]


def read_all_as(kind: type[_T], value: object) -> tuple[_T, ...]:
    return tuple(read_as(kind, source) for source in mappings(value))
