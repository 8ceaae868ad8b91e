"""Is `auto` slower than plain decoding before it has learnt anything, or where its costs are wrong?

For every family of prompts two new processes answer the first few, one plainly and one under auto, in turn and back to
back, prefill included. So both pay alike for the first use of memory and threads. Nothing learnt by earlier runs is
used, and each process has stores of its own. With --repeats all that is done again with new processes, in the other
order, and times are added up: of one and the same prompt they differ by a tenth on machines that others use too. An
even number of repeats has each plan first with each prompt equally often. From three repeats on, the ratios of the
medians of each prompt's times are reported as well. With --in-turn both plans run in one new process, each with a
model of its own, and take turns step by step: a slow second hits both, so that one run tells more than several of
the other kind. With --factor the target's costs are multiplied at the start, as if they had been measured wrongly; a
factor below 1 is a fraction. The texts must be the same. The last line is one JSON document. It made
docs/results/first-prompts.json.

example:
  python experiments/first_prompts.py spec_bench.jsonl --weights auto,int8 --output first-prompts.json
  python experiments/first_prompts.py spec_bench.jsonl --count 5 --factor 3,0.333 --one-process
  python experiments/first_prompts.py spec_bench.jsonl --weights int8 --in-turn
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hierspec.assembly.opening import WEIGHTS
from hierspec.cli import options
from hierspec.cli.console import note
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.errors import HierspecError
from hierspec.machine import machine
from hierspec.prompts import read_prompts
from hierspec_bench.cli import common

WORKER = """
import json, sys, time
import torch
import hierspec
from hierspec.assembly.measured_costs import CostBook
from hierspec.core.sampling import Sampling
from hierspec.pacing.healing import HealingCosts
from steps_in_turn import ClosedLoop, in_turn

job = json.loads(sys.stdin.readline())
models = {
    plan: hierspec.load(weights=job["weights"], stores=f"{job['stores']}/{plan}", keep_learnt=False)
    for plan in job["plans"]
}
targets = [model.assembler.target for model in models.values()]
measured = CostBook.costs

def falsified(book, scorer, computed_layers=0):
    key = f"{scorer.name}, {scorer.kind}", computed_layers
    if key not in book._costs:
        costs = measured(book, scorer, computed_layers)
        factor = job["factor"] if any(scorer is target for target in targets) else 1.0
        wrong, growth = ([factor * seconds for seconds in curve] for curve in (costs.measured, costs.growth))
        book._costs[key] = HealingCosts(costs.rows, wrong, costs.spread, growth, costs.growth_spread, costs.context)
    return book._costs[key]

def wake():
    # A process that has waited for the other one finds its cores slow at first (a virtual machine's more than others).
    until, square = time.perf_counter() + 0.3, torch.ones(512, 512)
    while time.perf_counter() < until:
        square @ square

CostBook.costs = falsified
for plan, model in models.items():
    model.hierarchy(model.plan(plan))  # opens stores and drafters
print("ready", flush=True)
for line in sys.stdin:
    prompt, order = json.loads(line)
    for model in models.values():
        model.forget()
    wake()
    if len(models) > 1:
        call = prompt, Sampling(max_tokens=job["max_tokens"])
        loops = {plan: ClosedLoop(models[plan], plan, [call], serving=False) for plan in order}
        in_turn(list(loops.values()))
        answered = {plan: {"seconds": loop.seconds, "tokens": loop.texts[0]} for plan, loop in loops.items()}
    else:
        began = time.perf_counter()
        answer = model.generate(prompt, plan=plan, max_tokens=job["max_tokens"])
        answered = {plan: {"seconds": time.perf_counter() - began, "tokens": answer.tokens}}
    print(json.dumps(answered), flush=True)
"""


PLANS = ("plain", "auto")


class Answering:
    """A new process that answers one prompt after the other under one plan, or under several that take turns."""

    def __init__(self, plans: Sequence[str], weights: str, factor: float, max_tokens: int, stores: str) -> None:
        job = {"plans": plans, "weights": weights, "factor": factor, "max_tokens": max_tokens, "stores": stores}
        folder = str(Path(__file__).resolve().parent)  # of steps_in_turn
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "HIERSPEC_LEARNT": "off", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._line(job)

    def answer(self, prompt: str, order: Sequence[str]) -> dict[str, Any]:
        """The seconds that the answer took, and its tokens, by plan. They take turns in this order."""
        answer: dict[str, Any] = json.loads(self._line([prompt, order]))
        return answer

    def _line(self, said: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise HierspecError("A process ended before it had answered; its error is above.")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def answers(
    prompts: list[tuple[str, str]], weights: str, factor: float, max_tokens: int, turn: int, together: bool
) -> list[dict[str, Any]]:
    """Answers of two new processes to these prompts, or of one process for both plans; `turn` says who begins."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            Answering(plans, weights, factor, max_tokens, folder) for plans in ([PLANS] if together else zip(PLANS))
        ]
        for number, (task, prompt) in enumerate(prompts):
            order = PLANS if (number + turn) % 2 else PLANS[::-1]
            answer: dict[str, Any] = {}
            if together:
                answer = processes[0].answer(prompt, order)
            else:
                for plan in order:
                    answer |= processes[PLANS.index(plan)].answer(prompt, [plan])
            seconds = {plan: answer[plan]["seconds"] for plan in PLANS}
            tokens = {plan: answer[plan]["tokens"] for plan in PLANS}
            same = tokens["plain"] == tokens["auto"]
            done.append({"task": task, "number": number, "same": same, "tokens": len(tokens["plain"]), **seconds})
        for process in processes:
            process.close()
    return done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, help="JSON lines with task and turns")
    parser.add_argument("--weights", default="auto,int8", help="formats, separated by commas (auto,int8)")
    parser.add_argument("--count", type=int, default=6, help="prompts of each family (6)")
    parser.add_argument("--factor", default="1", help="factors of the target's costs, separated by commas (1)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1, help="times, each with new processes (1)")
    parser.add_argument("--in-turn", action="store_true", help="both plans in one process, taking turns step by step")
    parser.add_argument("--one-process", action="store_true", help="the same for all families, which alternate")
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "count", "repeats", "max-tokens")
    factors, formats = _factors(arguments.factor), options.names(arguments.weights)
    for weights in formats:
        if weights not in WEIGHTS:
            raise HierspecError(f"Unknown weights {weights!r}; choose {', '.join(WEIGHTS)}.")
    families: dict[str, list[str]] = {}
    for prompt in read_prompts(arguments.prompts):
        families.setdefault(prompt.task, []).append(prompt.turns[0])
    chosen = [(task, prompt) for task, prompts in families.items() for prompt in prompts[: arguments.count]]
    if arguments.one_process:
        groups = [sorted(chosen, key=lambda pair: families[pair[0]].index(pair[1]))]
    else:
        groups = [[pair for pair in chosen if pair[0] == task] for task in families]
    runs = []
    for weights in formats:
        for factor in factors:
            done: list[dict[str, Any]] = []
            for turn in range(arguments.repeats):
                for group in groups:
                    done += answers(group, weights, factor, arguments.max_tokens, turn, arguments.in_turn)
            run = {"weights": weights, "factor": factor, **_ratios(done, families, "auto_over_plain", "all")}
            if arguments.repeats >= _FOR_MEDIANS:
                run |= _ratios(_medians(done), families, "auto_over_plain_by_medians", "all_by_medians")
            run |= {"same_texts": sum(each["same"] for each in done), "texts": len(done)}
            note(json.dumps(run))
            runs.append({**run, "answers": done})
    hand_out(
        {"command": command_line(), "machine": machine(), "max_tokens": arguments.max_tokens, "runs": runs},
        arguments.output,
    )
    return 0 if all(run["same_texts"] == run["texts"] for run in runs) else 1


_FOR_MEDIANS = 3  # repeats


def _factors(listed: str) -> list[float]:
    try:
        factors = [float(factor) for factor in options.names(listed)]
    except ValueError:
        factors = []
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise HierspecError(f"--factor takes numbers above 0, separated by commas, not {listed!r}.")
    return factors


def _ratios(done: list[dict[str, Any]], tasks: Iterable[str], by_task: str, all_tasks: str) -> dict[str, Any]:
    ratios = {task: _ratio([each for each in done if each["task"] == task]) for task in tasks}
    return {by_task: ratios, all_tasks: _ratio(done)}


def _medians(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One answer for each prompt, with the medians of its times."""
    prompts: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for each in done:
        prompts.setdefault((each["task"], each["number"]), []).append(each)
    return [
        {"task": task, **{plan: median(each[plan] for each in answered) for plan in ("plain", "auto")}}
        for (task, _), answered in prompts.items()
    ]


def _ratio(done: list[dict[str, Any]]) -> float:
    return round(sum(each["plain"] for each in done) / sum(each["auto"] for each in done), 3)


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
