"""Texts of many namespaces in memory, each in an indexed ring of its own, all of them within one limit of bytes."""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

import numpy as np

from hierspec.stores.archive import ACTIVE
from hierspec.stores.chains import SEPARATOR, ChainIndex

_LENGTHS = (2, 4, 8)  # of runs that are indexed; one token alone says next to nothing in a long history
_RECENT = 32  # documents of a namespace that a new one is compared with
_SMALLEST = 256  # tokens of a ring
_OVERHEAD = 3072  # bytes of a ring besides its index, on the safe side
_CHUNK = 1 << 16  # bytes that go into an index at once
_BETWEEN = np.array([SEPARATOR], "<i4").tobytes()


class Ring:
    """The newest documents of one namespace. A document is int32 tokens as bytes, lowest byte first."""

    def __init__(self, namespace: str, capacity: int) -> None:
        self.index = ChainIndex(capacity, _LENGTHS)
        self._overhead = _OVERHEAD + sys.getsizeof(namespace)
        self._written = 0  # tokens ever
        self._digests = np.zeros(_RECENT, np.uint64)
        self._ends = np.full(_RECENT, -(1 << 62), np.int64)  # what was written when the document was
        self._documents = 0  # ever

    @property
    def memory(self) -> int:
        return self.index.bytes + self._overhead

    def is_recent(self, document: bytes) -> bool:
        """Is the same document here? In the newer half, once the ring is full: what comes again never falls out."""
        ends = self._ends[self._digests == _digest(document)]
        kept = self.index.size if self.index.size <= self.index.capacity else self.index.capacity // 2
        return bool(len(ends)) and self._written - int(ends.max()) < kept

    def fill(self, documents: Iterable[bytes]) -> None:
        """Takes documents, oldest first."""
        last: deque[tuple[bytes, int]] = deque(maxlen=_RECENT)
        parts, size = [], 0
        for document in documents:
            parts += [document, _BETWEEN]
            size += len(document) + len(_BETWEEN)
            self._written += len(document) // 4 + 1
            last.append((document, self._written))
            if size >= _CHUNK:
                self.index.append(np.frombuffer(b"".join(parts), "<i4"))
                parts, size = [], 0
        self.index.append(np.frombuffer(b"".join(parts), "<i4"))
        for document, end in last:
            place = self._documents % _RECENT
            self._digests[place], self._ends[place] = _digest(document), end
            self._documents += 1

    def resize(self, capacity: int) -> None:
        """Another ring, with as much of the newest text as it can hold."""
        known = self._newest(capacity)
        del self.index  # before the new one is made: there is room for one only
        self.index = ChainIndex(capacity, _LENGTHS)
        self.index.append(known)

    def held(self) -> tuple[int, int]:
        """Documents, of which the oldest may be a part, and tokens."""
        known = self._newest(self.index.capacity)
        documents = int(np.count_nonzero(known == SEPARATOR))
        return documents, len(known) - documents

    def _newest(self, most: int) -> np.ndarray:
        """A copy of the newest `most` tokens, separators included, oldest first."""
        ring = self.index.tokens
        count = min(self.index.size, self.index.capacity, most)
        start = (self.index.size - count) % len(ring)
        return np.concatenate((ring[start : start + count], ring[: max(0, start + count - len(ring))]))


class Rings:
    """The rings of all namespaces.

    A ring doubles as it fills. Where the limit is reached, a namespace outside the last 64 that were used gives way,
    the one used longest ago first; among the last 64 a larger ring gives up half to a smaller one. Otherwise a ring
    stays as it is, and its oldest documents go: who writes a lot pushes out his own text and not that of others.
    The namespace `lasting` gives way to none as long as it takes less than half of the limit.
    """

    def __init__(self, limit: int, lasting: str | None = None) -> None:
        self.limit, self.lasting = limit, lasting
        self.memory = 0
        # Rings are the largest one that fits, halved so and so often: a namespace alone can use the whole limit.
        doublings = ((limit - _OVERHEAD) // _index_bytes(_SMALLEST)).bit_length() - 1
        room = (limit - _OVERHEAD) >> doublings
        sizes = range(_SMALLEST, 2 * _SMALLEST)
        self._first = sizes[bisect_right(sizes, room, key=_index_bytes) - 1]
        self._first_bytes = _index_bytes(self._first)
        # Small rings that may stay must not make up more than a quarter.
        self._active = min(ACTIVE, limit // (4 * self._needed("", self._first)))
        self._rings: OrderedDict[str, Ring] = OrderedDict()  # the one used longest ago first

    def __iter__(self) -> Iterator[tuple[str, Ring]]:
        return iter(self._rings.items())

    def get(self, namespace: str) -> Ring | None:
        return self._rings.get(namespace)

    def use(self, namespace: str) -> Ring | None:
        """The namespace's ring, marked as used just now."""
        ring = self._rings.get(namespace)
        if ring is not None:
            self._rings.move_to_end(namespace)
        return ring

    def make(self, namespace: str, tokens: int) -> Ring:
        """An empty ring for so many tokens, or the largest that there is room for."""
        capacity = self._first
        while capacity < tokens:
            capacity *= 2
        while capacity > self._first and not self._make_room(namespace, capacity, 0):
            capacity //= 2
        while capacity == self._first and not self._make_room(namespace, capacity, 0):
            # Many small ones: the one used longest ago goes.
            self.remove(next(name for name in self._rings if not self._lasts(name)))
        ring = self._rings[namespace] = Ring(namespace, capacity)
        self.memory += ring.memory
        return ring

    def append(self, namespace: str, document: bytes) -> None:
        """One more document; the ring grows if it may."""
        ring, size = self._rings[namespace], len(document) // 4 + 1
        while ring.index.size + size > ring.index.capacity:
            if not self._make_room(namespace, 2 * ring.index.capacity, ring.memory):
                break
            self._resize(namespace, 2 * ring.index.capacity)
        ring.fill([document])

    def remove(self, namespace: str) -> None:
        ring = self._rings.pop(namespace, None)
        if ring is not None:
            self.memory -= ring.memory

    def _make_room(self, namespace: str, capacity: int, given_back: int) -> bool:
        """Makes room for a ring of so many tokens; False if others have the better claim to it."""
        wanted = self._needed(namespace, capacity) - given_back
        if wanted + given_back > self.limit:
            return False
        while self.memory + wanted > self.limit:
            others = [name for name in self._rings if name != namespace and not self._lasts(name)]
            idle = others[: max(0, len(others) - self._active)]
            # Only from one that stays at least as large: two that both write a lot must not rob each other in turn.
            larger = [name for name in others[len(idle) :] if self._rings[name].index.capacity > capacity]
            if not larger and self.memory + wanted - sum(self._rings[name].memory for name in idle) > self.limit:
                return False
            victim = (idle or larger)[0]
            self._resize(victim, self._rings[victim].index.capacity // 2)
        return True

    def _lasts(self, namespace: str) -> bool:
        return namespace == self.lasting and 2 * self._rings[namespace].memory <= self.limit

    def _needed(self, namespace: str, capacity: int) -> int:
        return capacity // self._first * self._first_bytes + _OVERHEAD + sys.getsizeof(namespace)

    def _resize(self, namespace: str, capacity: int) -> None:
        if capacity < self._first:
            self.remove(namespace)
            return
        ring = self._rings[namespace]
        self.memory -= ring.memory
        ring.resize(capacity)
        self.memory += ring.memory


def _index_bytes(capacity: int) -> int:
    return ChainIndex(capacity, _LENGTHS).bytes


def _digest(document: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little"))
