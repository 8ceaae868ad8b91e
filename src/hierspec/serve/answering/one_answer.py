"""The single answer of a call, in parts as they arrive: for protocols without multiple answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from hierspec.generation import Generation, TextStep
from hierspec.serve.answering.answers import Answers
from hierspec.serve.answering.tools import AnswerPart, AnswerReader


async def one_answer(
    answers: Answers, reader: AnswerReader
) -> AsyncGenerator[Sequence[AnswerPart] | Generation | None, None]:
    """Yields parts as they are parsed, then the `Generation`; None if nothing was generated for a while."""
    async for news in answers.events():
        if news is None:
            yield None
            continue
        _, step = news
        parts = reader.add(step.text) if isinstance(step, TextStep) else reader.finish()
        if reader.full:
            answers.stop(0)
        yield parts
        if isinstance(step, Generation):
            yield step
