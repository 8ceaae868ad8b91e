"""Fuzzed requests against a real server with a tiny model: no 5xx, no hang, no error without a sentence, and nothing
held when all is over.

Bodies are made from the fields that the server knows, sensible and not; some are broken after that, and some clients
break off. Several clients send at once.

example:
  python tests/soak/fuzz_server.py --seed 1 --count 50000 --output fuzz_server.json
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
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving import Running, running, until

import hierspec
from hierspec.serve.settings import Limits, Settings
from hierspec.testing.checkpoints import tiny_checkpoint

CLIENTS = 8
HANG_SECONDS = 120  # far more than any of these takes
LENGTH = 4  # tokens of an answer, at most
LIMITS = Limits(max_tokens=LENGTH, body_bytes=1 << 20, call_answers=8, body_seconds=30)
PATHS = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
}
MESSAGE = {"role": "user", "content": "Why is the sky blue?"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SENSIBLE: dict[str, list[Any]] = {
    "messages": [
        [MESSAGE],
        [{"role": "system", "content": "Be brief."}, MESSAGE],
        [{**MESSAGE, "content": "é€😀" * 9}],
    ],
    "prompt": ["Hi", ["Hi", "Ho"], [5, 6, 7], [[5, 6], [7]], "x" * 600],
    "input": ["Hi", [MESSAGE]],
    "tokens": [[5, 6, 7], []],
    "model": ["tiny", "other", None],
    "max_tokens": [1, LENGTH, LENGTH + 1, None],
    "max_completion_tokens": [1, 0],
    "temperature": [0, 0.5, 2, 1e-9],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 3],
    "min_p": [0, 0.5, 1],
    "presence_penalty": [-2, 1.5],
    "frequency_penalty": [-2, 1.5],
    "repetition_penalty": [0.01, 1.1, 100],
    "logit_bias": [{"5": 100}, {"5": -100, "400": 1}, {}],
    "seed": [0, -1, 2**63 - 1],
    "stop": ["a", ["a", "b"], []],
    "stop_token_ids": [[5], [10**6]],
    "n": [1, 2, 9],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "logprobs": [True, False, 0, 3],
    "top_logprobs": [0, 20],
    "echo": [True],
    "suffix": ["x"],
    "best_of": [1, 2],
    "plan": ["plain", "auto", "lookup", "hispec+", "nothing", "../plan.toml"],
    "namespace": ["a", ""],
    "details": [True],
    "timings": [True],
    "timings_per_token": [True],
    "return_token_ids": [True],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}, {"json": SCHEMA}],
    "guided_regex": ["(", "a{1,3}"],
    "chat_template_kwargs": [{"enable_thinking": False}, {"messages": []}],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "parse_special": [True],
}
LEAVES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    10**30,
    0.5,
    -1e300,
    "",
    "a",
    "\0",
    "\ud800",
    "é€😀",
    "x" * 2000,
]


def value(chance: random.Random, depth: int = 3) -> Any:
    """Anything that JSON can say."""
    kind = chance.random()
    if depth and kind < 0.15:
        return [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if depth and kind < 0.3:
        return {chance.choice(["type", "role", "content", "text", "a"]): value(chance, depth - 1) for _ in range(2)}
    return chance.choice(LEAVES)


def body(chance: random.Random, needed: tuple[str, ...]) -> bytes:
    names = {*chance.sample(sorted(SENSIBLE), chance.randrange(5)), *(needed if chance.random() < 0.95 else ())}
    wrong = chance.random() < 0.5  # most requests with many wrong fields would be refused for the first of them
    fields = {name: chance.choice(SENSIBLE[name]) for name in sorted(names)}
    if wrong and fields:
        fields[chance.choice(sorted(fields))] = value(chance)
    data = json.dumps(fields).encode()
    if chance.random() < 0.1:
        place = chance.randrange(len(data) + 1)
        data = data[:place] + chance.choice([b"", b"\xff", b"\0", b"NaN", b"[" * 200, b'"', b"}"]) + data[place + 1 :]
    return data


def request(chance: random.Random) -> tuple[bytes, bool]:
    """The bytes of a request, and whether its client breaks off."""
    path, needed = chance.choice(sorted(PATHS.items()))
    data = body(chance, needed)
    if chance.random() < 0.01:
        data += b" " * LIMITS.body_bytes
    method = "POST" if chance.random() < 0.98 else chance.choice(["GET", "PUT", "OPTIONS", "HEAD", "BREW"])
    kind = "application/json" if chance.random() < 0.97 else chance.choice(["text/plain", "", "multipart/form-data"])
    length = len(data) if chance.random() < 0.98 else chance.choice([0, len(data) // 2, 10**12])
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    sent = head.encode() + f"Content-Length: {length}\r\n\r\n".encode() + data
    # What comes behind a body that said to be shorter is not read: the reply may be lost with it.
    breaks_off = length != len(data) or chance.random() < 0.05
    return sent[: chance.randrange(len(sent))] if breaks_off and chance.random() < 0.5 else sent, breaks_off


async def exchange(port: int, sent: bytes, breaks_off: bool) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        await writer.drain()
        return b"" if breaks_off else await reader.read()
    except ConnectionError:  # the server closed it first
        return b""
    finally:
        writer.close()


def complaint(received: bytes, method: bytes) -> str:
    """What is wrong with a reply, if anything."""
    if not received:
        return ""
    head, _, content = received.partition(b"\r\n\r\n")
    status = int(head[9:12])
    if status >= 500:
        return f"status {status}: {content[:500]!r}"
    if b"event-stream" in head and re.search(rb'"error": *[{"]', content):  # Responses say "error": null
        return f"an error amid a stream: {content[-500:]!r}"
    if status >= 400 and method != b"HEAD" and b"application/json" in head:
        error = json.loads(content)["error"]
        if not error["message"].endswith((".", "!", "?")):
            return f"no sentence: {content[:500]!r}"
    return ""


async def client(server: Running, requests: list[tuple[bytes, bool]], record: dict[str, Any]) -> None:
    while requests:
        sent, breaks_off = requests.pop()
        try:
            received = await asyncio.wait_for(exchange(server.port, sent, breaks_off), HANG_SECONDS)
            wrong = complaint(received, sent.split(b" ")[0])
            if not received and not breaks_off:
                wrong = "no reply"
        except TimeoutError:
            received, wrong = b"", "a hang"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        record["statuses"][received[9:12].decode("latin-1") or "none"] += 1
        if wrong:
            record["failures"].append({"request": repr(sent[:3000]), "wrong": wrong})
            print(f"FAILED: {wrong}\n{sent[:3000]!r}", flush=True)


def run(server: Running, seed: int, count: int) -> dict[str, Any]:
    """The same seed sends the same requests; which of them run together depends on the machine."""
    chance, began = random.Random(seed), time.perf_counter()
    record: dict[str, Any] = {"seed": seed, "count": count, "statuses": Counter(), "failures": []}

    async def run_all() -> None:
        for start in range(0, count, 2000):
            requests = [request(chance) for _ in range(min(2000, count - start))]
            await asyncio.gather(*[client(server, requests, record) for _ in range(CLIENTS)])
            print(f"{min(count, start + 2000)} of {count}, {len(record['failures'])} failures", flush=True)

    asyncio.run(run_all())
    until(lambda: server.answers == 0 and server.model.worker.running == 0)
    record["seconds"] = round(time.perf_counter() - began, 1)
    return record


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="by default a new one, which is printed")
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 31) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = hierspec.load(tiny_checkpoint(Path(folder) / "tiny", "llama"), keep_learnt=False)
        with running(model, Settings(model_name="tiny", limits=LIMITS)) as server:
            record = run(server, seed, chosen.count)
    record = {"command": shlex.join(["python", "tests/soak/fuzz_server.py", *sys.argv[1:]]), **record}
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({**record, "failures": len(record["failures"])}))
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
