"""Text as it is generated: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from hierspec.core.errors import HierspecError
from hierspec.text.tokenizer import Tokenizer


class Detokeniser:
    """Turns ids into text piece by piece; the pieces join to exactly `tokenizer.decode` of all ids.

    Works on bytes: a token is bytes, text is their UTF-8 decoding, and only an unfinished character (at most three
    bytes) is ever held back. So a token costs the same after ten tokens and after ten thousand.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._undecoded = b""  # the first bytes of a character
        self._spaces_to_drop = tokenizer.decoding.leading_spaces
        self._started = False

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return self._decode(b"".join(map(self._bytes, ids)), last=False)

    def finish(self) -> str:
        """The rest: a replacement character if the last character was never completed."""
        return self._decode(b"", last=True)

    def _decode(self, data: bytes, last: bool) -> str:
        data = self._undecoded + data
        text, decoded = codecs.utf_8_decode(data, "replace", last)
        self._undecoded = data[decoded:]
        return text

    def _bytes(self, token_id: int) -> bytes:
        if self._started:
            data = self._tokenizer.piece(token_id, self._special)
        elif self._tokenizer.is_shown(token_id, self._special):
            self._started = True
            data = self._tokenizer.opening_piece(token_id)
        else:
            return b""
        return self._without_leading_spaces(data) if self._spaces_to_drop else data

    def _without_leading_spaces(self, data: bytes) -> bytes:
        while self._spaces_to_drop and data:
            if data[:1] != b" ":
                self._spaces_to_drop = 0  # the text has begun: later spaces belong to it
                break
            data = data[1:]
            self._spaces_to_drop -= 1
        return data


class StopStrings:
    """Lets text through up to the first stop string, however its characters arrive.

    The stop string that is completed first ends the text, as if the text came character by character; of several
    completed by the same character the longest counts. So the result does not depend on how the text is split.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise HierspecError("A stop string must not be empty.")
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def add(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string ended it; the stop string itself is never shown."""
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._stopped, self._held = True, ""
            return text[: min(matches)[1]], True
        safe = len(text) - self._unsafe(text)
        self._held = text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """Text held back because it could have been the start of a stop string."""
        held, self._held = self._held, ""
        return held

    def _unsafe(self, text: str) -> int:
        """Length of the longest ending of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0
