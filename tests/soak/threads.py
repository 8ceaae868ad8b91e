"""Threads that share a model, doing anything at once: every text is the one that its caller gets alone.

python tests/soak/threads.py --seed 7 --count 200
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hierspec
from hierspec import Chat, LanguageModel, Plan, Sampling, TierPlan
from hierspec.testing.checkpoints import tiny_checkpoint

PLANS: list[Plan | str] = [
    "plain",
    "lookup",
    "hd",
    Plan(stores=("context",), merge=True, tiers=(TierPlan(exit_layer=3, gather=3, candidates=2),)),
    Plan(tiers=(TierPlan(skip_layers=(1,), gather=4),)),
]
THREADS, PATIENCE = 4, 600  # seconds after which a thread counts as stuck
Work = Callable[[Plan | str], object]  # the same thing under any plan


def a_prompt(rng: random.Random) -> str:
    return "".join(rng.choices(["ab", "abc", "the ", "dog ", "cat ", "12", "\n"], k=rng.randrange(1, 40)))


def a_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        max_tokens=rng.randrange(1, 30),
        temperature=rng.choice([0, 0.8]),
        seed=rng.randrange(1000),
        logprobs=rng.choice([None, None, 2]),
    )


def some_work(model: LanguageModel, rng: random.Random) -> Work:
    """One thing that a thread may do."""
    prompt, sampling, several = a_prompt(rng), a_sampling(rng), [a_prompt(rng) for _ in range(rng.randrange(1, 4))]
    most = rng.randrange(1, 6)

    def generate(plan: Plan | str) -> object:
        answer = model.generate(prompt, plan=plan, sampling=sampling)
        return answer.tokens, answer.logprobs

    def answers(plan: Plan | str) -> object:
        return [answer.tokens for answer in model.generate(prompt, n=2, plan=plan, sampling=sampling)]

    def batch(plan: Plan | str) -> object:
        return [answer.tokens for answer in model.generate_many(several, plan=plan, sampling=sampling)]

    def stream(plan: Plan | str) -> object:
        return [token for step in model.stream(prompt, plan=plan, sampling=sampling) for token in step.tokens]

    def left_early(plan: Plan | str) -> object:
        tokens: list[int] = []
        for step in model.stream(prompt, plan=plan, sampling=sampling):
            tokens += step.tokens
            if len(tokens) >= most:
                break
        return tokens[:most]  # a pass may bring more

    def chat(plan: Plan | str) -> object:
        conversation = Chat(model, plan=plan, sampling=sampling)
        return ["".join(step.text for step in conversation.say(text)) for text in several]

    def forget(plan: Plan | str) -> object:
        model.forget()
        return None

    works: list[Work] = [generate, answers, batch, stream, left_early, chat, forget]
    return rng.choice(works)


def round_of(model: LanguageModel, rng: random.Random) -> list[str]:
    """Some work for every thread, under random plans at once; what differs from plain decoding alone."""
    todo = [[(some_work(model, rng), rng.choice(PLANS)) for _ in range(3)] for _ in range(THREADS)]
    expected = [[work("plain") for work, _ in works] for works in todo]
    results: list[object] = [None] * THREADS

    def run(number: int) -> None:
        try:
            results[number] = [work(plan) for work, plan in todo[number]]
        except BaseException as error:  # whatever it is, it is a failure of this round
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if any(thread.is_alive() for thread in threads):
        return ["a thread is stuck"]
    return [
        f"{[work.__name__ for work, _ in works]}: {found!r} instead of {right!r}"
        for works, right, found in zip(todo, expected, results, strict=True)
        if found != right
    ]


def soak(seed: int, count: int, say: Callable[[str], None]) -> list[str]:
    """What went wrong in so many rounds."""
    rng, failures = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / "tiny", "llama")
        model = hierspec.load(checkpoint, backend="compiled", device="cpu", stores=Path(folder) / "stores")
        for number in range(1, count + 1):
            failures += [f"round {number}: {what}" for what in round_of(model, rng)]
            if number % 20 == 0 or number == count:
                say(f"{number} of {count} rounds, {len(failures)} failures")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="rounds of 12 pieces of work")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    began = time.perf_counter()
    failures = soak(arguments.seed, arguments.count, lambda line: print(line, flush=True))
    record = {
        "command": shlex.join(["python", "tests/soak/threads.py", *sys.argv[1:]]),
        "seed": arguments.seed,
        "rounds": arguments.count,
        "pieces_of_work": arguments.count * THREADS * 3,
        "failures": failures,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(failures) or "no failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
