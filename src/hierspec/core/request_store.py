"""A store as one request uses it. Drafts only change the speed, so a store that fails does not fail the request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Store
from hierspec.core.proposal import NOTHING, Proposal

_LOG = logging.getLogger("hierspec")


class RequestStore(Store):
    """The view of a store that `begin` returned for a request.

    After an unexpected error it is not asked again: the text goes on without its drafts, and the log says so. A
    `HierspecError` is meant for the user, and fails the request.

    The view learns the tokens of several rounds at once, before it is asked again: a batch that drafts nothing writes
    many rounds, and calls for each of its requests would cost 1% of the time.
    """

    def __init__(self, store: Store, prompt: np.ndarray, namespace: str) -> None:
        self.name = store.name
        self._failed = False
        self._unlearnt: list[int] = []
        view = self._try(store.begin, prompt, namespace)
        self.view: Store = store if view is None else view
        # Whether it wants to know what scorers would write.
        self.observes = not self._failed and type(self.view).observe is not Store.observe

    def propose(self, context: np.ndarray, budget: int) -> Proposal:
        self._learn()
        proposal = self._try(self.view.propose, context, budget)
        if not isinstance(proposal, Proposal) and not self._failed:
            self._leave_out(TypeError(f"propose returned a {type(proposal).__name__}"))
        return NOTHING if self._failed else proposal

    def learn(self, tokens: Sequence[int]) -> None:
        self._unlearnt += tokens

    def _learn(self) -> None:
        if self._unlearnt:
            tokens, self._unlearnt = self._unlearnt, []
            self._try(self.view.learn, tokens)

    def observe(self, proposal: Proposal, picks: np.ndarray) -> None:
        self._learn()
        self._try(self.view.observe, proposal, picks)

    def end(self) -> None:
        try:
            self._learn()
            self._try(self.view.end)
        except HierspecError as error:  # the text is complete, so this must not fail it
            self._leave_out(error)

    def _try(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._failed:
            return None
        try:
            return method(*arguments)
        except HierspecError:
            raise
        except Exception as error:
            self._leave_out(error)
            return None

    def _leave_out(self, error: Exception) -> None:
        self._failed, self.observes = True, False
        _LOG.warning("The store %s failed; the request goes on without its drafts and writes the same text.", self.name)
        _LOG.debug("What it failed with:", exc_info=error)
