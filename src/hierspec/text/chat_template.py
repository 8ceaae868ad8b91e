"""Chat templates: the Jinja program inside a checkpoint that writes a conversation as one text.

A template comes with a model from anywhere, so it is untrusted code: Jinja's immutable sandbox keeps it from reaching
Python, and a budget of steps and characters keeps it from hanging the machine. Within the budget the text equals what
`transformers` renders, which the tests compare.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hierspec.core.errors import HierspecError

_MOST_STEPS = 500_000  # loop iterations in one rendering, about a second of work; real templates need hundreds
_MACRO_STEPS = 10  # what a macro call costs, in loop iterations
_MOST_ITEMS = 2_000_000  # of a list, or of nested lists that are printed
_MOST_CHARACTERS = 64_000_000  # of any one value, and of everything that is printed
_LARGEST_ARGUMENT = 100_000  # widths, indents, counts given to string methods and filters
_WIDE_FORMAT = re.compile(r"[%{][^a-zA-Z%}]*\d{6}")  # a padding of more than five digits in "%d" or "{:d}"
_GUARDED_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "string", "truncate", "wordwrap")


class ChatTemplate:
    """One compiled template. `render` may be called from several threads."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, SyntaxError, RecursionError, MemoryError, OverflowError, ValueError) as error:
            raise HierspecError(f"The model's chat template cannot be read: {_sentence(error)}") from error
        self._lock = threading.Lock()  # one budget per environment

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. `variables` are other names the template may read, such as bos_token."""
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise HierspecError('Every chat message needs a "role" and usually a "content".')
        names: dict[str, Any] = {"tools": None, "documents": None, **(variables or {})}
        names |= {"messages": [_with_reasoning(message) for message in messages]}
        names |= {"add_generation_prompt": add_generation_prompt}
        with self._lock:
            self._environment.budget.reset()
            try:
                return self._template.render(_plain(names))
            except HierspecError:
                raise
            except (RecursionError, MemoryError) as error:
                raise HierspecError("The model's chat template asks for too much work and was stopped.") from error
            except Exception as error:  # a template can fail in any way a program can
                raise HierspecError(f"The model's chat template refused these messages: {_sentence(error)}") from error


class _Budget:
    """What one rendering may use."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._steps = _MOST_STEPS
        self._characters = _MOST_CHARACTERS

    def step(self, cost: int) -> None:
        self._steps -= cost
        if self._steps < 0:
            raise _too_much()

    def printed(self, value: Any) -> Any:
        """Called with everything the template prints, also inside macros and captured blocks."""
        self._characters -= len(value) if isinstance(value, str) else _printed_size(value)
        if self._characters < 0:
            raise _too_much()
        return value


class _Environment(ImmutableSandboxedEnvironment):
    """The settings of `transformers`, with the budget."""

    # Only intercepted operators are not computed while the template is compiled.
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        self.budget = _Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
            finalize=self.budget.printed,
            cache_size=0,
        )
        for name in _GUARDED_FILTERS:
            self.filters[name] = _guarded(self.filters[name], name)
        self.filters["tojson"] = _guarded(_to_json, "tojson")
        del self.filters["urlize"], self.globals["lipsum"]  # slow on hostile input, and no template needs them
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _make_dict,
            "namespace": _Namespace,
        }
        # Called by the checks that _insert_checks adds to the program; templates cannot name them.
        self.count_step, self.concatenate = self.budget.step, _concatenate

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        _insert_checks(source)
        return super()._generate(source, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and (_is_huge(left, right) or _repeats(left, right) or _repeats(right, left)):
            raise _too_much()
        if operator == "**" and (_magnitude(right) > 1000 or _magnitude(left) > _LARGEST_ARGUMENT):
            raise _too_much()
        if operator == "+" and _length(left) + _length(right) > _MOST_CHARACTERS:
            raise _too_much()
        if operator == "%" and isinstance(left, str):
            _check_arguments("format", left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:
        # Parameter names as in Jinja: templates may pass keywords called self or context.
        if __obj is __self.count_step:  # the sandbox's checks would cost ten times the step
            return __obj(*arguments)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str):
            _check_arguments(getattr(__obj, "__name__", ""), owner, (*arguments, *options.values()))
        return super().call(__context, __obj, *arguments, **options)


def _insert_checks(template: nodes.Template) -> None:
    """Counts every loop iteration and macro call, and checks the size of every `a ~ b`."""
    kinds: tuple[type[Any], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
    for block in template.find_all(kinds):
        cost = nodes.Const(1 if isinstance(block, nodes.For) else _MACRO_STEPS)
        step = nodes.ExprStmt(_environment_call("count_step", [cost]))
        block.body.insert(0, _located(step, block))
    _replace_concatenations(template)


def _environment_call(attribute: str, arguments: list[nodes.Expr]) -> nodes.Call:
    # A template can redefine names, but not attributes of the environment.
    return nodes.Call(nodes.EnvironmentAttribute(attribute), arguments, [], None, None)


def _located(new: nodes.Node, neighbour: nodes.Node) -> Any:
    """`new` with the line and the environment of another node, which the compiler needs."""
    assert neighbour.environment is not None
    return new.set_lineno(neighbour.lineno).set_environment(neighbour.environment)


def _replace_concatenations(node: nodes.Node) -> None:
    """`a ~ b` is the one operator that the sandbox cannot intercept, so it becomes a call."""
    for field, value in node.iter_fields():
        items = value if isinstance(value, list) else [value]
        replaced = []
        for item in items:
            if isinstance(item, nodes.Node):
                _replace_concatenations(item)
            if isinstance(item, nodes.Concat):
                item = _located(_environment_call("concatenate", item.nodes), item)
            replaced.append(item)
        setattr(node, field, replaced if isinstance(value, list) else replaced[0])


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        # A scope, because `transformers` renders the body as a call: names set inside end with it.
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))]


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, through which a template could reach Python's internals."""

    def __init__(*arguments: Any, **attributes: Any) -> None:  # no self: templates may write namespace(self=...)
        checked = dict(*arguments[1:], **attributes)
        for name in checked:
            _check_name(name)
        Namespace.__init__(arguments[0], checked)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold the name {name!r}")


def _make_dict(*arguments: Any, **entries: Any) -> dict[Any, Any]:
    return dict(*arguments, **entries)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if re.search(r"%[-_0^#+]*\d{3}", pattern):  # a width: some systems pad to any length
        raise _too_much()
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's filter escapes HTML, which templates for models must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _concatenate(*values: Any) -> str:
    if sum(len(value) if isinstance(value, str) else _printed_size(value) for value in values) > _MOST_CHARACTERS:
        raise _too_much()
    return "".join(map(str, values))


def _guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The filter `function`, with its arguments checked first."""
    takes_context = hasattr(function, "jinja_pass_arg")  # Jinja then passes it a context or environment first

    def guarded(*arguments: Any, **options: Any) -> Any:
        values = arguments[1:] if takes_context else arguments
        _check_arguments(name, values[0] if values else "", (*values[1:], *options.values()))
        return function(*arguments, **options)

    if takes_context:
        guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return guarded


def _check_arguments(name: str, subject: Any, arguments: Sequence[Any]) -> None:
    """Refuses a string method or filter whose result would be too large."""
    if any(_magnitude(argument) > _LARGEST_ARGUMENT for argument in arguments):
        raise _too_much()
    for value in (subject, *arguments):
        if not isinstance(value, str):
            _printed_size(value)
    if name in ("format", "format_map") and isinstance(subject, str) and _WIDE_FORMAT.search(subject):
        raise _too_much()
    size = 0
    if name == "replace" and len(arguments) >= 2:
        size = str(subject).count(str(arguments[0])) * len(str(arguments[1]))
    if name == "join":
        items = arguments[0] if isinstance(subject, str) and arguments else subject
        separator = subject if isinstance(subject, str) else str(arguments[0] if arguments else "")
        if isinstance(items, (list, tuple, str)):
            size = sum(_length(item) + len(separator) for item in items)
    if size > _MOST_CHARACTERS:
        raise _too_much()


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _repeats(sequence: Any, count: Any) -> bool:
    """Whether sequence * count is too large; a list element takes eight times the space of a character."""
    return _length(sequence) * _magnitude(count) > (_MOST_CHARACTERS if isinstance(sequence, str) else _MOST_ITEMS)


def _printed_size(value: Any) -> int:
    """About how many characters `value` takes when printed. Lists that hold one list twice, many levels deep, are
    small in memory and endless in print."""
    characters, items, waiting = 0, 0, [value]
    while waiting:
        item = waiting.pop()
        characters += len(item) if isinstance(item, str) else 1
        items += 1
        if characters > _MOST_CHARACTERS or items > _MOST_ITEMS:
            raise _too_much()
        if isinstance(item, Mapping):
            waiting += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item
    return characters


def _magnitude(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _is_huge(*values: Any) -> bool:
    return any(isinstance(value, int) and value.bit_length() > 4096 for value in values)


def _too_much() -> HierspecError:
    return HierspecError("The model's chat template asks for too much work and was stopped.")


def _plain(value: Any) -> Any:
    """A copy in plain JSON types: a template could misuse the methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for json_type in (str, int, float):
        if isinstance(value, json_type):
            return json_type(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Reasoning has three names; templates read the first or the second."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _sentence(error: Exception) -> str:
    """The first line of an error, ended as a sentence."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if text[-1] in ".!?" else text + "."
