"""Thousands of requests with random plans, lengths and cancellations in one engine: memory stays flat, and what ends
has plain decoding's text.

python tests/soak/many_requests.py --seed 7 --count 10000 --device cuda
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import hierspec
from hierspec import LanguageModel, Sampling
from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.request import Request
from hierspec.machine import machine

PLANS = ("plain", "lookup", "hd+", "layerskip", "hispec+", "draft", "eagle", "hsd", "auto")
RUNNING = 24  # at most, at once
CHECKED = 25  # of so many that end one is written again, plainly and alone
CANCELLED = 0.25
LOOKS = 10  # times that memory is looked at
GROWTH = 0.02  # of the memory after the first half: by then every plan has run, with all that it keeps


@dataclass
class Run:
    """What happened so far."""

    ended: int = 0
    cancelled: int = 0
    tokens: int = 0
    checked: int = 0
    megabytes: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def a_request(model: LanguageModel, plans: list[str], rng: random.Random) -> Request:
    """Few prompts have anything in common, and some repeat themselves so that there is something to draft."""
    words = [rng.randrange(model.config.vocabulary) for _ in range(rng.choice([1, 4, 20, 100, 400]))]
    prompt = words * rng.choice([1, 1, 3])
    sampling = Sampling(max_tokens=rng.choice([1, 4, 12, 40]), temperature=rng.choice([0, 0.8]), seed=rng.randrange(99))
    return model.request(prompt, model.plan(rng.choice(plans)), sampling)


def megabytes(device: str) -> float:
    """That are in use: on a GPU of its memory, otherwise the most that this process ever had."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def soak(model: LanguageModel, plans: list[str], rng: random.Random, count: int, device: str) -> Run:
    """So many requests. One that ends makes room for the next."""
    run, engine = Run(), Engine(serving=True)
    running: dict[Request, int] = {}  # and the tokens after which it is cancelled
    begun, written_again = 0, list[Request]()
    while begun < count or running:
        while begun < count and len(running) < RUNNING:
            request = a_request(model, plans, rng)
            running[request] = rng.randrange(30) if rng.random() < CANCELLED else 1 << 30
            engine.submit(request)
            begun += 1
        engine.step()
        for request, most in list(running.items()):
            if request.ended is None and len(request.output) >= most:
                request.cancel()
            if request.ended is None:
                continue
            del running[request]
            run.ended, run.tokens = run.ended + 1, run.tokens + len(request.output)
            run.cancelled += request.ended == "cancelled"
            if request.error is not None:
                run.failures.append(f"request {run.ended}: {request.error}")
            elif run.ended % CHECKED == 0:
                written_again.append(request)
            if run.ended % max(count // LOOKS, 1) == 0:
                run.megabytes.append(round(megabytes(device), 1))
                print(f"{run.ended} of {count}, {run.megabytes[-1]} MB, {len(run.failures)} failures", flush=True)
    for request in written_again:
        check(model, request, run)
    half = run.megabytes[len(run.megabytes) // 2]
    if run.megabytes[-1] > (1 + GROWTH) * half:
        run.failures.append(f"memory grew from {half} to {run.megabytes[-1]} MB in the second half")
    return run


def check(model: LanguageModel, request: Request, run: Run) -> None:
    """A cancelled one has the beginning of the text."""
    run.checked += 1
    sampling = Sampling(request.sampling.max_tokens, request.sampling.temperature, seed=request.seed)
    alone = list(model.generate(request.prompt.tolist(), plan="plain", sampling=sampling).tokens)
    same = alone[: len(request.output)] if request.ended == "cancelled" else alone
    if request.output != same:
        run.failures.append(f"{request.hierarchy.tiers[0].scorer.name}: {request.output} instead of {alone}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="by default a new one, which is printed")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", help="by default the default model")
    parser.add_argument("--plans", default=",".join(PLANS), help="separated by commas")
    parser.add_argument("--output", type=Path, help="write a record to this JSON file")
    chosen = parser.parse_args(arguments)
    if chosen.count < 1:
        parser.error(f"--count must be at least 1, not {chosen.count}.")
    seed = random.SystemRandom().randrange(1 << 31) if chosen.seed is None else chosen.seed
    print(f"{chosen.count} requests, seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        named = () if chosen.model is None else (chosen.model,)
        plans = chosen.plans.split(",")
        try:
            model = hierspec.load(*named, device=chosen.device, stores=folder, keep_learnt=False)
            for plan in plans:
                model.hierarchy(model.plan(plan))
        except HierspecError as error:
            parser.error(str(error))
        run = soak(model, plans, random.Random(seed), chosen.count, chosen.device)
    record = {
        "command": shlex.join(["python", "tests/soak/many_requests.py", *(arguments or sys.argv[1:])]),
        "machine": machine(),
        "seed": seed,
        "requests": run.ended,
        "cancelled": run.cancelled,
        "tokens": run.tokens,
        "written_again": run.checked,
        "megabytes": run.megabytes,
        "failures": run.failures,
        "seconds": round(time.monotonic() - began, 1),
    }
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(run.failures) or f"no failures in {record['seconds']} s")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
