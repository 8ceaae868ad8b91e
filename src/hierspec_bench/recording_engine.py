"""An engine that writes down what scorers answered, and one that says it again without them.

Whatever a plan learns along a run (its stores, what guesses are worth, when drafting pays) it learns from answers of
its scorers. So a run that was stopped is taken up by giving every plan the same answers again: the hierarchy, the
stores and the engine are the real ones, only no pass is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.request import Request


class RecordingEngine(Engine):
    """Keeps every packed pass's answers, in order. Laws are too large to be kept: then there is no transcript."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[list[Answer]] = []
        self._complete = True

    def _answers(self, group: list[tuple[Request, Ask]]) -> Sequence[Answer | None]:
        answers = super()._answers(group)
        kept = [answer for answer in answers if answer is not None and answer.picks is not None]
        self._complete &= len(kept) == len(group)
        if self._complete:
            self._heard.append(kept)
        return answers

    def transcript(self) -> list[list[Any]] | None:
        """For every pass, for every ask: picks, and leads where they were asked for."""
        return [[_to_json(answer) for answer in answers] for answers in self._heard] if self._complete else None


class Playback(Engine):
    """Answers from a transcript."""

    def __init__(self, transcript: Sequence[Sequence[Any]]) -> None:
        super().__init__()
        self._waiting = iter(transcript)

    def _answers(self, group: list[tuple[Request, Ask]]) -> Sequence[Answer | None]:
        answers = [_from_json(found) for found in next(self._waiting, ())]
        fitting = len(answers) == len(group) and all(
            answer.picks is not None and len(answer.picks) == 1 + len(ask.proposal)
            for answer, (_, ask) in zip(answers, group, strict=True)
        )
        if not fitting:
            raise HierspecError("What was kept of the run does not fit this program; begin anew with --restart.")
        return answers


def _to_json(answer: Answer) -> list[Any]:
    assert answer.picks is not None
    return [answer.picks.tolist(), None if answer.leads is None else answer.leads.tolist()]


def _from_json(found: Sequence[Any]) -> Answer:
    picks, leads = found
    return Answer(picks=np.array(picks, np.int32), leads=None if leads is None else np.array(leads))
