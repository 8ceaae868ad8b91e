"""Work sharing and barriers for the threads of a pass, inlined in compiled functions."""

# mypy: allow-untyped-defs
from __future__ import annotations

from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.kernels import add_atomically, read_atomically, yield_core
from hierspec.backends.cpu.threads import ARRIVED, BROKEN, GENERATION

_PATIENCE = 20_000  # polls of a barrier before the thread yields its core


@part
def barrier(sync, threads):
    """Waits until all threads have arrived, unless the barrier is broken. See `ThreadTeam`."""
    if threads == 1:
        return
    start = sync.ctypes.data
    count, generation, broken = start + 8 * ARRIVED, start + 8 * GENERATION, start + 8 * BROKEN
    mine = read_atomically(generation)
    if add_atomically(count, 1) + 1 == threads:
        add_atomically(count, -threads)
        add_atomically(generation, 1)
        return
    looks = 0
    while read_atomically(generation) == mine:
        looks += 1
        if looks > _PATIENCE:
            if read_atomically(broken):
                return
            yield_core(0)


@part
def share(count, thread, threads):
    """First and last of this thread's part of `count` items."""
    return count * thread // threads, count * (thread + 1) // threads
