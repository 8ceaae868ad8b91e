"""Servers under load: several ways to serve the same calls, interleaved; every text is compared with the same call
made alone."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, sqrt
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec_bench.serving.client import Address, Reply


@dataclass(frozen=True)
class Way:
    """A server, and additional fields for its calls."""

    name: str
    address: Address
    more: dict[str, Any] = field(default_factory=dict)
    apart: bool = False  # each call has its own namespace: nothing is drafted from earlier answers
    same_text_as: str = ""  # the way whose calls, made alone, give the reference texts; "": its own


@dataclass(frozen=True)
class Load:
    """The calls of several concurrent clients, each making one call after the other."""

    way: str
    clients: int
    seconds: float
    replies: list[Reply]
    different: list[int]  # calls whose text differs from the same call made alone

    def figures(self) -> dict[str, Any]:
        firsts = sorted(reply.first_seconds for reply in self.replies)
        gaps = sorted(gap for reply in self.replies for gap in reply.gaps)
        tokens = sum(reply.tokens for reply in self.replies)
        median = statistics.median(gaps) if gaps else 0.0
        return {
            "way": self.way,
            "clients": self.clients,
            "calls": len(self.replies),
            "tokens": tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 2),
            "first_ms": {"median": _ms(statistics.median(firsts)), "p99": _ms(quantile(firsts, 0.99))},
            "gap_ms": {
                "median": _ms(median),
                "p99": _ms(quantile(gaps, 0.99)),
                "longest": _ms(gaps[-1] if gaps else 0.0),
                "longest_over_median": round(gaps[-1] / median, 2) if median else 0.0,
            },
            "errors": [reply.error for reply in self.replies if reply.error],
            "different_texts": len(self.different),
        }


def calls_of(prompts: Sequence[BenchPrompt], count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Bodies of `count` calls, each with its own seed; every other one is sampled."""
    return [
        {
            "messages": [{"role": "user", "content": prompts[number % len(prompts)].turns[0]}],
            "max_tokens": max_tokens,
            "temperature": 0.8 if number % 2 else 0.0,
            "seed": number,
        }
        for number in range(count)
    ]


async def served_name(address: Address) -> str:
    """The server's name for its model: some require it in requests."""
    try:
        status, body = await address.get("/v1/models")
    except OSError as error:
        raise HierspecError(f"No server answers at {address.url}; start it, or correct the address.") from error
    if status != 200:
        raise HierspecError(f"{address.url} does not list its models (status {status}); is it an OpenAI server?")
    return str(json.loads(body)["data"][0]["id"])


class LoadTest:
    """Measures ways to serve, in interleaved rounds, so that disturbances of the machine affect all of them."""

    def __init__(
        self,
        ways: Sequence[Way],
        calls: list[dict[str, Any]],
        least_calls: int = 1,
        progress: Progress = silent,
        of_each_client: int = 1,
    ) -> None:
        """Each measurement makes so many calls for each client, and at least `least_calls`.

        With one call of each client all prompts come at once, and then fewer and fewer texts are left: a burst, whose
        time is that of its slowest text. With several it is mostly a load that stays the same.

        Each round goes on with the next calls. The first way of a round computes prompts that the others find cached,
        so ways take turns at being first, also with the same calls.
        """
        self.ways, self.calls, self.least_calls, self.progress = list(ways), calls, least_calls, progress
        self.of_each_client = of_each_client
        self._alone: dict[str, list[str]] = {}
        self._names: dict[str, str] = {}
        self._asked = 0

    def run(self, clients: Sequence[int], rounds: int) -> Iterator[Load]:
        for way in self.ways:
            self._names[way.name] = asyncio.run(served_name(way.address))
        for way in self.ways:
            if not way.same_text_as:
                self._alone[way.name] = self._texts_alone(way)
        done, total = 0, len(clients) * rounds * len(self.ways)
        for number in range(rounds):
            for count in clients:
                repeated, within = divmod(number * self._size(count), len(self.calls))
                turned = (repeated + within // self._size(count)) % len(self.ways)
                for way in (*self.ways[turned:], *self.ways[:turned]):
                    self.progress(f"Measuring {way.name} with {count} clients", done, total)
                    yield self.one(way, count, number)
                    done += 1

    def _size(self, clients: int) -> int:
        """Calls of a measurement."""
        return min(max(self.of_each_client * clients, self.least_calls), len(self.calls))

    def one(self, way: Way, clients: int, round: int = 0) -> Load:
        size = self._size(clients)
        made = [number % len(self.calls) for number in range(round * size, (round + 1) * size)]
        began = time.perf_counter()
        replies = asyncio.run(self._all(way, [self.calls[number] for number in made], clients))
        seconds = time.perf_counter() - began
        alone = self._alone[way.same_text_as or way.name]
        different = [
            number
            for number, reply in zip(made, replies, strict=True)
            if not reply.error and reply.text != alone[number]
        ]
        return Load(way.name, clients, seconds, replies, different)

    def _texts_alone(self, way: Way) -> list[str]:
        texts = []
        for number, body in enumerate(self.calls):
            self.progress(f"Asking {way.name} alone", number, len(self.calls))
            [reply] = asyncio.run(self._all(way, [body], 1))
            if reply.error:
                raise HierspecError(f"{way.name} at {way.address.url} failed ({reply.error}).")
            texts.append(reply.text)
        return texts

    async def _all(self, way: Way, bodies: Sequence[dict[str, Any]], clients: int) -> list[Reply]:
        replies: dict[int, Reply] = {}
        todo = iter(list(enumerate(bodies)))

        async def client() -> None:
            for index, body in todo:
                self._asked += 1
                more = way.more | ({"namespace": f"call {self._asked}"} if way.apart else {})
                replies[index] = await way.address.chat({**body, **more, "model": self._names[way.name]})

        await asyncio.gather(*(client() for _ in range(clients)))
        return [replies[index] for index in range(len(bodies))]


def summary(loads: Sequence[Load], baseline: str) -> list[dict[str, Any]]:
    """A row for each way and number of clients: medians over rounds, and speed relative to the baseline.

    Ways take turns at being first, and the first one's prompts are new to the server, the others' are cached. So only
    the sums over as many rounds as there are ways can be compared.
    """
    by_key: dict[tuple[int, str], list[Load]] = {}
    for load in loads:
        by_key.setdefault((load.clients, load.way), []).append(load)
    rows, ways = [], len({load.way for load in loads})
    for (clients, way), of_it in by_key.items():
        base = by_key.get((clients, baseline), [])
        starts = range(0, max(len(of_it) - ways, 0) + 1, ways)  # without rounds that are left over
        turns = [(of_it[start : start + ways], base[start : start + ways]) for start in starts]
        ratios = [_speed(*own) / _speed(*other) for own, other in turns if other and _speed(*other)]
        figures = [load.figures() for load in of_it]
        rows.append(
            {
                "clients": clients,
                "way": way,
                "tokens_per_second": round(statistics.median(_speed(load) for load in of_it), 2),
                "over_baseline": round(statistics.median(ratios), 3) if ratios else None,
                "over_baseline_error": round(_error_of_median(ratios), 3) if len(ratios) > 2 else None,
                "first_ms": _median(figures, "first_ms", "median"),
                "gap_ms": _median(figures, "gap_ms", "median"),
                "gap_p99_ms": _median(figures, "gap_ms", "p99"),
                "longest_over_median": max(figure["gap_ms"]["longest_over_median"] for figure in figures),
                "different_texts": sum(figure["different_texts"] for figure in figures),
                "errors": sum(len(figure["errors"]) for figure in figures),
            }
        )
    return rows


def _error_of_median(values: Sequence[float]) -> float:
    """The standard error of the median: half the distance between the values that enclose it two times in three.

    A few values of disturbed moments, which the median does not see, do not change it either.
    """
    ordered, beside = sorted(values), sqrt(len(values)) / 2
    first, last = floor((len(values) - 1) / 2 - beside), ceil((len(values) - 1) / 2 + beside)
    return (ordered[min(last, len(ordered) - 1)] - ordered[max(first, 0)]) / 2 if ordered else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile, as the nearest of the ordered values."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _speed(*loads: Load) -> float:
    return sum(reply.tokens for load in loads for reply in load.replies) / sum(load.seconds for load in loads)


def _median(figures: Sequence[dict[str, Any]], name: str, key: str) -> float:
    return round(statistics.median(figure[name][key] for figure in figures), 2)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
