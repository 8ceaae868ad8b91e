"""Compiles what is not yet in the cache of compiled code, in several worker processes at once.

One process would be slower: numba compiles one function at a time, whatever the number of threads. So workers
(`python -m hierspec.compiling NAME …`) compile into the cache on disk, and this process reads from there. If a worker
fails, this process compiles what it does not find.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Protocol

from hierspec.progress import COMPILING, Progress, silent

try:
    import fcntl
except ImportError:  # not on every system: then two processes may compile the same
    fcntl = None  # type: ignore[assignment]

_MOST_WORKERS = 4  # there is not more to compile in parallel
_START_SECONDS = 0.7  # until a worker begins to compile

log = logging.getLogger("hierspec")


class Compilable(Protocol):
    """Something to compile."""

    name: str  # MODULE:ATTRIBUTE: where a worker finds it
    seconds: float  # that compiling takes on a slow core, roughly

    def cached(self) -> bool:
        """Whether no worker needs to compile it: it is in the cache, or there is no cache to put it in."""

    def load(self) -> None:
        """Compile it, or read it from the cache."""


class _Workers:
    """The workers that this process has started, and what they still have to compile."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Compilable, subprocess.Popen[str]]] = {}
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """After a fork, in the child: the workers belong to the parent."""
        self._running, self._lock = {}, threading.RLock()

    def start(self, jobs: Iterable[Compilable]) -> None:
        """Start compiling these, without waiting."""
        with self._lock:
            missing = {job.name: job for job in jobs if job.name not in self._running and not job.cached()}
            if not missing or not _can_start():
                return
            atexit.unregister(self.stop)  # at most once
            atexit.register(self.stop)
            for names in _shares(missing.values(), min(_cores(), _MOST_WORKERS)):
                with suppress(OSError):  # no more processes: then it is compiled here
                    worker = _worker(names)
                    self._running.update({name: (missing[name], worker) for name in names})

    def finish(self, jobs: Sequence[Compilable] = (), progress: Progress = silent) -> None:
        """Load these, and wait until nothing is being compiled any more."""
        with self._lock:
            self.start(jobs)
            running = [job for job, _ in self._running.values()]
            todo = running + [job for job in jobs if job not in running and not job.cached()]
            if not todo:
                self._load(jobs)
                return
            began, what = time.monotonic(), COMPILING.format(seconds=_about(todo))
            total, done = sum(job.seconds for job in todo), 0.0
            log.info(what)
            try:
                for job in todo:
                    progress(what, round(10 * done), round(10 * total))
                    self._wait(job.name)
                    if job in jobs:
                        job.load()
                    done += job.seconds
                progress(what, round(10 * total), round(10 * total))
                self._load(jobs)
            except BaseException:
                self.stop()
                raise
            log.info("Compiled in %.1f s", time.monotonic() - began)

    def _load(self, jobs: Sequence[Compilable]) -> None:
        for job in jobs:
            job.load()

    def _wait(self, name: str) -> None:
        """Wait until its worker reports it as compiled, or ends."""
        while name in self._running:
            _, worker = self._running[name]
            assert worker.stdout is not None
            line = worker.stdout.readline().strip()
            for other, (_, its) in list(self._running.items()):
                if its is worker and line in (other, ""):
                    del self._running[other]
            if all(its is not worker for _, its in self._running.values()):
                _end(worker)

    def stop(self) -> None:
        """End all workers. What they have compiled stays in the cache."""
        for _, worker in list(self._running.values()):
            _end(worker)
        self._running.clear()


_workers = _Workers()
start, finish, stop = _workers.start, _workers.finish, _workers.stop


def _about(jobs: Sequence[Compilable]) -> int:
    """Expected seconds for these with one worker per core; a job is never split."""
    each = [job.seconds for job in jobs]
    return round(_START_SECONDS + max(sum(each) / min(_cores(), _MOST_WORKERS), *each))


def _shares(jobs: Iterable[Compilable], count: int) -> list[list[str]]:
    """Job names for each of at most `count` workers: the longest job goes to the worker with the least to do."""
    shares: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(count)]
    for job in sorted(jobs, key=lambda job: -job.seconds):
        least = min(range(count), key=lambda number: shares[number][0])
        shares[least] = shares[least][0] + job.seconds, [*shares[least][1], job.name]
    return [names for _, names in shares if names]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _can_start() -> bool:
    """Whether `sys.executable` is Python: in a frozen program, or one with Python inside, it is that program."""
    return not getattr(sys, "frozen", False) and Path(sys.executable or "").name.startswith("python")


def _worker(names: list[str]) -> subprocess.Popen[str]:
    # The worker must import this package from where this process imported it.
    here, before = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    path = os.pathsep.join([here, before] if before else [here])
    return subprocess.Popen(
        [sys.executable, "-m", "hierspec.compiling", *names],
        stdin=subprocess.PIPE,  # never written to: when it closes, the worker knows that nobody waits for it
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )


def _end(worker: subprocess.Popen[str]) -> None:
    if worker.poll() is None:
        worker.kill()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            stream.close()
    worker.wait()


def _work(names: list[str]) -> None:
    """The worker's program: compile each of these, and print its name when it is done."""
    with suppress(ValueError):
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Control-C is for the process that started it, which ends this one
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    for name in names:
        module, attribute = name.split(":")
        getattr(import_module(module), attribute).load()
        print(name, flush=True)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


@contextmanager
def locked(folder: str | None, name: str) -> Iterator[None]:
    """Let one process in at a time. The system releases the lock of a process that ends, however it ends."""
    if fcntl is None or folder is None:
        yield
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)  # numba makes it later
        file = (Path(folder) / f".{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock").open("a")
    except OSError:  # a folder that can only be read
        yield
        return
    with file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    _work(sys.argv[1:])
