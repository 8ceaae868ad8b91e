"""The budget of one rendering of a chat template: steps of work, and characters built or read.

Every operation of a template pays here before it runs, and nothing is refunded. So two numbers bound the memory and
time of a rendering, whatever the template does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierspec.core.errors import HierspecError

# A step takes a microsecond or two; a character at most four bytes and some nanoseconds.
_STEPS, _STEPS_A_MESSAGE = 1_000_000, 10_000  # real templates take hundreds, some a few per pair of messages
_CHARACTERS, _CHARACTERS_A_CHARACTER = 64_000_000, 16  # real templates read or copy each message a few times
ITEM = 64  # cost of a small object in a list, in characters
OTHER = 32  # cost of a number, in characters


class Budget:
    """Limits that grow with the caller's input, which no template controls."""

    def __init__(self) -> None:
        self.reset(0, 0)

    def reset(self, messages: int, characters: int) -> None:
        self.steps = _STEPS + _STEPS_A_MESSAGE * messages
        self.characters = _CHARACTERS + _CHARACTERS_A_CHARACTER * characters

    def pay(self, steps: int, characters: int = 0) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0 or self.characters < 0:
            raise too_much()

    def walk(self, *values: Any) -> int:
        """Pays for a traversal of everything inside `values`, and returns its number of characters.

        Lists that contain one list twice, many levels deep, are small in memory but endless to traverse.
        """
        total, waiting = 0, list(values)
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                size = len(item)
            elif isinstance(item, (list, tuple)):
                size = len(item)
                waiting += item
            elif isinstance(item, Mapping):
                size = 2 * len(item)
                waiting += [*item, *item.values()]
            elif isinstance(item, int):
                size = OTHER + item.bit_length()
            else:
                size = OTHER
            total += size
            self.pay(1, size)
        return total


def too_much() -> HierspecError:
    return HierspecError("The model's chat template asks for too much work and was stopped.")
