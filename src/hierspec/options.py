"""The options of `generate` and its kin by name: typed, so that an editor completes them and a checker knows them."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from hierspec.core.errors import HierspecError
from hierspec.core.grammar import Grammar
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling

PlanLike = Plan | str | Path  # a plan, its name, or its TOML file


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_ids: int | Sequence[int]
    logprobs: int | None


class GrammarOptions(TypedDict, total=False):
    """What the answer must look like: one of these."""

    json: bool  # any JSON object
    json_schema: Mapping[str, Any] | bool | str  # JSON that this schema allows; the schema, or its text
    regex: str  # a text that the whole of this regular expression matches
    grammar: Grammar | str | None  # a grammar in Lark's notation, or a Grammar
    choice: Sequence[str]  # one of these texts


class TemplateOptions(TypedDict, total=False):
    """What a chat template is given beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None  # functions that the model may call, as JSON schemas
    enable_thinking: bool  # for models whose template reads it
    template_variables: Mapping[str, Any]  # any others, by name
    continue_final_message: bool  # the last message is the beginning of the model's answer


class ChatOptions(SamplingOptions, GrammarOptions, total=False):
    """What a conversation is begun with."""

    tools: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool
    template_variables: Mapping[str, Any]


class Options(SamplingOptions, GrammarOptions, TemplateOptions, total=False):
    """What `generate` and its kin take by name beside their own arguments."""


class OneCall(Options, total=False):
    """All that a call for one prompt takes by name."""

    plan: PlanLike
    sampling: Sampling | None
    raw: bool
    namespace: str


class ManyCall(Options, total=False):
    """All that a call for several prompts takes by name."""

    plan: PlanLike | Sequence[PlanLike]
    sampling: Sampling | Sequence[Sampling] | None
    raw: bool
    namespace: str | Sequence[str]


_SEEDS = 1 << 53  # numbers that JSON readers everywhere keep exactly
_SEED_STRIDE = 0x13C6EF372FE94F
_SAMPLING = tuple(SamplingOptions.__annotations__)
_GRAMMAR = tuple(GrammarOptions.__annotations__)
_TEMPLATE = tuple(TemplateOptions.__annotations__)


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], TemplateOptions]:
    """Options of sampling, and of the template; a name that is neither is refused with the nearest one."""
    for name in options:
        if name not in _SAMPLING and name not in _GRAMMAR and name not in _TEMPLATE:
            names = (*_SAMPLING, *_GRAMMAR, *_TEMPLATE)
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise HierspecError(f"Unknown option {name!r}{hint}; options are {', '.join(names)}.")
    template = {name: value for name, value in options.items() if name in _TEMPLATE}
    changes = {name: options[name] for name in options if name in _SAMPLING}
    named = [name for name in _GRAMMAR if options.get(name) is not None and (name, options[name]) != ("json", False)]
    if named:
        changes["grammar"] = _grammar(named, options)
    return changes, template  # type: ignore[return-value]


def _grammar(named: Sequence[str], options: Mapping[str, Any]) -> Grammar:
    if len(named) > 1:
        raise HierspecError(f"{' and '.join(named)} cannot both say what the answer must look like; give one of them.")
    [name], value = named, options[named[0]]
    if name == "json":
        if value is not True:
            raise HierspecError("json must be True or False; a schema is given as json_schema.")
        return Grammar("json_object")
    if name == "json_schema":
        return Grammar.json_schema(value)
    if name == "choice":
        return Grammar.choice(value)
    if isinstance(value, Grammar) and name == "grammar":
        return value
    return Grammar("regex" if name == "regex" else "lark", value)


def sampling_with(sampling: Sampling | None, changes: Mapping[str, Any]) -> Sampling:
    """A sampling with some fields changed."""
    if not isinstance(sampling, Sampling | None):
        raise HierspecError("sampling must be a Sampling; give single options by name, such as max_tokens=100.")
    return replace(sampling or Sampling(), **changes)


def several_samplings(sampling: Sampling, count: int) -> list[Sampling]:
    """`count` samplings that differ in their seeds. The first has the seed of `sampling`, or a new one."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise HierspecError(f"n must be a whole number from 1 up, not {count!r}.")
    first = secrets.randbits(32) if sampling.seed is None else sampling.seed
    # An odd stride never repeats a seed, and a large one keeps them apart: seeds 1 and 2 have no answer in common.
    others = [(first + number * _SEED_STRIDE) % _SEEDS for number in range(1, count)]
    return [replace(sampling, seed=seed) for seed in (first, *others)]


def one_each(value: Any, count: int, name: str) -> list[Any]:
    """The value for each of `count` prompts: one for all, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise HierspecError(f"{name} must be one for all prompts or one for each: got {len(value)} for {count}.")
    return list(value)
