"""What to expect of drafts inside vLLM at batch 1, 16 and 256, for a model and a GPU that are not here: a simulation.

docs/results/vllm-batches.json was made by it. Texts are recorded answers (`--texts`, as `vllm_drafts.py` writes them);
the stores, the proposer and its pace are the real ones, and their time on this CPU counts. Only the target's steps are
made up, from public figures: a step reads the weights and every request's keys and values at 80% of the card's
bandwidth, or multiplies at 60% of its dense arithmetic, whichever takes longer, and 0.5 ms more. By these a token of
Llama 3.1 8B at batch 1 takes 4.7 ms on an H200; 4.97 was measured there after 512 tokens.
As texts repeat in large batches, only a request's own text drafts (the store `context`).

example:
  python experiments/vllm_batches.py --texts texts.jsonl --output docs/results/vllm-batches.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm_propose_times import made_proposer

from hierspec.core.plan import Plan
from hierspec.machine import machine

PLANS = {
    "adapting": Plan(stores=("context",), budget=24, merge=True, adapt=True),
    "fixed": Plan(stores=("context",), budget=24, merge=True),
}
_CONTEXT, _VOCABULARY = 4096, 1 << 20


@dataclass(frozen=True)
class Card:
    """Published figures of a GPU."""

    bandwidth: float  # bytes a second
    arithmetic: float  # dense bfloat16 operations a second


@dataclass(frozen=True)
class Target:
    """Published sizes of a model, in bfloat16."""

    weights: float
    keys_and_values: int  # bytes per token


CARDS = {"H200": Card(4.8e12, 989e12), "H100": Card(3.35e12, 989e12), "L40S": Card(0.864e12, 362e12)}
TARGETS = {"Llama-3.1-8B": Target(8.03e9, 131_072), "Llama-3.1-70B": Target(70.6e9, 327_680)}
_BANDWIDTH_USED, _ARITHMETIC_USED, _FIXED = 0.8, 0.6, 0.5e-3


def step_seconds(card: Card, target: Target, cards: int, rows: int, tokens_held: int) -> float:
    """Seconds of a step over `rows` rows, of requests whose texts have `tokens_held` tokens in total."""
    read = 2 * target.weights + tokens_held * target.keys_and_values
    multiplied = 2 * target.weights * rows
    reading = read / (_BANDWIDTH_USED * card.bandwidth * cards)
    return max(reading, multiplied / (_ARITHMETIC_USED * card.arithmetic * cards)) + _FIXED


class Batch:
    """Rows that each write one text after another."""

    def __init__(self, texts: Sequence[dict[str, Any]], rows: int) -> None:
        self.texts = [np.array(text["prompt"] + text["tokens"], np.int32) for text in texts]
        self.prompts = [len(text["prompt"]) for text in texts]
        self.token_ids = np.zeros((rows, max(map(len, self.texts))), np.int32)
        self.lengths = [0] * rows
        self.number = [row % len(texts) for row in range(rows)]
        self.drafts: list[list[int]] = [[] for _ in range(rows)]
        for row in range(rows):
            self._begin(row)
            # Rows start at different points: each has already written another share of its text.
            text, prompt = self.texts[self.number[row]], self.prompts[self.number[row]]
            self.lengths[row] = prompt + row * 7 % max(len(text) - prompt - 1, 1)

    def step(self) -> tuple[list[list[int]], int]:
        """What the target writes, and how many drafted tokens are accepted."""
        sampled, accepted = [], 0
        for row, draft in enumerate(self.drafts):
            if self.lengths[row] >= len(self.texts[self.number[row]]):
                self.number[row] = (self.number[row] + len(self.drafts)) % len(self.texts)
                self._begin(row)
                draft = []
            text, length, right = self.texts[self.number[row]], self.lengths[row], 0
            while right < len(draft) and length + right + 1 < len(text) and draft[right] == text[length + right]:
                right += 1
            sampled.append([int(token) for token in text[length : length + right + 1]])
            self.lengths[row] += right + 1
            accepted += right
        return sampled, accepted

    def _begin(self, row: int) -> None:
        text = self.texts[self.number[row]]
        self.token_ids[row, : len(text)] = text
        self.lengths[row] = self.prompts[self.number[row]]


def _time(passed: SimpleNamespace) -> float:
    """CPU time of this process, because others may run, plus the target's simulated steps."""
    return float(passed.seconds) + time.process_time()


def simulate(texts: Sequence[dict[str, Any]], plan: Plan | None, arguments: argparse.Namespace, rows: int) -> Any:
    """Tokens per second, and drafted and accepted tokens per row and step."""
    card, target = CARDS[arguments.card], TARGETS[arguments.target]
    batch, passed = Batch(texts, rows), SimpleNamespace(seconds=0.0)
    proposer = None
    if plan is not None:
        clock = partial(_time, passed)
        proposer = made_proposer(plan, arguments.tokens, _VOCABULARY, _CONTEXT, clock)
    tokens = drafted = accepted = 0
    spent = 0.0
    for _ in range(arguments.steps):
        wide = rows + sum(map(len, batch.drafts))
        passed.seconds += step_seconds(card, target, arguments.cards, wide, sum(batch.lengths))
        sampled, right = batch.step()
        tokens, drafted, accepted = tokens + sum(map(len, sampled)), drafted + wide - rows, accepted + right
        if proposer is not None:
            began = time.process_time()
            batch.drafts = proposer.propose(sampled, np.array(batch.lengths, np.int32), batch.token_ids)
            spent += time.process_time() - began
    return {
        "tokens_per_second": round(tokens / (passed.seconds + spent), 1),
        "drafted_a_row": round(drafted / rows / arguments.steps, 3),
        "accepted_a_row": round(accepted / rows / arguments.steps, 3),
        "drafting_ms_a_step": round(1e3 * spent / arguments.steps, 3),
        "step_ms": round(1e3 * passed.seconds / arguments.steps, 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with prompt and tokens")
    parser.add_argument("--batches", default="1,16,256")
    parser.add_argument("--card", choices=CARDS, default="H200")
    parser.add_argument("--cards", type=int, default=1, help="tensor parallel, without what they tell each other")
    parser.add_argument("--target", choices=TARGETS, default="Llama-3.1-8B")
    parser.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens (default 8)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    texts = [json.loads(line) for line in arguments.texts.read_text(encoding="utf-8").splitlines()]
    batches = {}
    for rows in map(int, arguments.batches.split(",")):
        plain = simulate(texts, None, arguments, rows)
        batches[str(rows)] = {"plain": plain}
        for name, plan in PLANS.items():
            result = simulate(texts, plan, arguments, rows)
            result["over_plain"] = round(result["tokens_per_second"] / plain["tokens_per_second"], 3)
            batches[str(rows)][name] = result
        print(rows, json.dumps(batches[str(rows)]), flush=True)
    record = {
        "command": " ".join(["python", "experiments/vllm_batches.py", *given]),
        "machine": machine(),
        "card": arguments.card,
        "cards": arguments.cards,
        "target": arguments.target,
        "num_speculative_tokens": arguments.tokens,
        "steps": arguments.steps,
        "batches": batches,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
