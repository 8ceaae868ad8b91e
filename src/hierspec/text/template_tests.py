"""The tests of chat templates, such as `is defined`; those that look into a value are paid for. Others do not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from jinja2.tests import TESTS

from hierspec.text.template_operations import Operations

Function = Callable[..., Any]
_FREE_TESTS = (  # they look at a value's type, not into it
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "sameas", "sequence", "string", "true", "undefined"),
)
_COMPARING_TESTS = {
    **dict.fromkeys(("eq", "==", "equalto"), "eq"),
    **dict.fromkeys(("ne", "!="), "ne"),
    **dict.fromkeys(("lt", "<", "lessthan"), "lt"),
    **dict.fromkeys(("le", "<="), "lteq"),
    **dict.fromkeys(("gt", ">", "greaterthan"), "gt"),
    **dict.fromkeys(("ge", ">="), "gteq"),
    "in": "in",
}


def tests(operations: Operations) -> dict[str, Function]:
    def comparing(symbol: str) -> Function:
        return lambda value, other: operations.compare(value, symbol, other)

    def divisible(value: Any, number: Any) -> bool:
        return bool(operations.binary("%", value, number) == 0)

    return {
        **{name: _test(name) for name in _FREE_TESTS},
        **{name: comparing(symbol) for name, symbol in _COMPARING_TESTS.items()},
        "divisibleby": divisible,
        "even": lambda value: divisible(value, 2),
        "odd": lambda value: operations.binary("%", value, 2) == 1,
        "lower": lambda value: operations.text(value).islower(),
        "upper": lambda value: operations.text(value).isupper(),
    }


def _test(name: str) -> Function:
    function: Any = TESTS[name]
    return cast(Function, function)
