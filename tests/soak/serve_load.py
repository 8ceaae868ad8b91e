"""A server under load for minutes: streaming clients with seeds, temperatures, plans and grammars mixed, some of which
vanish. Every text is that of the same call alone, nothing fails, and memory stays what it was after a fifth of the
time: by then as many run at once as ever will, and the KV cache, which is kept, has been in use as far as it will be.
Gaps between tokens are told as they were, and also without the moments in which the whole machine stood still.

python tests/soak/serve_load.py --seed 7 --minutes 10 --clients 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec_bench.serving.client import Address, Reply
from hierspec_bench.serving.load import quantile
from hierspec_bench.serving.pauses import PauseWatch
from hierspec_bench.serving.process import ServerProcess, our_server

VANISHING = 0.15  # share of clients that go away in the middle
WORDS = ["ab", "abc", "the ", "dog ", "cat ", "12", "\n", "why ", "blue "]
PLANS = ["auto", "plain", "lookup"]
GRAMMARS: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"regex": "[a-f]{3,12}( [0-9]{1,4})*"}},
    {"response_format": {"type": "json_object"}},
]
CALM_SECONDS = 60.0  # in which the server must have noticed that everybody has gone
MORE_MEMORY = 96 << 20  # bytes of resident memory that allocators may keep
PARTS = 5  # of the time, after each of which memory is looked at


@dataclass
class Soak:
    failures: list[str] = field(default_factory=list)
    grammars: int = 0  # of the distinct calls, those with one
    answered: int = 0
    vanished: int = 0
    tokens: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)  # when a piece of text arrived, and the next one
    watch: PauseWatch = field(default_factory=PauseWatch)
    memory: list[int] = field(default_factory=list)  # bytes at the start, after each fifth of the time, and in the end

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"FAILED: {what}", flush=True)


def a_call(rng: random.Random, grammars: bool) -> dict[str, Any]:
    """A random call. Its plan is drawn each time that it is made: it never changes the text."""
    grammar = rng.choice(GRAMMARS) if grammars and rng.random() < 0.3 else {}
    return {
        "messages": [{"role": "user", "content": "".join(rng.choices(WORDS, k=rng.randrange(1, 60)))}],
        "max_tokens": rng.choice([1, 8, 24, 60]),
        "temperature": rng.choice([0.0, 0.7, 1.2]),
        "seed": rng.randrange(1 << 30),
        **grammar,
    }


async def load(server: ServerProcess, rng: random.Random, clients: int, seconds: float, distinct: int) -> Soak:
    soak = Soak()
    grammars = await _has_grammars(server.address)
    calls = [a_call(rng, grammars) for _ in range(distinct)]
    soak.grammars = sum(len(call) > 4 for call in calls)
    alone = [await server.address.chat({**call, "plan": "plain"}) for call in calls]
    for call, reply in zip(calls, alone, strict=True):
        if reply.error:
            soak.fail(f"alone, {json.dumps(call)}: {reply.error}")
    soak.memory.append(server.resident_bytes())
    until = time.monotonic() + seconds

    async def watch() -> None:
        for _ in range(PARTS - 1):
            await asyncio.sleep(seconds / PARTS)
            soak.memory.append(server.resident_bytes())

    async def client(own: random.Random) -> None:
        while time.monotonic() < until and len(soak.failures) < 20:
            index = own.randrange(len(calls))
            body = {**calls[index], "plan": own.choice(PLANS), "namespace": own.choice(["", "a", "b"])}
            stop_after = own.randrange(0, 6) if own.random() < VANISHING else None
            _judge(soak, body, await server.address.chat(body, stop_after), alone[index], stop_after)

    with soak.watch:
        await asyncio.gather(watch(), *(client(random.Random(rng.random())) for _ in range(clients)))
    await _calm(server.address, soak)
    soak.memory.append(server.resident_bytes())
    if soak.memory[-1] > soak.memory[1] + MORE_MEMORY:
        soak.fail(f"memory has grown: {soak.memory}")
    return soak


def _judge(soak: Soak, body: dict[str, Any], reply: Reply, alone: Reply, stop_after: int | None) -> None:
    if reply.error:
        soak.fail(f"{json.dumps(body)}: {reply.error}")
    elif stop_after is not None and not reply.ended:
        soak.vanished += 1
        if not alone.text.startswith(reply.text):
            soak.fail(f"{json.dumps(body)}: {reply.text!r} does not begin {alone.text!r}")
    else:
        soak.answered += 1
        soak.tokens += reply.tokens
        soak.gaps += zip(reply.pieces, reply.pieces[1:], strict=False)
        if (reply.text, reply.ended) != (alone.text, alone.ended):
            soak.fail(f"{json.dumps(body)}: {reply.text!r} ({reply.ended}) instead of {alone.text!r} ({alone.ended})")


async def _has_grammars(address: Address) -> bool:
    """Whether the server keeps to grammars; without the package for them it refuses."""
    reply = await address.chat({"messages": [{"role": "user", "content": "yes?"}], "max_tokens": 8, **GRAMMARS[0]})
    return not reply.error and reply.text in GRAMMARS[0]["structured_outputs"]["choice"]


async def _calm(address: Address, soak: Soak) -> None:
    """Nothing runs or waits any more, and running requests hold nothing."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    until = time.monotonic() + CALM_SECONDS
    while True:
        text = (await address.get("/metrics"))[1].decode()
        values = {name: float(re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)[0]) for name in names}
        if not any(values.values()):
            return
        if time.monotonic() > until:
            soak.fail(f"after everybody had gone: {values}")
            return
        await asyncio.sleep(0.1)


def record_of(soak: Soak) -> dict[str, Any]:
    return {
        "calls_with_a_grammar": soak.grammars,
        "answered": soak.answered,
        "vanished": soak.vanished,
        "tokens": soak.tokens,
        **_figures([ended - began for began, ended in soak.gaps]),
        "pauses_of_the_machine_ms": [round(1000 * (ended - began), 1) for began, ended in soak.watch.pauses],
        "without_pauses": _figures([ended - began - soak.watch.within(began, ended) for began, ended in soak.gaps]),
        "memory_bytes": soak.memory,
        "failures": soak.failures,
    }


_SHARES = {"median": 0.5, "p99": 0.99, "longest": 1.0}


def _figures(gaps: list[float]) -> dict[str, Any]:
    ordered = sorted(gaps)
    median = quantile(ordered, 0.5)
    return {
        "gap_ms": {name: round(1000 * quantile(ordered, share), 2) for name, share in _SHARES.items()},
        "longest_over_median": round(ordered[-1] / median, 2) if median else 0.0,
    }


def run(model: str | None, seed: int, clients: int, minutes: float, distinct: int, say: Callable[[str], None]) -> Soak:
    with ExitStack() as stack:
        if model is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = str(tiny_checkpoint(folder / "tiny", "llama"))
        server = stack.enter_context(our_server([] if model == "default" else [model]))
        say(f"serving at {server.address.url}")
        return asyncio.run(load(server, random.Random(seed), clients, 60 * minutes, distinct))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="default: a tiny random one; `default`: the default model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--distinct", type=int, default=100, help="different calls, each answered alone first")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    soak = run(
        arguments.model,
        arguments.seed,
        arguments.clients,
        arguments.minutes,
        arguments.distinct,
        lambda line: print(line, flush=True),
    )
    record = {"command": shlex.join(["python", "tests/soak/serve_load.py", *sys.argv[1:]]), "seed": arguments.seed}
    record |= {"clients": arguments.clients, "minutes": arguments.minutes, **record_of(soak)}
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
