"""Figures of tiers that one need not have, read from a TOML file: what a planner would do with them.

[[tier]]                                 the target first, and a tier only above later ones
name = "target"
milliseconds = [20.0, 0.1]               a pass over one token, and what each more adds; or {1 = 20.0, 8 = 20.7}
accepts = {draft = 0.7, exit = [0.8, 0.75]}   whose tokens stand here, by their place in the block; the last continues

More keys are in docs/planning.md. Whatever is not known is an error that names the nearest known.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import HANDS_UP, Figures, Ladder, Rung, StoreFigures, Survival, TierFigures
from hierspec.planner.formula.search import USUAL, Limits

_WIDEST = 256  # rows up to which two numbers are a line
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
    ladders: dict[str, Ladder]  # hierarchies to be scored beside what the search finds, by name


def read(path: str | Path) -> WhatIf:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HierspecError(f"The file {path} cannot be read ({error}).") from error
    try:
        return from_toml(text)
    except HierspecError as error:
        raise HierspecError(f"{path}: {error}") from error


def from_toml(text: str) -> WhatIf:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HierspecError(f"This is not valid TOML: {error}.") from error
    _known(table, _KEYS, "the file")
    tiers = _tables(table, "tier")
    if not tiers:
        raise HierspecError("There is no [[tier]]; begin with the target's name and milliseconds.")
    for number, tier in enumerate(tiers, 1):  # before a name is asked for: it may be that key which is misspelt
        _known(tier, _TIER_KEYS, f"the tier {tier.get('name', number)!r}")
    names = [_text(tier, "name", f"tier {number}") for number, tier in enumerate(tiers, 1)]
    for name, tier in zip(names, tiers, strict=True):
        for key in (*_RATES, "milliseconds_over"):
            _known(_table(tier, key, f"the tier {name!r}"), names, f"{key} of the tier {name!r}", "tiers")
    survivals = {
        (name, below): _survival(name, tier, below)
        for name, tier in zip(names, tiers, strict=True)
        for below in tier.get("accepts", {})
    }
    for name, tier in zip(names, tiers, strict=True):
        for key in _RATES[1:]:
            for below in tier.get(key, {}):
                if (name, below) not in survivals:
                    raise HierspecError(f"{key} of the tier {name!r} has {below!r}, which its accepts has not.")
    stores = {
        name: tuple(_store(store, name) for store in _tables(tier, "store"))
        for name, tier in zip(names, tiers, strict=True)
        if "store" in tier
    }
    figures = Figures(
        tuple(_tier(name, tier) for name, tier in zip(names, tiers, strict=True)),
        survivals,
        stores,
        dict(_through(survivals)),
    )
    longest = _whole(table, "longest", "the file", USUAL.longest)
    candidates = table.get("candidates", list(USUAL.candidates))
    if not isinstance(candidates, list) or not candidates or not all(type(n) is int and n > 0 for n in candidates):
        raise HierspecError(f"candidates must be a list of whole numbers from 1 up, not {candidates!r}.")
    return WhatIf(
        _text(table, "title", "the file", ""),
        figures,
        Limits(longest, tuple(candidates)),
        dict(_ladder(one, number, figures) for number, one in enumerate(_tables(table, "ladder"), 1)),
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
    """Two numbers are a line; a table is as measured, and goes on beyond its end as steeply as on the whole."""
    if isinstance(value, list) and len(value) == 2 and all(_is_number(one) for one in value):
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


def _survival(name: str, table: dict[str, Any], below: str) -> Survival:
    rates = {}
    for key in _RATES:
        value = table.get(key, {}).get(below, [])
        listed = value if isinstance(value, list) else [value]
        if not all(_is_number(one) and 0 <= one <= 1 for one in listed) or (key == "accepts" and not listed):
            raise HierspecError(
                f"{key} of {below!r} at {name!r} must be from 0 to 1, one number or a list, not {value!r}."
            )
        rates[key] = tuple(float(one) for one in listed)
    return Survival(rates["accepts"], rates["stood"], rates["corrected"], rates["beside"])


def _through(survivals: dict[tuple[str, str], Survival]) -> Iterable[tuple[tuple[str, str, str], Survival]]:
    """Survival of a middle tier's tokens by who is below it, where only one of `stood` and `corrected` was given.

    The other follows: together they must give `accepts`, in the shares in which the tier accepts the one below. Where
    that cannot be, both move as far as they must.
    """
    for (above, tier), one in survivals.items():
        if bool(one.stood) == bool(one.corrected):
            continue
        for (middle, below), under in survivals.items():
            if middle != tier:
                continue
            places = max(len(one.own), len(one.stood), len(one.corrected))
            pairs = [
                _parted(_at(one.own, place), under.own[0], _at(one.stood, place), _at(one.corrected, place))
                for place in range(places)
            ]
            stood, corrected = zip(*pairs, strict=True)
            yield (above, tier, below), Survival(one.own, stood, corrected, one.beside)


def _at(rates: tuple[float, ...], place: int) -> float | None:
    return rates[min(place, len(rates) - 1)] if rates else None


def _parted(whole: float | None, share: float, stood: float | None, corrected: float | None) -> tuple[float, float]:
    """Two rates that give `whole` where the first has this share, one of them as near as can be to what is given."""
    assert whole is not None
    if share in (0.0, 1.0):  # there is only one kind
        return (whole if stood is None else stood), (whole if corrected is None else corrected)
    if stood is None:
        assert corrected is not None
        stood = (whole - (1 - share) * corrected) / share
    stood = min(1.0, stood, whole / share)
    stood = max(stood, (whole - (1 - share)) / share, 0.0)
    return stood, min(1.0, max(0.0, (whole - share * stood) / (1 - share)))


def _store(table: dict[str, Any], tier: str) -> StoreFigures:
    name = _text(table, "name", f"a store of the tier {tier!r}")
    where = f"the store {name!r} of the tier {tier!r}"
    _known(table, _STORE_KEYS, where)
    stands = table.get("stands")
    if not isinstance(stands, list) or not stands or not all(_is_number(one) for one in stands):
        raise HierspecError(f"stands of {where} must be a list: shares of passes in which 0, 1, 2, … tokens stand.")
    rows = _whole(table, "rows", where, len(stands) - 1)
    return StoreFigures(name, tuple(map(float, stands)), rows, _number(table, "milliseconds", where, 0.0) / 1e3)


def _ladder(table: dict[str, Any], number: int, figures: Figures) -> tuple[str, Ladder]:
    name = _text(table, "name", f"ladder {number}")
    where = f"the ladder {name!r}"
    _known(table, _LADDER_KEYS, where)
    tiers, gathers = table.get("tiers", []), table.get("gather", [])
    if not isinstance(tiers, list) or not tiers or tiers[0] != figures.target.name:
        raise HierspecError(f"tiers of {where} must be a list that begins with {figures.target.name!r}.")
    if (
        not isinstance(gathers, list)
        or len(gathers) != len(tiers) - 1
        or not all(type(n) is int and n > 0 for n in gathers)
    ):
        raise HierspecError(f"gather of {where} must have a whole number from 1 up for each tier below the target.")
    known = [tier.name for tier in figures.tiers]
    _known(dict.fromkeys(map(str, tiers)), known, f"tiers of {where}", "tiers")
    stores, until = (_table(table, key, where) for key in ("stores", "until"))
    for key, given in (("stores", stores), ("until", until)):
        _known(given, tiers, f"{key} of {where}", "tiers")
    for value in until.values():
        if value not in HANDS_UP:
            raise HierspecError(f"until of {where} must be one of {', '.join(HANDS_UP)}, not {value!r}.")
    ladder = tuple(
        Rung(tier, gather, stores.get(tier), until.get(tier, "count"))
        for tier, gather in zip(tiers, [1, *gathers], strict=True)
    )
    for above, rung in pairwise(ladder):
        figures.survival(above.tier, rung.tier)
    for rung in ladder:
        if rung.store is not None:
            figures.store(rung.tier, rung.store)
    return name, ladder


def _known(table: Iterable[str], known: Iterable[str], where: str, called: str = "keys") -> None:
    names = list(known)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            guess = f" (did you mean {near[0]!r}?)" if near else ""
            raise HierspecError(f"Unknown {key!r} in {where}{guess}; {called} are {', '.join(names)}.")


def _tables(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise HierspecError(f"{key} is written as a table of its own, with double brackets: [[{key}]].")
    return found


def _table(table: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise HierspecError(f"{key} of {where} must be a table by names of tiers, {{draft = …}}, not {found!r}.")
    return found


def _text(table: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    found = table.get(key, default)
    if not isinstance(found, str) or (default is None and not found):
        raise HierspecError(f"{key} of {where} must be a string, not {found!r}.")
    return found


def _whole(table: dict[str, Any], key: str, where: str, default: int) -> int:
    found = table.get(key, default)
    if type(found) is not int or found < 1:
        raise HierspecError(f"{key} of {where} must be a whole number from 1 up, not {found!r}.")
    return found


def _number(table: dict[str, Any], key: str, where: str, default: float) -> float:
    found = table.get(key, default)
    if not _is_number(found) or found < 0:
        raise HierspecError(f"{key} of {where} must be a number from 0 up, not {found!r}.")
    return float(found)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
