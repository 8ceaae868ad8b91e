"""What a history store must withstand: 200,000 requests within its limit, and kill -9 at any instant.

Exits with 1 where a limit was exceeded, or a batch that was committed is lost or damaged.

It made docs/results/stores-soak.json.

example:
  python experiments/store_soak.py --output soak.json
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import killed_writer
import numpy as np
from killed_writer import DOCUMENTS, document

from hierspec.cli.console import note, progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.errors import HierspecError
from hierspec.machine import machine
from hierspec.progress import Progress, silent
from hierspec.stores.archive import LEAST_LIMIT, Archive
from hierspec.stores.history import HistoryStore
from hierspec_bench.cli import common

_NAMESPACE = "anna"
_PER_FILE = 5  # kills before a new file is started
# Limit of the file, tokens of a document. With the second, old documents are evicted every few batches.
_FILES = ((64 << 20, 40), (LEAST_LIMIT, 700))


def soak(requests: int = 200_000, limit: int = 4 << 20, progress: Progress = silent) -> list[dict[str, Any]]:
    """`requests` requests, in memory only and with a file."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            learn_requests(requests, limit, path, progress=progress) for path in (None, Path(folder) / "history.sqlite")
        ]


def learn_requests(
    requests: int, limit: int, path: Path | None = None, trace: bool = True, progress: Progress = silent
) -> dict[str, Any]:
    """Requests of some three thousand namespaces, half of them of one, and the peak memory of the history.

    `traced_bytes` is what Python allocated meanwhile, if `trace` is set: tracing makes everything slower.
    """
    rng = np.random.default_rng(1)
    text = rng.integers(0, 5000, 50_000).astype(np.int32)
    learnt = 0

    def request(store: HistoryStore) -> int:
        name = "busy" if rng.random() < 0.5 else f"n{int(rng.zipf(1.3)) % 3000}"
        start, length = int(rng.integers(0, len(text) - 300)), int(rng.integers(0, 200))
        view = store.begin(text[start : start + 20], name)
        view.propose(text[start : start + 20], 8)
        view.learn(text[start + 20 : start + 20 + length].tolist())
        view.end()
        return length

    where = "in memory" if path is None else "with a file"
    with HistoryStore(path, limit) as store:
        request(store)  # imports and compiled code are not the store's memory
    gc.collect()
    if trace:
        tracemalloc.start()
    try:
        with HistoryStore(path, limit) as store:
            before, most, on_disk, began = tracemalloc.get_traced_memory()[0], 0, 0, time.perf_counter()
            for number in range(requests):
                learnt += request(store)
                if number % 100 == 0:
                    info = store.info()
                    most, on_disk = max(most, info["bytes"]), max(on_disk, info["file_bytes"])
                    progress(f"Learning requests, {where}", number, requests)
            traced = tracemalloc.get_traced_memory()[1] - before if trace else None
            seconds = time.perf_counter() - began
    finally:
        tracemalloc.stop()
    progress(f"Learning requests, {where}", requests, requests)
    return {
        "history": where,
        "requests": requests,
        "tokens": learnt,
        "seconds": round(seconds, 1),
        "limit": limit,
        "most_bytes": most,
        "traced_bytes": traced,
        "most_file_bytes": on_disk,
        "within_limit": max(most, on_disk, traced or 0) <= limit,
    }


@dataclass
class _Kills:
    """Results after kills."""

    kills: int = 0
    committed: int = 0  # batches that a process reported as written
    half_done: int = 0  # batches in the file whose process was killed before it reported them
    lost: int = 0  # committed batches that are missing
    corrupted: int = 0  # times that a file could not be opened, or held wrong content
    over_limit: int = 0  # times that a file was larger than its limit


def kill_while_writing(
    kills: int = 100, files: tuple[tuple[int, int], ...] = _FILES, progress: Progress = silent
) -> dict[str, Any]:
    """Kills writing processes at random instants, also while they open the file, and looks at what they left."""
    counts, rng = _Kills(), random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        for number, (limit, size) in enumerate(files):
            share = kills // len(files) + (number < kills % len(files))
            for start in range(0, share, _PER_FILE):
                path = Path(folder) / f"{number}-{start}"
                _one_file(path, limit, size, min(_PER_FILE, share - start), rng, counts)
                progress("Killing processes that write", counts.kills, kills)
    return vars(counts)


def _one_file(path: Path, limit: int, size: int, kills: int, rng: random.Random, counts: _Kills) -> None:
    """Several processes in turn, each continuing where the one before was killed."""
    newest = -1  # the last batch that must be there
    for kill in range(kills):
        committed = _killed(path, limit, size, newest + 1, while_opening=kill == 0, rng=rng)
        counts.kills += 1
        counts.committed += len(committed)
        newest = committed[-1] if committed else newest
        try:
            archive = Archive(path, limit, "v")
            held = held_batches(archive, _NAMESPACE, size)
            counts.over_limit += archive.file_bytes() > limit
            archive.close()
        except (HierspecError, ValueError):
            counts.corrupted += 1
            return
        # Eviction removes the oldest, so batches must be complete up to the newest; without eviction, from the first.
        first = 0 if limit > LEAST_LIMIT or not held else held[0]
        there = set(held)
        counts.lost += sum(batch not in there for batch in range(first, newest + 1))
        counts.half_done += sum(batch > newest for batch in held)
        newest = held[-1] if held else -1


def _killed(path: Path, limit: int, size: int, first: int, while_opening: bool, rng: random.Random) -> list[int]:
    """The batches that a process reported as written before it was killed."""
    program = [sys.executable, killed_writer.__file__]
    arguments = [str(path), str(limit), _NAMESPACE, str(first), "100000", str(size)]
    with subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        begun = b""
        if while_opening:
            time.sleep(rng.uniform(0.04, 0.1))
        else:
            begun = child.stdout.read(1)
            time.sleep(rng.uniform(0, 0.03))
        child.kill()
        return [int(line) for line in (begun + child.stdout.read()).split(b"\n")[:-1] if line]


def held_batches(archive: Archive, namespace: str, size: int) -> list[int]:
    """The complete batches that an archive holds; ValueError if they are not what was written."""
    numbers = []
    for held in archive.read(namespace.encode()):
        batch, number = np.frombuffer(held[:8], "<i4").tolist()
        if held != document(batch, number, size):
            raise ValueError("a document is not what was written")
        numbers.append((batch, number))
    first = len(numbers) % DOCUMENTS  # some of the oldest batch may have been evicted
    documents = [number for _, number in numbers[first:]]
    if numbers != sorted(set(numbers)) or documents != list(range(DOCUMENTS)) * (len(documents) // DOCUMENTS):
        raise ValueError("a batch is not whole")
    return [batch for batch, number in numbers if number == DOCUMENTS - 1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    with progress_bars() as progress:
        soaked, killed = soak(progress=progress), kill_while_writing(progress=progress)
    if not arguments.json:
        for row in soaked:
            note(
                f"{row['requests']:,} requests, {row['history']}: at most {row['most_bytes']:,} bytes of memory "
                f"and {row['most_file_bytes']:,} on disk, the limit is {row['limit']:,} each"
            )
        note(f"{killed['kills']} kills: {killed['lost']} batches lost, {killed['corrupted']} files damaged")
    hand_out({"machine": machine(), "command": command_line(), "soak": soaked, "kills": killed}, arguments.output)
    harm = killed["lost"] + killed["corrupted"] + killed["over_limit"]
    return 0 if harm == 0 and all(row["within_limit"] for row in soaked) else 1


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
