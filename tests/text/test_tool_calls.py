"""Tool calls and reasoning in a model's text: every format, whole and in any pieces; what is no call stays text."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hierspec.text.json_reader import NotJson, read_container
from hierspec.text.tool_calls import Answer, AnswerParser, Text, ToolCall, parse
from hierspec.text.tool_formats import AUTO, FORMATS, MARKER_TOKENS, THOUGHTS, tool_format

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"weather": WEATHER, "now": {}}
PARIS = ToolCall("weather", '{"city": "Paris"}')
NOW = ToolCall("now", "{}")
JSON = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARAMETERS = JSON.replace("arguments", "parameters")
FUNCTION = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
CALLS = [
    ("hermes", f"<tool_call>\n{JSON}\n</tool_call>", [PARIS]),
    ("hermes", f'<tool_call>{JSON}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>', [PARIS, NOW]),
    ("hermes", f'<tool_call>[\n{JSON},\n{{"name": "now", "arguments": {{}}}}]</tool_call>', [PARIS, NOW]),  # SmolLM2
    ("hermes", f"<tool_call>\n{JSON}", [PARIS]),  # small models forget the end
    (
        "hermes",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        [PARIS],
    ),
    ("hermes", "<tool_call><function=now></function></tool_call>", [NOW]),
    (
        "seed",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter></function>\n</seed:tool_call>",
        [PARIS],
    ),
    ("mistral", f"[TOOL_CALLS][{JSON}]", [PARIS]),
    ("mistral", f'[TOOL_CALLS] [{JSON}, {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]', [PARIS, NOW]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', [PARIS, NOW]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', [PARIS]),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}', [PARIS]),
    ("llama", PARAMETERS, [PARIS]),
    ("llama", f"<|python_tag|>{PARAMETERS}", [PARIS]),
    ("llama", f'<|python_tag|>{PARAMETERS}; {{"name": "now", "parameters": {{}}}}', [PARIS, NOW]),
    ("llama", f'{{"type": "function", "name": "now", "parameters": null}}\n{PARAMETERS}', [NOW, PARIS]),
    ("phi", f"<|tool_call|>[{JSON}]<|/tool_call|>", [PARIS]),
    ("phi", f"functools[{JSON}]", [PARIS]),
    ("gemma", "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", [PARIS]),
    ("gemma", '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>', [PARIS]),
    ("gemma", "<start_function_call>call:now{}<end_function_call>", [NOW]),
    ("auto", f"\n{JSON}", [PARIS]),
    ("auto", f"[{JSON}]", [PARIS]),
    ("auto", f'[{{"type": "function", "function": {JSON}}}]', [PARIS]),
    ("auto", json.dumps([{"name": "weather", "arguments": '{"city": "Paris"}'}]), [PARIS]),
]
NO_CALLS = [
    "Use the <tool_call> tag for that.",
    "<tool_call>",
    "  <tool_call>\n{'name': 'weather'}</tool_call>",
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": "Par',
    "<tool_call><function=weather><parameter=city>Paris",
    "<tool_call><function=weather>Paris</function></tool_call>",
    "[TOOL_CALLS] are written in brackets",
    "[TOOL_CALLS]weather[AR{}",
    '{"answer": 42}',
    '{"name": "unknown", "arguments": {}}',
    '{"name": "weather"}',
    "  {",
    "[]",
    "[1, 2, 3]",
    "functools is a module",
    "import functools",
    "<start_function_call>call:weather{city:Paris}<end_function_call>",
    "a <",
    " \n ",
    '{"name": "weather", "arguments": ' + '{"a":' * 100,
    '{"name": "weather", "arguments": {"a": ' + "1" * 5000 + "}}",
]


def read(pieces, form=AUTO, tools=TOOLS, begin=""):
    """The parts, with texts that follow each other joined: how they were cut is no part of the promise."""
    parser = AnswerParser(form, tools, begin)
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.finish()
    joined = []
    for part in parts:
        if joined and not isinstance(part, ToolCall) and type(joined[-1]) is type(part):
            joined[-1] = type(part)(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("name", "text", "calls"), CALLS)
def test_calls_of_every_format_are_read(name, text, calls):
    for form in (FORMATS[name], AUTO):
        assert parse(text, form, TOOLS) == Answer("", "", tuple(calls))
        assert read(text, form) == calls
    assert parse(f"I look.{text}", FORMATS[name], TOOLS).text.startswith("I look.")
    assert parse(text, FORMATS[name]) == Answer(text, "", ())  # nobody gave it tools


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_stays_the_text_that_it_was(text):
    assert parse(text, AUTO, TOOLS) == Answer(text, "", ())
    assert read(text) == [Text(text)]


def test_text_around_calls_is_kept():
    text = f"First.\n<tool_call>{JSON}</tool_call>\n\nThen.\n<tool_call>{JSON}\n</tool_call>\n"
    assert read([text]) == [Text("First.\n"), PARIS, Text("Then.\n"), PARIS]


def test_text_that_is_no_call_is_shown_at_the_first_character_that_tells():
    parser = AnswerParser(AUTO, TOOLS)
    assert parser.add("A <tool_call>") == [Text("A ")]
    assert Answer.of(parser.add(" t")).text == "<tool_call> t"
    parser = AnswerParser(AUTO, TOOLS)
    assert parser.add('{"answer') == []
    assert Answer.of(parser.add('": ')).text == '{"answer": '


def test_a_call_is_given_at_its_last_character():
    parser = AnswerParser(FORMATS["hermes"], TOOLS)
    assert parser.add(f"<tool_call>\n{JSON[:-1]}") == []
    assert parser.add("}") == [PARIS]
    assert parser.add("\n</tool_call>") + parser.finish() == []


def test_values_of_functions_written_as_tags_have_the_types_of_the_schema():
    text = "<tool_call><function=weather><parameter=city>75001</parameter><parameter=days>3</parameter></function>"
    assert json.loads(parse(text, AUTO, TOOLS).calls[0].arguments) == {"city": "75001", "days": 3}


def test_values_of_gemma_calls_may_be_nested():
    text = "<start_function_call>call:f{a:{b:[1,<escape>x: {y}<escape>],c:true}}<end_function_call>"
    assert json.loads(parse(text, AUTO, TOOLS).calls[0].arguments) == {"a": {"b": [1, "x: {y}"], "c": True}}


@pytest.mark.parametrize("opening", THOUGHTS)
def test_reasoning_is_read_apart(opening):
    form = tool_format(f"… {opening} …")
    closing = THOUGHTS[opening]
    assert parse(f"{opening}\nLet me see.\n{closing}\n\nYes.", form) == Answer("Yes.", "Let me see.", ())
    assert parse(f"Let me see.\n{closing}\n\nYes.", form, begin=opening) == Answer("Yes.", "Let me see.", ())
    assert parse(f"{opening}Let me", form) == Answer("", "Let me", ())
    assert parse(f"Of {opening}", form) == Answer(f"Of {opening}", "", ())
    assert parse(f"{opening}\n\n{closing}\n\n{JSON}", form, TOOLS) == Answer("", "", (PARIS,))


def test_an_answer_that_was_begun_with_a_marker_goes_on_as_a_call():
    for form in FORMATS.values():
        assert parse(JSON, form, TOOLS, begin=form.forced).calls == (PARIS,)
        assert parse(f"[{JSON}, {JSON}]", form, TOOLS, begin=form.forced).calls == (PARIS, PARIS)


def test_the_format_is_that_of_the_chat_template():
    templates = {
        "hermes": '{{ \'<tool_call>\\n{"name": "\' }}',
        "mistral": '{{ "[TOOL_CALLS] [" }}',
        "llama": '{{- "<|python_tag|>" + tool_call.name + ".call(" }}{{- \'"parameters": \' }}',
        "phi": "<|tool_call|>",
        "gemma": "<start_function_call>call:",
        "seed": "<seed:tool_call><seed:think>",
        "auto": "{% for message in messages %}",
    }
    assert {name: tool_format(template).name for name, template in templates.items()} == {n: n for n in templates}
    assert tool_format(None) is AUTO
    assert tool_format(templates["seed"]).thoughts == ("<seed:think>",)


FRAGMENTS = st.sampled_from(
    [*MARKER_TOKENS, *NO_CALLS, *(text for _, text, _ in CALLS), JSON, "functools", "{", "}", '"', " ", "\n", ";", "x"]
)
ANSWERS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=5)), max_size=6).map("".join)


@settings(deadline=None)
@given(ANSWERS, st.lists(st.integers(0, 200)), st.sampled_from([*FORMATS.values()]), st.booleans())
@example("<think>a <tool_call>\n", [3], AUTO, True)
def test_any_split_gives_the_same_parts(text, cuts, form, with_tools):
    tools = TOOLS if with_tools else None
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = read([text], form, tools)
    assert read(pieces, form, tools) == whole
    assert read(text, form, tools) == whole
    if not any(marker in text for marker in MARKER_TOKENS) and not with_tools:
        assert whole == ([Text(text)] if text else [])


NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=4)


@settings(deadline=None)
@given(NAMES, ARGUMENTS, st.sampled_from(["hermes", "mistral", "phi", "seed", "llama", "auto"]), st.booleans())
def test_whatever_the_arguments_are_they_come_back(name, arguments, form, pretty):
    written = json.dumps({"name": name, FORMATS[form].arguments: arguments}, indent=2 if pretty else None)
    read_back = parse(FORMATS[form].forced + written, FORMATS[form], {name: {}})
    assert read_back.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in read_back.calls] == [(name, arguments)]


def scan(text):
    """Where a JSON object or list ends, or the first character that it cannot go on with; None: it may go on."""
    reader = read_container(text[0])
    next(reader)
    for position, character in enumerate(text[1:], 1):
        try:
            reader.send(character)
        except StopIteration:
            return "end", position
        except NotJson:
            return "wrong", position
    return None


@settings(deadline=None)
@given(st.one_of(st.lists(VALUES, max_size=3), ARGUMENTS), st.booleans(), st.text(max_size=3))
def test_json_is_read_to_its_end(value, ascii_only, rest):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert scan(text + rest) == ("end", len(text) - 1)


@settings(deadline=None)
@given(st.text(alphabet='{}[]",:\\u01-+.eEtrufalsn ', min_size=1).map(lambda text: "[" + text))
def test_text_that_is_no_json_is_told_apart(text):
    outcome = scan(text)
    if outcome is not None:
        text = text[: outcome[1] + 1]
    try:
        json.loads(text)
        is_json = True
    except ValueError:
        is_json = False
    assert is_json == (outcome is not None and outcome[0] == "end")
