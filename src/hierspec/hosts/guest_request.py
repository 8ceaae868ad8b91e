"""A text that a host writes."""

from __future__ import annotations

from collections.abc import Sequence

from hierspec.core.proposal import Proposal
from hierspec.core.request import Request


class GuestRequest(Request):
    """A request that is told what the host has written, and holds what it should verify next."""

    drafted: tuple[int, ...] = ()  # the chain that the host verifies next
    proposals: Sequence[Proposal] = ()  # that it was chosen from, where only stores draft
    read_from: int = 0  # where the text begins for draft models: they need not read all of a long prompt

    def follow(self, tokens: Sequence[int]) -> None:
        """The host has written these."""
        self._append(tokens)
