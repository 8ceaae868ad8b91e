"""The methods of texts, lists and dictionaries that chat templates may call, each paid for before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter
from typing import Any

from markupsafe import Markup

from hierspec.text.template_budget import ITEM, too_much
from hierspec.text.template_operations import ESCAPED, Operations, joined_size

# Every character that str.split() splits at, which includes those of str.splitlines().
WHITESPACE = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_CHANGED_CASE = 3  # one character can become three
_LONGEST_FORMAT = 20

# Pays for a method of `subject` called with these arguments.
Cost = Callable[[Operations, Any, tuple[Any, ...]], None]


def _linear(operations: Operations, subject: Any, arguments: tuple[Any, ...]) -> None:
    operations.pay(1, len(subject))
    operations.budget.walk(*arguments)


def _change_case(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    operations.pay(1, _CHANGED_CASE * len(subject))


def _pad(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    width = arguments[0] if arguments and isinstance(arguments[0], int) else 0
    operations.pay(1, max(len(subject), width))


def _strip(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    operations.pay_strip(subject, arguments[0] if arguments else None)


def _search(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    operations.pay_search(subject, arguments[0] if arguments else None)


def _search_backwards(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    operations.pay_search(subject, arguments[0] if arguments else None, backwards=True)


def _split(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    separator = arguments[0] if arguments else None
    _search_backwards(operations, subject, arguments)
    at_words = not isinstance(separator, str) or not separator
    pieces = lines_and_words(subject) if at_words else 1 + subject.count(str(separator))
    operations.pay(1 + pieces // 8, pieces * ITEM)


def lines_and_words(text: str) -> int:
    """An upper bound of the pieces from splitting at white space or line ends."""
    return 1 + sum(map(text.count, WHITESPACE))


def _replace(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    old, new = (*arguments, "", "")[:2]
    if isinstance(old, str) and isinstance(new, str):
        pay_replace(operations, subject, old, new)


def pay_replace(operations: Operations, subject: str, old: str, new: str) -> None:
    operations.pay_search(subject, old)
    size = len(subject) + subject.count(old) * len(new)
    operations.pay(1, size * (ESCAPED if isinstance(subject, Markup) else 1))


def _join(operations: Operations, subject: str, arguments: tuple[Any, ...]) -> None:
    if arguments and isinstance(arguments[0], (list, tuple, str)):
        operations.pay(1 + len(arguments[0]), joined_size(subject, arguments[0]))
    elif arguments:
        raise TypeError("only lists can be joined")


def pay_format(operations: Operations, subject: str, *arguments: Any) -> None:
    """For "{}: {:d}".format(…)."""
    count = 0
    operations.pay(1 + subject.count("{"), ITEM * subject.count("{") + len(subject))
    for _, _, form, _ in Formatter().parse(subject):
        count += 1
        if form and (len(form) > _LONGEST_FORMAT or "{" in form or re.search(r"\d{4}", form)):
            raise too_much()  # it could pad to any width
    operations.pay_placeholders(subject, count, *arguments)


def _lookup(operations: Operations, subject: dict[Any, Any], arguments: tuple[Any, ...]) -> None:
    operations.key(arguments[0] if arguments else None)


def _copy(operations: Operations, subject: Any, arguments: tuple[Any, ...]) -> None:
    operations.pay(1 + len(subject) // 8, ITEM * len(subject))


def _look_through(operations: Operations, subject: Any, arguments: tuple[Any, ...]) -> None:
    operations.budget.walk(subject, *arguments)


def _named(cost: Cost, names: str) -> dict[str, Cost]:
    return dict.fromkeys(names.split(), cost)


_TEXT = {
    **_named(_linear, "startswith endswith removeprefix removesuffix"),
    **_named(_linear, "isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper"),
    **_named(_change_case, "capitalize casefold lower swapcase title upper"),
    **_named(_pad, "center ljust rjust zfill"),
    **_named(_strip, "strip lstrip rstrip"),
    **_named(_search, "count find index partition"),
    **_named(_search_backwards, "rfind rindex rpartition"),
    **_named(_split, "split rsplit splitlines"),
    **_named(_replace, "replace"),
    **_named(_join, "join"),
}
_LIST = _named(_look_through, "count index")
_DICT = {**_named(_lookup, "get"), **_named(_copy, "items keys values copy")}
_VIEWS = ("items", "keys", "values")
METHODS: dict[type, dict[str, Cost]] = {str: _TEXT, list: {**_LIST, **_named(_copy, "copy")}, tuple: _LIST, dict: _DICT}


def call_method(operations: Operations, subject: Any, name: str, cost: Cost, *arguments: Any, **options: Any) -> Any:
    cost(operations, subject, (*arguments, *options.values()))
    result = getattr(subject, name)(*arguments, **options)
    # A dictionary's views print and compare their content unpaid; lists are paid for.
    return list(result) if name in _VIEWS and isinstance(subject, dict) else result
