"""Allocations that fail at random places: at most one request fails, in one sentence; all other texts are plain's.

python tests/soak/allocations.py --seed 7 --count 500
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import PLANS, Allocations, Subject, a_prompt, a_sampling, write
from soaking import Soak, main

from hierspec.core.errors import OutOfMemory


def attack(subject: Subject, rng: random.Random, soak: Soak) -> None:
    """Refuse one allocation, then go on from what that left."""
    plan, model = rng.choice(list(PLANS)), subject.model
    sampling = a_sampling(rng, plan)
    prompts = [a_prompt(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    if rng.random() < 0.1:
        for pool in subject.pools():
            pool._drop_memory()  # so that the memory itself may be refused
    requests = [model.request(prompt, PLANS[plan], sampling) for prompt in prompts]
    key = plan, len(prompts)
    at = rng.randrange(1, subject.sizes.get(key, 200) + 1)
    allocations = Allocations(at)
    try:
        with allocations.watched():
            write(requests)
    except Exception as error:
        soak.fail(f"{subject.name}, {plan}, refused at {allocations.hit}: {error!r} came out of the engine")
    if not allocations.hit:  # there are fewer than that
        subject.sizes[key] = allocations.count
        return
    subject.sizes[key] = max(subject.sizes.get(key, 200), 2 * at)
    what = f"{subject.name}, {plan}, {len(prompts)} requests, refused at {allocations.hit}"
    soak.count_one(what)
    failed = [request for request in requests if request.error is not None]
    if len(failed) > 1 or any(not isinstance(request.error, OutOfMemory) for request in failed):
        soak.fail(f"{what}: {[str(request.error) for request in failed]}")
    soak.failed_requests += len(failed)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = subject.plain(prompt, sampling)
        if request.error is None and not subject.same(prompt, sampling, expected, request.output):
            soak.fail(f"{what}: another text beside it")
    prompt = [*prompts[0], *requests[0].output, 77] if rng.random() < 0.7 else prompts[-1]
    again = model.generate(prompt, plan=PLANS[rng.choice(["plain", plan])], sampling=sampling).tokens
    if not subject.same(prompt, sampling, subject.plain(prompt, sampling), again):
        soak.fail(f"{what}: another text afterwards")
    if trouble := subject.unbalanced(forget=rng.random() < 0.3):
        soak.fail(f"{what}: {trouble}")


def summary(soak: Soak) -> dict[str, object]:
    files = Counter(what.split("refused at ")[1].split(":")[0] for what in soak.what)
    return {"failed_requests": soak.failed_requests, "by_file": dict(files.most_common())}


if __name__ == "__main__":
    sys.exit(main("Failed allocations", attack, 500, summary))
