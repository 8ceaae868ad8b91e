"""The operators of chat templates, each paid for before it runs.

Values are JSON's: text, numbers, booleans, None, lists, tuples and dictionaries, none of which a template can change.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import Macro
from markupsafe import Markup

from hierspec.text.template_budget import ITEM, OTHER, Budget, too_much

# Larger integers are useless to a template, slow to print, and can be chosen to collide in a dictionary.
_MOST_BITS = 60
_MOST_POWER = 64
ESCAPED = 6  # how much longer HTML escaping can make a text; Markup escapes what it is joined with
_SHOWN = 10  # how much longer Python's repr of a value inside a list can be than its text
_PADDED = 2000  # characters that one placeholder may add: width and precision have at most three digits
_PLACEHOLDER = re.compile(
    r"%(?:%|(?:\([^()%]{0,100}\))?[-+ #0]{0,5}[0-9]{0,3}(?:\.[0-9]{0,3})?[diouxXeEfFgGcrsa])", re.ASCII
)
_LAZY: type = type(
    iter([])
)  # what filters such as map return: true even when empty, and read once, as Jinja's generators
_ITERABLE: tuple[Any, ...] = (str, list, tuple, dict, range, Undefined, _LAZY)
_SCALAR = (str, int, float, type(None))
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}


class Operations:
    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.pay = budget.pay

    def text(self, value: Any) -> str:
        """`value` as printed."""
        if isinstance(value, str):
            self.pay(1, len(value))
            return value
        if isinstance(value, (list, tuple, dict)):
            self.pay(1, _SHOWN * self.budget.walk(value))
        elif isinstance(value, int):
            self.pay(1, OTHER + value.bit_length())
        elif isinstance(value, Macro):
            self.pay(1, OTHER + len(value.name))
        else:
            self.pay(1, ITEM)
        return str(value)

    def concatenate(self, *values: Any) -> str:
        """`a ~ b`"""
        texts = [str(self.text(value)) for value in values]
        self.pay(1, sum(map(len, texts)))
        return "".join(texts)

    def binary(self, symbol: str, left: Any, right: Any) -> Any:
        self.pay(1)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if symbol == "**" and abs(right) > _MOST_POWER and abs(left) > 1:
                raise too_much()
            return self.number(_ARITHMETIC[symbol](self.number(left), self.number(right)))
        if symbol == "%" and isinstance(left, str):
            self._pay_placeholders(left, right)
        elif symbol == "+":
            self.pay(1, (_weight(left) + _weight(right)) * _escaping(left, right))
        elif symbol == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    self.pay(1, _weight(sequence) * max(count, 0))
        return _ARITHMETIC[symbol](left, right)

    def unary(self, symbol: str, value: Any) -> Any:
        self.pay(1)
        return -value if symbol == "-" else +value

    def number(self, value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise too_much()
        return value

    def compare(self, left: Any, *rest: Any) -> Any:
        """`a < b <= c`, given as a, "lt", b, "lteq", c."""
        result: Any = True
        for position in range(0, len(rest), 2):
            symbol, right = rest[position], rest[position + 1]
            result = self._compare(symbol, left, right)
            if not result:
                return result
            left = right
        return result

    def _compare(self, symbol: str, left: Any, right: Any) -> Any:
        if symbol in ("in", "notin"):
            return self.contains(right, left) == (symbol == "in")
        if isinstance(left, str) and isinstance(right, str):
            self.pay(1, min(len(left), len(right)))
        elif not (isinstance(left, _SCALAR) and isinstance(right, _SCALAR)):
            self.budget.walk(left, right)
        else:
            self.pay(1)
        return _COMPARISONS[symbol](left, right)

    def contains(self, container: Any, value: Any) -> bool:
        if isinstance(container, str):
            self.pay_search(container, value)
        elif isinstance(container, dict):
            self.key(value)
        elif isinstance(container, range):
            self.pay(1 if isinstance(value, int) else len(container))
        elif isinstance(container, _ITERABLE):
            container = self.items(container)
            self.budget.walk(container, value)
        else:
            self.pay(1)
        return value in container

    def pay_search(self, text: str, part: Any, backwards: bool = False) -> None:
        """Pays for a search: Python's is linear forwards for long parts; otherwise it compares part by part."""
        length = len(part) if isinstance(part, str) else 0
        self.pay(1, len(text) * (1 + (length if backwards else min(length, 100)) // 8) + length)

    def pay_strip(self, text: str, characters: Any) -> None:
        self.pay_search(text, characters, backwards=True)  # each character of the text against each of these

    def key(self, value: Any) -> Any:
        """`value`, checked as a dictionary key. Tuples are refused: nested ones take for ever to hash."""
        if not isinstance(value, (*_SCALAR, Undefined)):
            raise TypeError("only text and numbers can be keys")
        self.pay(1, len(value) if isinstance(value, str) else 0)
        return value

    def dictionary(self, *keys_and_values: Any) -> dict[Any, Any]:
        """`{a: b}`, given as a, b."""
        pairs = zip(keys_and_values[::2], keys_and_values[1::2], strict=True)
        return {self.key(key): value for key, value in pairs}

    def slice(self, value: Any, *borders: Any) -> Any:
        """`a[b:c:d]`"""
        cut = slice(*borders)
        if isinstance(value, (str, list, tuple)):
            self.pay(1, len(range(*cut.indices(len(value)))) * (1 if isinstance(value, str) else 8))
        return value[cut]

    def iterate(self, value: Any, steps_an_item: int = 0) -> Iterable[Any]:
        """`value` for a loop. The body pays for itself; the loop's condition is paid for here, for all items."""
        if not isinstance(value, _ITERABLE):
            raise TypeError(f"{type(value).__name__!r} cannot be iterated over")
        self.pay(1 + steps_an_item * operator.length_hint(value))
        return value

    def items(self, value: Any) -> list[Any]:
        """Everything in `value`, as a list."""
        count = operator.length_hint(self.iterate(value))
        self.pay(1 + count // 8, count * (ITEM if isinstance(value, (str, range)) else 8))
        return list(value)

    def lazy(self, items: list[Any]) -> Iterable[Any]:
        return iter(items)

    def _pay_placeholders(self, template: str, values: Any) -> None:
        """For "%s: %d" % values."""
        rest, count = _PLACEHOLDER.subn("", template)
        if "%" in rest:  # an unusual placeholder, perhaps one that pads to any width
            raise too_much()
        self.pay_placeholders(template, count, values)

    def pay_placeholders(self, template: str, count: int, *values: Any) -> None:
        self.pay(1 + count, len(template))
        size = _SHOWN * self.budget.walk(*values) + _PADDED
        self.pay(1, count * size * _escaping(template))


def _weight(value: Any) -> int:
    """The size of a text in characters, or the equivalent for a list."""
    return len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, (list, tuple)) else 0


def _escaping(*values: Any) -> int:
    return ESCAPED if any(isinstance(value, Markup) for value in values) else 1


def joined_size(separator: str, texts: Sequence[Any]) -> int:
    """Characters of `separator.join(texts)`."""
    size = sum(len(text) for text in texts if isinstance(text, str)) + len(separator) * len(texts)
    return size * _escaping(separator, *texts)
