"""Many tokens of `auto` beside plain decoding's: the same seed must give the same text, whatever was decided online.

Prompts are asked at several temperatures, each time with another seed, and a plan answers them alone and in batches.
Plain decoding writes in wide batches, which is faster and the same (`tests/test_bits.py`); one answer of every batch is
also written alone and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.equality import first_difference
from hierspec.language_model import LanguageModel
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt

TEMPERATURES = (0.0, 0.8, 1.0)
BATCHES = (1, 4, 8)  # in which the plan writes, in turn
PLAIN_BATCH = 16  # answers of one group, written side by side by plain decoding


@dataclass(frozen=True)
class Case:
    """One answer to be written twice."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass
class Equality:
    """What has been compared so far. As JSON it is what a later run goes on from."""

    groups: int = 0
    tokens: int = 0
    answers: int = 0
    by_temperature: dict[str, int] = field(default_factory=dict)  # tokens
    by_batch: dict[str, int] = field(default_factory=dict)
    plain_alone: int = 0  # tokens of plain decoding that were also written alone
    seconds: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def from_json(found: dict[str, Any]) -> Equality:
        try:
            return Equality(**found)
        except TypeError as error:
            raise HierspecError(f"This is no record of an equality run ({error}); name another file.") from error


def compare_many(
    model: LanguageModel,
    plan: Plan,
    prompts: Sequence[BenchPrompt],
    tokens: int,
    max_tokens: int = 128,
    found: Equality | None = None,
    keep: Callable[[Equality], None] = lambda found: None,
    progress: Progress = silent,
) -> Equality:
    """Go on until so many tokens have been compared. `keep` is given all that there is after every group."""
    if plan.rule != "coupled":
        raise HierspecError(f"The rule {plan.rule} promises the same law, not the same text; compare a coupled plan.")
    found = found or Equality()
    texts = [turn for prompt in prompts for turn in prompt.turns]
    while found.tokens < tokens:
        began = time.perf_counter()
        group = [_case(model, texts, PLAIN_BATCH * found.groups + place, max_tokens) for place in range(PLAIN_BATCH)]
        batch = BATCHES[found.groups % len(BATCHES)]
        plain = _written(model, Plan(), group)
        alone = found.groups % len(group)
        _compare(model, found, group[alone], plain[alone], _written(model, Plan(), [group[alone]])[0], "plain alone")
        found.plain_alone += len(plain[alone])
        for start in range(0, len(group), batch):
            some = group[start : start + batch]
            for case, one, two in zip(some, plain[start:], _written(model, plan, some), strict=False):
                _compare(model, found, case, one, two, f"batch of {batch}")
                found.answers += 1
                found.tokens += len(two)
                _count(found.by_temperature, str(case.sampling.temperature), len(two))
                _count(found.by_batch, str(batch), len(two))
        found.groups += 1
        found.seconds += time.perf_counter() - began
        keep(found)
        progress("Comparing tokens", min(found.tokens, tokens), tokens)
    return found


def _case(model: LanguageModel, texts: Sequence[str], number: int, max_tokens: int) -> Case:
    """Texts come again with another beginning, so that also greedy answers differ from earlier ones."""
    turn, text = divmod(number, len(texts))
    asked = texts[text] if not turn else f"Question {turn}. {texts[text]}"
    temperature = TEMPERATURES[(number + turn) % len(TEMPERATURES)]
    return Case(tuple(model.encode(asked)), Sampling(max_tokens=max_tokens, temperature=temperature, seed=number))


def _written(model: LanguageModel, plan: Plan, cases: Sequence[Case]) -> list[list[int]]:
    """What a plan writes for these side by side."""
    requests: list[Request] = [model.request(case.prompt, plan, case.sampling) for case in cases]
    for _ in Engine().run(requests):
        pass
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.output for request in requests]


def _compare(model: LanguageModel, found: Equality, case: Case, plain: list[int], other: list[int], where: str) -> None:
    assert case.sampling.seed is not None
    difference = first_difference(model, case.prompt, plain, other, replace(case.sampling), case.sampling.seed)
    if difference is not None:
        found.differences.append(
            {
                "answer": case.sampling.seed, "temperature": case.sampling.temperature, "where": where,
                "position": difference.position, "tokens": list(difference.tokens), "gap": difference.gap,
                "tie": difference.is_tie,
            }
        )  # fmt: skip


def _count(counts: dict[str, int], key: str, more: int) -> None:
    counts[key] = counts.get(key, 0) + more
