"""Many tokens of a plan beside plain decoding's: the same seed must give the same text, whatever was decided online.

Prompts are asked at several temperatures, each time with another seed, and a plan answers them alone and in batches.
Plain decoding writes in wide batches, which is faster and gives the same bits; one answer of every batch is also
written alone and compared. --output is written after every group, and a later run goes on from it.

It made docs/results/auto-equality.json and docs/results/auto-equality-again.json.

example:
  python experiments/equality.py --tokens 100000 --weights int8 --max-tokens 128 --output equality.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.equality import first_difference
from hierspec.language_model import LanguageModel
from hierspec.machine import machine
from hierspec.paths import whole_file
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec_bench.cli import common

TEMPERATURES = (0.0, 0.8, 1.0)
BATCHES = (1, 4, 8)  # batch sizes of the plan, in turn
PLAIN_BATCH = 16  # answers per group, which plain decoding writes at once


@dataclass(frozen=True)
class Case:
    """One answer, to be written twice."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass
class Equality:
    """What has been compared so far. A later run continues from its JSON."""

    groups: int = 0
    tokens: int = 0
    answers: int = 0
    by_temperature: dict[str, int] = field(default_factory=dict)  # tokens
    by_batch: dict[str, int] = field(default_factory=dict)
    plain_alone: int = 0  # tokens of plain decoding that were also written alone
    seconds: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def from_json(document: dict[str, Any]) -> Equality:
        try:
            return Equality(**document)
        except TypeError as error:
            raise HierspecError(f"This is no record of an equality run ({error}); name another file.") from error


def compare_many(
    model: LanguageModel,
    plan: Plan,
    prompts: Sequence[BenchPrompt],
    tokens: int,
    max_tokens: int = 128,
    compared: Equality | None = None,
    keep: Callable[[Equality], None] = lambda compared: None,
    progress: Progress = silent,
    batches: Sequence[int] = BATCHES,
) -> Equality:
    """Continues until `tokens` tokens have been compared; calls `keep` after every group."""
    if plan.rule != "coupled":
        raise HierspecError(
            f"The rule {plan.rule} promises the same distribution, not the same text; compare a coupled plan."
        )
    compared = compared or Equality()
    texts = [turn for prompt in prompts for turn in prompt.turns]
    size = max(PLAIN_BATCH, *batches)
    while compared.tokens < tokens:
        began = time.perf_counter()
        first = size * compared.groups
        group = [_case(model, texts, first + offset, max_tokens) for offset in range(size)]
        batch = batches[compared.groups % len(batches)]
        plain = _written(model, Plan(), group)
        alone = compared.groups % len(group)
        [written] = _written(model, Plan(), [group[alone]])
        _compare(model, compared, group[alone], plain[alone], written, "plain alone")
        compared.plain_alone += len(plain[alone])
        for start in range(0, len(group), batch):
            cases = group[start : start + batch]
            for case, expected, written in zip(cases, plain[start:], _written(model, plan, cases), strict=False):
                _compare(model, compared, case, expected, written, f"batch of {batch}")
                compared.answers += 1
                compared.tokens += len(written)
                _count(compared.by_temperature, str(case.sampling.temperature), len(written))
                _count(compared.by_batch, str(batch), len(written))
        compared.groups += 1
        compared.seconds += time.perf_counter() - began
        keep(compared)
        progress("Comparing tokens", min(compared.tokens, tokens), tokens)
    return compared


def _case(model: LanguageModel, texts: Sequence[str], number: int, max_tokens: int) -> Case:
    """Later rounds put a number before the texts, so that greedy answers also differ from earlier ones."""
    lap, index = divmod(number, len(texts))
    asked = texts[index] if not lap else f"Question {lap}. {texts[index]}"
    temperature = TEMPERATURES[(number + lap) % len(TEMPERATURES)]
    return Case(tuple(model.encode(asked)), Sampling(max_tokens=max_tokens, temperature=temperature, seed=number))


def _written(model: LanguageModel, plan: Plan, cases: Sequence[Case]) -> list[list[int]]:
    """What a plan writes for these cases at once."""
    requests: list[Request] = [model.request(case.prompt, plan, case.sampling) for case in cases]
    for _ in Engine().run(requests):
        pass
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.output for request in requests]


def _compare(
    model: LanguageModel, compared: Equality, case: Case, plain: list[int], other: list[int], where: str
) -> None:
    seed = case.sampling.seed
    assert seed is not None
    difference = first_difference(model, case.prompt, plain, other, replace(case.sampling), seed)
    if difference is not None:
        row = {"answer": seed, "temperature": case.sampling.temperature, "where": where}
        row |= {"position": difference.position, "tokens": list(difference.tokens)}
        compared.differences.append(row | {"gap": difference.gap, "tie": difference.is_tie})


def _count(counts: dict[str, int], key: str, more: int) -> None:
    counts[key] = counts.get(key, 0) + more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="compare so many")
    common.add_prompts(parser)
    common.add_plans(parser)
    common.add_output(parser, ", after every group; a later run goes on from it")
    parser.add_argument(
        "--batches",
        metavar="N,…",
        default=",".join(map(str, BATCHES)),
        help="in which the plan writes, in turn (default %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of each answer (default 256)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the comparison; an interrupted run writes what it has compared."""
    if arguments.tokens < 1:
        raise HierspecError(f"--tokens must be at least 1, not {arguments.tokens}.")
    names = options.names(arguments.plans)
    if len(names) != 1:
        raise HierspecError("One plan is compared with plain decoding; give --plans one name.")
    batches = common.batch_sizes("--batches", arguments.batches)
    if not batches:
        raise HierspecError("--batches names no number; give one, such as 1,8.")
    _, prompts = common.chosen_prompts(arguments)
    model = options.load_model(arguments)
    plan = model.plan(names[0])
    about: dict[str, Any] = {
        "machine": machine(),
        "model": model.name,
        "dtype": model.dtype,
        "weights": model.weights,
        "products": model.decoder.products,
        "plan": plan.to_toml(),
        "max_tokens": arguments.max_tokens,
        "plain": f"written in batches of {max(PLAIN_BATCH, *batches)}; one answer of each batch also alone",
    }
    compared = _earlier(arguments.output, about) or Equality()

    def document() -> dict[str, Any]:
        return {"command": command_line(), **about, **asdict(compared), "seconds": round(compared.seconds, 1)}

    def keep(_: Equality) -> None:
        if arguments.output is not None:
            with whole_file(arguments.output) as temporary:
                temporary.write_text(json.dumps(document(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    try:
        with progress_bars() as progress:
            compare_many(
                model, plan, prompts, arguments.tokens, arguments.max_tokens, compared, keep, progress, batches
            )
    except KeyboardInterrupt:
        note("Interrupted; what follows was compared until then.")
    if not arguments.json:
        differences = len(compared.differences)
        note(f"{compared.tokens:,} tokens of {compared.answers} answers compared: {differences} differences")
    hand_out(document(), arguments.output)
    return int(any(not difference["tie"] for difference in compared.differences))


def _earlier(path: Path | None, about: dict[str, Any]) -> Equality | None:
    """What a run of the same model and plan left in the file, if there is one."""
    if path is None or not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        same = all(document.get(key) == value for key, value in about.items())
    except (OSError, ValueError, AttributeError) as error:
        raise HierspecError(f"{path} cannot be gone on from ({error}); name another file.") from error
    if not same:
        raise HierspecError(f"{path} is of another model, plan or setting; name another file.")
    return Equality.from_json({key: value for key, value in document.items() if key not in {*about, "command"}})


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
