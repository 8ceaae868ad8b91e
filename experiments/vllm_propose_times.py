"""What a call of the vLLM proposer costs a row, against a recorded trace: no model runs.

docs/results/vllm-propose.json was made by it. Texts are replayed as vLLM would write them, in a batch whose rows all
sample in every step; the time is that of `propose` alone. By default the texts are prompts that come again and again,
so that nearly all drafts are accepted; with `--texts` they are recorded answers (as `vllm_drafts.py` writes them),
which docs/results/vllm-propose-answers.json was made with.

examples:
  python experiments/vllm_propose_times.py --output docs/results/vllm-propose.json
  python experiments/vllm_propose_times.py --texts texts.jsonl --output docs/results/vllm-propose-answers.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hierspec.assembly.assembler import Assembler
from hierspec.assembly.drafts import LoadOptions
from hierspec.assembly.vocabulary import open_home
from hierspec.core.plan import Plan
from hierspec.hosts.guest import Guest
from hierspec.hosts.host_pace import HostPace
from hierspec.hosts.vllm import Proposer
from hierspec.machine import machine
from hierspec.prompts import own_prompts, read_prompts
from hierspec.stores.registry import Home


class Replay:
    """A batch of texts that a host writes; nothing is computed."""

    def __init__(self, texts: Sequence[np.ndarray], context: int, steps: int) -> None:
        self.texts, self.lengths = texts, [context] * len(texts)
        self.tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
        for row, text in enumerate(texts):
            self.tokens[row, : len(text)] = text
        self.drafts: list[list[int]] = [[] for _ in texts]
        self.steps = steps

    def run(self, proposer: Proposer) -> tuple[list[float], int]:
        """Seconds of each call, and how many drafted tokens were accepted."""
        seconds, accepted = [], 0
        for _ in range(self.steps):
            sampled = []
            for row, draft in enumerate(self.drafts):
                following, right = self.texts[row][self.lengths[row] :], 0
                while right < len(draft) and draft[right] == following[right]:
                    right += 1
                sampled.append([int(token) for token in following[: right + 1]])
                self.lengths[row] += right + 1
                accepted += right
            counts = np.array(self.lengths, np.int32)
            began = time.process_time()  # CPU time of this process, because others may run
            self.drafts = proposer.propose(sampled, counts, self.tokens)
            seconds.append(time.process_time() - began)
        return seconds, accepted


def trace(path: Path | None, rows: int, length: int) -> tuple[list[np.ndarray], int]:
    """Texts of `length` tokens from the prompts of a file; each starts at another prompt and continues with the
    next."""
    tokenizer, size, _ = open_home()
    prompts = own_prompts() if path is None else read_prompts(path)
    return _joined([tokenizer.encode("\n".join(prompt.turns)) for prompt in prompts], rows, length, 7), size


def recorded(path: Path, rows: int, length: int) -> tuple[list[np.ndarray], int]:
    """The same with recorded prompts and answers, concatenated: few occur twice in a text."""
    pieces = []
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        pieces.append(item["prompt"] + item["tokens"])
    return _joined(pieces, rows, length, 1), open_home()[1]


def _joined(pieces: Sequence[list[int]], rows: int, length: int, step: int) -> list[np.ndarray]:
    texts = []
    for row in range(rows):
        tokens: list[int] = []
        at = row
        while len(tokens) < length:
            tokens += pieces[at % len(pieces)]
            at += step
        texts.append(np.array(tokens[:length], np.int32))
    return texts


def made_proposer(
    plan: Plan, most: int, size: int, context: int, clock: Callable[[], float] = time.perf_counter
) -> Proposer:
    """A proposer as in vLLM, without its configuration and without databases on disk."""
    vocabulary: Any = SimpleNamespace(model="trace", size=size, home=lambda *_: Home(Path("none"), ""))
    pace = HostPace(most, plan.adapt, clock)
    return Proposer.over(Guest(Assembler(vocabulary, LoadOptions()), plan, pace, context), context)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON lines with turns (default: hierspec's own)")
    parser.add_argument("--texts", type=Path, help="recorded answers instead: JSON lines with prompt and tokens")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--most", type=int, default=8, help="num_speculative_tokens (default 8)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    length = arguments.context + arguments.steps * (arguments.most + 1) + 1
    made_of = recorded if arguments.texts is not None else trace
    texts, size = made_of(arguments.texts or arguments.prompts, arguments.rows, length)
    plan = Plan(stores=("context", "history"), budget=24, merge=True)
    proposer = made_proposer(plan, arguments.most, size, length + arguments.most)
    seconds, accepted = Replay(texts, arguments.context, arguments.steps).run(proposer)
    again = [each[::-1].copy() for each in texts]  # other texts take their place, so that these become history
    Replay(again, arguments.context, 3).run(proposer)
    with_history, accepted_again = Replay(texts, arguments.context, arguments.steps).run(proposer)
    per_row = [1e6 * each / arguments.rows for each in with_history[1:]]
    record = {
        "command": " ".join(
            ["python", "experiments/vllm_propose_times.py", *(argv if argv is not None else sys.argv[1:])]
        ),
        "machine": machine(),
        "rows": arguments.rows,
        "context": arguments.context,
        "steps": arguments.steps,
        "num_speculative_tokens": arguments.most,
        "clock": "CPU time of the process",
        "microseconds_a_row": {
            "median": round(statistics.median(per_row), 1),
            "mean": round(statistics.mean(per_row), 1),
            "most": round(max(per_row), 1),
            "without_history": round(statistics.median(1e6 * each / arguments.rows for each in seconds[1:]), 1),
            "first_call": round(1e6 * seconds[0] / arguments.rows, 1),
        },
        "accepted_a_row_and_step": {
            "without_history": round(accepted / arguments.rows / arguments.steps, 2),
            "with_history": round(accepted_again / arguments.rows / arguments.steps, 2),
        },
    }
    document = json.dumps(record, indent=2) + "\n"
    if arguments.output:
        arguments.output.write_text(document, encoding="utf-8")
    print(document, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
