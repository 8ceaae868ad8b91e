"""Which request a row of a host's batch is, where the host gives no ids and rows move between steps.

A row is recognised by its whole text: it is the request that was known with exactly these tokens. So nothing that was
drafted from one text can reach a row with another. Comparing 4,096 tokens takes a microsecond or two, no more than
hashing the new ones would. Two rows with the same text cannot be told apart, and need not be: what is kept of one is
right for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np


class HasText(Protocol):
    @property
    def text(self) -> np.ndarray: ...


Known = TypeVar("Known", bound=HasText)


class Rows(Generic[Known]):
    """The requests of a host's batch, by row, as of the last step.

    `patience`: steps for which a request may be out of the batch before it counts as ended. With pipeline parallelism
    batches take turns; otherwise a request out of the batch has ended, or was preempted and begins again as a new one.
    """

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        self._rows: list[Known | None] = []
        self._absent: dict[int, tuple[Known, int]] = {}  # by identity: out of the batch, and for how many steps

    def __len__(self) -> int:
        """Requests that are remembered."""
        return sum(row is not None for row in self._rows) + len(self._absent)

    def __iter__(self) -> Iterator[Known]:
        yield from (row for row in self._rows if row is not None)
        yield from (request for request, _ in self._absent.values())

    def recognise(self, texts: Sequence[np.ndarray | None]) -> tuple[list[Known | None], list[Known]]:
        """The request of each row, by its text up to the last step, and the requests that have ended.

        A text of None means that its row is not looked at. Unknown rows are None; `put` says who they are.
        """
        last = self._rows
        found: list[Known | None] = [None] * len(texts)
        missed = []
        for row, text in enumerate(texts):
            if text is None:
                continue
            known = last[row] if row < len(last) else None
            if known is not None and _same(known.text, text):
                found[row] = known
            else:
                missed.append(row)
        taken = {id(known) for known in found if known is not None}
        others = [known for known in last if known is not None and id(known) not in taken]
        if missed and (others or self._absent):
            others = self._search(texts, missed, others, found)
        self._rows = list(found)
        return found, self._ended(others)

    def catch_up(self, texts: Sequence[np.ndarray | None]) -> list[tuple[Known, list[int]]]:
        """After steps that nobody looked at: requests whose texts continue in some row, and what was written since.

        Once that is added to their texts, `recognise` finds them. If a row continues two of them, either will do.
        """
        grown, missed = list[tuple[Known, list[int]]](), []
        left = {id(known): known for known in self}
        for row, text in enumerate(texts):
            known = self._rows[row] if row < len(self._rows) else None
            if text is not None and known is not None and _begins(text, known.text):
                grown.append((left.pop(id(known)), text[len(known.text) :].tolist()))
            elif text is not None:
                missed.append(text)
        for text in missed:
            for key, known in left.items():
                if _begins(text, known.text):
                    grown.append((left.pop(key), text[len(known.text) :].tolist()))
                    break
        return grown

    def put(self, row: int, request: Known | None) -> None:
        """Say which request a row of the last step is; None: none worth remembering."""
        self._rows[row] = request

    def forget_all(self) -> list[Known]:
        """Forget all requests, and return them."""
        everybody = list(self)
        self._rows, self._absent = [], {}
        return everybody

    def _search(
        self, texts: Sequence[np.ndarray | None], missed: list[int], others: list[Known], found: list[Known | None]
    ) -> list[Known]:
        """Finds rows that have moved or come back; returns those of `others` that are still missing."""
        by_length: dict[int, list[Known]] = {}
        for request in (*others, *(request for request, _ in self._absent.values())):
            by_length.setdefault(len(request.text), []).append(request)
        for row in missed:
            text = texts[row]
            assert text is not None
            candidates = by_length.get(len(text), [])
            for at, request in enumerate(candidates):
                if _same(request.text, text):
                    found[row] = candidates.pop(at)
                    self._absent.pop(id(request), None)
                    break
        left = {id(request) for candidates in by_length.values() for request in candidates}
        return [request for request in others if id(request) in left]

    def _ended(self, gone: list[Known]) -> list[Known]:
        """Count a step for the requests out of the batch; returns those whose patience is over."""
        self._absent = {key: (request, steps + 1) for key, (request, steps) in self._absent.items()}
        self._absent.update((id(request), (request, 1)) for request in gone)
        ended = [request for request, steps in self._absent.values() if steps >= self._patience]
        for request in ended:
            del self._absent[id(request)]
        return ended


def _begins(text: np.ndarray, known: np.ndarray) -> bool:
    """Whether a text begins with another one."""
    return len(known) <= len(text) and _same(known, text[: len(known)])


def _same(known: np.ndarray, text: np.ndarray) -> bool:
    """Whether two texts are equal. The last token first: of two different texts it mostly differs."""
    return len(known) == len(text) and known[-1] == text[-1] and bool((known == text).all())
