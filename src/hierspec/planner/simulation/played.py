"""Scorers that are played: they say what a trace says, and no model runs. The recursion above them is the real one.

Along the target's text all is exact. Off it nobody knows what a tier would say: there, a middle tier lets a guess stand
that the target will not, and what follows is lost anyway; it only matters how long it takes. So every tier picks the
same pseudo-random token as the tier above it, at the rate at which the two agree along the text, or another one.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from hierspec.core.interfaces import Answer, Ask, RequestView
from hierspec.core.sampling import noise_keys
from hierspec.planner.simulation.traces import Trace

Script = MutableMapping[RequestView, Trace]  # which text a request is for
_APART = 4  # tokens between those that tiers say which do not agree: room for runners-up


def new_script() -> Script:
    return WeakKeyDictionary()


class PlayedScorer:
    """Plays the target, or the tier `key` of the traces, for the requests of a script.

    `seconds` is what its passes would have taken, by `price`, and `playing` what it took to play them.
    """

    def __init__(
        self,
        name: str,
        vocabulary: int,
        script: Script | None = None,
        key: str | None = None,  # None: the target
        above: PlayedScorer | None = None,
        agreement: float = 1.0,  # with the tier above, where the text is not the target's
        price: Callable[[Sequence[Ask]], float] | None = None,
    ) -> None:
        self.name, self.vocabulary, self.key = name, vocabulary, key
        self.script = new_script() if script is None else script
        self.above, self.agreement = above, agreement
        self.seconds = self.playing = 0.0
        self._price = price
        self._place: int = 0 if above is None else above._place + 1
        self._texts: WeakKeyDictionary[RequestView, tuple[np.ndarray, int]] = WeakKeyDictionary()

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        began = time.thread_time()
        answers = [self._answer(ask) for ask in asks]
        if self._price is not None:
            self.seconds += self._price(asks)
        self.playing += time.thread_time() - began
        return answers

    def release(self, request: RequestView) -> None:
        self._texts.pop(request, None)

    def _answer(self, ask: Ask) -> Answer:
        trace = self.script[ask.request]
        if ask.request not in self._texts:
            text = np.array(trace.prompt + trace.output, np.int32)
            self._texts[ask.request] = text, zlib.crc32(text.tobytes())
        text, hashed = self._texts[ask.request]
        prompt, start = len(trace.prompt), len(ask.context)
        written = prompt + len(ask.request.output)
        true = start <= len(text) and np.array_equal(ask.context[written:], text[written:start])
        picks = np.empty((1 + len(ask.proposal), ask.candidates), np.int32)
        leads = np.zeros(len(picks)) if ask.leads else None
        standing, depths = [true], [0]  # of the row after each node, the context first
        last = [int(ask.context[-1])]
        for token, parent in zip(ask.proposal.tokens, ask.proposal.parents, strict=True):
            place = start + depths[parent + 1]
            standing.append(standing[parent + 1] and place < len(text) and token == text[place])
            depths.append(depths[parent + 1] + 1)
            last.append(token)
        for row, (on_text, depth) in enumerate(zip(standing, depths, strict=True)):
            place = start + depth
            if place >= len(text):
                on_text = False
            elif leads is not None and self.key is not None:
                leads[row] = self._lead(trace, place - prompt, place - written)
            if on_text:
                found = self._said(trace, place - prompt, place - written)
                picks[row, : len(found)] = found[: ask.candidates]
                if len(found) < ask.candidates:
                    picks[row, len(found) :] = found[-1]  # nobody else was asked: a node that can only be there twice
            else:
                first = self._off_text(hashed + (last[row] << 32), place)
                picks[row] = [self._writable(first + other, trace) for other in range(ask.candidates)]
        return Answer(picks=picks, leads=leads)

    def _said(self, trace: Trace, position: int, depth: int) -> np.ndarray:
        if self.key is None:
            return np.array(trace.output[position : position + 1], np.int32)
        return trace.tiers[self.key].at(depth)[position]

    def _lead(self, trace: Trace, position: int, depth: int) -> float:
        assert self.key is not None
        leads = trace.tiers[self.key].leads
        return float(leads[min(depth, len(leads) - 1), position])

    def _off_text(self, text: int, position: int) -> int:
        """What this tier says after some text that is not the target's."""
        low, high = noise_keys(text + (self._place << 56), position)
        if self.above is not None and self.above.key is not None and high / 2**32 < self.agreement:
            return self.above._off_text(text, position)
        low, _ = noise_keys(text, position)
        return low + _APART * self._place

    def _writable(self, token: int, trace: Trace) -> int:
        """A token of the vocabulary that does not end a text: few guesses do."""
        token %= self.vocabulary
        while token in trace.stop_ids:
            token = (token + 1) % self.vocabulary
        return token
