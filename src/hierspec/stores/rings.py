"""The history in memory: one indexed ring of tokens per namespace, all of them within one limit of bytes."""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

import numpy as np

from hierspec.stores.archive import ACTIVE
from hierspec.stores.ngram_index import SEPARATOR, NgramIndex

_NGRAM_LENGTHS = (2, 4, 8)  # a match of one token says next to nothing in a long history
_RECENT = 32  # documents of a namespace that a new one is compared with
_MIN_CAPACITY = 256  # tokens of a ring
_OVERHEAD = 3072  # bytes of a ring besides its index, an upper bound
_CHUNK = 1 << 16  # bytes indexed at once
_SEPARATOR_BYTES = np.array([SEPARATOR], "<i4").tobytes()


class Ring:
    """The newest documents of one namespace. A document is little-endian int32 tokens as bytes."""

    def __init__(self, namespace: bytes, capacity: int) -> None:
        self.index = NgramIndex(capacity, _NGRAM_LENGTHS)
        self._overhead = _OVERHEAD + sys.getsizeof(namespace)
        self._written = 0  # tokens ever
        self._digests = np.zeros(_RECENT, np.uint64)
        self._ends = np.full(_RECENT, -(1 << 62), np.int64)  # `_written` after each document
        self._documents = 0  # ever
        self.birth = self.last = b""  # how far a shared database was read (`News`)

    @property
    def memory(self) -> int:
        return self.index.bytes + self._overhead

    def is_recent(self, document: bytes) -> bool:
        """Whether this document is here. In a full ring only the newer half counts, so that repeated documents stay."""
        ends = self._ends[self._digests == _digest(document)]
        recent = self.index.size if self.index.size <= self.index.capacity else self.index.capacity // 2
        return bool(len(ends)) and self._written - int(ends.max()) < recent

    def fill(self, documents: Iterable[bytes]) -> None:
        """Appends documents, oldest first."""
        recent: deque[tuple[bytes, int]] = deque(maxlen=_RECENT)
        parts, size = [], 0
        for document in documents:
            parts += [document, _SEPARATOR_BYTES]
            size += len(document) + len(_SEPARATOR_BYTES)
            self._written += len(document) // 4 + 1
            recent.append((document, self._written))
            if size >= _CHUNK:
                self.index.append(np.frombuffer(b"".join(parts), "<i4"))
                parts, size = [], 0
        self.index.append(np.frombuffer(b"".join(parts), "<i4"))
        for document, end in recent:
            slot = self._documents % _RECENT
            self._digests[slot], self._ends[slot] = _digest(document), end
            self._documents += 1

    def resize(self, capacity: int) -> None:
        """Moves as much of the newest text as fits to a ring of another size."""
        tokens = self._newest(capacity)
        # Free the old one before the new one is allocated: the limit has room for one only. If that fails, or Ctrl-C
        # comes, an empty index is left.
        self.index = NgramIndex(1, _NGRAM_LENGTHS)
        self.index = NgramIndex(capacity, _NGRAM_LENGTHS)
        self.index.append(tokens)

    def counts(self) -> tuple[int, int]:
        """Documents, the oldest of which may be cut, and tokens."""
        tokens = self._newest(self.index.capacity)
        documents = int(np.count_nonzero(tokens == SEPARATOR))
        return documents, len(tokens) - documents

    def _newest(self, max_tokens: int) -> np.ndarray:
        """A copy of the newest tokens, separators included, oldest first."""
        ring = self.index.tokens
        count = min(self.index.size, self.index.capacity, max_tokens)
        start = (self.index.size - count) % len(ring)
        return np.concatenate((ring[start : start + count], ring[: max(0, start + count - len(ring))]))


class Rings:
    """The rings of all namespaces.

    A ring doubles as it fills. At the limit, namespaces other than the 64 most recently used shrink first, the least
    recently used one before the others; among those 64 a larger ring gives half to a smaller one. Otherwise a ring
    keeps its size and overwrites its oldest documents: a namespace that writes a lot evicts its own text and not that
    of others. The namespace `protected` never shrinks while it takes less than half of the limit.
    """

    def __init__(self, limit: int, protected: bytes | None = None) -> None:
        self.limit, self.protected = limit, protected
        self.memory = 0
        # Capacities are the largest that fits, halved repeatedly: a single namespace can use the whole limit.
        doublings = ((limit - _OVERHEAD) // _index_bytes(_MIN_CAPACITY)).bit_length() - 1
        max_bytes = (limit - _OVERHEAD) >> doublings
        capacities = range(_MIN_CAPACITY, 2 * _MIN_CAPACITY)
        self._smallest = capacities[bisect_right(capacities, max_bytes, key=_index_bytes) - 1]
        self._smallest_bytes = _index_bytes(self._smallest)
        # Small rings that are not evicted may take a quarter of the limit at most.
        self._active = min(ACTIVE, limit // (4 * self._ring_bytes(b"", self._smallest)))
        self._rings: OrderedDict[bytes, Ring] = OrderedDict()  # least recently used first

    def __iter__(self) -> Iterator[tuple[bytes, Ring]]:
        return iter(self._rings.items())

    def get(self, namespace: bytes) -> Ring | None:
        return self._rings.get(namespace)

    def use(self, namespace: bytes) -> Ring | None:
        """The namespace's ring, marked as most recently used."""
        ring = self._rings.get(namespace)
        if ring is not None:
            self._rings.move_to_end(namespace)
        return ring

    def make(self, namespace: bytes, tokens: int) -> Ring:
        """An empty ring for this many tokens, or the largest that there is room for."""
        capacity = self._smallest
        while capacity < tokens:
            capacity *= 2
        while capacity > self._smallest and not self._make_room(namespace, capacity, 0):
            capacity //= 2
        while capacity == self._smallest and not self._make_room(namespace, capacity, 0):
            # All are small: evict the least recently used.
            self.remove(next(name for name in self._rings if not self._is_protected(name)))
        ring = self._rings[namespace] = Ring(namespace, capacity)
        self.memory += ring.memory
        return ring

    def append(self, namespace: bytes, document: bytes) -> None:
        """Appends a document; the ring grows if there is room."""
        ring, size = self._rings[namespace], len(document) // 4 + 1
        while ring.index.size + size > ring.index.capacity:
            if not self._make_room(namespace, 2 * ring.index.capacity, ring.memory):
                break
            self._resize(namespace, 2 * ring.index.capacity)
        ring.fill([document])

    def remove(self, namespace: bytes) -> None:
        ring = self._rings.pop(namespace, None)
        if ring is not None:
            self.memory -= ring.memory

    def _make_room(self, namespace: bytes, capacity: int, freed: int) -> bool:
        """Shrinks other rings until one of this capacity fits, `freed` bytes given back; False if none may shrink."""
        wanted = self._ring_bytes(namespace, capacity) - freed
        if wanted + freed > self.limit:
            return False
        while self.memory + wanted > self.limit:
            others = [name for name in self._rings if name != namespace and not self._is_protected(name)]
            idle = others[: max(0, len(others) - self._active)]
            # Only rings that stay at least as large: otherwise two busy ones would take space from each other forever.
            larger = [name for name in others[len(idle) :] if self._rings[name].index.capacity > capacity]
            if not larger and self.memory + wanted - sum(self._rings[name].memory for name in idle) > self.limit:
                return False
            victim = (idle or larger)[0]
            self._resize(victim, self._rings[victim].index.capacity // 2)
        return True

    def _is_protected(self, namespace: bytes) -> bool:
        return namespace == self.protected and 2 * self._rings[namespace].memory <= self.limit

    def _ring_bytes(self, namespace: bytes, capacity: int) -> int:
        return capacity // self._smallest * self._smallest_bytes + _OVERHEAD + sys.getsizeof(namespace)

    def _resize(self, namespace: bytes, capacity: int) -> None:
        if capacity < self._smallest:
            self.remove(namespace)
            return
        ring = self._rings[namespace]
        try:
            before = ring.memory
            ring.resize(capacity)
            self.memory += ring.memory - before
        except (
            BaseException
        ):  # without memory, or interrupted: half a ring is none, and may be read from its file again
            self._rings.pop(namespace, None)
            self.memory = sum(ring.memory for ring in self._rings.values())
            raise


def _index_bytes(capacity: int) -> int:
    return NgramIndex(capacity, _NGRAM_LENGTHS).bytes


def _digest(document: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little"))
