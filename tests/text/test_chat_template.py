"""Chat templates: the same text as transformers, one-sentence errors, no way to hang or to run code."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hierspec.core.errors import HierspecError
from hierspec.text.chat_template import ChatTemplate

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
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_cannot_run_code(template: str) -> None:
    with pytest.raises(HierspecError, match="refused these messages"):
        ChatTemplate(template).render(TALK)


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
