"""Threads share a model: a pass each, the same texts as alone, and nobody waits for ever."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from faults import Lines
from soak.threads import soak

import hierspec
from hierspec import Chat, Plan, TierPlan
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.turns import Turns

PATIENCE = 120  # seconds after which a thread counts as stuck: far more than any machine needs
EXITS = Plan(stores=("context",), merge=True, tiers=(TierPlan(exit_layer=3, gather=3),))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")
    return hierspec.load(folder, backend="compiled", device="cpu")


def in_threads(*works: Callable[[], object]) -> list[object]:
    """What each returns, all at the same time."""
    results: list[object] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread is stuck"
    return results


def test_threads_write_what_each_would_write_alone(model):
    def generate() -> object:
        return [model.generate("the dog", max_tokens=20, plan=EXITS, temperature=0.8, seed=s).text for s in range(3)]

    def stream() -> object:
        return ["".join(step.text for step in model.stream(text, max_tokens=30)) for text in ("abab abab", "cat")]

    def many() -> object:
        return [answer.text for answer in model.generate_many(["ab", "abc", "12"], max_tokens=20, plan="lookup")]

    def several() -> object:
        return [answer.text for answer in model.generate("ab", n=3, max_tokens=12, temperature=1.0, seed=3)]

    def chat() -> object:
        chat = Chat(model, max_tokens=12, plan=EXITS)
        return ["".join(step.text for step in chat.say(text)) for text in ("one", "two")]

    def forget() -> None:
        for _ in range(10):
            model.forget()
            model.memory()

    works = [generate, stream, many, several, chat]
    alone = [work() for work in works]
    assert in_threads(*works, forget, *works)[: len(works)] == alone
    assert in_threads(*works, *works)[len(works) :] == alone


def test_a_little_of_the_soak_run():
    assert soak(seed=5, count=2, say=lambda line: None) == []


def test_a_stream_takes_its_turn_pass_by_pass(model):
    """Each thread stops in the middle of its stream until the other has come as far."""
    both = threading.Barrier(2)

    def work() -> int:
        steps = 0
        for _ in model.stream("abc", max_tokens=6, plan="plain"):
            both.wait(PATIENCE)
            steps += 1
        return steps

    assert in_threads(work, work) == [6, 6]


def test_whoever_waits_comes_before_whoever_just_had_a_turn():
    turns, order, waiting = Turns(), list[str](), threading.Event()

    def other() -> None:
        waiting.wait(PATIENCE)
        with turns.turn():
            order.append("other")

    def hasty() -> None:
        with turns.turn():
            waiting.set()
            while not turns._waiting:  # until the other one waits for the lock
                time.sleep(0.001)
        with turns.turn():
            order.append("hasty")

    assert in_threads(other, hasty) == [None, None]
    assert order == ["other", "hasty"]


def test_a_stream_that_is_left_in_any_way_keeps_nobody_waiting(model):
    expected = model.generate("abc", max_tokens=20).text

    def leave() -> None:
        for _ in model.stream("abc", max_tokens=50):
            break

    def drop() -> None:
        next(iter(model.stream("abc", max_tokens=50)))

    def forget_in_a_circle() -> None:
        circle: list[object] = []
        steps = iter(model.stream("abc", max_tokens=50))
        next(steps)
        circle += [circle, steps]

    kept = iter(model.stream("abc", max_tokens=50))
    next(kept)  # held open by this thread all the time
    assert in_threads(leave, drop, forget_in_a_circle) == [None] * 3
    assert in_threads(gc.collect, lambda: model.generate("abc", max_tokens=20).text)[1] == expected


def test_what_is_dropped_in_the_middle_of_a_turn_is_cancelled_after_it(model):
    """Python may collect a stream at any line, also where the cache that it would be taken from is half changed."""
    stream = model.stream("abc", max_tokens=50)
    request = stream._writer.request
    with model.turn():
        steps = iter(stream)
        next(steps)
        del steps
        assert request.ended is None
    assert request.ended == "cancelled"


def test_a_thread_that_collects_the_stream_of_another_does_not_wait(model):
    """It may be the event loop of a server, which must go on while a turn lasts."""
    stream = model.stream("abc", max_tokens=50)
    request, steps = stream._writer.request, [iter(stream)]
    next(steps[0])
    with model.turn():
        assert in_threads(steps.clear) == [None]
        assert request.ended is None
    assert request.ended == "cancelled"
    steps = [iter(stream := model.stream("abc", max_tokens=50))]
    next(steps[0])
    assert in_threads(steps.clear) == [None]
    assert stream._writer.request.ended == "cancelled"


def test_an_error_or_an_interrupt_ends_the_turn(model):
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), model.turn(), model.turn():
            raise error

    def interrupt() -> None:
        for _ in model.stream("abc", max_tokens=50):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert in_threads(lambda: len(model.generate("abc", max_tokens=3).tokens)) == [3]


def test_a_copy_with_other_stores_takes_turns_at_the_same_caches(model):
    assert model.apart().turns is model.turns


def interrupted_at(number: int, work: Callable[[], None]) -> bool:
    """Ctrl-C at the so-manyth line of hierspec that `work` runs. Whether there is such a line."""
    lines = Lines(number)
    with suppress(KeyboardInterrupt):
        lines.run(work)
    return bool(lines.hits)


def test_an_interrupt_at_any_line_leaves_the_lock_free():
    class Ending:
        ended = 0

        def cancel(self) -> None:
            self.ended += 1

    def work() -> None:
        with turns.turn(), turns.turn():
            turns.cancel(request)
        turns.cancel(request)

    turns, request, number = Turns(), Ending(), 1
    while interrupted_at(number, work):
        assert in_threads(lambda: interrupted_at(0, work)) == [False], number
        number += 1
    assert number > 20
    before = request.ended
    work()
    assert request.ended >= before + 2
