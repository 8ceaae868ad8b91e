"""Text and load that change on the way: how near `auto` comes to the best fixed plan of each phase.

Conversations go from code to prose and back, then 1, 4, 16 and again 1 requests run at once. Every plan goes through
the same phases in the same order and keeps its stores and what it learnt from phase to phase; plans take turns within a
phase, so that a slow minute of the machine hits all of them. Exits with 1 where a text is not plain decoding's.

It made docs/results/auto-phases.json.

example:
  python experiments/phases.py --plans plain,lookup,draft,hd+ --max-tokens 96 --output phases.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hierspec.assembly.auto import AUTO
from hierspec.chat import Chat
from hierspec.cli import options
from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.equality import Difference, first_difference
from hierspec.language_model import LanguageModel
from hierspec.machine import machine
from hierspec.progress import Progress, silent
from hierspec.prompts import BenchPrompt
from hierspec_bench.cli import common

PLAIN = "plain"
LOADS = (1, 4, 16, 1)  # concurrent requests
_REQUESTS = 4  # per phase with fewer concurrent requests

# Code, prose, code again: text that prompt lookup drafts well and text that it does not, in one conversation each.
CONVERSATIONS = (
    (
        "Write a Python class Stack with the methods push, pop, peek, is_empty and size, each with a docstring.",
        "Leave the code. Tell a short story about a lighthouse keeper who finds a letter on the beach.",
        "Back to the class: write it once more with type annotations, and add a method clear.",
    ),
    (
        "Write a JavaScript function that sorts an array of objects by a given key, and show two calls of it.",
        "Something else: describe an autumn morning in a small town by a river, in two paragraphs.",
        "Now write the function again so that it can sort in descending order too, with the same two calls.",
    ),
    (
        "Write SQL that creates a table of books and a table of authors, and insert three rows into each.",
        "Explain to a child why leaves change their colours, in your own words and without a list.",
        "Write the SQL again with a column for the year in both tables, and all rows once more.",
    ),
    (
        "Write a shell script that renames all .txt files of a folder to .md and prints what it did.",
        "Write a letter to a friend about a concert that was better than expected.",
        "Now the script again, with a check that the folder exists and a count at the end.",
    ),
)
NAMES = ("code", "prose", "code again")


@dataclass
class Phase:
    """The time of each plan for the same texts, and differences from plain decoding's text."""

    name: str
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by plan, prefill included
    later: dict[str, float] = field(default_factory=dict)  # the part of `seconds` after prefill; not for batches
    differences: dict[str, list[Difference]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        fixed = {plan: seconds for plan, seconds in self.seconds.items() if plan != AUTO}
        best = min(fixed, key=fixed.__getitem__)
        later = {plan: seconds for plan, seconds in self.later.items() if plan != AUTO}
        decoding: dict[str, Any] = {}
        if later:
            least = min(later.values())
            decoding["decode_seconds"] = {plan: round(seconds, 3) for plan, seconds in self.later.items()}
            decoding["decode_auto_over_best"] = round(self.later[AUTO] / least, 4) if least else None
        return {
            "phase": self.name,
            "tokens": self.tokens,
            "seconds": {plan: round(seconds, 3) for plan, seconds in self.seconds.items()},
            "best_fixed": best,
            "auto_over_best": round(self.seconds[AUTO] / fixed[best], 4),
            "auto_over_plain": round(self.seconds[AUTO] / fixed[PLAIN], 4),
            **decoding,
            "differences": {
                plan: [str(difference) for difference in differences]
                for plan, differences in self.differences.items()
                if differences
            },
        }


class PhaseRun:
    """The plans of one run, each with its own stores; plain decoding and `auto` are always among them."""

    def __init__(self, model: LanguageModel, plans: Mapping[str, Plan], sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        self.plans = {PLAIN: Plan(), AUTO: model.plan(AUTO), **plans}
        self._apart = {name: model.apart() for name in self.plans}
        self._phases = 0
        for name, plan in self.plans.items():  # the first passes of a process pay for page faults and threads
            self._apart[name].generate("Hello", plan=plan, max_tokens=8)

    def phase(self, phase: Phase, prompts: Sequence[Sequence[int]], running_requests: int) -> list[tuple[int, ...]]:
        """All plans answer these prompts, `running_requests` at once. Returns plain decoding's answers."""
        written: dict[str, list[tuple[int, ...]]] = {}
        names = list(self.plans)
        first, self._phases = self._phases % len(names), self._phases + 1
        for name in names[first:] + names[:first]:
            written[name] = []
            for start in range(0, len(prompts), running_requests):
                group = [list(prompt) for prompt in prompts[start : start + running_requests]]
                began = time.perf_counter()
                answers = self._apart[name].generate_many(group, plan=self.plans[name], sampling=self.sampling)
                phase.seconds[name] = phase.seconds.get(name, 0.0) + time.perf_counter() - began
                written[name] += [answer.tokens for answer in answers]
                if running_requests == 1:
                    [answer] = answers
                    phase.later[name] = phase.later.get(name, 0.0) + answer.seconds - answer.first_seconds
            self.model.forget()  # what one plan computed must not help the next
        phase.tokens += sum(map(len, written[PLAIN]))
        for name, plan in self.plans.items():
            if plan.rule == "coupled" or self.sampling.temperature == 0:
                differences = self._differences(prompts, written[PLAIN], written[name])
                phase.differences.setdefault(name, []).extend(differences)
        return written[PLAIN]

    def _differences(
        self, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
    ) -> Iterator[Difference]:
        for prompt, expected, written in zip(prompts, plain, other, strict=True):
            difference = first_difference(self.model, prompt, expected, written, self.sampling, self.sampling.seed or 0)
            if difference is not None:
                yield difference


def shifting_text(
    run: PhaseRun, conversations: Sequence[Sequence[str]] = CONVERSATIONS, progress: Progress = silent
) -> list[Phase]:
    """Conversations whose turns go from code to prose and back, one after the other."""
    phases = [Phase(name) for name in NAMES]
    for number, turns in enumerate(conversations):
        chat = Chat(run.model)
        for phase, turn in zip(phases, turns, strict=True):
            [answer] = run.phase(phase, [chat.ask(turn)], 1)
            chat.answer(answer)
        progress("Shifting text", number + 1, len(conversations))
    return phases


def shifting_load(
    run: PhaseRun, prompts: Sequence[BenchPrompt], loads: Sequence[int] = LOADS, progress: Progress = silent
) -> list[Phase]:
    """First turns of prompts, more and more of them at once and then one again."""
    phases, start = [], 0
    for number, load in enumerate(loads):
        phases.append(Phase(f"{load} at once" + (", again" if load in loads[:number] else "")))
        wanted = max(load, _REQUESTS)
        chosen = [prompts[(start + offset) % len(prompts)].turns[0] for offset in range(wanted)]
        start += wanted
        run.phase(phases[-1], [run.model.encode(text) for text in chosen], load)
        progress("Shifting load", number + 1, len(loads))
    return phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    common.add_prompts(parser)
    common.add_plans(parser)
    common.add_output(parser)
    options.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    _, prompts = common.chosen_prompts(arguments)
    sampling = options.chosen_sampling(arguments)
    sampling = replace(sampling, seed=sampling.seed or 0)
    model = options.load_model(arguments)
    plans = {name: model.plan(name) for name in options.names(arguments.plans)}
    with progress_bars() as progress:
        phases = PhaseRun(model, plans, sampling)
        text = shifting_text(phases, CONVERSATIONS[: arguments.limit or len(CONVERSATIONS)], progress)
        load = shifting_load(PhaseRun(model, plans, sampling), prompts, progress=progress)
    document: dict[str, Any] = {
        "machine": machine(),
        "command": command_line(),
        "model": model.name,
        "dtype": model.dtype,
        "weights": model.weights,
        "threads": torch.get_num_threads(),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "auto": phases.plans[AUTO].to_toml(),
        "text": [phase.to_json() for phase in text],
        "load": [phase.to_json() for phase in load],
    }
    if not arguments.json:
        for shown in (*document["text"], *document["load"]):
            times = ", ".join(f"{plan} {seconds:.2f} s" for plan, seconds in shown["seconds"].items())
            note(f"{shown['phase']}: auto takes {shown['auto_over_best']:.3f} of {shown['best_fixed']} ({times})")
    hand_out(document, arguments.output)
    differences = [rows for phase in (*text, *load) for rows in phase.differences.values()]
    return int(any(not difference.is_tie for rows in differences for difference in rows))


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
