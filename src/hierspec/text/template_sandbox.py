"""Jinja for untrusted templates: the settings of `transformers`, with every operation paid for.

Jinja compiles a template to Python. Its immutable sandbox keeps the program away from Python's internals. Here,
templates are further restricted to a list of operators, filters, tests, methods and functions, which pay before they
run. Operations that the sandbox cannot intercept are rewritten as calls before compilation, and bodies of loops and
macros pay for their own length, so that nothing runs unpaid.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from types import MethodType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
    safe_range,
)
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from hierspec.text.template_budget import OTHER, Budget, too_much
from hierspec.text.template_filters import Filters
from hierspec.text.template_methods import METHODS, call_method, pay_format
from hierspec.text.template_operations import Operations
from hierspec.text.template_tests import tests

_MACRO_STEPS = 10
_NODES_A_STEP = 8  # nodes that run in the time of one step, not counting operations that pay for themselves
_MOST_NODES = 30_000  # of a template; the longest real ones have a few thousand
_METHODS_OF_OBJECTS = {Cycler: ("next", "reset"), LoopContext: ("cycle", "changed")}
_LARGEST_RANGE_BORDER = 1 << 53
_DATE = 64  # characters of one "%c"


class Payable:
    """A function that a template may call and that pays for itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function  # a name that templates cannot read

    def __repr__(self) -> str:
        return "<function>"


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    intercepted_unops = frozenset({"+", "-"})

    def __init__(self) -> None:
        self.budget = Budget()
        self.operations = Operations(self.budget)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
            finalize=_printed,
            optimized=False,  # no constant folding: nobody would pay for it
            cache_size=0,
        )
        self.filters: dict[str, Any] = Filters(self, self.operations).all()
        self.tests: dict[str, Any] = tests(self.operations)
        functions: dict[str, Callable[..., Any]] = {
            "range": self._range,
            "dict": self._dictionary,
            "namespace": self._namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": self._raise_exception,
            "strftime_now": self._strftime_now,
        }
        self.globals = {name: Payable(function) for name, function in functions.items()}
        # Used by code that _rewrite inserts; templates cannot name attributes of the environment.
        self.pay_steps = Payable(self.budget.pay)
        self.concatenate = Payable(self.operations.concatenate)
        self.compare = Payable(self.operations.compare)
        self.dictionary = Payable(self.operations.dictionary)
        self.slice = Payable(self.operations.slice)
        self.iterate = Payable(self.operations.iterate)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        if _rewrite(source) > _MOST_NODES:
            raise TemplateError("it is too long")
        return super()._generate(source, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self.operations.binary(operator, left, right)

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        return self.operations.unary(operator, arg)

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:
        # Parameter names as in Jinja: templates may pass keywords called self or context.
        if isinstance(__obj, Payable):
            options.pop("_loop_vars", None), options.pop("_block_vars", None)
            return __obj._function(*arguments, **options)
        __self.budget.pay(1 + len(arguments) + len(options))
        if isinstance(__obj, Macro):
            __self.budget.pay(_MACRO_STEPS)
        elif isinstance(__obj, LoopContext):  # a recursive loop
            arguments = tuple(map(__self.operations.iterate, arguments))
        elif isinstance(__obj, MethodType) and __obj.__name__ in _METHODS_OF_OBJECTS.get(type(__obj.__self__), ()):
            __self.budget.walk(*arguments, *options.values())
        elif not isinstance(__obj, (Joiner, Undefined)):  # an Undefined raises its own error
            raise SecurityError(f"{type(__obj).__name__!r} cannot be called")
        return super().call(__context, __obj, *arguments, **options)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.pay(1)
        if type(obj) is _Namespace:  # Jinja's own access takes five times as long
            return obj.attributes.get(attribute, self.undefined(obj=obj, name=attribute))
        if (kind := _kind(obj)) is None:
            return super().getattr(obj, attribute)
        found = self._method(obj, kind, attribute)
        return self._item(obj, attribute) if found is None else found

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.pay(1)
        if type(obj) is _Namespace:
            return self.getattr(obj, self.operations.key(argument))
        if (kind := _kind(obj)) is None:
            return super().getitem(obj, argument) if isinstance(argument, str) else self._absent(obj, argument)
        found = self._item(obj, argument)
        method = self._method(obj, kind, argument) if isinstance(found, Undefined) else None
        return found if method is None else method

    def _item(self, obj: Any, key: Any) -> Any:
        try:
            return obj[self.operations.key(key)]
        except (TypeError, LookupError):
            return self._absent(obj, key)

    def _absent(self, obj: Any, key: Any) -> Undefined:
        # An Undefined names the missing key in its message, and a list may be endless when printed.
        if isinstance(key, (str, int)):
            name: Any = key  # Jinja accepts numbers, too
            return self.undefined(obj=obj, name=name)
        return self.undefined("a value is looked up by something that is neither text nor a number")

    def _method(self, obj: Any, kind: type, name: Any) -> Any:
        """A Python attribute: None if there is none, undefined if templates may not use it."""
        if not isinstance(name, str):
            return None
        if kind is str and name == "format":
            return Payable(lambda *arguments, **options: self._format(obj, arguments, options))
        if cost := METHODS[kind].get(name):
            return Payable(
                lambda *arguments, **options: call_method(self.operations, obj, name, cost, *arguments, **options)
            )
        if name in getattr(obj, "_fields", ()):  # a group of the filter groupby
            return getattr(obj, name)
        return self.unsafe_undefined(obj, name) if hasattr(obj, name) else None

    def _format(self, text: str, arguments: Any, options: Any) -> str:
        pay_format(self.operations, text, *arguments, *options.values())
        if isinstance(text, Markup):
            escaping = SandboxedEscapeFormatter(self, escape=text.escape)
            return type(text)(escaping.vformat(text, arguments, options))
        return SandboxedFormatter(self).vformat(text, arguments, options)

    def _range(self, *borders: Any) -> range:
        self.budget.pay(1)
        if any(abs(border) > _LARGEST_RANGE_BORDER for border in borders):
            raise too_much()
        return safe_range(*borders)

    def _dictionary(self, *arguments: Any, **entries: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for argument in arguments:
            pairs = argument.items() if isinstance(argument, dict) else self.operations.items(argument)
            for key, value in pairs:
                made[self.operations.key(key)] = value
        self.budget.pay(1 + len(entries))
        return made | entries

    def _namespace(self, *arguments: Any, **attributes: Any) -> Namespace:
        return _Namespace(self._dictionary(*arguments, **attributes))

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(self.operations.text(message))

    def _strftime_now(self, pattern: Any) -> str:
        if re.search(r"%[-_0^#+]*[0-9]", pattern):  # a width, which some systems pad to any length
            raise too_much()
        self.budget.pay(1, len(pattern) + _DATE * pattern.count("%"))
        return datetime.now().strftime(pattern)


@pass_context  # pass_context also keeps Jinja from printing constants at compile time
def _printed(context: Context, value: Any) -> str:
    """Called with everything a template prints, also inside macros and captured blocks, where it is joined."""
    environment = context.environment
    assert isinstance(environment, SandboxedEnvironment)
    text = environment.operations.text(value)
    environment.budget.pay(1, len(text))
    return text


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, through which a template could reach Python's internals."""

    __getattribute__ = object.__getattribute__  # Jinja's version looks names up in its own dictionary

    def __init__(self, attributes: dict[Any, Any]) -> None:
        for name in attributes:
            _check_name(name)
        self.attributes = attributes

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        self.attributes[name] = value

    def __repr__(self) -> str:  # Jinja's shows what it holds, which may be itself
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold the name {name[:OTHER]!r}")


def _kind(value: Any) -> type | None:
    """The type in METHODS that has the methods of a value."""
    own = type(value)
    if own in METHODS:
        return own
    return next((kind for kind in METHODS if issubclass(own, kind)), None)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        # A scope, because `transformers` renders the body as a call: names set inside end with it.
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))]


def _rewrite(node: nodes.Node) -> int:
    """Makes every operation below `node` pay, and returns the number of nodes."""
    count = 1
    for field, value in node.iter_fields():
        items = value if isinstance(value, list) else [value]
        below = 0
        for position, item in enumerate(items):
            if isinstance(item, nodes.Node):
                below += _rewrite(item)
                items[position] = _paying(item)
        if not isinstance(value, list):
            setattr(node, field, items[0])
        count += below
        if field == "test" and isinstance(node, nodes.For) and node.test is not None:
            node.iter = _environment_call("iterate", [node.iter, nodes.Const(1 + below // _NODES_A_STEP)], node)
    if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
        if isinstance(node, nodes.For) and node.test is None:
            node.iter = _environment_call("iterate", [node.iter], node)
        steps = _environment_call("pay_steps", [nodes.Const(1 + count // _NODES_A_STEP)], node)
        node.body.insert(0, _located(nodes.ExprStmt(steps), node))
    return count


def _paying(node: nodes.Node) -> nodes.Node:
    """The node, or a call that replaces it."""
    if isinstance(node, nodes.TemplateData):  # as a constant it is printed like any value
        return _located(nodes.Const(node.data), node)
    if isinstance(node, nodes.Concat):
        return _environment_call("concatenate", node.nodes, node)
    if isinstance(node, nodes.Compare):
        operands = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _environment_call("compare", [node.expr, *operands], node)
    if isinstance(node, nodes.Dict):
        return _environment_call("dictionary", [part for pair in node.items for part in (pair.key, pair.value)], node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        borders = [border or nodes.Const(None) for border in (node.arg.start, node.arg.stop, node.arg.step)]
        return _environment_call("slice", [node.node, *borders], node)
    if isinstance(node, nodes.ScopedEvalContextModifier):
        raise TemplateError("autoescape is not supported")
    return node


def _environment_call(attribute: str, arguments: list[Any], place: nodes.Node) -> Any:
    # A template can redefine names, but not attributes of the environment.
    call = nodes.Call(nodes.EnvironmentAttribute(attribute), arguments, [], None, None)
    return _located(call, place)


def _located(new: nodes.Node, neighbour: nodes.Node) -> Any:
    """`new` with the line and the environment of another node, which the compiler needs."""
    assert neighbour.environment is not None
    return new.set_lineno(neighbour.lineno).set_environment(neighbour.environment)
