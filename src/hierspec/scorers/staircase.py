"""The staircase: what is already computed for a text, token by token, up to which layer.

A cache is a memo. `align` is given the whole context and proposal, keeps what it holds of exactly that and forgets
the rest; dropping a staircase costs time, never a different token. Exits of one checkpoint and the checkpoint itself
share a staircase: a token climbs from tap to tap, each layer at most once while it is kept.

    entry    0 1 2 3 4 | 5 6 7      context | proposal nodes
    layers  30 # # # # .
             8 # # # # . . #        states are kept at every tap,
             4 # # # # # # # .      so a token can go on from where it got to

Keys, values and states are in the memory of a backend, in pages that texts may share. A page that is shared is only
read: a text that has to write to it gets a copy first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from hierspec.backends.base import Memory
from hierspec.core.errors import OutOfMemory
from hierspec.core.proposal import Proposal
from hierspec.scorers.alignment import follow, seen_by

KEYS_ONLY = -1  # a height: keys and values of all layers are there, but no state; later tokens need no more

_NO_PATHS = np.zeros(0, np.int64)


class Pages:
    """Hands out the pages of a memory and counts how many texts hold each."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._holders: dict[int, int] = {}
        self._returned: list[int] = []  # used before; the last is taken first: it may still be in caches
        self._unused = 0  # pages from this one on were never in use

    @property
    def in_use(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return self.memory.pages - len(self._holders)

    def take(self) -> int:
        """A page for one holder. There must be a free one."""
        if not self.free:
            raise OutOfMemory("There is no room left for keys and values; raise --kv-memory, or run fewer requests.")
        if self._returned:
            page = self._returned.pop()
        else:
            page, self._unused = self._unused, self._unused + 1
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One holder more."""
        self._holders[page] += 1

    def holders(self, page: int) -> int:
        return self._holders[page]

    def recount(self, staircases: Iterable[Staircase]) -> None:
        """Count holders again, after an interruption between taking a page and noting it."""
        self._holders = dict(Counter(int(page) for staircase in staircases for page in staircase.table))
        self._returned = [page for page in range(self._unused) if page not in self._holders]

    def give_back(self, page: int) -> None:
        """One holder less; without any the page is free."""
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            self._returned.append(page)


class Staircase:
    """One text. Entry i < `chain` is position i of the context; the proposal's nodes come after it."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.memory = pages.memory
        self.used = 0
        self.chain = 0
        self.table = np.zeros(0, np.int64)  # pages, in the order of the entries
        self.tokens = np.zeros(0, np.int32)
        self.parents = np.zeros(0, np.int64)
        self.positions = np.zeros(0, np.int64)
        self.slots = np.zeros(0, np.int64)  # of the memory, by entry
        self.heights = np.zeros(0, np.int32)  # layers that an entry has been through: 0, a tap or `KEYS_ONLY`
        self._shared = 0  # leading pages that others may hold too
        # For a drafter on a checkpoint's states: leading entries made from those. Only these can be shared.
        self.from_features: int | None = None
        self.assumed = False  # holds entries that were never computed, for timing: nobody else may read it

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    def pages_lacking(self, entries: int, same: int) -> int:
        """Pages to take before `entries` entries fit, if those after the first `same` will change."""
        page = self.memory.page
        lacking = max(-(-entries // page) - len(self.table), 0)
        first = same // page
        if first < self._shared:
            lacking += sum(self._pages.holders(int(number)) > 1 for number in self.table[first : self._shared])
        return lacking

    def reserve(self, entries: int) -> None:
        """Take the pages for this many entries."""
        lacking = -(-entries // self.memory.page) - len(self.table)
        if lacking > 0:
            self._hold([*self.table.tolist(), *(self._pages.take() for _ in range(lacking))])

    def _hold(self, pages: list[int]) -> None:
        """Use these pages, and make room in the arrays that describe their entries."""
        page = self.memory.page
        self.table = np.array(pages, np.int64)
        if len(pages) * page > self.capacity:
            # Double the capacity, so that a long text is not copied at every page.
            room = np.zeros(max(len(pages) * page, 2 * self.capacity) - self.capacity, np.int32)
            self.tokens = np.append(self.tokens, room)
            self.heights = np.append(self.heights, room)
            self.parents, self.positions = np.append(self.parents, room), np.append(self.positions, room)
        self.slots = (self.table[:, None] * page + np.arange(page)).ravel()

    def common(self, context: np.ndarray) -> int:
        """How many leading tokens of the context it holds."""
        size = min(self.chain, len(context))
        if not size:
            return 0
        differs = self.tokens[:size] != context[:size]
        first = int(differs.argmax())
        return first if differs[first] else size

    def finished(self, context: np.ndarray) -> int:
        """How many of the tokens of `common` have been through every layer, so that others may read them."""
        size = 0 if self.assumed else self.common(context)
        if self.from_features is not None:
            size = min(size, self.from_features)
        heights = self.heights[:size]
        below = (heights < self.memory.taps[-1]) & (heights != KEYS_ONLY)
        first = int(below.argmax()) if size else 0
        return first if size and below[first] else size

    def share(self, context: np.ndarray, count: int) -> Staircase:
        """A new staircase that begins with `count` finished tokens of this one.

        Full pages are shared, the rest is copied. There must be a free page.
        """
        other, page = Staircase(self._pages), self.memory.page
        full = count // page
        other._hold(self.table[:full].tolist())
        for number in other.table:
            self._pages.hold(int(number))
        other._shared, self._shared = full, max(full, self._shared)
        other.reserve(count)
        if full * page < count:
            rest = slice(full * page, count)
            self.memory.copy(other.slots[rest], self.slots[rest])
        other.tokens[:count] = context[:count]
        other.heights[:count] = self.heights[:count]
        other.parents[:count] = np.arange(-1, count - 1)
        other.positions[:count] = np.arange(count)
        other.chain = other.used = count
        other.from_features = None if self.from_features is None else count
        return other

    def recompute(self, start: int) -> None:
        """Forget what was computed for the entries from `start` on."""
        self._unshare(start)
        self.heights[start : self.used] = 0

    def assume(self, done: int, height: int, start: int = 0) -> None:
        """For timing alone: the entries start..done count as computed up to this layer, those after them as not."""
        self.assumed = True
        self._unshare(0)
        self.heights[start:done] = height
        self.heights[done : self.used] = 0

    def add_computed(self, start: int, tokens: Sequence[int], height: int) -> None:
        """Append tokens to the chain that the backend has computed in the slots after it. There are no nodes.

        They and the last entry before them have been through `height` layers. The entries from `start` up to that one
        have keys and values only.
        """
        first, end = self.chain, self.chain + len(tokens)
        self.tokens[first:end] = tokens
        self._number(first, end)
        self.heights[start : first - 1] = KEYS_ONLY
        self.heights[first - 1 : end] = height
        self.chain = self.used = end

    def release(self) -> None:
        """Give all pages back. It is of no use afterwards."""
        for number in self.table:
            self._pages.give_back(int(number))
        self.table = self.table[:0]

    def align(self, context: np.ndarray, proposal: Proposal, same: int | None = None) -> None:
        """Make entries 0.. hold the context and those after it the proposal's nodes, keeping what is known.

        `same` is what `common` says of the context. New entries have height 0. There must be room for all of them.
        """
        length, wanted = len(context), len(context) + len(proposal)
        same = self.common(context) if same is None else same
        if same // self.memory.page < self._shared:
            self._unshare(same)
        if self.used in (same, self.chain) and not proposal.tokens:
            # Nothing that is held can be reused after `same`, so there is nothing to search. This is the path of
            # drafting token by token, where every microsecond counts.
            self._put_context(context, same)
            self.heights[same:length] = 0
            self.chain = self.used = length
            return
        nodes = np.array((proposal.tokens, proposal.parents), np.int64)
        to, sources = follow(
            self.tokens, self.parents, self.positions, self.heights, same, self.used, context, nodes[0], nodes[1]
        )
        if len(to):
            self.memory.copy(self.slots[to], self.slots[sources])
        self.chain, self.used = length, wanted

    def seen(self, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each of these entries attends to: the number of leading entries, and a path of slots beyond them.

        Returns these numbers, where each path begins and ends, and the paths one after the other, from the context down
        to the entry itself. An entry whose index is its position has all entries before it as ancestors, even if they
        are nodes. It needs no path, which is cheaper for backends.
        """
        if entries[-1] < self.chain:  # entries are sorted
            return entries + 1, np.zeros(len(entries) + 1, np.int64), _NO_PATHS
        return seen_by(entries, self.chain, self.positions, self.parents, self.slots)

    def _put_context(self, context: np.ndarray, same: int) -> None:
        length = len(context)
        self.tokens[same:length] = context[same:]
        self._number(same, length)

    def _number(self, first: int, end: int) -> None:
        """Let each of these entries follow the one before it."""
        self.parents[first:end] = np.arange(first - 1, end - 1)
        self.positions[first:end] = np.arange(first, end)

    def _unshare(self, start: int) -> None:
        """Replace shared pages from the entry `start` on by copies of its own."""
        page, first = self.memory.page, start // self.memory.page
        for index in range(first, self._shared):
            number = int(self.table[index])
            if self._pages.holders(number) == 1:
                continue
            self.table[index] = self._pages.take()
            entries = np.arange(index * page, min((index + 1) * page, max(self.used, index * page)))
            old = self.slots[entries]
            self.slots[index * page : (index + 1) * page] = self.table[index] * page + np.arange(page)
            if len(entries):
                self.memory.copy(self.slots[entries], old)
            self._pages.give_back(number)
        self._shared = min(self._shared, first)
