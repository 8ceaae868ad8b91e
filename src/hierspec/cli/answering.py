"""Shows an answer while it is written: plain or coloured, with progress until its first words are there."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

from hierspec.cli.console import Colours, note, plain_write, progress_bars

if TYPE_CHECKING:
    from hierspec.generation import Generation, TextStep


class Answering:
    """Where answers are shown. `silent`: only progress is, because a document will follow."""

    def __init__(self, file: TextIO, colour: bool, silent: bool, most: int) -> None:
        self._file, self._silent, self._most = file, silent, most
        self._colours = Colours(file, force=True) if colour and not silent else None

    def show(self, steps: Iterable[TextStep]) -> None:
        with ExitStack() as until_shown:
            progress = until_shown.enter_context(progress_bars())
            progress("Prefill", 0, 1)
            written = 0
            for step in steps:
                if self._silent:
                    progress("Prefill", 1, 1)
                    written += len(step.tokens)
                    progress("Answering", written, self._most)
                    continue
                until_shown.close()
                if self._colours is not None:
                    self._colours.write(step.pieces)
                else:
                    plain_write(step.pieces, self._file)
        if not self._silent:
            print(file=self._file, flush=True)

    def show_legend(self, generation: Generation) -> None:
        if self._colours is not None:
            note(self._colours.legend(generation))
