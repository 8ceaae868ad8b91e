"""A progress bar in plain text on stderr: for `load(progress=True)`, in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hierspec.progress import Progress, silent

_WIDTH = 30


@contextmanager
def progress_bar(wanted: Progress | bool | None) -> Iterator[Progress]:
    """The caller's own progress, a bar (True), or none."""
    if wanted is not True:
        yield wanted or silent
        return
    bar = _Bar()
    try:
        yield bar.show
    finally:
        bar.close()


class _Bar:
    """One line that is overwritten where that is possible; elsewhere one line per step."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._overwrites = self._stream.isatty() or "ipykernel" in sys.modules
        self._shown, self._what = "", ""

    def show(self, what: str, done: int, total: int) -> None:
        if not self._overwrites:
            if what != self._what:
                print(f"{what} …", file=self._stream, flush=True)
            self._what = what
            return
        line = f"{what} …"
        if total:
            filled = min(_WIDTH, _WIDTH * done // total)
            line = f"{what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {min(100, 100 * done // total):3d}%"
        if line != self._shown:  # some work reports thousands of times
            self._write(line)

    def close(self) -> None:
        if self._shown:
            self._write("")

    def _write(self, line: str) -> None:
        print(f"\r{line}{' ' * (len(self._shown) - len(line))}\r{line}", end="", file=self._stream, flush=True)
        self._shown = line
