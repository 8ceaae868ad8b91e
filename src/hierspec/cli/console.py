"""What a terminal shows: progress bars, and tokens coloured by who drafted them.

rich is imported where it is used: without it commands run too, with no bars and no colours.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file
from hierspec.progress import COMPILING, Progress

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from hierspec.generation import Generation, Piece

# The target's own tokens have no colour, so that colour always means "drafted". Bright enough on dark and light.
_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on stderr for what takes longer than a second. Where stderr is not a terminal, lines about compiling only:
    it takes longest, and happens when somebody tries hierspec for the first time."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield _CompilingLines()
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    bars = Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    tasks: dict[str, Any] = {}
    # A timer, not a check in `progress`: some work reports once and is then silent for seconds.
    start = threading.Timer(1.0, bars.start)
    start.daemon = True
    if not bars.console.is_terminal:
        yield _CompilingLines()
        return
    start.start()

    def progress(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total or None)
        bars.update(tasks[what], completed=done, total=total or None)

    try:
        yield progress
    finally:
        start.cancel()
        if bars.live.is_started:  # stopping what was never shown would print an empty line
            bars.stop()


class _CompilingLines:
    """A line on stderr when compiling begins, and one when it ends."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if not what.startswith(COMPILING.split(":")[0]):
            return
        if what not in self._began:
            self._began[what] = time.monotonic()
            print(what, file=sys.stderr, flush=True)
        if done == total:
            print(f"Compiled in {time.monotonic() - self._began[what]:.0f} s", file=sys.stderr, flush=True)


class Colours:
    """A colour for every source, in the order in which they appear."""

    def __init__(self, stream: TextIO, force: bool) -> None:
        try:
            from rich.console import Console
        except ImportError as error:
            raise HierspecError("Colours need rich; install it with: pip install rich") from error
        # rich honours NO_COLOR by itself; --colour asks for colours also where the output is not a terminal.
        self.console = Console(file=stream, force_terminal=True if force else None, highlight=False, soft_wrap=True)
        self._styles: dict[str, str] = {"target": ""}

    def style(self, source: str) -> str:
        if source not in self._styles:
            self._styles[source] = _COLOURS[(len(self._styles) - 1) % len(_COLOURS)]
        return self._styles[source]

    def write(self, pieces: Iterable[Piece]) -> None:
        from rich.text import Text

        for piece in pieces:
            self.console.print(Text(piece.text, style=self.style(piece.source)), end="")

    def legend(self, generation: Generation) -> Text:
        """Each source in its colour, with the share of the tokens that it drafted."""
        from rich.text import Text

        counts, total = Counter(generation.sources), max(1, len(generation.sources))
        parts = [
            Text(f"{source} {100 * count / total:.0f}%", style=self.style(source))
            for source, count in counts.most_common()
        ]
        return Text("drafted by: ") + Text(", ").join(parts)


def note(text: RenderableType) -> None:
    """A line or table for people, on stderr."""
    try:
        from rich.console import Console
    except ImportError:
        print(text, file=sys.stderr)
        return
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output; without rich as lines."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for row in (columns, *rows):
            print("  ".join(row))
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def command_line() -> str:
    """What was typed, for records."""
    script = Path(sys.argv[0])
    program = ["python", f"experiments/{script.name}"] if script.parent.name == "experiments" else ["hierspec"]
    return shlex.join([*program, *sys.argv[1:]])


def hand_out(result: dict[str, Any], output: Path | None) -> None:
    """A document as the last line of standard output, and as a file where one was asked for."""
    if output is not None:
        with whole_file(output) as temporary:
            temporary.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, ensure_ascii=False))


def plain_write(pieces: Iterable[Piece], stream: TextIO) -> None:
    stream.write("".join(piece.text for piece in pieces))
    stream.flush()
