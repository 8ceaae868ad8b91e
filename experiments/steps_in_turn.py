"""What `auto` costs or gains under load, on a machine whose speed changes: servers' engines take turns, step by step.

Whole loads that follow each other differ by several percent where others use the machine too, even plain decoding and
plain decoding. Here every engine has a model of its own, with a KV cache and stores of its own, and the same closed
loop of clients: each makes one call after the other. A step of one engine is followed by a step of the next, so a slow
second hits all of them. The times of each engine's steps are added up, prompts included; nothing that a plan writes to
disk is kept. `plain again` is the control: its ratio should be 1.

Half of the calls are sampled. Exits with 1 where a text is not that of the plain engine. It made
docs/results/steps-in-turn.json.

example:
  python experiments/steps_in_turn.py --clients 1,4,16,64 --rounds 4 --output steps-in-turn.json
  python experiments/steps_in_turn.py --enlarged 8B --clients 16,64 --unmeasured 1 --output steps-in-turn-h200.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

import hierspec
from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.language_model import LanguageModel
from hierspec.machine import machine
from hierspec_bench.cli import common

WAYS = {"plain": "plain", "plain again": "plain", "auto": "auto"}  # -> plan

Call = tuple[str, Sampling]


class ClosedLoop:
    """An engine with a number of clients, each making one call after the other.

    `serving`: it is a server's, and each call is another user's, so nothing is drafted from earlier answers.
    """

    clock: Callable[[], float] = time.perf_counter

    def __init__(
        self, model: LanguageModel, plan: str, calls: Sequence[Call], clients: int = 1, serving: bool = True
    ) -> None:
        self.model, self.plan, self.clients, self.serving = model, plan, clients, serving
        self.seconds = 0.0
        self.texts: list[list[int]] = [[] for _ in calls]
        self._todo = list(enumerate(calls))
        self._running: dict[Request, int] = {}
        self._engine = Engine(serving=serving)

    @property
    def busy(self) -> bool:
        return bool(self._todo or self._running)

    def step(self) -> None:
        """One step of the engine. New calls take the places of those that have ended."""
        began = self.clock()
        while self._todo and len(self._running) < self.clients:
            number, (prompt, sampling) = self._todo.pop(0)
            namespace = f"call {id(self)} {number}" if self.serving else ""
            request = self.model.request(prompt, self.plan, sampling, namespace=namespace)
            self._running[request] = number
            self._engine.submit(request)
        with self.model.turn():
            self._engine.step()
        for request in [request for request in self._running if request.ended is not None]:
            self.texts[self._running.pop(request)] = request.output
        self.seconds += self.clock() - began


def calls_from(prompts: Sequence[str], first: int, count: int, max_tokens: int) -> list[Call]:
    return [
        (
            prompts[number % len(prompts)],
            Sampling(max_tokens=max_tokens, temperature=0.8 if number % 2 else 0.0, seed=number),
        )
        for number in range(first, first + count)
    ]


def in_turn(loops: Sequence[ClosedLoop]) -> None:
    while any(loop.busy for loop in loops):
        for loop in loops:
            if loop.busy:
                loop.step()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    options.add_enlarged(parser)
    common.add_load(parser, rounds=4)
    parser.add_argument(
        "--unmeasured",
        type=int,
        default=0,
        metavar="N",
        help="rounds before these, in which a GPU's kernels are made (0)",
    )
    parser.add_argument("--weights", default="auto", help="the weight format (auto)")
    common.add_prompts(parser)
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    sizes = common.chosen_clients(arguments)
    if arguments.unmeasured < 0:
        raise HierspecError(f"--unmeasured must be 0 or more, not {arguments.unmeasured}.")
    title, chosen = common.chosen_prompts(arguments)
    prompts = [prompt.turns[0] for prompt in chosen]
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, progress_bars() as progress:
        models = {
            way: hierspec.load(
                arguments.model,
                weights=arguments.weights,
                stores=str(Path(folder, way)),
                enlarged=arguments.enlarged,
                keep_learnt=False,
            )
            for way in WAYS
        }
        for way, plan in WAYS.items():
            models[way].generate("Hello", plan=plan, max_tokens=8)  # opens stores and drafters, and compiles
        all_rounds = arguments.unmeasured + arguments.rounds
        for number in range(all_rounds):
            for clients in sizes:
                progress(f"{clients} clients", number * len(sizes) + sizes.index(clients), all_rounds * len(sizes))
                count = max(arguments.calls, arguments.each * clients)
                calls = calls_from(prompts, number * count, count, arguments.max_tokens)
                loops = {way: ClosedLoop(models[way], plan, calls, clients) for way, plan in WAYS.items()}
                in_turn([loops[way] for way in _turned(list(WAYS), number)])
                if number < arguments.unmeasured:
                    continue
                rounds.append(
                    {
                        "clients": clients,
                        "calls": count,
                        "tokens": sum(map(len, loops["plain"].texts)),
                        "seconds": {way: round(loop.seconds, 4) for way, loop in loops.items()},
                        "same_texts": all(loop.texts == loops["plain"].texts for loop in loops.values()),
                    }
                )
    summary = [_summary(clients, [each for each in rounds if each["clients"] == clients]) for clients in sizes]
    for row in summary:
        note(", ".join(f"{name} {value}" for name, value in row.items()))
    same = all(each["same_texts"] for each in rounds)
    document = {
        "command": command_line(),
        "machine": machine(),
        "prompts": title,
        "max_tokens": arguments.max_tokens,
        "model": models["plain"].name,
        "enlarged": models["plain"].enlarged,
        "weights": arguments.weights,
        "same_texts": same,
        "summary": summary,
        "rounds": rounds,
    }
    hand_out(document, arguments.output)
    return 0 if same else 1


def _turned(ways: list[str], number: int) -> list[str]:
    turn = number % len(ways)
    return [*ways[turn:], *ways[:turn]]


def _summary(clients: int, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speeds over plain's, from the sums of all times, and the standard errors of the rounds' own ratios."""
    row: dict[str, Any] = {"clients": clients}
    for way in WAYS:
        times = [(each["seconds"]["plain"], each["seconds"][way]) for each in rounds]
        if way != "plain":
            row[f"{way} over plain"] = round(sum(plain for plain, _ in times) / sum(own for _, own in times), 4)
            ratios = [plain / own for plain, own in times]
            row[f"error of {way}"] = round(stdev(ratios) / sqrt(len(ratios)), 4) if len(ratios) > 1 else None
    return row


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
