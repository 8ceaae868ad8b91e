"""Random row moves, preemptions and aborts in a host without a model: never a token of another request, bounded memory.

python tests/soak/vllm_rows.py --seed 7 --count 10000
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_free_host import Host, Text, own_text, owner, proposer

from hierspec.core.plan import Plan
from hierspec.machine import peak_memory

PLANS = {
    "lookup": Plan(stores=("context",), merge=True),
    "lookup, adapting": Plan(stores=("context",), merge=True, adapt=True),
    "history": Plan(stores=("context", "history"), merge=True),  # may draft what earlier requests wrote
}


def soak(name: str, rng: random.Random, steps: int) -> tuple[list[str], dict[str, int]]:
    """What went wrong in so many steps, and what was done."""
    host, failures = Host(proposer(PLANS[name], patience=rng.choice([1, 2])), rows=16), list[str]()
    preempted: list[Text] = []
    counts = dict.fromkeys(("requests", "aborted", "preempted", "moved", "drafted"), 0)
    early = 0
    for step in range(steps):
        while len(host.batch) < host.rows and rng.random() < 0.5:
            back = bool(preempted) and rng.random() < 0.5
            counts["requests"] += not back
            host.batch.append(preempted.pop(0) if back else own_text(counts["requests"], rng, rng.randrange(20, 400)))
        if host.batch and rng.random() < 0.1:
            text = host.batch.pop(rng.randrange(len(host.batch)))
            if rng.random() < 0.5:
                preempted.append(text)
                counts["preempted"] += 1
            else:
                counts["aborted"] += 1
        if rng.random() < 0.3:
            rng.shuffle(host.batch)
            counts["moved"] += 1
        prefilling = frozenset(id(text) for text in host.batch if rng.random() < 0.05)
        drafts = host.step(prefilling, verified=rng.choice([0, 1, 9, 9, 9]))
        for text in host.batch:
            draft = drafts[id(text)]
            counts["drafted"] += len(draft)
            own = owner(text.tokens[0])
            if name != "history" and any(owner(token) != own for token in draft):
                failures.append(f"{name}, step {step}: {draft} in a text of {own}")
        if len(host.proposer._rows) > 2 * host.rows:
            failures.append(f"{name}, step {step}: {len(host.proposer._rows)} requests are remembered")
        host.batch = [text for text in host.batch if len(text.tokens) - text.length > 1]
        if step == steps // 4:
            early = peak_memory()
    late = peak_memory()
    counts |= {"accepted": host.accepted, "peak_bytes_after_a_quarter": early, "peak_bytes_in_the_end": late}
    most = early + (16 << 20) if name != "history" else early + (80 << 20)  # a history may grow to its limit
    if late > most:
        failures.append(f"{name}: {early} bytes after a quarter of the steps, {late} in the end")
    return failures, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="steps of each plan")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    began, failures, done = time.perf_counter(), list[str](), {}
    for name in PLANS:
        failed, done[name] = soak(name, random.Random(arguments.seed), arguments.count)
        failures += failed
        print(f"{name}: {done[name]}, {len(failed)} failures", flush=True)
    record = {
        "command": shlex.join(["python", "tests/soak/vllm_rows.py", *sys.argv[1:]]),
        "seed": arguments.seed,
        "steps": arguments.count,
        "plans": [{"plan": name, **counts} for name, counts in done.items()],
        "failures": failures,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(failures[:20]) or "no failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
