"""What a command tells: tables and lines for people, and one JSON document for programs.

On a terminal people see tables. With --json, or where standard output is a file or a pipe, the document is all that is
written to standard output; tables then go to standard error, and with --json nowhere.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hierspec.paths import whole_file

_WIDTH = 80  # columns of the narrowest terminal that tables fit
_GAP = "  "


class Report:
    """The output of a command that has a document."""

    def __init__(self, json: bool = False) -> None:
        terminal = sys.stdout.isatty()
        self.has_document = json or not terminal
        self.for_people: TextIO | None = None if json else sys.stdout if terminal else sys.stderr

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Report:
        return cls(arguments.json)

    def line(self, text: str) -> None:
        if self.for_people is not None:
            print(text, file=self.for_people, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns but the first hold numbers or a word; the first is folded where the table would be too wide."""
        width = max(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
        for line in table_lines(title, columns, rows, width):
            self.line(line)

    def document(self, document: Mapping[str, Any], output: Path | None = None) -> None:
        """Last: to standard output where programs read it, and to a file where one was asked for."""
        if output is not None:
            write_document(document, output)
        if self.has_document:
            print_document(document)


def table_lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int = _WIDTH) -> list[str]:
    """A table as lines of at most `width` letters. Columns may hold line ends: their names take several lines then."""
    heads = [head.split("\n") for head in columns]
    height = max(len(head) for head in heads)
    head_rows = [[(head + [""] * height)[line] for head in heads] for line in range(height)]
    widths = [max(len(row[column]) for row in (*head_rows, *rows)) for column in range(len(columns))]
    widths[0] = min(widths[0], max(12, width - sum(widths[1:]) - len(_GAP) * (len(widths) - 1)))
    lines = textwrap.wrap(title, width) if title else []
    for number, row in enumerate((*head_rows, *rows)):
        if number == height:
            lines.append(_GAP.join("-" * wide for wide in widths))
        # A row of a table may be indented, below another that it is a part of.
        indent = " " * (len(row[0]) - len(row[0].lstrip(" ")))
        first = textwrap.wrap(row[0], widths[0], subsequent_indent=indent + _GAP) or [""]
        first[0] = indent + first[0].lstrip(" ")
        cells = [cell.rjust(wide) for cell, wide in zip(row[1:], widths[1:], strict=True)]
        lines.append(_GAP.join([first[0].ljust(widths[0]), *cells]).rstrip())
        lines += first[1:]
    return lines


def print_document(document: Mapping[str, Any]) -> None:
    """As one line. An encoding that lacks letters gets them as JSON's escapes, so that it is JSON still."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("_", "-")
    print(json.dumps(document, ensure_ascii=not encoding.startswith("utf")), flush=True)


def write_document(document: Mapping[str, Any], path: Path) -> None:
    with whole_file(path) as temporary:
        text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
        # Names of files may hold bytes that are no text; \udc… is how JSON writes them.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def hand_out(document: Mapping[str, Any], output: Path | None) -> None:
    """A document as the last line of standard output, and as a file where one was asked for: what scripts do."""
    Report(json=True).document(document, output)


def command_line() -> str:
    """What was typed, for records."""
    script = Path(sys.argv[0])
    program = ["python", f"experiments/{script.name}"] if script.parent.name == "experiments" else ["hierspec"]
    return shlex.join([*program, *sys.argv[1:]])
