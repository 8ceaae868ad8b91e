"""An engine that records the answers of scorers, and one that replays them without scorers.

Everything that a plan learns during a run (its stores, which drafts are worth verifying, when drafting pays off) comes
from its scorers' answers and their times, from the times of its stores, from how much of a text its tiers had in the KV
cache, and from what drafters' passes also computed for the target. So a stopped run is resumed by giving every plan the
same answers and times again: the hierarchy, the stores and the engine are the real ones, but no forward pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.pass_times import PassClock
from hierspec.core.request import Request

_READINGS = 3  # where a pass of a transcript has them


class RecordingEngine(Engine):
    """Records the answers of every batched pass, its time, the time before it, whether it prepared something, and what
    the clock showed when stores were asked for its drafts.

    Distributions are too large to record; with them there is no transcript.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[tuple[PassClock, list[float], list[list[float]], list[Answer]]] = []
        self._readings: list[float] = []  # of the requests' clocks since the last pass
        self._submitted: list[Request] = []
        self._clock_of_pass = PassClock(0.0, 0.0, False)  # of the last pass
        self._before: list[tuple[float, float]] = []  # what each ask's tier had taken before the pass
        self._charged: list[list[float]] = []  # what the scorer took off that during the last pass
        self._complete = True

    def _answers(self, group: list[tuple[Request, Ask]]) -> Sequence[Answer | None]:
        self._before = [(ask.stats.seconds, ask.stats.prefill_seconds) for _, ask in group]
        answers = super()._answers(group)
        picked = [answer for answer in answers if answer is not None and answer.picks is not None]
        self._complete &= len(picked) == len(group)
        if self._complete:
            self._passes.append((self._clock_of_pass, self._readings, self._charged, picked))
        self._readings = []
        return answers

    def submit(self, request: Request) -> None:
        clock = request.clock

        def read() -> float:
            self._readings.append(clock())
            return self._readings[-1]

        request.clock = read
        self._submitted.append(request)
        super().submit(request)

    def _note(self, group: list[tuple[Request, Ask]], answers: Sequence[Answer], clock: PassClock) -> None:
        self._clock_of_pass = clock
        self._charged = [
            [seconds - ask.stats.seconds, prefill - ask.stats.prefill_seconds]
            for (seconds, prefill), (_, ask) in zip(self._before, group, strict=False)
        ]
        super()._note(group, answers, clock)

    def transcript(self) -> list[list[Any]] | None:
        """First how many tokens of each request its tiers had in the KV cache. Then for every pass its seconds, the
        seconds before it, whether something was prepared, the readings of the requests' clocks before it, and seconds
        that each tier is not charged with, of all and of prefill; then the answers.

        An answer has picks, leads if they were requested, what should follow runners-up, and the same for the answers
        ahead.
        """
        if not self._complete:
            return None
        return [
            [[stats.known for stats in request.stats.tiers] for request in self._submitted],
            *(
                [*clock, readings, charged, *map(_to_json, answers)]
                for clock, readings, charged, answers in self._passes
            ),
        ]


class Playback(Engine):
    """Answers from a transcript."""

    def __init__(self, transcript: Sequence[Sequence[Any]]) -> None:
        super().__init__()
        known, *passes = transcript
        self._known, self._passes = iter(known), iter(passes)
        self._readings = chain.from_iterable(one[_READINGS] for one in passes)

    def submit(self, request: Request) -> None:
        for stats, known in zip(request.stats.tiers, next(self._known, ()), strict=False):
            stats.known = known
        request.clock = lambda: next(self._readings, 0.0)
        super().submit(request)

    def _answers(self, group: list[tuple[Request, Ask]]) -> Sequence[Answer | None]:
        seconds, between, prepared, _, charged, *recorded = next(self._passes, (0.0, 0.0, False, (), ()))
        answers = [_from_json(answer) for answer in recorded]
        fits = len(answers) == len(group) and all(
            answer.picks is not None and len(answer.picks) == 1 + len(ask.proposal)
            for answer, (_, ask) in zip(answers, group, strict=True)
        )
        if not fits:
            raise HierspecError("What was recorded of the run does not fit this program; start over with --restart.")
        for (request, ask), (off, prefill) in zip(group, charged, strict=False):
            if off:
                ask.stats.seconds -= off
                ask.stats.prefill_seconds -= prefill
                request.stats.tiers[0].seconds += off
        self._note(group, answers, PassClock(float(seconds), float(between), bool(prepared)))
        return answers


def _to_json(answer: Answer) -> list[Any]:
    assert answer.picks is not None
    leads = None if answer.leads is None else answer.leads.tolist()
    branches = [[[int(token), float(lead)] for token, lead in branch] for branch in answer.branches]
    return [answer.picks.tolist(), leads, branches, *(_to_json(further) for further in answer.ahead)]


def _from_json(document: Sequence[Any]) -> Answer:
    picks, leads, branches, *ahead = document
    return Answer(
        picks=np.array(picks, np.int32),
        leads=None if leads is None else np.array(leads),
        branches=tuple(tuple((token, lead) for token, lead in branch) for branch in branches),
        ahead=tuple(_from_json(further) for further in ahead),
    )
