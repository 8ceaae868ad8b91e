"""Two replicas behind Ray Serve share a history; one is killed under load, and the database is stopped and started.

Counts requests that fail even after a retry, and histories that were in the database and are not there at the end.

  python tests/soak/replicas.py --requests 300 --output replicas.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import redis_server  # noqa: E402
from redis_server import RedisServer, until  # noqa: E402

TRIES = 2  # of a client: one retry
TOKENS = 24  # of an answer
LEARNT_TOKENS = 8  # shorter answers are not remembered


def why_not() -> str:
    """What is missing here; empty: nothing."""
    if importlib.util.find_spec("ray") is None:
        return "there is no ray here (make ray-test installs it apart: ray[serve] 2.60)"
    return redis_server.WHY_NOT


class Clients:
    """What users asked, and what they were answered."""

    def __init__(self, url: str, users: int) -> None:
        self.url, self.users = url, users
        self.failures: list[str] = []
        self.retries = self.answers = 0
        self.processes: dict[str, Counter[int]] = defaultdict(Counter)  # user -> who answered
        self.texts: dict[str, set[str]] = defaultdict(set)  # prompt -> answers, which must be one
        self.learnt: set[tuple[str, str]] = set()  # user and text, of answers that are long enough to be remembered
        self.attempts: Counter[int] = Counter()  # of the front
        self.lock = threading.Lock()

    def ask(self, number: int) -> None:
        user, prompt = (
            f"user {number % self.users}",
            f"What comes after {number // 3}, and why?",
        )  # three users ask the same
        why = ""
        for _ in range(TRIES):
            try:
                answer = self._post(user, prompt)
            except (urllib.error.URLError, OSError) as error:
                why = repr(error)
                with self.lock:
                    self.retries += 1
                continue
            with self.lock:
                self.answers += 1
                self.processes[user][answer["process"]] += 1
                self.attempts[answer["attempts"]] += 1
                self.texts[prompt].add(answer["text"])
                if answer["tokens"] >= LEARNT_TOKENS:
                    self.learnt.add((user, answer["text"]))
            return
        with self.lock:
            self.failures.append(f"{user}: {why}")

    def newest_process(self) -> int:
        with self.lock:
            return next(iter(self.processes[f"user {self.users - 1}"]))

    def _post(self, user: str, prompt: str) -> dict[str, Any]:
        body = json.dumps({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}).encode()
        request = urllib.request.Request(self.url, body, {"x-session-id": user})
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


def histories(port: int) -> set[tuple[bytes, bytes]]:
    """Every (namespace, document) of the database."""
    import redis

    with redis.Redis(port=port, protocol=2) as client:
        streams = list(client.scan_iter("hierspec:*:documents:*"))
        return {(stream, entry[b"t"]) for stream in streams for _, entry in client.xrange(stream)}


def start(model: str, history: str, plan: str, port: int) -> str:
    os.environ.update(HIERSPEC_MODEL=model, HIERSPEC_HISTORY=history, HIERSPEC_PLAN=plan, HIERSPEC_LEARNT="off")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    paths = os.pathsep.join([str(ROOT / "src"), *sys.path[:2], os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": paths, "HIERSPEC_LEARNT": "off"}}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    import ray_serve

    serve.run(ray_serve.application)
    return f"http://127.0.0.1:{port}/"


def run(model: str, plan: str, requests: int, users: int, clients: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        database = RedisServer(Path(folder), "--appendfsync", "always")
        try:
            asked = Clients(start(model, database.url, plan, redis_server.free_port()), users)
            return _disturbed(asked, database, requests, clients)
        finally:
            import ray
            from ray import serve

            serve.shutdown()
            ray.shutdown()
            database.kill()


def _disturbed(asked: Clients, database: RedisServer, requests: int, clients: int) -> dict[str, Any]:
    began, flushed = time.perf_counter(), set()
    with ThreadPoolExecutor(clients) as pool:
        for number in range(asked.users):  # every user once, so that each has a replica
            asked.ask(number)
        routed = {user: dict(processes) for user, processes in asked.processes.items()}
        third = requests // 3
        list(pool.map(asked.ask, range(third)))
        at_home = sum(len(processes) == 1 for processes in asked.processes.values())
        victim = asked.newest_process()
        flushed |= histories(database.port)
        under_load = [pool.submit(asked.ask, number) for number in range(third, 2 * third)]
        until(lambda: under_load[third // 8].done(), "load", 600)
        flushed |= histories(database.port)
        os.kill(victim, signal.SIGKILL)
        for each in under_load:
            each.result()
        under_load = [pool.submit(asked.ask, number) for number in range(2 * third, requests)]
        until(lambda: under_load[third // 8].done(), "load", 600)
        flushed |= histories(database.port)
        database.stop()
        until(lambda: under_load[third // 2].done(), "load without a database", 600)
        database.start()
        for each in under_load:
            each.result()
    at_end: set[tuple[bytes, bytes]] = set()

    def settled() -> bool:
        nonlocal at_end
        before, at_end = at_end, histories(database.port)
        time.sleep(3)  # longer than between two attempts of a history to write
        return before == at_end

    until(settled, "the end of all writing")
    return {
        "answers": asked.answers,
        "failed_after_a_retry": len(asked.failures),
        "failures": asked.failures[:10],
        "retries_of_clients": asked.retries,
        "attempts_of_the_front": {str(key): value for key, value in sorted(asked.attempts.items())},
        "users": asked.users,
        "users_at_one_replica_before_the_kill": at_home,
        "replicas_before_the_kill": len({process for each in routed.values() for process in each}),
        "processes_that_answered": len({process for each in asked.processes.values() for process in each}),
        "prompts_with_two_texts": sum(len(texts) > 1 for texts in asked.texts.values()),
        "answers_to_be_remembered": len(asked.learnt),
        "histories_flushed_before_a_failure": len(flushed),
        "histories_lost": len(flushed - at_end),
        "histories_at_end": len(at_end),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="of no use here: what happens depends on processes")
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--plan", default="hd+", help="default hd+")
    parser.add_argument("--requests", type=int, default=300, help="default 300")
    parser.add_argument("--users", type=int, default=20, help="default 20")
    parser.add_argument("--clients", type=int, default=8, help="at once (default 8)")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    arguments = parser.parse_args(command)
    if missing := why_not():
        print(f"Not run: {missing}.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            from hierspec.testing.checkpoints import tiny_checkpoint

            model = str(tiny_checkpoint(Path(folder) / "tiny", "llama"))
        found = run(model, arguments.plan, arguments.requests, arguments.users, arguments.clients)
    spoken = "python tests/soak/replicas.py " + " ".join(sys.argv[1:] if command is None else command)
    record = {"command": spoken.strip(), "model": arguments.model or "tiny, random weights", **found}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    return int(bool(record["failed_after_a_retry"] or record["histories_lost"] or record["prompts_with_two_texts"]))


if __name__ == "__main__":
    sys.exit(main())
