"""Formats of tool calls: their markers, and which format a chat template uses."""

from __future__ import annotations

from dataclasses import dataclass

HERMES, SEED, MISTRAL, PYTHON_TAG = "<tool_call>", "<seed:tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
PHI, FUNCTOOLS, FUNCTION_GEMMA, GEMMA = "<|tool_call|>", "functools", "<start_function_call>", "<|tool_call>"
# What may follow the end of a call and is not text.
CLOSINGS = {
    HERMES: "</tool_call>",
    SEED: "</seed:tool_call>",
    PHI: "<|/tool_call|>",
    FUNCTION_GEMMA: "<end_function_call>",
    GEMMA: "<tool_call|>",
}
QUOTES = {FUNCTION_GEMMA: "<escape>", GEMMA: '<|"|>'}  # around strings, in formats without JSON
MISTRAL_ID, MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}
# Tokenizers often mark these as special, which hides them; but an answer cannot be parsed without them.
MARKER_TOKENS = frozenset(
    {HERMES, SEED, MISTRAL, PYTHON_TAG, PHI, FUNCTION_GEMMA, GEMMA, MISTRAL_ID, MISTRAL_ARGUMENTS}
    | {*CLOSINGS.values(), *QUOTES.values(), *THOUGHTS, *THOUGHTS.values()}
)


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    markers: tuple[str, ...]  # each begins a call
    bare: bool = False  # an answer that begins with a JSON call is a call, without a marker
    forced: str = ""  # how an answer that must be a call begins
    listed: bool = False  # several calls are one JSON list
    arguments: str = "arguments"  # the model's name for them
    thoughts: tuple[str, ...] = ()  # markers with which an answer may begin reasoning


_FORMATS = (
    ToolFormat("seed", (SEED,), forced=SEED + "\n"),
    ToolFormat("mistral", (MISTRAL,), forced=MISTRAL, listed=True),
    ToolFormat("phi", (PHI, FUNCTOOLS), forced=PHI, listed=True),
    ToolFormat("gemma", (FUNCTION_GEMMA, GEMMA), bare=True),
    ToolFormat("hermes", (HERMES,), forced=HERMES + "\n"),
    ToolFormat("llama", (PYTHON_TAG,), bare=True, arguments="parameters"),
)
AUTO = ToolFormat(
    "auto",
    (HERMES, SEED, MISTRAL, PYTHON_TAG, PHI, FUNCTOOLS, FUNCTION_GEMMA, GEMMA),
    bare=True,
    forced=HERMES + "\n",
    thoughts=("<think>",),
)
FORMATS = {each.name: each for each in (*_FORMATS, AUTO)}


def tool_format(template: str | None) -> ToolFormat:
    """The format whose marker the chat template writes; if it writes none, all formats are tried."""
    if not template:
        return AUTO
    thoughts = tuple(marker for marker in THOUGHTS if marker in template or THOUGHTS[marker] in template)
    for each in _FORMATS:
        if any(marker in template for marker in each.markers):
            return ToolFormat(**{**vars(each), "thoughts": thoughts})
    return ToolFormat(**{**vars(AUTO), "thoughts": thoughts})


def writes_tools(template: str | None) -> bool:
    """Whether the chat template reads the variable `tools`."""
    return bool(template) and "tools" in (template or "")
