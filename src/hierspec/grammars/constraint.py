"""What a grammar allows along one text and every draft of it.

The matcher is at one position of the text; it moves by rolling tokens back and reading others. Results are cached by
position, so a node that was first drafted and is verified later costs nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Constraint
from hierspec.core.proposal import CERTAIN, NOTHING, Proposal

SOURCE = "grammar"  # source of forced tokens
_LIKELY = 0  # evidence of a token whose characters are forced, perhaps in other tokens


class _Place:
    """A position after some tokens: what may follow, and the positions after tokens that were asked about."""

    __slots__ = ("after", "bits", "forced", "single")

    def __init__(self) -> None:
        self.after: dict[int, _Place | None] = {}  # None: the token is forbidden here
        self.bits: np.ndarray | None = None  # mask of allowed tokens, once it was computed
        self.single = -1  # the only allowed token, if there is just one; set with `bits`
        self.forced: list[int] | None = None  # llguidance's tokens for the characters that must follow


_END = _Place()  # after a stop token: nothing follows


class GrammarConstraint(Constraint):
    """`Constraint` of one request, with its own `LLMatcher`."""

    def __init__(
        self,
        matcher: Any,
        vocabulary: int,
        ends: Sequence[int],
        first_opening: int = 0,  # the matcher's id of token 0 at the start of a text; 0: ids are the same everywhere
        opening_token: Callable[[bytes], int | None] = lambda text: None,  # begins a text with these bytes
    ) -> None:
        self._matcher = matcher
        self._bytes = -(-vocabulary // 8)
        self._ends = list(ends)
        self._text = np.full(self._bytes, 0xFF, np.uint8)  # mask of tokens that may be text
        for token in ends:
            self._text[token >> 3] &= 0xFF ^ (1 << (token & 7))
        self._first_opening, self._opening_token = first_opening, opening_token
        self._settled = 0  # tokens that the request has written, which are never rolled back
        self._place = _Place()  # the position after them
        self._read: list[int] = []  # tokens that the matcher has read since

    def wrote(self, tokens: Sequence[int]) -> None:
        kept, place = list[int](), self._place
        for token in tokens:
            following = None if token in self._ends else self._following(place, kept, token)
            if following is None:  # the end: nothing more will be asked
                break
            kept.append(token)
            place = following
        self._go(kept)
        self._place, self._settled = place, self._settled + len(tokens)
        self._read = []

    def allowed(self, written: np.ndarray, proposal: Proposal) -> list[np.ndarray | None]:
        paths, places = self._walk(written, proposal)
        return [None if place is None else self._bits(place, path) for path, place in zip(paths, places, strict=True)]

    def pruned(self, written: np.ndarray, proposal: Proposal) -> Proposal:
        _, places = self._walk(written, proposal, ends=True)
        moved, kept = {-1: -1}, list[int]()
        for node, parent in enumerate(proposal.parents):
            if parent in moved and (places[node + 1] is not None or proposal.distributions[node] is not None):
                moved[node] = len(kept)
                kept.append(node)
        return proposal if len(kept) == len(proposal) else proposal.subtree(kept)

    def forced(self, written: np.ndarray, most: int) -> Proposal:
        [path], [place] = self._walk(written, NOTHING)
        tokens, evidence, certain = list[int](), list[int](), True
        while place is not None and len(tokens) < most:
            self._bits(place, path)
            if place.single >= 0:
                next_tokens = [place.single]
            else:
                certain = False
                next_tokens = self._forced(place, path)
            for token in next_tokens[: most - len(tokens)]:
                tokens.append(token)
                evidence.append(CERTAIN if certain else _LIKELY)
                place = None if token in self._ends else self._following(place, path, token)
                path = [*path, token]
                if place is None:
                    break
            if not next_tokens:
                break
        if not tokens:
            return NOTHING
        size = len(tokens)
        return Proposal(tuple(tokens), tuple(range(-1, size - 1)), (SOURCE,) * size, (), tuple(evidence))

    def _walk(
        self, written: np.ndarray, proposal: Proposal, ends: bool = False
    ) -> tuple[list[list[int]], list[_Place | None]]:
        """The path since the settled tokens, and the position, for `written` and for every node.

        With `ends`, a text that may end has the position `_END` after its stop token.
        """
        start, place = list[int](), self._place
        here: _Place | None = place
        for token in written[self._settled :].tolist():
            here = None if here is None else self._following(here, start, token)
            start.append(token)
        paths, places = [start], [here]
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            before, path = places[parent + 1], paths[parent + 1]
            paths.append([*path, token])
            if before is None or before is _END:
                places.append(None)
            elif token in self._ends:
                places.append(_END if ends and self._allows(before, path, token) else None)
            else:
                places.append(self._following(before, path, token))
        return paths, places

    def _following(self, place: _Place, path: list[int], token: int) -> _Place | None:
        """The position after a token; None if the token is forbidden."""
        if token not in place.after:
            place.after[token] = _Place() if self._allows(place, path, token) else None
        return place.after[token]

    def _allows(self, place: _Place, path: list[int], token: int) -> bool:
        if place.bits is None and token not in self._ends:  # a mask for a rejected draft would cost more
            self._go(path)
            return bool(self._matcher.validate_tokens([self._spelled(path, token)]))
        return bool(self._bits(place, path)[token >> 3] >> (token & 7) & 1)

    def _bits(self, place: _Place, path: list[int]) -> np.ndarray:
        if place.bits is None:
            self._go(path)
            opens = self._opens(path)
            first = self._first_opening >> 3 if opens else 0
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[first : first + self._bytes] & self._text
            self._check()
            if opens and not bits.any():
                self._open_forced(bits)
            if self._matcher.is_accepting():
                for token in self._ends:
                    bits[token >> 3] |= 1 << (token & 7)
            place.bits = bits
            some = np.flatnonzero(bits)
            if len(some) == 1 and (only := int(bits[some[0]])) & (only - 1) == 0:
                place.single = 8 * int(some[0]) + only.bit_length() - 1
        return place.bits

    def _open_forced(self, bits: np.ndarray) -> None:
        """Allows the token that begins a text with the forced first characters.

        The matcher only allows the token that has these characters inside a text.
        """
        token = self._opening_token(self._matcher.compute_ff_bytes())
        if token is not None and self._matcher.validate_tokens([token + self._first_opening]):
            bits[token >> 3] |= 1 << (token & 7)

    def _forced(self, place: _Place, path: list[int]) -> list[int]:
        if place.forced is None:
            place.forced = []
            if not self._opens(path):
                self._go(path)
                place.forced = [token for token in self._matcher.compute_ff_tokens() if token < 8 * self._bytes]
                self._check()
        return place.forced

    def _opens(self, path: list[int]) -> bool:
        """Whether the next token is the first of the text, and the first token is spelled differently."""
        return bool(self._first_opening) and not self._settled and not path

    def _spelled(self, path: list[int], token: int) -> int:
        """The matcher's id of a token that follows this path."""
        return token + self._first_opening if self._opens(path) else token

    def _go(self, path: list[int]) -> None:
        """Moves the matcher to the end of this path, all of whose tokens are allowed."""
        same = 0
        for read, token in zip(self._read, path, strict=False):
            if read != token:
                break
            same += 1
        if back := len(self._read) - same:
            self._matcher.rollback(back)
            del self._read[same:]
        for token in path[same:]:
            self._matcher.consume_token(self._spelled(self._read, token))
            self._read.append(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise HierspecError("The grammar is too complex to go on with here; make it simpler.")
