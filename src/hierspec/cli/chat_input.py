"""What a user says in a chat: lines from a terminal or a pipe, put together to messages."""

from __future__ import annotations

from contextlib import suppress

from hierspec.cli.parser import is_text
from hierspec.core.errors import HierspecError

_QUOTES = '"""'


class ChatInput:
    """Messages of one line, or of several: where lines end with a backslash, or stand between lines of three quotes.

    `plain`: every line is a message as it is.
    """

    def __init__(self, interactive: bool, plain: bool = False) -> None:
        self.interactive, self.plain = interactive, plain
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 (lines can then be edited and called back)

    def next(self) -> str:
        """EOFError at the end of the input."""
        line = self._line("> ")
        if self.plain:
            return line
        if line.strip().startswith(_QUOTES):
            return self._quoted(line.strip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("… "))
        return "\n".join(lines)

    def _quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._line("… ")
        lines.append(line.rstrip().removesuffix(_QUOTES))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        try:
            line = input(prompt if self.interactive else "")
        except UnicodeDecodeError:
            line = "\udcff"
        if not is_text(line):
            raise HierspecError("The message is not UTF-8 text; send text.")
        return line
