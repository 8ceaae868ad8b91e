"""What a terminal shows: progress bars, and tokens coloured by who drafted them.

rich is imported where it is used: without it commands run too, with no bars and no colours.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from hierspec.core.errors import HierspecError
from hierspec.progress import COMPILING, Progress

if TYPE_CHECKING:
    from rich.text import Text

    from hierspec.generation import Generation, Piece

# The target's own tokens have no colour, so that colour always means "drafted". Bright enough on dark and light.
_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
_BARS_AFTER_SECONDS, _LINES_AFTER_SECONDS = 1.0, 2.0


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """What takes longer than a second or two is shown on stderr: as bars on a terminal, elsewhere as one line each."""
    try:
        from rich.console import Console
    except ImportError:
        terminal = False
    else:
        terminal = Console(stderr=True).is_terminal
    with _bars() if terminal else _lines() as progress:
        yield progress


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    bars = Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    tasks: dict[str, Any] = {}
    # A timer, not a check in `progress`: some work reports once and is then silent for seconds.
    start = threading.Timer(_BARS_AFTER_SECONDS, bars.start)
    start.daemon = True
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


@contextmanager
def _lines() -> Iterator[Progress]:
    """For a log: work that is not done after two seconds is named once. Compiling, which takes longest and happens when
    somebody tries hierspec for the first time, is named at once, and when it is done."""
    timers: dict[str, threading.Timer] = {}
    compiling: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith(COMPILING.split(":")[0]):
            if what not in compiling:
                compiling[what] = time.monotonic()
                note(f"{what} …")
            if done == total:
                note(f"Compiled in {time.monotonic() - compiling[what]:.0f} s")
        elif total and done >= total:
            if what in timers:
                timers[what].cancel()
        elif what not in timers:
            timers[what] = threading.Timer(_LINES_AFTER_SECONDS, lambda: note(f"{what} …"))
            timers[what].daemon = True
            timers[what].start()

    try:
        yield progress
    finally:
        for timer in timers.values():
            timer.cancel()


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


def note(text: str | Text) -> None:
    """A line for people, on stderr."""
    try:
        from rich.console import Console
    except ImportError:
        print(text, file=sys.stderr)
        return
    # Without markup: what a text holds in brackets is text.
    Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True).print(text)


def plain_write(pieces: Iterable[Piece], stream: TextIO) -> None:
    stream.write("".join(piece.text for piece in pieces))
    stream.flush()


def ending(generation: Generation, max_tokens: int) -> str:
    """Why an answer is not whole; nothing where the model ended it."""
    if generation.ended != "length":
        return ""
    written = len(generation.tokens)
    if written < max_tokens:
        return f"The answer was cut after {written} tokens: the model's context is full; shorten what came before."
    return f"The answer was cut after {written} tokens, the limit; --max-tokens raises it."
