"""The results tables of a Markdown file, made from bench records.

python -m hierspec_bench.readme README.md     writes every table again that is between two comments such as

    <!-- results: docs/results/X.json -->                    all that ran
    <!-- results: docs/results/X.json auto lookup vllm -->   only these plans and engines, beside plain
    <!-- results: docs/results/perplexity.json -->           formats of weights, where the record is of those
    <!-- end of results -->

The first comment says everything, so that a test can see whether file and tables still agree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_object, read_text, shown_path
from hierspec.paths import whole_file
from hierspec_bench.record import PEER, PLAIN, Entry, Record
from hierspec_bench.typed_json import mapping, mappings

_MARKS = re.compile(r"(<!-- results: (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)
_TASKS = {
    "mt_bench": "multi-turn",
    "conversation": "multi-turn",
    "translation": "translation",
    "summarization": "summaries",
    "summary": "summaries",
    "qa": "questions",
    "math_reasoning": "mathematics",
    "mathematics": "mathematics",
    "rag": "retrieval",
    "retrieval": "retrieval",
}


def results(record: Record, names: Sequence[str] = ()) -> str:
    """Two tables in Markdown, over all prompts and by task, below a description of the run."""
    entries = [*record.main.named(PEER), *(entry for entry in record.main.entries if entry.kind != PEER)]
    shown = [entry for entry in entries if not names or entry.kind == PLAIN or entry.name in names]
    missing = [name for name in names if name not in {entry.name for entry in shown}]
    if missing:
        raise HierspecError(f"The record has no plan or engine {missing[0]!r}; correct the names in the comment.")
    lines = [_about(record), ""]
    lines += ["| | tokens/s | over plain | decoding alone | tokens per pass | same text as plain |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [_row(entry, record.plain.figures.decode_tokens_per_second) for entry in shown]
    if not names:
        lines += [f"| {name} | not run: {reason} | | | | |" for name, reason in record.absent.items()]
    if tasks := list(record.plain.tasks):
        lines += ["", "| over plain | " + " | ".join(_TASKS.get(task, task) for task in tasks) + " |"]
        lines += ["|---" * (1 + len(tasks)) + "|"]
        for entry in shown:
            if entry.kind != PLAIN:
                cells = [f"{entry.in_task(task).figures.speedup or 0.0:.2f}x" for task in tasks]
                lines.append(f"| {_label(entry)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def formats(document: Mapping[str, Any]) -> str:
    """A table in Markdown of a `hierspec bench perplexity` record."""
    reference = document.get("reference")
    lines = [
        f"{document.get('model')} on {document.get('text')}: {document.get('tokens'):,} tokens, in windows of "
        f"{document.get('window'):,}.",
        f"Made by `{document.get('command')}`.",
        "",
        f"| weights | MB read a token | perplexity | over {reference} | best token is {reference}'s |",
        "|---|---|---|---|---|",
    ]
    for row in mappings(document.get("formats")):
        perplexity = f"{row['perplexity']:.2f} ({_range(row['perplexity_interval'], 2)})"
        ratio, same = f"{row['ratio']:.4f}", f"{100 * row['same_best']:.1f}%"
        if row["weights"] != reference:
            ratio += f" ({_range(row['ratio_interval'], 4)})"
            same += f" ({_range([100 * edge for edge in row['same_best_interval']], 1)})"
        lines.append(f"| `{row['weights']}` | {row['weight_megabytes']:.0f} | {perplexity} | {ratio} | {same} |")
    return "\n".join(lines) + "\n"


def _range(edges: Sequence[float], digits: int) -> str:
    return f"{edges[0]:.{digits}f} to {edges[1]:.{digits}f}"


def with_results(text: str, folder: Path) -> str:
    """The Markdown text with every table regenerated from the record that its comment names."""
    if not _MARKS.search(text):
        raise HierspecError(
            "There is no place for results: add the lines <!-- results: X.json --> and <!-- end of results -->."
        )

    def table(match: re.Match[str]) -> str:
        opening, name, names, _, closing = match.groups()
        path = folder / name
        document = read_object(path, "correct the name in the comment")
        if "formats" in document:
            try:
                return opening + formats(document) + closing
            except (KeyError, IndexError, TypeError, ValueError) as error:
                wrong = f"{shown_path(path)} cannot be used; give what hierspec bench perplexity --output FILE wrote."
                raise HierspecError(wrong) from error
        return opening + results(Record.read(path), names.split()) + closing

    return _MARKS.sub(table, text)


def write_results(target: Path) -> None:
    text = read_text(
        target,
        lambda reason: HierspecError(
            f"{shown_path(target)} cannot be read ({reason}); give a Markdown file such as README.md."
        ),
    )
    text = with_results(text, target.parent)
    with whole_file(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _about(record: Record) -> str:
    document, plain = record.document, record.plain
    weights, temperature = document.get("weights", "auto"), record.main.temperature
    dtype = document.get("dtype") if weights == "auto" else f"{weights} weights"
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    part = "" if record.complete else " A part of the run: it was stopped."
    processor = mapping(document.get("machine")).get("processor")
    return (
        f"{document.get('model')}, {dtype}, {sampling}, {plain.figures.prompts} prompts ({record.prompt_set[0]}) x "
        f"{document.get('max_tokens')} tokens, {document.get('threads')} threads of {processor}, "
        f"prefill included.{part}\n"
        f"Made by `{document.get('command')}`."
    )


def _row(entry: Entry, plain_rate: float | None) -> str:
    figures, plain = entry.figures, entry.kind == PLAIN
    over = "1" if plain else f"{figures.speedup or 0.0:.2f}x"
    if not plain and figures.speedup_interval is not None:
        over += f" ({figures.speedup_interval[0]:.2f} to {figures.speedup_interval[1]:.2f})"
    rate = figures.decode_tokens_per_second
    decoding = "" if rate is None else f"{rate:.1f}"
    if rate is not None and plain_rate and not plain:
        decoding += f", {rate / plain_rate:.2f}x"
    weights = entry.about.get("weights")  # that the engine was fastest with
    cells = (
        _label(entry) + (f" ({weights})" if weights else ""),
        f"{figures.tokens_per_second or 0.0:.1f}",
        over,
        decoding,
        "" if figures.tokens_per_pass is None else f"{figures.tokens_per_pass:.2f}",
        _same(entry),
    )
    return "| " + " | ".join(cells) + " |"


def _same(entry: Entry) -> str:
    if entry.kind == PLAIN:
        return ""
    if not entry.promises_text:
        p = entry.distribution.p
        return "same distribution" + ("" if p is None else f" (p {p:g})")
    ties = f", {entry.figures.ties} ties" if entry.figures.ties else ""
    return f"{entry.figures.identical} of {entry.figures.prompts}{ties}"


def _label(entry: Entry) -> str:
    return entry.name if entry.kind == PEER else f"`{entry.name}`"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("use: python -m hierspec_bench.readme README.md")
    try:
        write_results(Path(sys.argv[1]))
    except HierspecError as error:
        sys.exit(f"hierspec: {error}")
