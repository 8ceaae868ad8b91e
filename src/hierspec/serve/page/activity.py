"""A worker's recent activity, second by second: an observer for the page."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hierspec.core.stats import TierStats
from hierspec.generation import Failure, Generation, TextStep
from hierspec.worker import Job

_SECONDS = 60  # of history
_PASSES = 64  # number of recent target passes
_NOW = 3  # seconds over which "now" is averaged


class TargetPass(NamedTuple):
    """A request's share of a forward pass of the target."""

    at: float
    seconds: float  # of the pass, divided by its number of requests
    between: float  # seconds from one pass to the next in which no tier or store worked, divided likewise
    rows: int  # of this request
    requests: int  # in the pass


@dataclass
class _Second:
    at: int
    tokens: int = 0
    passes: int = 0
    drafted: Counter[str] = field(default_factory=Counter)  # by source
    accepted: Counter[str] = field(default_factory=Counter)


class Activity:
    """An observer for a worker: the worker's thread counts, any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: set[Job] = set()  # unfinished jobs
        self._seconds: deque[_Second] = deque(maxlen=_SECONDS)
        self._passes: deque[TargetPass] = deque(maxlen=_PASSES)
        self._worked: dict[Job, tuple[float, float]] = {}  # seconds so far of running jobs: in the target, in all else
        self._target = TierStats("target")
        self._below: dict[str, TierStats] = {}  # tiers below the target, by name; counted when a request ends

    def on_submit(self, job: Job) -> None:
        with self._lock:
            self._jobs.add(job)

    def on_first(self, job: Job) -> None:
        return

    def on_step(self, job: Job, step: TextStep) -> None:
        drafted, accepted = step.draft.sources, [step.draft.sources[node] for node in step.accepted]
        with self._lock:
            second = self._second(int(self._clock()))
            self._count_pass(job, step)
            second.tokens += len(step.tokens)
            second.passes += 1
            for counted in (second.drafted, self._target.proposed):
                counted.update(drafted)
            for counted in (second.accepted, self._target.accepted):
                counted.update(accepted)

    def _count_pass(self, job: Job, step: TextStep) -> None:
        """Counts a pass, except a text's first, which is mostly prefill."""
        if job.writer is None:
            return
        request = job.writer.request
        target, *below = request.stats.tiers
        worked = sum(tier.seconds for tier in below) + sum(tier.store_seconds for tier in request.stats.tiers)
        before, now = self._worked.get(job), (target.seconds, worked)
        self._worked[job] = now
        if before is not None:
            seconds, others = now[0] - before[0], now[1] - before[1]
            between = max(0.0, step.seconds / request.running_requests - seconds - others)
            rows, requests = 1 + len(step.draft), request.running_requests
            self._passes.append(TargetPass(self._clock(), seconds, between, rows, requests))

    def on_end(self, job: Job, result: Generation | Failure) -> None:
        generation = result.partial if isinstance(result, Failure) else result
        with self._lock:
            self._jobs.discard(job)
            self._worked.pop(job, None)
            for tier in generation.stats.tiers[1:] if generation is not None else ():
                self._below.setdefault(tier.name, TierStats(tier.name)).add(tier)

    def _second(self, at: int) -> _Second:
        if not self._seconds or self._seconds[-1].at != at:
            self._seconds.append(_Second(at))
        return self._seconds[-1]

    @property
    def jobs(self) -> list[Job]:
        """Jobs that are waiting or running."""
        with self._lock:
            return list(self._jobs)

    def passes(self) -> list[TargetPass]:
        """Recent passes of the target, within the last minute."""
        since = self._clock() - _SECONDS
        with self._lock:
            return [each for each in self._passes if each.at >= since]

    def tokens_per_second(self) -> float:
        """The rate of all requests together, over the last few whole seconds."""
        now = int(self._clock())
        with self._lock:
            lately = [second.tokens for second in self._seconds if now - _NOW <= second.at < now]
        return sum(lately) / _NOW

    def acceptance(self) -> list[dict[str, Any]]:
        """By tier, since the start: drafted and accepted tokens by source."""
        with self._lock:
            tiers = [self._target, *self._below.values()]
            return [{"tier": tier.name, "sources": _shares(tier.proposed, tier.accepted)} for tier in tiers]

    def history(self) -> list[dict[str, Any]]:
        """Seconds of the last minute in which tokens were generated, oldest first; sources are the target's."""
        now = int(self._clock())
        with self._lock:
            return [
                {
                    "seconds_ago": now - second.at,
                    "tokens": second.tokens,
                    "passes": second.passes,
                    "sources": _shares(second.drafted, second.accepted),
                }
                for second in self._seconds
                if now - second.at <= _SECONDS
            ]


def _shares(drafted: Counter[str], accepted: Counter[str]) -> dict[str, dict[str, int]]:
    return {source: {"drafted": count, "accepted": accepted[source]} for source, count in drafted.items()}


class Observers:
    """Several observers of one worker. If one fails, the others still count."""

    def __init__(self, *observers: Any) -> None:
        self._observers = observers

    def on_submit(self, job: Job) -> None:
        self._all("on_submit", job)

    def on_first(self, job: Job) -> None:
        self._all("on_first", job)

    def on_step(self, job: Job, step: TextStep) -> None:
        self._all("on_step", job, step)

    def on_end(self, job: Job, result: Generation | Failure) -> None:
        self._all("on_end", job, result)

    def _all(self, what: str, *news: Any) -> None:
        failures = []
        for observer in self._observers:
            try:
                getattr(observer, what)(*news)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
