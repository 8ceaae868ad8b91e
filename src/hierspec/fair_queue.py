"""A queue in which nobody is served twice while somebody else waits for the first time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Owners take turns; of what one owner has put in, the first comes first."""

    def __init__(self) -> None:
        self._by_owner: dict[str, deque[T]] = {}  # in the order of turns; only owners with items

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._by_owner.values())

    def put(self, owner: str, item: T) -> None:
        self._by_owner.setdefault(owner, deque()).append(item)

    def take(self) -> T:
        """Take the next item, and end its owner's turn. The queue must not be empty."""
        owner, waiting = next(iter(self._by_owner.items()))
        item = waiting.popleft()
        del self._by_owner[owner]
        if waiting:
            self._by_owner[owner] = waiting
        return item

    def take_where(self, wanted: Callable[[T], bool]) -> list[T]:
        """Take all items for which `wanted` is true, out of turn."""
        taken = []
        for owner, waiting in list(self._by_owner.items()):
            taken += [item for item in waiting if wanted(item)]
            self._by_owner[owner] = deque(item for item in waiting if not wanted(item))
            if not self._by_owner[owner]:
                del self._by_owner[owner]
        return taken
