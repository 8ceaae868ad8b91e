"""Prompts for measuring: JSON lines with `task` and `turns`, as in Spec-Bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import json_lines, shown_path

# Spec-Bench names the subjects of its multi-turn questions, which are MT-Bench's, and counts them as one family.
_SUBJECTS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
_EXAMPLE = '{"task": "qa", "turns": ["…"]}'
_MOST_PROMPTS = 1_000_000


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation's user turns, and the family it belongs to."""

    task: str
    turns: tuple[str, ...]


def own_prompts() -> list[BenchPrompt]:
    """36 prompts written for this project: six of each of six families."""
    return read_prompts(_SHIPPED)


def read_prompts(path: Path) -> list[BenchPrompt]:
    def refuse(reason: str) -> HierspecError:
        return HierspecError(
            f"The prompt file {shown_path(path)} cannot be read ({reason}): name a text file with one JSON object a "
            f"line, like {_EXAMPLE}."
        )

    def refuse_line(number: int, reason: str) -> HierspecError:
        return HierspecError(f"{shown_path(path)}, line {number}: {reason}; each line is an object like {_EXAMPLE}.")

    prompts = []
    for number, item in json_lines(path, refuse, refuse_line):
        if reason := _fault(item):
            raise refuse_line(number, reason)
        prompts.append(BenchPrompt(_family(item), tuple(item["turns"])))
        if len(prompts) > _MOST_PROMPTS:
            raise refuse(f"it has more than {_MOST_PROMPTS:,} prompts")
    if not prompts:
        raise HierspecError(f"The prompt file {shown_path(path)} is empty.")
    return prompts


def _fault(item: Any) -> str:
    """Why this is no prompt; "" where it is one."""
    if not isinstance(item, dict):
        return "it is no object"
    turns = item.get("turns")
    if not isinstance(turns, list) or not turns:
        return "its turns must be a list of texts"
    if not all(isinstance(turn, str) and turn for turn in turns):
        return "its turns must be texts, none of them empty"
    if not isinstance(item.get("task", item.get("category", "")), str):
        return "its task must be a text"
    if not all(_has_whole_characters(text) for text in [*turns, _family(item)]):
        return "one of its texts holds half a character (a surrogate without its other half)"
    return ""


def _has_whole_characters(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _family(item: dict[str, Any]) -> str:
    task = item.get("task", item.get("category", "all"))
    return "mt_bench" if "question_id" in item and "task" not in item and task in _SUBJECTS else str(task)


def spread(prompts: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """`count` prompts: about as many from each family, at even steps within it."""
    families: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.task, []).append(prompt)
    each, left = divmod(count, len(families))
    chosen = []
    for number, family in enumerate(families.values()):
        size = min(each + (number < left), len(family))
        chosen += [family[step * len(family) // size] for step in range(size)]
    return chosen
