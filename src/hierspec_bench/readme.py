"""The results tables of a Markdown file, made from documents of the bench.

python -m hierspec_bench.readme README.md     makes every table anew that stands between two comments such as

    <!-- results: docs/results/X.json -->                    all that ran
    <!-- results: docs/results/X.json auto lookup vllm -->   only these plans and peers, beside plain
    <!-- end of results -->

The first comment says it all, so that a test can see whether file and tables still agree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file
from hierspec_bench.compare import read_document

_MARKS = re.compile(r"(<!-- results: (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
_TASKS = {
    "mt_bench": "multi-turn", "conversation": "multi-turn", "translation": "translation",
    "summarization": "summaries", "summary": "summaries", "qa": "questions", "math_reasoning": "mathematics",
    "mathematics": "mathematics", "rag": "retrieval", "retrieval": "retrieval",
}  # fmt: skip


def results(document: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """Two tables in Markdown, contenders and tasks, with what was run above them."""
    plain = document["plans"]["plain"]
    shown = [
        (kind, name, figures)
        for kind in ("peers", "plans")
        for name, figures in document.get(kind, {}).items()
        if not names or name in ("plain", *names)
    ]
    lost = [name for name in names if name not in {found for _, found, _ in shown}]
    if lost:
        raise HierspecError(f"The document has no plan or peer {lost[0]!r}; correct the names in the comment.")
    lines = [_about(document), ""]
    lines += ["| | tokens/s | over plain | after the prompt | tokens per pass | same text as plain |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [_row(kind, name, figures, plain.get("decode_tokens_per_second")) for kind, name, figures in shown]
    if not names:
        absent = document.get("absent_peers", {}).items()
        lines += [f"| {name} | not run: {reason} | | | | |" for name, reason in absent]
    if tasks := list(plain.get("tasks", {})):
        lines += ["", "| over plain | " + " | ".join(_TASKS.get(task, task) for task in tasks) + " |"]
        lines += ["|---" * (1 + len(tasks)) + "|"]
        for kind, name, figures in shown:
            if name != "plain":
                cells = [f"{figures['tasks'][task]['speedup']:.2f}x" for task in tasks]
                lines.append(f"| {_label(kind, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_results(text: str, folder: Path) -> str:
    """A Markdown text in which every table is what the document says that its comment names."""
    if not _MARKS.search(text):
        raise HierspecError(
            "There is no place for results: add the lines <!-- results: X.json --> and <!-- end of results -->."
        )

    def made(found: re.Match[str]) -> str:
        opening, name, names, _, closing = found.groups()
        return opening + results(read_document(folder / name), names.split()) + closing

    return _MARKS.sub(made, text)


def write_results(target: Path) -> None:
    try:
        text = target.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise HierspecError(f"{target} cannot be read ({reason}); give a Markdown file such as README.md.") from error
    made = with_results(text, target.parent)
    with whole_file(target) as temporary:
        temporary.write_text(made, encoding="utf-8")


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
        distribution = figures.get("law")
        same = "same distribution" + (f" (p {distribution['p']:g})" if distribution else "")
    rate_cell, passes = f"{figures['tokens_per_second']:.1f}", figures.get("tokens_per_pass")
    weights = figures.get("about", {}).get("weights")  # that a peer was fastest with
    named = _label(kind, name) + (f" ({weights})" if weights else "")
    cells = (named, rate_cell, over, later, "" if passes is None else f"{passes:.2f}", same)
    return "| " + " | ".join(cells) + " |"


def _label(kind: str, name: str) -> str:
    return name if kind == "peers" else f"`{name}`"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("use: python -m hierspec_bench.readme README.md")
    try:
        write_results(Path(sys.argv[1]))
    except HierspecError as error:
        sys.exit(f"hierspec: {error}")
