"""A worker that says what it is told to: for what servers make of a text, which no tiny model would write."""

from __future__ import annotations

from hierspec.core.stats import Stats, TierStats
from hierspec.generation import Generation, Piece, TextStep
from hierspec.text.tokenizer import Tokenizer
from hierspec.worker import Job


class ScriptedWorker:
    """Answers every job with `text`, a few characters a step."""

    def __init__(self, tokenizer: Tokenizer, characters: int = 3) -> None:
        self._tokenizer, self._characters = tokenizer, characters
        self.text, self.ended = "", "stop"
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        pieces = [self.text[at : at + self._characters] for at in range(0, len(self.text), self._characters)]
        for piece in pieces:
            job.listener(TextStep((0,), (Piece(piece, "target"),), 0.0))
        job.listener(
            Generation(
                text=self.text,
                tokens=(0,) * len(pieces),
                sources=("target",) * len(pieces),
                pieces=tuple(Piece(piece, "target") for piece in pieces),
                ended=self.ended,
                seed=0,
                prompt_tokens=len(job.ids),
                stats=Stats([TierStats("target")]),
                first_seconds=0.0,
                first_tokens=1,
                seconds=0.0,
            )
        )

    @property
    def prompt(self) -> str:
        """What the last job was asked, with control tokens."""
        return self._tokenizer.decode(self.jobs[-1].ids, special=True)

    def close(self, finish: bool = True) -> None:
        pass
