"""Figures of tiers that need not exist, read from a TOML file: what the planner would do with them.

[[tier]]                                 the target first, and a tier only above later ones
name = "target"
milliseconds = [20.0, 0.1]               a pass over one token, and what each more adds; or {1 = 20.0, 8 = 20.7}
accepts = {draft = 0.7, exit = [0.8, 0.75]}   acceptance rates by position in the block; the last value continues

More keys are in docs/planning.md. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_text, shown_path, toml_table
from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import (
    BLOCK_ENDS,
    AcceptanceRates,
    Figures,
    HierarchyConfig,
    Pair,
    StoreFigures,
    TierConfig,
    TierFigures,
)
from hierspec.planner.formula.search import USUAL, Limits

_WIDEST = 256  # rows up to which two numbers are extended as a line
_KEYS = ("title", "longest", "candidates", "tier", "ladder")
_RATES = ("accepts", "stood", "corrected", "beside")  # by the name of the tier whose tokens are verified
_TIER_KEYS = ("name", "milliseconds", "milliseconds_over", "overhead", *_RATES, "store")
_STORE_KEYS = ("name", "stands", "rows", "milliseconds")
_LADDER_KEYS = ("name", "tiers", "gather", "stores", "until")


@dataclass(frozen=True)
class WhatIf:
    title: str
    figures: Figures
    limits: Limits
    hierarchies: dict[str, HierarchyConfig]  # the file's [[ladder]] tables by name: scored beside the search's results


def read(path: str | Path) -> WhatIf:
    name = shown_path(path)
    text = read_text(
        path, lambda reason: HierspecError(f"The file {name} cannot be read ({reason}); docs/planning.md has its keys.")
    )
    try:
        return from_toml(text)
    except HierspecError as error:
        raise HierspecError(f"{name}: {error}") from error


def from_toml(text: str) -> WhatIf:
    table = toml_table(text, lambda reason: HierspecError(f"This is not valid TOML: {reason}."))
    _check_keys(table, _KEYS, "the file")
    tiers = _tables(table, "tier")
    if not tiers:
        raise HierspecError("There is no [[tier]]; begin with the target's name and milliseconds.")
    for number, tier in enumerate(tiers, 1):  # before the name is read: that key may be the misspelt one
        _check_keys(tier, _TIER_KEYS, f"the tier {tier.get('name', number)!r}")
    names = [_text(tier, "name", f"tier {number}") for number, tier in enumerate(tiers, 1)]
    for name, tier in zip(names, tiers, strict=True):
        for key in (*_RATES, "milliseconds_over"):
            _check_keys(_table(tier, key, f"the tier {name!r}"), names, f"{key} of the tier {name!r}", "tiers")
    acceptance = {
        (name, below): _acceptance_rates(name, tier, below)
        for name, tier in zip(names, tiers, strict=True)
        for below in tier.get("accepts", {})
    }
    for name, tier in zip(names, tiers, strict=True):
        for key in _RATES[1:]:
            for below in tier.get(key, {}):
                if (name, below) not in acceptance:
                    raise HierspecError(f"{key} of the tier {name!r} has {below!r}, which its accepts has not.")
    stores = {
        name: tuple(_store(store, name) for store in _tables(tier, "store"))
        for name, tier in zip(names, tiers, strict=True)
        if "store" in tier
    }
    figures = Figures(
        tuple(_tier(name, tier) for name, tier in zip(names, tiers, strict=True)),
        acceptance,
        stores,
        dict(_completed(acceptance)),
    )
    longest = _whole_number(table, "longest", "the file", USUAL.longest)
    candidates = table.get("candidates", list(USUAL.candidates))
    if not isinstance(candidates, list) or not candidates or not all(type(n) is int and n > 0 for n in candidates):
        raise HierspecError(f"candidates must be a list of whole numbers from 1 up, not {candidates!r}.")
    return WhatIf(
        _text(table, "title", "the file", ""),
        figures,
        Limits(longest, tuple(candidates)),
        dict(_hierarchy(ladder, number, figures) for number, ladder in enumerate(_tables(table, "ladder"), 1)),
    )


def _tier(name: str, table: dict[str, Any]) -> TierFigures:
    where = f"the tier {name!r}"
    if "milliseconds" not in table:
        raise HierspecError(f"{where} needs milliseconds: [of one token, of each more], or {{rows = milliseconds}}.")
    over = {
        below: _costs(value, f"milliseconds_over of {where}")
        for below, value in table.get("milliseconds_over", {}).items()
    }
    return TierFigures(
        name,
        _costs(table["milliseconds"], f"milliseconds of {where}"),
        over,
        _number(table, "overhead", where, 0.0) / 1e3,
    )


def _costs(value: Any, where: str) -> Costs:
    """Two numbers are a line. A table is used as measured, and extended at its average slope."""
    if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
        first, more = value
        points = {1: float(first), _WIDEST: first + (_WIDEST - 1) * float(more)}
    elif isinstance(value, dict) and value and all(k.isdecimal() and _is_number(v) for k, v in value.items()):
        points = {int(rows): float(taken) for rows, taken in sorted(value.items(), key=lambda item: int(item[0]))}
    else:
        raise HierspecError(f"{where} must be two numbers or a table of milliseconds by rows, not {value!r}.")
    if min(points) != 1 or min(points.values()) < 0 or (isinstance(value, list) and value[1] < 0):
        raise HierspecError(f"{where} must begin with a pass over 1 row, and none may be below 0.")
    costs = Costs(list(points), [taken / 1e3 for taken in points.values()])
    if max(points) < _WIDEST:
        slope = (costs.seconds(max(points)) - costs.seconds(1)) / max(1, max(points) - 1)
        widest = costs.seconds(max(points)) + slope * (_WIDEST - max(points))
        costs = Costs([*points, _WIDEST], [*(taken / 1e3 for taken in points.values()), widest])
    return costs


def _acceptance_rates(name: str, table: dict[str, Any], below: str) -> AcceptanceRates:
    rates = {}
    for key in _RATES:
        value = table.get(key, {}).get(below, [])
        listed = value if isinstance(value, list) else [value]
        if not all(_is_number(rate) and 0 <= rate <= 1 for rate in listed) or (key == "accepts" and not listed):
            raise HierspecError(
                f"{key} of {below!r} at {name!r} must be from 0 to 1, one number or a list, not {value!r}."
            )
        rates[key] = tuple(map(float, listed))
    return AcceptanceRates(rates["accepts"], rates["stood"], rates["corrected"], rates["beside"])


def _completed(acceptance: dict[Pair, AcceptanceRates]) -> Iterable[tuple[tuple[str, str, str], AcceptanceRates]]:
    """Rates of a middle tier's tokens by the tier below it, if only one of `stood` and `corrected` was given.

    The other follows: weighted by how often the tier accepts the one below, the two must average to `accepts`. If that
    is impossible, both change as much as needed.
    """
    for (above, tier), rates in acceptance.items():
        if bool(rates.accepted) == bool(rates.corrected):
            continue
        for (middle, below), lower_rates in acceptance.items():
            if middle != tier:
                continue
            positions = max(len(rates.undrafted), len(rates.accepted), len(rates.corrected))
            pairs = [
                _split(
                    _at(rates.undrafted, position),
                    lower_rates.undrafted[0],
                    _at(rates.accepted, position),
                    _at(rates.corrected, position),
                )
                for position in range(positions)
            ]
            accepted, corrected = zip(*pairs, strict=True)
            yield (above, tier, below), AcceptanceRates(rates.undrafted, accepted, corrected, rates.runner_ups)


def _at(rates: tuple[float, ...], position: int) -> float | None:
    return rates[min(position, len(rates) - 1)] if rates else None


def _split(mean: float | None, share: float, accepted: float | None, corrected: float | None) -> tuple[float, float]:
    """Two rates whose average is `mean` if the first has this share; one is the given one, or as near as possible."""
    assert mean is not None
    if share in (0.0, 1.0):  # all tokens are of one kind
        return (mean if accepted is None else accepted), (mean if corrected is None else corrected)
    if accepted is None:
        assert corrected is not None
        accepted = (mean - (1 - share) * corrected) / share
    accepted = min(1.0, accepted, mean / share)
    accepted = min(max(accepted, (mean - (1 - share)) / share, 0.0), 1.0)  # the quotient may round to a little more
    return accepted, min(1.0, max(0.0, (mean - share * accepted) / (1 - share)))


def _store(table: dict[str, Any], tier: str) -> StoreFigures:
    name = _text(table, "name", f"a store of the tier {tier!r}")
    where = f"the store {name!r} of the tier {tier!r}"
    _check_keys(table, _STORE_KEYS, where)
    shares = table.get("stands")
    if not isinstance(shares, list) or not shares or not all(map(_is_number, shares)):
        raise HierspecError(
            f"stands of {where} must be a list: shares of passes in which 0, 1, 2, … tokens are accepted."
        )
    rows = _whole_number(table, "rows", where, len(shares) - 1)
    return StoreFigures(name, tuple(map(float, shares)), rows, _number(table, "milliseconds", where, 0.0) / 1e3)


def _hierarchy(table: dict[str, Any], number: int, figures: Figures) -> tuple[str, HierarchyConfig]:
    name = _text(table, "name", f"ladder {number}")
    where = f"the ladder {name!r}"
    _check_keys(table, _LADDER_KEYS, where)
    tiers, gathers = table.get("tiers", []), table.get("gather", [])
    if not isinstance(tiers, list) or not tiers or tiers[0] != figures.target.name:
        raise HierspecError(f"tiers of {where} must be a list that begins with {figures.target.name!r}.")
    if (
        not isinstance(gathers, list)
        or len(gathers) != len(tiers) - 1
        or not all(type(n) is int and n > 0 for n in gathers)
    ):
        raise HierspecError(f"gather of {where} must have a whole number from 1 up for each tier below the target.")
    _check_keys(map(str, tiers), [tier.name for tier in figures.tiers], f"tiers of {where}", "tiers")
    stores, until = (_table(table, key, where) for key in ("stores", "until"))
    for key, given in (("stores", stores), ("until", until)):
        _check_keys(given, tiers, f"{key} of {where}", "tiers")
    for value in until.values():
        if value not in BLOCK_ENDS:
            raise HierspecError(f"until of {where} must be one of {', '.join(BLOCK_ENDS)}, not {value!r}.")
    hierarchy = tuple(
        TierConfig(tier, gather, stores.get(tier), until.get(tier, "count"))
        for tier, gather in zip(tiers, [1, *gathers], strict=True)
    )
    # Both raise if the file has no such pair or store.
    for above, config in pairwise(hierarchy):
        figures.acceptance_rates(above.tier, config.tier)
    for config in hierarchy:
        if config.store is not None:
            figures.store(config.tier, config.store)
    return name, hierarchy


def _check_keys(keys: Iterable[str], allowed: Iterable[str], where: str, plural: str = "keys") -> None:
    names = list(allowed)
    for key in keys:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise HierspecError(f"Unknown {key!r} in {where}{hint}; {plural} are {', '.join(names)}.")


def _tables(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise HierspecError(f"{key} is written as a table of its own, with double brackets: [[{key}]].")
    return value


def _table(table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise HierspecError(f"{key} of {where} must be a table by names of tiers, {{draft = …}}, not {value!r}.")
    return value


def _text(table: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise HierspecError(f"{key} of {where} must be a string, not {value!r}.")
    return value


def _whole_number(table: dict[str, Any], key: str, where: str, default: int) -> int:
    value = table.get(key, default)
    if type(value) is not int or value < 1:
        raise HierspecError(f"{key} of {where} must be a whole number from 1 up, not {value!r}.")
    return value


def _number(table: dict[str, Any], key: str, where: str, default: float) -> float:
    value = table.get(key, default)
    if not _is_number(value) or value < 0:
        raise HierspecError(f"{key} of {where} must be a number from 0 up, not {value!r}.")
    return float(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
