"""Answers as they are written: one stream, or several together in batched passes."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

from hierspec.core.engine import Engine, failure_of
from hierspec.core.request import Step
from hierspec.generation import Failure, Generation, TextStep, Writer, shortened
from hierspec.turns import Turns


def write_together(writers: Sequence[Writer], turns: Turns) -> Generator[tuple[int, TextStep]]:
    """(index, step) as passes finish, until all have ended. Leaving it early cancels those that have not.

    A turn lasts for one round of the engine, so that other threads' requests go on beside these. A prompt that is given
    several times is computed once: the others wait until the first has written something, and begin with its cache.
    """
    engine, first_of, waiting = Engine(), dict[bytes, Writer](), list[Writer]()
    for writer in writers:
        if first_of.setdefault(writer.request.prompt.tobytes(), writer) is writer:
            engine.submit(writer.request)
        else:
            waiting.append(writer)
    index_of = {id(writer.request): index for index, writer in enumerate(writers)}
    thread = 0  # that took the last step
    try:
        while any(writer.request.ended is None for writer in writers):
            thread = threading.get_ident()
            with turns.turn():
                steps = [(index_of[id(request)], step) for request, step in engine.step()]
                added = [(index, _added(writers[index], step)) for index, step in steps]
                still_waiting: list[Writer] = []
                for writer in waiting:
                    first = first_of[writer.request.prompt.tobytes()]
                    if first.tokens or first.request.ended is not None:
                        engine.submit(writer.request)
                    else:
                        still_waiting.append(writer)
                waiting = still_waiting
            yield from ((index, step) for index, step in added if step is not None)
    finally:
        for writer in writers:
            if writer.request.ended is None:
                (turns.cancel if threading.get_ident() == thread else turns.leave)(writer.request)


def _added(writer: Writer, step: Step) -> TextStep | None:
    """The step as text. If it cannot be decoded, for want of memory, that request fails and the others go on."""
    try:
        return writer.add(step)
    except Exception as error:
        writer.request.fail(failure_of("The request", error))
        return None


class Stream:
    """Iterate for the steps, once; leaving the loop cancels. `generation` holds what there is so far."""

    def __init__(self, writer: Writer, turns: Turns) -> None:
        self._writer, self._turns = writer, turns

    def __iter__(self) -> Iterator[TextStep]:
        with closing(write_together([self._writer], self._turns)) as steps:
            for _, step in steps:
                yield step
        self._writer.finish()  # raises what went wrong

    def cancel(self) -> None:
        """Stop before the next pass."""
        self._turns.cancel(self._writer.request)

    @property
    def generation(self) -> Generation:
        return self._writer.finish()

    def __repr__(self) -> str:
        so_far = self._writer.so_far()
        return f"Stream({shortened(so_far.text)}, {len(so_far.tokens)} tokens, {_state(self._writer)})"


class StreamMany:
    """Iterate for (index of the prompt, step) as passes finish, once; leaving the loop cancels what still runs.

    `results` holds an answer for every prompt, as far as it got, or a `Failure`.
    """

    def __init__(self, begun: Sequence[Writer | Failure], turns: Turns) -> None:
        self._begun, self._turns = list(begun), turns

    def __iter__(self) -> Iterator[tuple[int, TextStep]]:
        writers = {index: each for index, each in enumerate(self._begun) if isinstance(each, Writer)}
        indices = list(writers)
        with closing(write_together(list(writers.values()), self._turns)) as steps:
            for number, step in steps:
                yield indices[number], step

    def cancel(self, index: int | None = None) -> None:
        """Stop one of the answers, or all, before the next pass."""
        for each in self._begun if index is None else [self._begun[index]]:
            if isinstance(each, Writer):
                self._turns.cancel(each.request)

    @property
    def results(self) -> list[Generation | Failure]:
        return [each.result() if isinstance(each, Writer) else each for each in self._begun]

    def __repr__(self) -> str:
        return f"StreamMany({', '.join(_state(each) for each in self._begun)})"


def _state(begun: Writer | Failure) -> str:
    if isinstance(begun, Failure):
        return "refused"
    ended = begun.request.ended
    return "running" if ended is None else f"ended by {ended}"
