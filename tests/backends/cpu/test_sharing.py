"""Threads take work as it comes: every item once, whatever their speeds, and again after a barrier."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.backends.cpu.sharing import barrier, take, take_blocks
from hierspec.backends.cpu.threads import LINE, TAKEN, ThreadTeam


@numba.njit(nogil=True)
def work(thread, threads, sync, counts, slow, patience, taken_by):
    """Counts every item in two loops with a barrier between them. Thread `slow` waits after each part."""
    for loop in range(len(counts)):
        turn = np.int64(0)
        first, last, turn = take(sync, thread, threads, counts.shape[1], turn)
        while first < last:
            for item in range(first, last):
                counts[loop, item] += 1
                taken_by[loop, item] = thread
            if thread == slow:
                for i in range(patience):
                    taken_by[loop, first] = taken_by[loop, first] + i - i
            first, last, turn = take(sync, thread, threads, counts.shape[1], turn)
        barrier(sync, threads)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 300),
    threads=st.sampled_from([1, 2, 3, 7]),
    slow=st.integers(0, 6),
    patience=st.sampled_from([0, 1000]),
)
def test_every_item_is_taken_once(count, threads, slow, patience):
    counts, taken_by = np.zeros((3, count), np.int64), np.zeros((3, count), np.int64)
    team = ThreadTeam(threads)
    team.run(work, team.sync, counts, slow, patience, taken_by)
    assert (counts == 1).all()


@numba.njit
def taken_alone(sync, thread, threads, count, blocks):
    """What a thread takes if the others do nothing, in order."""
    parts, turn = [], np.int64(0)
    while True:
        if blocks:
            first, last, turn = take_blocks(sync, thread, threads, count, turn)
        else:
            first, last, turn = take(sync, thread, threads, count, turn)
        if first >= last:
            return parts
        parts.append((first, last))


def alone(thread: int, threads: int, count: int, blocks: bool = False) -> list[tuple[int, int]]:
    return list(taken_alone(np.zeros(TAKEN + LINE * threads, np.int64), thread, threads, count, blocks))


def test_a_thread_takes_halves_of_its_own_share_and_then_those_of_others():
    assert alone(1, 2, 16) == [(8, 12), (12, 14), (14, 15), (15, 16), (0, 4), (4, 6), (6, 7), (7, 8)]
    assert alone(0, 1, 16) == [(0, 16)]
    assert alone(2, 3, 2) == [(1, 2), (0, 1)]  # more threads than items
    assert alone(0, 2, 0) == []


@pytest.mark.parametrize("count", [1, 2, 7, 36])
def test_blocks_are_taken_in_pairs_but_for_the_last(count):
    parts = sorted(alone(0, 2, count, blocks=True))
    assert [first for first, _ in parts] == [0, *[last for _, last in parts[:-1]]]
    assert parts[-1][1] == count
    assert all(first % 2 == 0 for first, _ in parts)


def test_shares_that_many_threads_found_empty_stay_empty():
    """A shift by 64 bits or more would be a shift by a few."""
    sync = np.zeros(TAKEN + LINE * 2, np.int64)
    sync[TAKEN] = sync[TAKEN + LINE] = 64
    assert list(taken_alone(sync, 0, 2, 16, False)) == []
