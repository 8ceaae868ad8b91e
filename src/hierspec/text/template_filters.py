"""The filters of chat templates, each paid for before it runs. Others do not exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import log2
from typing import Any, cast

from jinja2 import Environment, Undefined
from jinja2 import filters as jinja_filters
from markupsafe import Markup, escape

from hierspec.text.template_budget import ITEM, OTHER, too_much
from hierspec.text.template_methods import lines_and_words, pay_replace
from hierspec.text.template_operations import ESCAPED, Operations, joined_size

Function = Callable[..., Any]
_WORDS = 40  # cost factor of Jinja's title filter, which makes a list of all words
_ESCAPED_IN_JSON = 12  # a character can become two of "\ud83d"
_WIDEST_INDENT = 16
_MOST_PLACES = 300  # of a rounded number: floats have no more
_MOST_DIGITS = 1000  # of a text that is parsed as a number


class Filters:
    """Filters as methods; a trailing underscore avoids the name of a Python built-in."""

    def __init__(self, environment: Environment, operations: Operations) -> None:
        self._environment = environment
        self._operations = operations
        self._pay, self._text = operations.pay, operations.text

    def all(self) -> dict[str, Function]:
        named = {name.strip("_"): getattr(self, name) for name in dir(self) if not name.startswith("_")}
        del named["all"]
        aliases = {"count": "length", "d": "default", "e": "escape"}
        return named | {alias: named[name] for alias, name in aliases.items()}

    # Texts.

    def capitalize(self, value: Any) -> str:
        return self._changed(value, 3).capitalize()

    def lower(self, value: Any) -> str:
        return self._changed(value, 3).lower()

    def upper(self, value: Any) -> str:
        return self._changed(value, 3).upper()

    def title(self, value: Any) -> str:
        return jinja_filters.do_title(self._changed(value, _WORDS))

    def escape(self, value: Any) -> Markup:
        return escape(value if isinstance(value, Markup) else self._changed(value, ESCAPED))

    def forceescape(self, value: Any) -> Markup:
        return escape(str(self._changed(value, ESCAPED)))

    def safe(self, value: Any) -> Markup:
        return Markup(self._text(value))

    def string(self, value: Any) -> str:
        return self._text(value)

    def trim(self, value: Any, chars: str | None = None) -> str:
        text = self._text(value)
        self._operations.pay_strip(text, chars)
        return text.strip(chars)

    def center(self, value: Any, width: int = 80) -> str:
        text = self._changed(value, 1)
        self._pay(1, max(width, 0))
        return text.center(width)

    def indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self._text(s)
        lines = lines_and_words(text)
        wide = len(width) if isinstance(width, str) else max(width, 0)
        self._pay(1 + lines, (len(text) + lines * (ITEM + wide)) * (ESCAPED if isinstance(text, Markup) else 1))
        return jinja_filters.do_indent(text, width, first, blank)

    def truncate(
        self, s: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int | None = None
    ) -> str:
        text = self._changed(s, 1)
        self._pay(1, len(end) * ESCAPED)
        return jinja_filters.do_truncate(self._environment, text, length, killwords, end, leeway)

    def replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(self._text(s)), str(self._text(old)), str(self._text(new))
        pay_replace(self._operations, text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def format(self, value: Any, *arguments: Any, **options: Any) -> Any:
        if arguments and options:
            raise TypeError("the filter format takes a list of values or named ones, not both")
        return self._operations.binary("%", self._text(value), options or arguments)

    def join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        items = self._operations.items(value)
        if attribute is not None:
            items = self._attributes(items, attribute)
        texts, separator = [str(self._text(item)) for item in items], str(self._text(d))
        self._pay(1 + len(texts), joined_size(separator, texts))
        return separator.join(texts)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's filter escapes HTML, which templates for models must not.
        step = len(indent) if isinstance(indent, str) else indent or 0
        if step > _WIDEST_INDENT or any(len(separator) > _WIDEST_INDENT for separator in separators or ()):
            raise too_much()
        self._pay(1, _ESCAPED_IN_JSON * self._operations.budget.walk(value))
        if separators or step:
            self._pay_layout(value, step + _WIDEST_INDENT)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # Numbers.

    def abs_(self, value: Any) -> Any:
        return abs(value)

    def int_(self, value: Any, default: int = 0, base: int = 10) -> Any:
        if isinstance(value, str) and len(value) > _MOST_DIGITS:
            raise too_much()
        return self._operations.number(jinja_filters.do_int(value, default, base))

    def float_(self, value: Any, default: float = 0.0) -> float:
        if isinstance(value, str) and len(value) > _MOST_DIGITS:
            raise too_much()
        return jinja_filters.do_float(value, default)

    def round_(self, value: Any, precision: int = 0, method: Any = "common") -> Any:
        if abs(precision) > _MOST_PLACES:
            raise too_much()
        return jinja_filters.do_round(self._operations.number(value), precision, method)

    # Collections.

    def length(self, value: Any) -> int:
        return len(value)

    def default(self, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
        return jinja_filters.do_default(value, default_value, boolean)

    def first(self, value: Any) -> Any:
        for item in self._operations.iterate(value):
            return item
        return self._environment.undefined("No first item, sequence was empty.")

    def last(self, value: Any) -> Any:
        return jinja_filters.do_last(self._environment, self._sized(value))

    def reverse(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._changed(value, 1)[::-1]
        return self._operations.lazy(self._operations.items(value)[::-1])

    def list_(self, value: Any) -> list[Any]:
        return self._operations.items(value)

    def items(self, value: Any) -> Any:
        if isinstance(value, Undefined):
            return self._operations.lazy([])
        if not isinstance(value, Mapping):
            raise TypeError("Can only get item pairs from a mapping.")
        self._pay(1 + len(value) // 8, ITEM * len(value))
        return self._operations.lazy(list(value.items()))

    def batch(self, value: Any, linecount: int, fill_with: Any = None) -> Any:
        items = self._operations.items(value)
        self._pay(1 + len(items), ITEM * (len(items) + (abs(linecount) if fill_with is not None else 0)))
        return self._operations.lazy(list(jinja_filters.do_batch(items, linecount, fill_with)))

    def slice(self, value: Any, slices: int, fill_with: Any = None) -> Any:
        items = self._operations.items(value)
        self._pay(1 + abs(slices), ITEM * (len(items) + abs(slices)))
        return self._operations.lazy(list(jinja_filters.sync_do_slice(items, slices, fill_with)))

    def map(self, value: Any, *arguments: Any, **options: Any) -> Any:
        items = self._operations.items(value or [])  # None counts as empty, as in Jinja
        if not arguments and "attribute" in options:
            attribute, default = options.pop("attribute"), options.pop("default", None)
            if options:
                raise TypeError(f"Unexpected keyword argument {next(iter(options))!r}")
            return self._operations.lazy(self._attributes(items, attribute, default))
        if not arguments:
            raise TypeError("map requires a filter argument")
        function = self._named(self._environment.filters, arguments[0], "filter")
        return self._operations.lazy([function(item, *arguments[1:], **options) for item in items])

    def select(self, value: Any, *arguments: Any, **options: Any) -> Any:
        return self._selected(value, False, True, arguments, options)

    def reject(self, value: Any, *arguments: Any, **options: Any) -> Any:
        return self._selected(value, False, False, arguments, options)

    def selectattr(self, value: Any, *arguments: Any, **options: Any) -> Any:
        return self._selected(value, True, True, arguments, options)

    def rejectattr(self, value: Any, *arguments: Any, **options: Any) -> Any:
        return self._selected(value, True, False, arguments, options)

    def sort(self, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None) -> Any:
        items = self._sorting(value, attribute)
        return jinja_filters.do_sort(self._environment, items, reverse, case_sensitive, attribute)

    def dictsort(
        self, value: Any, case_sensitive: bool = False, by: Any = "key", reverse: bool = False
    ) -> list[tuple[Any, Any]]:
        if not isinstance(value, dict):
            raise TypeError("only a dictionary can be sorted by its keys")
        self._sorting(list(value.items()))
        return jinja_filters.do_dictsort(value, case_sensitive, by, reverse)

    def groupby(self, value: Any, attribute: Any, default: Any = None, case_sensitive: bool = False) -> Any:
        items = self._sorting(value, attribute)
        self._pay(1, 4 * ITEM * len(items))
        return jinja_filters.sync_do_groupby(self._environment, items, attribute, default, case_sensitive)

    def unique(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        items = self._sorting(value, attribute)
        for key in items if attribute is None else self._attributes(items, attribute):
            self._operations.key(key)
        found = jinja_filters.do_unique(self._environment, items, case_sensitive, attribute)
        return self._operations.lazy(list(found))

    def min_(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        return jinja_filters.do_min(self._environment, self._sorting(value, attribute), case_sensitive, attribute)

    def max_(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
        return jinja_filters.do_max(self._environment, self._sorting(value, attribute), case_sensitive, attribute)

    def sum_(self, value: Any, attribute: Any = None, start: Any = 0) -> Any:
        items = self._operations.items(value)
        total = start
        for item in items if attribute is None else self._attributes(items, attribute):
            total = self._operations.binary("+", total, item)
        return total

    # What several filters need.

    def _changed(self, value: Any, growth: int) -> str:
        """The text of `value`, after paying for a text `growth` times as long."""
        text = self._text(value)
        self._pay(1, growth * len(text))
        return text

    def _sized(self, value: Any) -> Any:
        return value if hasattr(value, "__len__") else self._operations.items(value)

    def _attributes(self, items: list[Any], attribute: Any, default: Any = None) -> list[Any]:
        if not isinstance(attribute, (str, int)):
            raise TypeError("an attribute is named by a text or a number")
        size = len(attribute) if isinstance(attribute, str) else OTHER
        self._pay(len(items) * (1 + size // 8), len(items) * (8 + size) + ITEM * size)
        return list(map(jinja_filters.make_attrgetter(self._environment, attribute, default=default), items))

    def _sorting(self, value: Any, attribute: Any = None) -> list[Any]:
        """The items, after paying for every comparison of a sort."""
        items = self._operations.items(value)
        parts = 1 + (len(attribute) if isinstance(attribute, str) else 0)
        rounds = 1 + int(log2(len(items) + 1))
        before = self._operations.budget.steps
        characters = self._operations.budget.walk(items)
        walked = before - self._operations.budget.steps
        self._pay(walked * rounds + len(items) * parts, characters * rounds + ITEM * (len(items) + 1) * parts)
        return items

    def _selected(self, value: Any, by_attribute: bool, keep: bool, arguments: Any, options: Any) -> Any:
        items = self._operations.items(value or [])
        judged = items
        if by_attribute:
            if not arguments:
                raise TypeError("Missing parameter for attribute name")
            judged, arguments = self._attributes(items, arguments[0]), arguments[1:]
        test = self._named(self._environment.tests, arguments[0], "test") if arguments else bool
        self._pay(len(items))
        kept = [
            item
            for item, judge in zip(items, judged, strict=True)
            if bool(test(judge, *arguments[1:], **options)) == keep
        ]
        return self._operations.lazy(kept)

    def _named(self, table: Mapping[str, Any], name: Any, kind: str) -> Function:
        if not isinstance(name, str) or name not in table:
            raise TypeError(f"there is no {kind} of this name")
        return cast(Function, table[name])

    def _pay_layout(self, value: Any, step: int) -> None:
        """Pays for what indentation and separators add to JSON: a line per item, indented by its depth."""
        waiting = [(value, 1)]
        while waiting:
            item, depth = waiting.pop()
            self._pay(1, depth * step)
            if isinstance(item, Mapping):
                waiting += [(inner, depth + 1) for inner in item.values()]
            elif isinstance(item, (list, tuple)):
                waiting += [(inner, depth + 1) for inner in item]
