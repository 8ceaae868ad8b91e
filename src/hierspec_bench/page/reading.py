"""A bench record as the page sees it. Older records lack keys, so everything that is asked for may be absent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec_bench.estimates import interval_over

PLAIN, PLAN, PEER = "plain", "plan", "peer"
_TOGETHER = ", batch of "  # how the bench names a plan that ran several prompts side by side


def real(value: object) -> float | None:
    """A finite number, or None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def mappings(value: object) -> list[Mapping[str, Any]]:
    return [mapping(item) for item in items(value) if isinstance(item, Mapping)]


@dataclass(frozen=True)
class Entry:
    """One plan or peer with its figures."""

    name: str
    kind: str  # PLAIN, PLAN or PEER
    figures: Mapping[str, Any]

    @property
    def alone(self) -> bool:
        """One prompt at a time, as a person at a desk would have it."""
        return _TOGETHER not in self.name

    def number(self, key: str) -> float | None:
        return real(self.figures.get(key))

    def interval(self) -> tuple[float, float] | None:
        edges = [real(edge) for edge in items(self.figures.get("speedup_interval"))]
        if len(edges) != 2 or edges[0] is None or edges[1] is None:
            return None
        return edges[0], edges[1]

    def over(self, other: Entry) -> float | None:
        """Its tokens/s over another's."""
        ours, theirs = self.number("tokens_per_second"), other.number("tokens_per_second")
        return ours / theirs if ours is not None and theirs else None

    def interval_over(self, other: Entry, task: str | None = None) -> tuple[float, float] | None:
        """95% bootstrap interval of its tokens/s over another's, where the record tells both prompt by prompt."""
        with suppress(KeyError, TypeError, ValueError, ArithmeticError):  # a record of another hand
            both = [mappings(entry.figures.get("by_prompt")) for entry in (self, other)]
            found = interval_over(both[0], both[1], task)
            return None if found is None else (found[0], found[1])
        return None

    def in_task(self, task: str) -> Entry:
        return Entry(self.name, self.kind, mapping(mapping(self.figures.get("tasks")).get(task)))

    @property
    def time(self) -> dict[str, float]:
        """Seconds by what they were spent on, in the order in which they are drawn."""
        told = mapping(self.figures.get("time"))
        parts = {name: seconds for name in TIME_PARTS if (seconds := real(told.get(name))) is not None}
        return parts or self._time_of_tiers()

    def _time_of_tiers(self) -> dict[str, float]:
        """For records that do not tell: from the counters of the tiers, where those fit into the whole."""
        tiers, whole = mappings(self.figures.get("tiers")), self.number("seconds")
        if not tiers or whole is None:
            return {}
        seconds = [real(tier.get("seconds")) or 0.0 for tier in tiers]
        stores = sum(real(tier.get("store_seconds")) or 0.0 for tier in tiers)
        rest = whole - sum(seconds) - stores
        if rest < -0.02 * whole:
            return {}
        return {"drafting": sum(seconds[1:]), "verifying": seconds[0], "stores": stores, "other": max(0.0, rest)}


TIME_PARTS = ("drafting", "verifying", "picking", "stores", "other")


@dataclass(frozen=True)
class Setting:
    """Everything that ran at one temperature."""

    temperature: float | None
    entries: tuple[Entry, ...]

    def named(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]


@dataclass(frozen=True)
class Run:
    document: Mapping[str, Any]
    settings: tuple[Setting, ...]  # the first is the one that the page is about

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Run:
        if not isinstance(document, Mapping) or not isinstance(document.get("plans"), Mapping):
            raise HierspecError('This is no bench record (it has no "plans" by name): give the JSON of hierspec bench.')
        others = mappings(document.get("other_temperatures"))
        return cls(document, tuple(_setting(part) for part in (document, *others)))

    @property
    def main(self) -> Setting:
        return self.settings[0]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for entry in self.main.entries for task in mapping(entry.figures.get("tasks"))))

    @property
    def best(self) -> Entry | None:
        """The fastest plan of ours that answers one prompt at a time."""
        return fastest(entry for entry in self.main.named(PLAN) if entry.alone)

    @property
    def best_peer(self) -> Entry | None:
        return fastest(self.main.named(PEER))

    @property
    def partial(self) -> bool:
        return self.document.get("complete") is False

    @property
    def synthetic(self) -> bool:
        return bool(self.document.get("synthetic")) or any(e.figures.get("synthetic") for e in self.main.entries)


def _setting(part: Mapping[str, Any]) -> Setting:
    plans, peers = mapping(part.get("plans")), mapping(part.get("peers"))
    entries = [Entry(str(name), PLAIN if name == PLAIN else PLAN, mapping(value)) for name, value in plans.items()]
    entries += [Entry(str(name), PEER, mapping(value)) for name, value in peers.items()]
    return Setting(real(part.get("temperature")), tuple(entries))


def fastest(entries: Iterable[Entry]) -> Entry | None:
    timed = [entry for entry in entries if entry.number("tokens_per_second") is not None]
    return max(timed, key=lambda entry: entry.number("tokens_per_second") or 0.0, default=None)
