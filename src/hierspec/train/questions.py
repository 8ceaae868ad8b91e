"""What users may ask first, from files of several kinds: prompts, questions, instructions, and texts to ask about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import json_lines, shown_path

_PASSAGE = 1200  # letters of a passage
_TASKS = (
    "Summarize the following text:\n\n{}",
    "Answer the question using the passage below.\n\nPassage: {}\n\nQuestion: What happens in this passage?",
)


def gather_questions(files: Sequence[Path], texts: Sequence[Path], each: int) -> list[str]:
    """`each` questions from every source, so that none outweighs the others.

    Sources are files of JSON lines with `turns`, `question` or `instruction` and `input`, and passages of texts, to
    summarise and to answer from.
    """
    sources = [_questions(path) for path in files]
    for path in texts:
        text = path.read_text(encoding="utf-8", errors="replace")
        passages = [text[start : start + _PASSAGE].strip() for start in range(0, len(text), _PASSAGE)]
        for number, task in enumerate(_TASKS):
            sources.append([task.format(passage) for passage in passages[number :: len(_TASKS)]])
    return [source[number % len(source)] for source in sources if source for number in range(each)]


def _questions(path: Path) -> list[str]:
    def refuse(reason: str) -> HierspecError:
        return HierspecError(f"{shown_path(path)} cannot be read as questions ({reason}).")

    def refuse_line(number: int, reason: str) -> HierspecError:
        return HierspecError(f"{shown_path(path)}, line {number}: {reason}.")

    asked = []
    for number, item in json_lines(path, refuse, refuse_line):
        question = _question(item)
        if not question:
            raise refuse_line(number, "it has no turns, no question and no instruction")
        asked.append(question)
    return asked


def _question(item: Any) -> str:
    if not isinstance(item, dict):
        return ""
    turns = item.get("turns")
    if isinstance(turns, list) and turns:
        return str(turns[0])
    return str(item.get("question") or f"{item.get('instruction', '')}\n{item.get('input', '')}".strip())
