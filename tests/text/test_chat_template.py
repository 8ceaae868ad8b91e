"""Chat templates: the same text as transformers, one-sentence errors, no way to hang or to run code."""

from __future__ import annotations

import sys
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hostile_templates import hostile_templates
from transformers.utils.chat_template_utils import render_jinja_template

from hierspec.core.errors import HierspecError
from hierspec.text import template_budget
from hierspec.text.chat_template import ChatTemplate
from hierspec.text.template_methods import WHITESPACE

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nAnswer kindly.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today: " ~ (strftime_now("%Y") | length) ~ " digits\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message['content'] | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{%- set ns = namespace(system='', turns=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content ~ '\n\n' %}{% continue %}{% endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (ns.system if ns.turns == 0 else '') ~ message.content ~ ' [/INST]' }}
        {%- set ns.turns = ns.turns + 1 %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('Only system, user and assistant may speak') }}
    {%- endif %}
{%- endfor %}
"""
QWEN = """{%- macro show(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content %}{{- item.text }}{% endfor %}{%- endif %}
{%- endmacro %}
{%- if tools %}{{- 'Tools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n' }}{% endif %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}{{- '#' ~ index ~ '%s' % '' }}{% break %}{% endif %}
{%- endfor %}
  {% for message in messages %}
    {{ '<|im_start|>' + message.role }}
    {{ show(message.content) }}
    {%- if message.reasoning_content is defined %}<think>{{ message.thinking }}</think>{% endif %}
{{ '<|im_end|>' }}
  {% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
TALK = [
    {"role": "user", "content": "  Is 2 < 3 & 'so' on?\n"},
    {"role": "assistant", "content": "Yes — ünïcode 漢字 😀"},
    {"role": "user", "content": "Why?"},
]
CHATS: list[list[dict[str, Any]]] = [
    TALK,
    [{"role": "system", "content": "Be brief. "}, *TALK],
    TALK[:1],
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, QWEN], ids=["chatml", "llama3", "mistral", "qwen"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=["talk", "system", "one"])
def test_text_equals_transformers(template: str, prompt: bool, chat: list[dict[str, Any]]) -> None:
    expected, _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=prompt, **VARIABLES)
    assert ChatTemplate(template).render(chat, prompt, VARIABLES) == expected[0]


def test_tools_parts_and_reasoning_equal_transformers() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "reasoning": "hm"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<b>é</b>", "parameters": {}}}]
    expected, _ = render_jinja_template(
        [chat], tools=tools, chat_template=QWEN, add_generation_prompt=True, enable_thinking=False
    )
    rendered = ChatTemplate(QWEN).render(chat, True, {"tools": tools, "enable_thinking": False})
    assert rendered == expected[0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 10 ** 10 * 'a' }}",
        "{{ [[1] * 2000000] * 2000000 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}"
        "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=3) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('x' * 6000000).replace('x', 'y' * 6000000) }}",
        "{{ strftime_now('%999999999d') }}",
        # Work inside one turn of a loop, in one filter, or kept where nobody looks: a count of turns misses all of it.
        "{% set a = [0] * 100000 %}{{ ([a] * 2000) | sum(start=[]) | length }}",
        "{% set s = 'x' * 1000000 %}{{ ([s] * 1000) | map('string') | join | length }}",
        "{{ ('\\n' * 1000000) | indent(100000) | length }}",
        "{{ ([0] * 100000) | tojson(indent=100000) | length }}",
        "{% set s = 'x' * 600000 %}{% set n = namespace(l=[]) %}"
        "{% for i in range(2000) %}{% set n.l = n.l + [s | upper] %}{% endfor %}",
        "{% for i in range(90000) %}" + "x" * 2000 + "{% endfor %}",
        "{% for i in range(90000) %}" + "{% set a = i %}" * 300 + "{% endfor %}",
        "{% for i in range(90000) if not [" + "i, " * 900 + "i] %}{% endfor %}",
        "{{ ('a' * 90000).rfind('b' + 'a' * 45000) }}{{ ('a' * 90000).rfind('b' + 'a' * 45000) }}",
        "{{ ('a' * 90000) | trim('b' * 90000 + 'a') }}",
        "{% set n = namespace(a=[1], b=[1]) %}"
        "{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
        "{{ range(0, (2 ** 61 - 1) * 90000, 2 ** 61 - 1) | unique | list | length }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d' is odd }}",
        "{{ 1.5 | round(10 ** 9) }}",
        "{{ [1] | batch(10 ** 9, 0) | list | length }}",
        "{{ 'x' * 600000 }}",
        "{% macro f() %}{% for i in range(90000) %}{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call f() %}" + "y" * 2000 + "{% endcall %}",
    ],
)
def test_a_template_cannot_hang_the_machine(template: str) -> None:
    started = time.monotonic()
    with pytest.raises(HierspecError, match="too much work"):
        ChatTemplate(template).render(TALK)
    assert time.monotonic() - started < 20  # a second or two; the machine may be busy


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{% set x = messages.append(1) %}",
        "{% include 'passwd' %}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ ''['__class__'] | length }}{{ ''['__class__'].mro }}",
        "{{ namespace.function }}{{ namespace.function.__globals__ }}",
        "{{ self._TemplateReference__context }}{{ self._TemplateReference__context.environment }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_cannot_run_code(template: str) -> None:
    with pytest.raises(HierspecError, match="refused these messages"):
        ChatTemplate(template).render(TALK)


@pytest.mark.parametrize(
    "use",
    ["(1)[n.a].x", "messages[n.a].x", "{}[n.a].x", "n[n.a]", "n.a | int", "[1].index(n.a)", "dict(n.a)", "{n.a: 1}"],
)
def test_a_message_shows_no_endless_value(use: str) -> None:
    """Two to the power of sixty items in sixty lists: nothing may look at all of it, errors included."""
    for pair in ("[n.a, n.a]", "(n.a, n.a)"):
        nested = f"{{% set n = namespace(a=[1]) %}}{{% for i in range(60) %}}{{% set n.a = {pair} %}}{{% endfor %}}"
        with suppress(HierspecError):
            ChatTemplate(f"{nested}{{{{ {use} }}}}").render(TALK)


def test_errors_are_one_sentence() -> None:
    with pytest.raises(HierspecError, match=r"cannot be read: .*\.$"):
        ChatTemplate("{% for %}")
    with pytest.raises(HierspecError, match=r"Only system, user and assistant may speak\.$"):
        ChatTemplate(MISTRAL).render([{"role": "tool", "content": "x"}], True, VARIABLES)
    with pytest.raises(HierspecError, match='needs a "role"'):
        ChatTemplate(CHATML).render([{"content": "x"}])


def test_the_messages_are_left_alone_and_the_budget_starts_anew() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = [{"role": "user", "content": "x", "thinking": "y"}]
    assert [template.render(chat) for _ in range(8)] == ["x"] * 8
    assert chat == [{"role": "user", "content": "x", "thinking": "y"}]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_template_does_it_stays_within_the_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs made of everything the sandbox has, under a small budget: calls and memory are bounded by it."""
    steps, characters = 3_000, 100_000
    monkeypatch.setattr(template_budget, "_STEPS", steps)
    monkeypatch.setattr(template_budget, "_CHARACTERS", characters)
    monkeypatch.setattr(template_budget, "_STEPS_A_MESSAGE", 0)
    for source in hostile_templates(seed, 20):
        calls, peak, seconds = _measured(ChatTemplate(source))
        assert calls < 100 * steps, source
        assert peak < 20 * characters + 2_000_000, source
        assert seconds < 20, source  # milliseconds; the rest is for a busy machine


def _measured(template: ChatTemplate) -> tuple[int, int, float]:
    """Function calls, bytes at the peak and seconds of processor time of one rendering."""
    calls = 0

    def count(*event: Any) -> None:
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    started = time.process_time()
    try:
        with suppress(HierspecError):
            template.render(TALK)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak, time.process_time() - started


def test_what_splits_is_counted() -> None:
    """Of texts that are split at white space or line ends the pieces are counted first."""
    assert {character for character in map(chr, range(sys.maxunicode + 1)) if character.isspace()} == set(WHITESPACE)
    assert all(
        character in WHITESPACE for character in map(chr, range(0x110000)) if len(f"a{character}b".splitlines()) > 1
    )
