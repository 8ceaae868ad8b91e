"""Random chat templates that mean harm: every operation of the sandbox on large, nested and odd values, in loops."""

from __future__ import annotations

import random

from hierspec.text.template_methods import METHODS
from hierspec.text.template_sandbox import SandboxedEnvironment

_NUMBERS = ("0", "1", "-1", "7", "1000", "99999", "10 ** 9", "-10 ** 9", "2 ** 61", "1.5", "1e308", "true")
_TEXTS = (
    *("''", "'x'", "'a b'", "('ab ' * 3000)", "('<&' * 900)", "('\\n' * 2000)", "'%s%s'", "'%999d'", "'{0}{0}'"),
    *("'{:999}'", "'%(a)s'", "('%s' * 500)", "('{}' * 500)", "'lower'", "'a.a.a'", "('a.' * 500)", "'\U0001f600'"),
    *("('\U0001f600' * 900)", "(('x' * 900) | safe)", "('9' * 900)", "messages[0].content"),
)
_LISTS = (
    *("[]", "[1, 'a', none]", "([0] * 2000)", "(['ab'] * 900)", "([[1, [2]]] * 300)", "range(2000)", "messages"),
    *("range(0, 2 ** 52, 2 ** 40)", "[('x' * 2000)] * 20", "('abc' | list)", "[[1, 2], [3, 4]]"),
    "(messages | map('length'))",
)
_DICTS = (
    "{}",
    "{'a': 1, 'b': [1, 2]}",
    "{'a': {'a': {'a': 'x' * 999}}}",
    "messages[0]",
    "dict(a=1)",
    "dict([['a', 2]])",
)
_OBJECTS = (
    "ns",
    "ns.value",
    "ns.other",
    "loop",
    "f",
    "f()",
    "cycler('a', 'b')",
    "joiner()",
    "missing",
    "none",
    "(1, 2)",
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or")
FILTERS = tuple(SandboxedEnvironment().filters)
_METHOD_NAMES = (*(name for names in METHODS.values() for name in names), "format")
_OTHER_NAMES = (
    "next",
    "cycle",
    "changed",
    "encode",
    "append",
    "pop",
    "__class__",
    "mro",
    "real",
    "index0",
    "length",
    "list",
)
_TESTS = (
    "defined",
    "string",
    "mapping",
    "odd",
    "even",
    "divisibleby(3)",
    "in('abc')",
    "eq('a')",
    "lower",
    "iterable",
    "sameas(1)",
)
_OPTIONS = ("start=[]", "attribute='a'", "attribute='content'", "indent=9", "default='x'", "width=99", "reverse=true")


def hostile_templates(seed: int, count: int) -> list[str]:
    """`count` templates that can be compiled, if not rendered."""
    random_source = random.Random(seed)
    return [_Writer(random_source).template() for _ in range(count)]


class _Writer:
    def __init__(self, source: random.Random) -> None:
        self._pick = source.choice
        self._chance = source.random

    def template(self) -> str:
        start = "{% set ns = namespace(value='ab', other=[1]) %}{% macro f(a=1) %}{{ ns.value }}{% endmacro %}"
        start += "{% macro c() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        return start + "".join(self._statement(2) for _ in range(1 + int(2 * self._chance())))

    def _statement(self, depth: int) -> str:
        inner = self._statement(depth - 1) if depth else "{{ " + self._value(1) + " }}"
        value = self._value(2)
        twice = "{% if a %}{{ g(a - 1) }}{{ g(a - 1) }}{% endif %}"
        return self._pick(
            (
                f"{{% for i in {value} %}}{inner}{{% endfor %}}",
                f"{{% for i in range(2000) %}}{inner}{{% endfor %}}",
                f"{{% for i in range(2000) if {value} %}}{{% endfor %}}{inner}",
                f"{{% for i in [1, [2, [3]]] recursive %}}{{{{ loop({value}) }}}}{inner}{{% endfor %}}",
                f"{{% for i in range(60) %}}{{% set ns.value = {self._grown()} %}}{{% endfor %}}{inner}",
                f"{{% for i in range(60) %}}{{% set ns.other = [ns.other, ns.other] %}}{{% endfor %}}{inner}",
                f"{{% set ns.value %}}{inner}{inner}{{% endset %}}{{{{ {value} }}}}",
                f"{{% set ns.value = {value} %}}{inner}",
                f"{{% if {value} %}}{inner}{{% else %}}{'abc ' * 100}{{% endif %}}",
                f"{{% macro g(a) %}}{inner}{twice}{{% endmacro %}}{{{{ g(30) }}}}",
                f"{{% filter {self._pick(('upper', 'escape', 'indent(999)', 'title'))} %}}{inner}{{% endfilter %}}",
                f"{{% call c() %}}{inner}{{% endcall %}}",
                f"{{{{ {value} }}}}",
            )
        )

    def _grown(self) -> str:
        return self._pick(
            (
                "ns.value ~ ns.value",
                "ns.value + ns.value",
                "[ns.value, ns.value]",
                "(ns.value, ns.value)",
                "ns.value * 2",
                "{'a': ns.value, 'b': ns.value}",
                "ns.value | string",
                "ns.value | tojson",
                "ns.value ~ i",
                "[ns.value] + ns.other",
            )
        )

    def _value(self, depth: int) -> str:
        leaf = self._pick(self._pick((_NUMBERS, _TEXTS, _LISTS, _DICTS, _OBJECTS)))
        if not depth or self._chance() < 0.1:
            return leaf
        value, other = self._value(depth - 1), self._value(depth - 1)
        method = self._pick(self._pick((_METHOD_NAMES, _METHOD_NAMES, _OTHER_NAMES)))
        return self._pick(
            (
                f"({value} {self._pick(_OPERATORS)} {other})",
                f"({value}) | {self._pick(FILTERS)}{self._arguments()}",
                f"({value}) | {self._pick(FILTERS)}{self._arguments()}",
                f"({value}).{method}{self._arguments() or '()'}",
                f"({value})[{other}]",
                f"({value})[{self._pick(_NUMBERS)}:{self._pick(('', *_NUMBERS))}:{self._pick(('', '-1', '2'))}]",
                f"({value} is {self._pick(_TESTS)})",
                f"[{value}, {other}]",
                f"{{{value}: {other}}}",
                f"({value} if {other} else {value})",
                f"strftime_now({value})",
                f"range({value}, {other})",
                f"-({value})",
            )
        )

    def _arguments(self) -> str:
        arguments = [
            self._pick(self._pick((_NUMBERS, _TEXTS, _LISTS, _OBJECTS, FILTERS)))
            for _ in range(int(4 * self._chance()))
        ]
        arguments = [f"'{argument}'" if argument in FILTERS else argument for argument in arguments]
        if self._chance() < 0.3:
            arguments.append(self._pick(_OPTIONS))
        return f"({', '.join(arguments)})" if arguments else ""
