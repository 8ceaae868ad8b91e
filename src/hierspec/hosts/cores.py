"""The cores that a host's process computes on.

A host may pin each of its threads to one core, and threads that a pinned one starts would all share that core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")
_ENOUGH = 1 << 20  # numbers in a tensor that is worth several threads


@contextmanager
def on_all_cores(tasks: Path = _TASKS) -> Iterator[None]:
    """Threads that are started inside may run on every core that any thread of this process may run on."""
    if not hasattr(os, "sched_setaffinity") or not tasks.is_dir():
        yield
        return
    torch.ones(_ENOUGH).add_(1)  # makes torch start its threads before their cores are read
    before = os.sched_getaffinity(0)
    cores = set(before)
    for task in tasks.iterdir():
        with suppress(OSError, ValueError):  # it may have ended
            cores |= os.sched_getaffinity(int(task.name))
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
