"""Owners take turns; of what one owner has put in, the first comes first."""

from hierspec.fair_queue import FairQueue


def filled(items):
    queue = FairQueue()
    for item in items:
        queue.put(item[0], item)
    return queue


def test_owners_take_turns():
    queue = filled(["a1", "a2", "a3", "b1", "b2", "c1"])
    assert len(queue) == 6
    assert [queue.take() for _ in range(3)] == ["a1", "b1", "c1"]
    queue.put("c", "c2")
    assert [queue.take() for _ in range(len(queue))] == ["a2", "b2", "c2", "a3"]
    assert not queue


def test_some_leave_out_of_turn():
    queue = filled(["a1", "a2", "b1"])
    assert queue.take_where(lambda item: item.endswith("1")) == ["a1", "b1"]
    assert [queue.take() for _ in range(len(queue))] == ["a2"]
