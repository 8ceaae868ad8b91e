"""What soak runs over small models share: a seed, a count, a record."""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from faults import Subject, subjects

_STUCK_SECONDS = 300  # without an attack that ends


@dataclass
class Soak:
    """What happened so far."""

    count: int
    what: list[str] = field(default_factory=list)  # one entry an attack
    failures: list[str] = field(default_factory=list)
    failed_requests: int = 0

    def count_one(self, what: str) -> None:
        self.what.append(what)

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"FAILED: {what}", flush=True)


Attack = Callable[[Subject, random.Random, Soak], None]


def run(attack: Attack, made: list[Subject], seed: int, count: int) -> Soak:
    """Attack until so many have come to something. The same seed attacks the same places."""
    rng, soak, shown = random.Random(seed), Soak(count), 0
    while len(soak.what) < count:
        faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True)
        attack(rng.choice(made), rng, soak)
        if len(soak.what) >= shown + max(count // 10, 1):
            shown = len(soak.what)
            print(f"{shown} of {count}, {len(soak.failures)} failures", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return soak


def main(title: str, attack: Attack, default_count: int, summary: Callable[[Soak], dict[str, object]]) -> int:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seed", type=int, help="by default a new one, which is printed")
    parser.add_argument("--count", type=int, default=default_count)
    parser.add_argument("--output", type=Path, help="write a record to this JSON file")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    print(f"{title}: {arguments.count}, seed {seed}", flush=True)
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = run(attack, subjects(Path(folder)), seed, arguments.count)
    seconds = round(time.monotonic() - began, 1)
    record = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "seed": seed,
        "count": len(soak.what),
        "failures": soak.failures,
        "seconds": seconds,
        **summary(soak),
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{title}: {len(soak.what)} in {seconds} s, {len(soak.failures)} failures")
    return 1 if soak.failures else 0
