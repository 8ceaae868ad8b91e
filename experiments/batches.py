"""How many tokens a second come where many write at once, and is `auto` ever slower than plain decoding?

Prompts that ship with hierspec are answered by one worker, as a server does it: so many at a time, in batches under
plain and under the other plans in turn. Nothing learnt by earlier runs is used, and each plan has stores of its own.
The texts must be the same. Beside the tokens a second it counts the processor's seconds, which mean more where others
use the machine too, and how wide the passes of each scorer were. The last line is one JSON document.
It made docs/results/batches.json.

example:
  python experiments/batches.py --together 1,4,16,64 --max-tokens 64
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hierspec
from hierspec.core.interfaces import Answer, Ask
from hierspec.generation import Generation, TextStep
from hierspec.language_model import LanguageModel
from hierspec.machine import machine
from hierspec.prompts import own_prompts, spread
from hierspec.scorers.base import StateScorer
from hierspec.worker import Event, Job, Worker


@contextmanager
def counted_passes() -> Iterator[dict[str, Counter[str]]]:
    """Counts passes, asks and rows of every scorer by name, inside the context. Prefill counts by its asks."""
    counts: dict[str, Counter[str]] = {}
    score = StateScorer.score

    def counted(scorer: StateScorer, asks: Sequence[Ask]) -> list[Answer]:
        rows = sum(1 + len(ask.proposal) for ask in asks)
        counts.setdefault(scorer.name, Counter()).update(passes=1, asks=len(asks), rows=rows)
        return score(scorer, asks)

    with patch.object(StateScorer, "score", counted):
        yield counts


def answers(worker: Worker, prompts: Sequence[list[int]], plan: str, max_tokens: int) -> list[Generation]:
    """Answers to all these prompts at once, half of them sampled."""
    heard: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in prompts]
    for number, (prompt, events) in enumerate(zip(prompts, heard, strict=True)):
        sampling = hierspec.Sampling(max_tokens=max_tokens, temperature=0.8 * (number % 2), seed=number)
        worker.submit(Job(prompt, plan, sampling, events.put))
    results = []
    for events in heard:
        while isinstance(event := events.get(), TextStep):
            pass
        if not isinstance(event, Generation):
            raise event.error
        results.append(event)
    return results


def timed(worker: Worker, prompts: Sequence[list[int]], plan: str, max_tokens: int) -> dict[str, Any]:
    """Tokens, times and passes of these prompts at once."""
    worker.model.forget()
    with counted_passes() as counts:
        began, spent = time.perf_counter(), time.process_time()
        results = answers(worker, prompts, plan, max_tokens)
        seconds, processor = time.perf_counter() - began, time.process_time() - spent
    tokens = sum(len(result.tokens) for result in results)
    passes = {
        name: {
            "passes": count["passes"],
            "requests_a_pass": round(count["asks"] / count["passes"], 2),
            "rows_a_pass": round(count["rows"] / count["passes"], 2),
        }
        for name, count in counts.items()
    }
    return {
        "outputs": [result.tokens for result in results],
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "processor_seconds": round(processor, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "scorers": passes,
    }


def compare(workers: dict[str, Worker], prompts: Sequence[list[int]], rounds: int, max_tokens: int) -> dict[str, Any]:
    """These prompts at once under all plans in turn, several times."""
    runs: dict[str, list[dict[str, Any]]] = {plan: [] for plan in workers}
    same = True
    for number in range(rounds):
        outputs = []
        for plan in list(workers) if number % 2 else list(workers)[::-1]:
            run = timed(workers[plan], prompts, plan, max_tokens)
            outputs.append(run.pop("outputs"))
            runs[plan].append(run)
        same = same and all(output == outputs[0] for output in outputs)
    return {"together": len(prompts), "same": same, **_summary(runs), "runs": runs}


def _summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Speed relative to plain decoding, by wall-clock and by CPU time."""

    def total(plan: str, name: str) -> float:
        return float(sum(run[name] for run in runs[plan]))

    return {
        "tokens_per_second": {plan: round(total(plan, "tokens") / total(plan, "seconds"), 2) for plan in runs},
        "over_plain": {
            plan: {
                "speedup": round(total("plain", "seconds") / total(plan, "seconds"), 3),
                "by_processor_seconds": round(
                    total("plain", "processor_seconds") / total(plan, "processor_seconds"), 3
                ),
            }
            for plan in runs
            if plan != "plain"
        },
    }


def prompts_for(model: LanguageModel, count: int) -> list[list[int]]:
    shipped = own_prompts()
    texts = [prompt.turns[0] for prompt in spread(shipped, min(count, len(shipped)))]
    return [model.encode(texts[number % len(texts)]) for number in range(count)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or hub name (the default model)")
    parser.add_argument("--together", default="1,4,16,64", help="requests at once, separated by commas (1,4,16,64)")
    parser.add_argument("--plans", default="plain,auto", help="plain and others, separated by commas (plain,auto)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (2)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, help="write the result to this JSON file too")
    arguments = parser.parse_args(argv)
    plans = arguments.plans.split(",")
    if "plain" not in plans:
        parser.error("--plans must name plain, which the others are compared with")
    os.environ["HIERSPEC_LEARNT"] = "off"
    results = []
    with tempfile.TemporaryDirectory() as stores:
        model = hierspec.load(arguments.model, stores=stores, keep_learnt=False)
        workers = {plan: Worker(model.apart()) for plan in plans}  # no plan may benefit from what another wrote
        for plan, worker in workers.items():  # first passes pay for page faults, threads and opening stores
            answers(worker, [model.encode("Hello")], plan, 8)
        for together in map(int, arguments.together.split(",")):
            prompts = prompts_for(model, together)
            results.append(compare(workers, prompts, arguments.rounds, arguments.max_tokens))
            shown = {name: value for name, value in results[-1].items() if name != "runs"}
            print(json.dumps(shown), file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.close()
    command = "python experiments/batches.py " + shlex.join(sys.argv[1:] if argv is None else argv)
    document = {"command": command, "machine": machine(), "max_tokens": arguments.max_tokens, "results": results}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if all(result["same"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
