"""The staircases of one checkpoint, by request, within a stated number of bytes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from hierspec.backends.base import Decoder
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import RequestView
from hierspec.core.proposal import Proposal
from hierspec.scorers.staircase import Pages, Staircase

_MOST_IDLE = 8  # staircases of ended requests that wait for a prompt with a common prefix


class StaircasePool:
    """Ended requests leave their staircases behind for a later prompt with a common prefix (the next turn of a chat),
    and running ones share what is finished of theirs with a new one. When memory is short the longest unused ones go
    first; a running request that lost its own computes it again.
    """

    def __init__(self, decoder: Decoder, budget: int) -> None:
        self.decoder, self.budget = decoder, budget
        self.taps: tuple[int, ...] = (decoder.config.layers,)
        self._pages: Pages | None = None  # reserved when first asked for
        self._running: weakref.WeakKeyDictionary[RequestView, Staircase] = weakref.WeakKeyDictionary()
        self._idle: list[Staircase] = []
        self._use: dict[Staircase, None] = {}  # least recently used first

    def add_tap(self, layer: int) -> None:
        """Keep states after this layer too."""
        if layer not in self.taps:
            self.taps = tuple(sorted({*self.taps, layer}))
            self.clear()
            self._pages = None

    def clear(self) -> None:
        """Forget everything. Never changes what is written."""
        for staircase in self._use:
            staircase.release()
        self._running.clear()
        self._idle, self._use = [], {}

    def staircases(self) -> list[Staircase]:
        """All that is kept, the least recently used first."""
        return list(self._use)

    def bytes_held(self) -> int:
        """Of the pages that hold something; those that several texts share count once."""
        return 0 if self._pages is None else self._pages.in_use * self._pages.memory.bytes_per_page

    def release(self, request: RequestView) -> None:
        staircase = self._running.pop(request, None)
        if staircase is not None and staircase in self._use:
            self._idle.append(staircase)
            if len(self._idle) > _MOST_IDLE:
                self._forget(self._idle[0])

    def known(self, context: np.ndarray) -> int:
        """How much of the beginning of a new request's context is computed here already."""
        left = [staircase.common(context) for staircase in self._idle]
        shared = [staircase.finished(context) for staircase in self._use]
        return max((*left, *shared), default=0)

    def prepare(self, wanted: Sequence[tuple[RequestView, np.ndarray, Proposal]]) -> list[Staircase]:
        """The staircases of these requests, each aligned with its context and proposal and with room for them."""
        pinned: list[Staircase] = []
        for request, context, proposal in wanted:
            try:
                self._prepare(request, context, proposal, pinned)
            except BaseException:  # Ctrl-C included: what is half moved must not be read again
                self._drop(request)
                raise
        return pinned

    def _prepare(self, request: RequestView, context: np.ndarray, proposal: Proposal, pinned: list[Staircase]) -> None:
        staircase = self._running.get(request)
        if staircase is None:
            staircase = self._running[request] = self._begun(context, pinned)
        self._use.pop(staircase, None)
        self._use[staircase] = None
        pinned.append(staircase)
        same, entries = staircase.common(context), len(context) + len(proposal)
        lacking = staircase.pages_lacking(entries, same)
        if lacking:
            self._make_room(lacking, pinned)
            staircase.reserve(entries)
        staircase.align(context, proposal, same)

    @property
    def pages(self) -> Pages:
        if self._pages is None:
            self._pages = Pages(self.decoder.memory(self.taps, self.budget))
        return self._pages

    def _begun(self, context: np.ndarray, pinned: list[Staircase]) -> Staircase:
        """The staircase of a new request: one that an ended request left, the beginning of one in use, or a new one."""
        left = max(self._idle, key=lambda staircase: staircase.common(context), default=None)
        common = 0 if left is None else left.common(context)
        page = self.pages.memory.page
        if left is not None and common and common + page > left.chain:  # hardly more than what is wanted
            self._idle.remove(left)
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
            raise HierspecError(
                f"Keys and values need {needed / 2**20:.0f} MiB but the budget is {self.budget / 2**20:.0f} MiB; raise "
                "--kv-memory, or run fewer or shorter requests."
            )

    def _evict(self, pinned: list[Staircase]) -> bool:
        """Forget the one that was unused for longest, if there is one that may go."""
        for staircase in self._use:
            if not any(staircase is needed for needed in pinned):
                self._forget(staircase)
                return True
        return False

    def _drop(self, request: RequestView) -> None:
        """Forget the staircase of a request that something interrupted, and count pages again."""
        staircase = self._running.pop(request, None)
        if staircase is not None:
            self._use.pop(staircase, None)
        if self._pages is not None:
            self._pages.recount(self._use)

    def _forget(self, staircase: Staircase) -> None:
        staircase.release()
        self._use.pop(staircase, None)
        self._idle = [other for other in self._idle if other is not staircase]
        for request in [request for request, held in self._running.items() if held is staircase]:
            del self._running[request]
