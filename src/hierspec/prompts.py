"""Prompts for measuring: JSON lines with `task` and `turns`, as in Spec-Bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hierspec.core.errors import HierspecError

# Spec-Bench names the subjects of its multi-turn questions, which are MT-Bench's, and counts them as one family.
_SUBJECTS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation's user turns, and the family it belongs to."""

    task: str
    turns: tuple[str, ...]


def own_prompts() -> list[BenchPrompt]:
    """36 prompts written for this project: six of each of six families."""
    return read_prompts(_SHIPPED)


def read_prompts(path: Path) -> list[BenchPrompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HierspecError(
            f"The prompt file {path} cannot be read ({reason}): name a text file with one JSON object a line, like "
            '{"task": "qa", "turns": ["…"]}.'
        ) from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            task, turns = _family(item), item["turns"]
            if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
                raise ValueError("turns must be a list of texts")
        except (ValueError, KeyError, AttributeError) as error:
            raise HierspecError(
                f'{path}, line {number}: each line is an object like {{"task": "qa", "turns": ["…"]}} ({error}).'
            ) from error
        prompts.append(BenchPrompt(task, tuple(turns)))
    if not prompts:
        raise HierspecError(f"The prompt file {path} is empty.")
    return prompts


def _family(item: dict[str, object]) -> str:
    task = item.get("task", item.get("category", "all"))
    return "mt_bench" if "question_id" in item and "task" not in item and task in _SUBJECTS else str(task)


def spread(prompts: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """`count` prompts, as evenly as they go from each family, and at even steps within it."""
    families: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        families.setdefault(prompt.task, []).append(prompt)
    each, left = divmod(count, len(families))
    chosen = []
    for number, family in enumerate(families.values()):
        size = min(each + (number < left), len(family))
        chosen += [family[step * len(family) // size] for step in range(size)]
    return chosen
