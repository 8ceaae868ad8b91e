"""The model's own text as a file: answers from its conversations with itself, one per line, for corpus or training."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from hierspec.core.errors import HierspecError
from hierspec.paths import make_folder, whole_file
from hierspec.progress import Progress, silent
from hierspec.train.material import open_writer
from hierspec.train.synthesise import Texts, synthesise

_SHORTEST = 16  # tokens of an answer that is worth a line


def write_own_text(
    source: str | Path | None,
    path: Path,
    conversations: int,
    length: int = 640,
    prompts: Sequence[str] = (),
    seed: int = 0,
    batch: int = 256,
    device: str = "auto",
    progress: Progress = silent,
) -> int:
    """Writes JSON lines with `text`, through gzip if the name ends in .gz; returns how many tokens they have.

    Every conversation is of `length` tokens; a third of them begin with one of the prompts, which are not written.
    """
    if min(conversations, length - 15, batch) < 1:
        raise HierspecError("Own text needs at least one conversation of 16 tokens, and one at a time.")
    _, tokenizer, network = open_writer(source, device, progress)
    make_folder(path.parent)
    tokens = 0
    with whole_file(path) as temporary, _opened(temporary, path.name.endswith(".gz")) as file:
        for first in range(0, conversations, batch):

            def within(what: str, done: int, total: int, before: int = first) -> None:
                progress(what, before + done, conversations)

            count = min(batch, conversations - first)
            texts = synthesise(network, tokenizer, count, length, prompts, seed + first, count, within)
            for answer in answers(texts):
                file.write(json.dumps({"text": tokenizer.decode(answer)}) + "\n")
                tokens += len(answer)
    return tokens


def answers(texts: Texts) -> Iterator[list[int]]:
    """Every run of tokens that belongs to an answer, unless it is short."""
    for row, answering in zip(texts.tokens.tolist(), texts.answers.tolist(), strict=True):
        answer: list[int] = []
        for token, wanted in zip([*row, 0], [*answering, False], strict=True):
            if wanted:
                answer.append(token)
            elif answer:
                if len(answer) >= _SHORTEST:
                    yield answer
                answer = []


def _opened(path: Path, zipped: bool) -> IO[str]:
    return gzip.open(path, "wt", encoding="utf-8") if zipped else path.open("w", encoding="utf-8")
