"""Thousands of hostile files, by seed: each is answered with a text or with one sentence, in time and within memory.

    python tests/soak/hostile_files.py --seed 1 --count 10000
    python tests/soak/hostile_files.py --seed 1 --only 4711

Cases run in worker processes. A failure is any exception but HierspecError, a message of several lines, a process that
dies, more than five seconds of processor time, or more than a gigabyte beyond what the worker had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

_SECONDS = 5  # of processor time, for a case
_MEMORY = 1 << 30
_WAIT = 300.0  # seconds on the clock, for a case that waits for something
_CASES_A_WORKER = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", type=int, help="replay one case in this process, with its traceback")
    parser.add_argument("--output", type=Path, help="write the record here, as JSON")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return _worker(chosen.worker, chosen.seed)
    if chosen.only is not None:
        return _replay(chosen.seed, chosen.only)
    print(f"seed {chosen.seed}", flush=True)
    started = time.monotonic()
    failures, outcomes = soak(chosen.seed, chosen.count, chosen.workers)
    record = {
        "command": " ".join(sys.argv),
        "seed": chosen.seed,
        "count": chosen.count,
        "outcomes": outcomes,
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
    }
    if chosen.output:
        chosen.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{chosen.count} cases, {len(failures)} failures, {record['seconds']} s: {outcomes}")
    return 1 if failures else 0


def soak(seed: int, count: int, workers: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Runs the cases 0 to `count`; the failures, and how many cases of each kind ended how."""
    failures: list[dict[str, Any]] = []
    outcomes: Counter[str] = Counter()
    numbers, lock = iter(range(count)), threading.Lock()

    def next_number() -> int | None:
        with lock:
            number = next(numbers, None)
        if number is not None and number % 500 == 0:
            print(f"case {number} of {count}, {len(failures)} failures", flush=True)
        return number

    def work(home: Path) -> None:
        number = next_number()
        while number is not None:
            with _started(home, seed) as worker:
                for _ in range(_CASES_A_WORKER):
                    answer = _ask(worker, number)
                    outcomes[f"{answer['kind']}: {answer['outcome']}"] += 1
                    if answer["outcome"] == "failure":
                        failures.append({"number": number, **answer})
                        print(f"case {number} ({answer['kind']}): {answer['what']}", flush=True)
                    number = next_number()
                    if number is None or not answer["alive"]:
                        break

    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        homes = [Path(folder) / str(number) for number in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, homes))
    return sorted(failures, key=lambda failure: failure["number"]), dict(sorted(outcomes.items()))


@contextlib.contextmanager
def _started(home: Path, seed: int) -> Iterator[subprocess.Popen[str]]:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    environment = {**os.environ, **one_thread, "HIERSPEC_CACHE": str(home / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--worker", str(home), "--seed", str(seed)]
    pipe = subprocess.PIPE
    with (home / "errors").open("w") as errors:
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)
        try:
            yield worker
        finally:
            worker.kill()
            worker.wait()


def _ask(worker: subprocess.Popen[str], number: int) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    watchdog = threading.Timer(_WAIT, worker.kill)
    watchdog.start()
    line = ""
    with contextlib.suppress(OSError):
        worker.stdin.write(f"{number}\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    watchdog.cancel()
    if line:
        answer: dict[str, Any] = json.loads(line)
        return answer
    code = worker.wait()
    reasons = {-signal.SIGXCPU: f"more than {_SECONDS} s of processor time", -signal.SIGKILL: "it never ends"}
    what = reasons.get(code, f"the process died ({code})")
    return {"kind": "unknown", "outcome": "failure", "what": what, "alive": False}


def _worker(home: Path, seed: int) -> int:
    from hostile_cases import Originals, make_case

    answers, sys.stdout = sys.stdout, sys.stderr
    originals = Originals(home / "originals")
    with contextlib.suppress(Exception):  # whatever is loaded at first use is loaded now
        import hierspec

        hierspec.load(originals.model, dtype="float32", backend="torch", pack="none").generate("x", max_tokens=4)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _MEMORY, resource.RLIM_INFINITY))
    for line in sys.stdin:
        number = int(line)
        folder = home / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(home / "cache" / "converted", ignore_errors=True)
        case = make_case(originals, seed, number, folder)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + _SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        outcome, what = _tried(case.run)
        # A thread that was left behind takes its time from the next case.
        alive = threading.active_count() == 1
        print(
            json.dumps({"kind": case.kind, "outcome": outcome, "what": what, "alive": alive}), file=answers, flush=True
        )
        if not alive:
            os._exit(0)
    return 0


def _tried(run: Any) -> tuple[str, str]:
    from hierspec.core.errors import HierspecError

    try:
        run()
        return "text", ""
    except HierspecError as error:
        return _told(error)
    except BaseException as error:  # also panics; none of them may reach a user
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "failure", f"{type(error).__name__}: {str(error)[:200]!r} at {Path(place.filename).name}:{place.lineno}"


def _told(error: BaseException) -> tuple[str, str]:
    message = str(error)
    if "\n" in message or not message.isprintable() or len(message) > 2000:
        return "failure", f"not one readable sentence: {message[:200]!r}"
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, MemoryError):
            return "failure", f"memory ran out: {message}"
        cause = cause.__cause__ or cause.__context__
    return "sentence", message


def _replay(seed: int, number: int) -> int:
    from hostile_cases import Originals, make_case

    with tempfile.TemporaryDirectory(prefix="hostile-") as home:
        os.environ["HIERSPEC_CACHE"] = str(Path(home) / "cache")
        case = make_case(Originals(Path(home) / "originals"), seed, number, Path(home) / "case")
        print(f"seed {seed}, case {number}: {case.kind}")
        started = time.process_time()
        try:
            print(case.run())
        except BaseException:
            traceback.print_exc()
        print(f"{time.process_time() - started:.2f} s of processor time")
    return 0


def _status(name: str) -> int:
    """Bytes, from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
