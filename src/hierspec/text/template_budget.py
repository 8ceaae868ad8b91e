"""What one rendering of a chat template may use: steps of work, and characters built or read.

Every operation that a template can perform pays here before it runs, and nothing is paid back. So the memory of a
rendering, and the time it takes, are bounded by two numbers, whatever the template does with its operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hierspec.core.errors import HierspecError

# A step takes a microsecond or two; a character at most four bytes and some nanoseconds.
_STEPS, _STEPS_A_MESSAGE = 1_000_000, 10_000  # real templates take hundreds, some a few for each pair of messages
_CHARACTERS, _CHARACTERS_A_CHARACTER = 64_000_000, 16  # ... and read or copy each message a few times
ITEM = 64  # what a small object in a list weighs, in characters
OTHER = 32  # characters of a number


class Budget:
    """The limits grow with what the caller gave, which no template decides."""

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
        """Pays for a look at everything inside `values`, and returns its characters.

        Lists that hold one list twice, many levels deep, are small in memory and endless to look at.
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
