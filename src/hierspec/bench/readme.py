"""The results table of a Markdown file, made from a document of the bench.

python -m hierspec.bench.readme docs/results/X.json README.md     replaces what stands between the two comments

The first comment names the document, so that a test can see whether file and table still agree.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hierspec.bench.comparing import read_document
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file

_MARKS = re.compile(r"<!-- results: (\S+) -->\n(.*?)<!-- end of results -->", re.DOTALL)
_TASKS = {
    "mt_bench": "multi-turn", "conversation": "multi-turn", "translation": "translation",
    "summarization": "summaries", "summary": "summaries", "qa": "questions", "math_reasoning": "mathematics",
    "mathematics": "mathematics", "rag": "retrieval", "retrieval": "retrieval",
}  # fmt: skip


def results(document: Mapping[str, Any]) -> str:
    """Two tables in Markdown, contenders and tasks, with what was run above them."""
    lines = [_about(document), ""]
    lines += ["| | tokens/s | over plain | after the prompt | tokens per pass | same text as plain |"]
    lines += ["|---|---|---|---|---|---|"]
    plain_rate = document["plans"]["plain"].get("decode_tokens_per_second")
    for kind in ("peers", "plans"):
        for name, figures in document.get(kind, {}).items():
            lines.append(_row(kind, name, figures, plain_rate))
    for name, reason in document.get("absent_peers", {}).items():
        lines.append(f"| {name} | not run: {reason} | | | | |")
    tasks = list(document["plans"]["plain"].get("tasks", {}))
    if tasks:
        lines += ["", "| over plain | " + " | ".join(_TASKS.get(task, task) for task in tasks) + " |"]
        lines += ["|---" * (1 + len(tasks)) + "|"]
        for kind in ("peers", "plans"):
            for name, figures in document.get(kind, {}).items():
                if name != "plain":
                    cells = [f"{figures['tasks'][task]['speedup']:.2f}x" for task in tasks]
                    lines.append(f"| {_label(kind, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def named_document(text: str) -> tuple[str, str]:
    """The document that a Markdown file names in its first comment, and what stands below that."""
    found = _MARKS.search(text)
    if found is None:
        raise HierspecError(
            "There is no place for results: add the lines <!-- results: X.json --> and <!-- end of results -->."
        )
    return found[1], found[2]


def write_results(source: Path, target: Path) -> None:
    text = target.read_text(encoding="utf-8")
    named_document(text)
    name = Path(os.path.relpath(source.resolve(), target.resolve().parent)).as_posix()
    block = f"<!-- results: {name} -->\n{results(read_document(source))}<!-- end of results -->"
    with whole_file(target) as temporary:
        temporary.write_text(_MARKS.sub(lambda _: block, text, count=1), encoding="utf-8")


def _about(document: Mapping[str, Any]) -> str:
    machine, prompts = document["machine"], document.get("prompts", "")
    named = prompts["name"] if isinstance(prompts, Mapping) else prompts
    weights = document.get("weights", "auto")
    dtype = document["dtype"] if weights == "auto" else f"{weights} weights"
    count = document["plans"]["plain"]["prompts"]
    temperature = document.get("temperature", 0.0)
    sampling = "greedy" if not temperature else f"temperature {temperature:g}"
    part = "" if document.get("complete", True) else " A part of the run: it was stopped."
    return (
        f"{document['model']}, {dtype}, {sampling}, {count} prompts ({named}) x {document['max_tokens']} tokens, "
        f"{document['threads']} threads of {machine['processor']}, reading the prompts included.{part}\n"
        f"Made by `{document['command']}`."
    )


def _row(kind: str, name: str, figures: Mapping[str, Any], plain_rate: float | None) -> str:
    low, high = figures["speedup_interval"]
    over = "1" if name == "plain" else f"{figures['speedup']:.2f}x ({low:.2f} to {high:.2f})"
    rate = figures.get("decode_tokens_per_second")
    later = "" if rate is None else f"{rate:.1f}"
    if rate is not None and plain_rate and name != "plain":
        later += f", {rate / plain_rate:.2f}x"
    same = "" if name == "plain" else f"{figures['identical']} of {figures['prompts']}"
    if figures.get("ties"):
        same += f", {figures['ties']} ties"
    if not figures.get("promises_text", True):
        law = figures.get("law")
        same = "same law" + (f" (p {law['p']:g})" if law else "")
    rate_cell, passes = f"{figures['tokens_per_second']:.1f}", figures.get("tokens_per_pass")
    cells = (_label(kind, name), rate_cell, over, later, "" if passes is None else f"{passes:.2f}", same)
    return "| " + " | ".join(cells) + " |"


def _label(kind: str, name: str) -> str:
    return name if kind == "peers" else f"`{name}`"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("use: python -m hierspec.bench.readme docs/results/X.json README.md")
    try:
        write_results(Path(sys.argv[1]), Path(sys.argv[2]))
    except (HierspecError, OSError) as error:
        sys.exit(f"hierspec: {error}")
