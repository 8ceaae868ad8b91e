"""The staircases of one checkpoint, by request, within a budget of bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from hierspec.backends.base import Decoder
from hierspec.core.errors import OutOfMemory
from hierspec.core.interfaces import RequestView
from hierspec.core.proposal import Proposal
from hierspec.scorers.staircase import Pages, Staircase

_MOST_IDLE = 8  # staircases of ended requests that wait for a prompt with a common prefix

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class StaircasePool:
    """The KV cache of running requests, and a prefix cache of ended ones.

    Ended requests leave their staircases for a later prompt with a common prefix (the next turn of a chat); running
    ones share their finished entries with new ones. When memory is short, the least recently used are evicted, those of
    ended requests first. A running request that lost its staircase computes it again.

    A change of staircases or pages that is interrupted (Ctrl-C, a failed allocation) makes the pool forget what it
    touched. If even that is interrupted, everything is forgotten before the next change.
    """

    def __init__(self, decoder: Decoder, budget: int) -> None:
        self.decoder, self.budget = decoder, budget
        self.taps: tuple[int, ...] = (decoder.config.layers,)
        self._pages: Pages | None = None  # reserved when first asked for
        self._running: weakref.WeakKeyDictionary[RequestView, Staircase] = weakref.WeakKeyDictionary()
        self._idle: list[Staircase] = []
        self._use: dict[Staircase, None] = {}  # all of them, least recently used first; others are forgotten
        self._changing = False  # a change runs, or was interrupted

    def add_tap(self, layer: int) -> None:
        """Keep states after this layer too."""
        if layer not in self.taps:
            self._drop_memory()
            self.taps = tuple(sorted({*self.taps, layer}))  # only now: memory is made for exactly these taps

    def clear(self) -> None:
        """Forget everything. Never changes what is written."""
        self._changing = True
        self._running.clear()
        self._idle, self._use = [], {}
        if self._pages is not None:
            self._pages.recount(())
        self._changing = False

    def staircases(self) -> list[Staircase]:
        """All that is kept, the least recently used first."""
        return list(self._use)

    def bytes_held(self) -> int:
        """Bytes of the pages in use; pages that several texts share count once."""
        return 0 if self._pages is None else self._pages.in_use * self._pages.memory.bytes_per_page

    def share_of_running(self) -> float:
        """The share of all pages that running requests hold. Those of ended requests may be evicted at any time."""
        if self._pages is None:
            return 0.0
        pages = {int(page) for staircase in self._running.values() for page in staircase.table}
        return len(pages) / self._pages.memory.pages

    def share(self, positions: int) -> float:
        """The share of all pages that a text of this many positions takes."""
        memory = self.pages.memory
        return -(-positions // memory.page) / memory.pages

    def release(self, request: RequestView) -> None:
        """The request has ended; a later one may reuse what was computed for it."""
        self._change(self._running.get(request), self._make_idle, request)

    def known(self, context: np.ndarray) -> int:
        """Leading tokens of a new request's context that are already computed here."""
        left = [staircase.common(context) for staircase in self._idle]
        shared = [staircase.finished(context) for staircase in self._use]
        return max((*left, *shared), default=0)

    def prepare(self, wanted: Sequence[tuple[RequestView, np.ndarray, Proposal]]) -> list[Staircase]:
        """The staircases of these requests, each aligned with its context and proposal and with room for them."""
        pinned: list[Staircase] = []
        for request, context, proposal in wanted:
            self._change(self._running.get(request), self._prepare, request, context, proposal, pinned)
        return pinned

    def reserve(self, staircase: Staircase, entries: int) -> bool:
        """Try to have room for so many entries of this staircase, without evicting what running requests use.

        Returns whether there is room.
        """
        if entries > len(staircase.slots):
            self._change(staircase, self._reserve, staircase, entries)
        return entries <= len(staircase.slots)

    def _reserve(self, staircase: Staircase, entries: int) -> None:
        pages, lacking = self.pages, staircase.pages_lacking(entries, staircase.used)
        idle = Counter(int(page) for other in self._idle for page in other.table)
        if pages.free + sum(pages.holders(page) == count for page, count in idle.items()) < lacking:
            return
        while pages.free < lacking and self._idle:
            self._forget(self._idle[0])
        staircase.reserve(entries)

    def recompute(self, staircase: Staircase, start: int) -> None:
        """Forget what was computed for the staircase's entries from `start` on."""
        self._change(staircase, staircase.recompute, start)

    def add_computed(self, staircase: Staircase, start: int, tokens: Sequence[int], height: int) -> None:
        """`Staircase.add_computed`, whole or not at all."""
        self._change(staircase, staircase.add_computed, start, tokens, height)

    def assume(self, staircase: Staircase, done: int, height: int, start: int = 0) -> None:
        """For timing alone: the entries start..done count as computed up to this layer, those after them as not."""
        self._change(staircase, staircase.assume, done, height, start)

    @property
    def pages(self) -> Pages:
        if self._pages is None:
            self._pages = Pages(self.decoder.memory(self.taps, self.budget))
        return self._pages

    def _change(
        self,
        staircase: Staircase | None,
        change: Callable[_Arguments, _Result],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        """Run a change of this staircase (None: of a new one) and of the pages. If it fails, forget what it touched."""
        if self._changing:
            self.clear()
        self._changing = True
        try:
            result = change(*arguments, **named)
        except BaseException:  # Ctrl-C included: entries that are half moved must not be read again
            if staircase is not None:
                self._use.pop(staircase, None)
            self._keep_only_used()
            self._changing = False
            raise
        self._changing = False
        return result

    def _prepare(self, request: RequestView, context: np.ndarray, proposal: Proposal, pinned: list[Staircase]) -> None:
        running = self._running.get(request)
        staircase = self._begun(context, pinned) if running is None else running
        self._use.pop(staircase, None)  # nobody finds it while it changes
        pinned.append(staircase)
        same, entries = staircase.common(context), len(context) + len(proposal)
        lacking = staircase.pages_lacking(entries, same)
        if lacking:
            self._make_room(lacking, pinned)
            staircase.reserve(entries)
        staircase.align(context, proposal, same)
        self._use[staircase] = None
        if running is None:
            self._running[request] = staircase

    def _make_idle(self, request: RequestView) -> None:
        staircase = self._running.pop(request, None)
        if staircase is None:
            return
        if staircase.assumed or request.ended == "error":  # nothing of a text that failed is read again
            self._forget(staircase)
            return
        self._idle.append(staircase)
        if len(self._idle) > _MOST_IDLE:
            self._forget(self._idle[0])

    def _begun(self, context: np.ndarray, pinned: list[Staircase]) -> Staircase:
        """A new request's staircase: one left by an ended request, a shared prefix of another, or an empty one."""
        left = max(self._idle, key=lambda staircase: staircase.common(context), default=None)
        common = 0 if left is None else left.common(context)
        page = self.pages.memory.page
        if left is not None and common and common + page > left.chain:  # less than a page of it goes unused
            self._leave_out(left)
            return left
        best = max(self._use, key=lambda staircase: staircase.finished(context), default=None)
        shared = 0 if best is None else best.finished(context)
        if best is not None and shared and (self.pages.free or self._evict([*pinned, best])):
            return best.share(context, shared)
        return Staircase(self.pages)

    def _make_room(self, lacking: int, pinned: list[Staircase]) -> None:
        pages = self.pages
        while pages.free < lacking and self._evict(pinned):
            pass
        if pages.free < lacking:
            needed = (pages.in_use + lacking) * pages.memory.bytes_per_page
            if pages.memory.pages < self.budget // pages.memory.bytes_per_page:
                self._drop_memory()  # the machine had less free when it was reserved, and may have more next time
            raise OutOfMemory(
                f"Keys and values need {needed / 2**20:.1f} MiB, more than the {self.budget / 2**20:.1f} MiB that they "
                "may take or than the machine has; raise --kv-memory, or run fewer or shorter requests."
            )

    def _evict(self, pinned: list[Staircase]) -> bool:
        """Forget the least recently used staircase that is not pinned, those of ended requests first.

        Returns whether there was one.
        """
        for staircase in (*self._idle, *self._use):
            if not any(staircase is needed for needed in pinned):
                self._forget(staircase)
                return True
        return False

    def _forget(self, staircase: Staircase) -> None:
        self._leave_out(staircase)
        staircase.release()

    def _leave_out(self, staircase: Staircase) -> None:
        """Remove it from all lists, so that no request finds it any more."""
        self._use.pop(staircase, None)
        self._idle = [other for other in self._idle if other is not staircase]
        for request in [request for request, held in self._running.items() if held is staircase]:
            del self._running[request]

    def _keep_only_used(self) -> None:
        """Bring lists and counts in line with `_use` after an interrupted change."""
        self._idle = [staircase for staircase in self._idle if staircase in self._use]
        for request in [request for request, staircase in self._running.items() if staircase not in self._use]:
            del self._running[request]
        if self._pages is not None:
            self._pages.recount(self._use)

    def _drop_memory(self) -> None:
        """Forget everything; memory is reserved again when it is next needed."""
        self.clear()
        self._pages = None
