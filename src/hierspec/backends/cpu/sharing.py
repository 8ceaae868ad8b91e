"""Work sharing and barriers for the threads of a pass, inlined in compiled functions."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from hierspec.backends.cpu.compiled import part
from hierspec.backends.cpu.kernels import add_atomically, read_atomically, yield_core
from hierspec.backends.cpu.threads import ARRIVED, BROKEN, GENERATION, LINE, TAKEN

_PATIENCE = 20_000  # polls of a barrier before the thread yields its core
_SHIFTED_OUT = 62  # shifted by so many bits, nothing is left of any count


@part
def barrier(sync, threads):
    """Waits until all threads have arrived, unless the barrier is broken. See `ThreadTeam`."""
    if threads == 1:
        return
    start = sync.ctypes.data
    count, generation, broken = start + 8 * ARRIVED, start + 8 * GENERATION, start + 8 * BROKEN
    mine = read_atomically(generation)
    if add_atomically(count, 1) + 1 == threads:
        for owner in range(threads):  # the next loop starts with nothing taken
            sync[TAKEN + owner * LINE] = 0
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


@part
def take(sync, thread, threads, count, turn):
    """First and last of the items that this thread does next, of `count`; both 0 if nothing is left.

    A thread first takes its own share, half of what is left of it at a time, then what slower threads have not begun
    of theirs. So a core that is disturbed, or slower than others, delays nobody for long. `turn` is 0 in the first call
    and then what the call before returned last. A barrier must come between two loops over this.
    """
    zero = np.int64(0)
    if threads == 1:
        return zero, (count if turn == 0 else zero), turn + 1
    while turn < threads:
        owner = (thread + turn) % threads
        begin, end = share(count, owner, threads)
        parts = min(add_atomically(sync.ctypes.data + 8 * (TAKEN + owner * LINE), 1), _SHIFTED_OUT)
        first = end - ((end - begin) >> parts)
        if first < end:
            return first, end - ((end - begin) >> (parts + 1)), turn
        turn += 1
    return zero, zero, turn


@part
def take_blocks(sync, thread, threads, blocks, turn):
    """`take` for blocks of outputs, of which products compute two at once."""
    first, last, turn = take(sync, thread, threads, (blocks + 1) // 2, turn)
    return 2 * first, min(2 * last, blocks), turn
