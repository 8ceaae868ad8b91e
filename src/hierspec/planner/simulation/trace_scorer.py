"""Scorers that pick what a trace recorded, with no model. The recursion above them is the real one.

Along the target's text all picks are exact. Off the text nothing was recorded: there a middle tier has accepted a token
that the target will reject, what follows is lost anyway, and only its time matters. So off the text a tier picks the
same pseudo-random token as the tier above it, as often as the two agree along the text, and otherwise another one.
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

TraceOfRequest = MutableMapping[RequestView, Trace]  # which recorded text a request writes
_SPACING = 4  # between the tokens that disagreeing tiers pick: room for runners-up


def trace_map() -> TraceOfRequest:
    """Empty; forgets requests that nothing else refers to."""
    return WeakKeyDictionary()


class TraceScorer:
    """Stands in for the target, or for the tier `key` of the traces.

    `seconds` is what its passes would take, by `price`; `simulation_seconds` is what simulating them took.
    """

    def __init__(
        self,
        name: str,
        vocabulary: int,
        traces: TraceOfRequest | None = None,
        key: str | None = None,  # None: the target
        above: TraceScorer | None = None,
        agreement: float = 1.0,  # with the tier above, off the target's text
        price: Callable[[Sequence[Ask]], float] | None = None,
    ) -> None:
        self.name, self.vocabulary, self.key = name, vocabulary, key
        self.traces = trace_map() if traces is None else traces
        self.above, self.agreement = above, agreement
        self.seconds = self.simulation_seconds = 0.0
        self._price = price
        self._level: int = 0 if above is None else above._level + 1
        self._texts: WeakKeyDictionary[RequestView, tuple[np.ndarray, int]] = WeakKeyDictionary()

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        started = time.thread_time()
        answers = [self._answer(ask) for ask in asks]
        if self._price is not None:
            self.seconds += self._price(asks)
        self.simulation_seconds += time.thread_time() - started
        return answers

    def release(self, request: RequestView) -> None:
        self._texts.pop(request, None)

    def _answer(self, ask: Ask) -> Answer:
        trace = self.traces[ask.request]
        if ask.request not in self._texts:
            text = np.array(trace.prompt + trace.output, np.int32)
            self._texts[ask.request] = text, zlib.crc32(text.tobytes())
        text, text_hash = self._texts[ask.request]
        prompt, start = len(trace.prompt), len(ask.context)
        written = prompt + len(ask.request.output)
        context_on_text = start <= len(text) and np.array_equal(ask.context[written:], text[written:start])
        picks = np.empty((1 + len(ask.proposal), ask.candidates), np.int32)
        leads = np.zeros(len(picks)) if ask.leads else None
        # For each row, the context first, then the nodes: whether it is on the text, its depth, its last token.
        on_text, depths, last = [context_on_text], [0], [int(ask.context[-1])]
        for token, parent in zip(ask.proposal.tokens, ask.proposal.parents, strict=True):
            position = start + depths[parent + 1]
            on_text.append(on_text[parent + 1] and position < len(text) and token == text[position])
            depths.append(depths[parent + 1] + 1)
            last.append(token)
        for row, depth in enumerate(depths):
            position = start + depth
            if position < len(text) and leads is not None and self.key is not None:
                leads[row] = self._lead(trace, position - prompt, position - written)
            if position < len(text) and on_text[row]:
                recorded = self._recorded(trace, position - prompt, position - written)
                picks[row, : len(recorded)] = recorded[: ask.candidates]
                if len(recorded) < ask.candidates:
                    picks[row, len(recorded) :] = recorded[-1]  # no more were recorded: a duplicate node is harmless
            else:
                first = self._off_text(text_hash + (last[row] << 32), position)
                picks[row] = [self._not_stopping(first + other, trace) for other in range(ask.candidates)]
        return Answer(picks=picks, leads=leads)

    def _recorded(self, trace: Trace, position: int, depth: int) -> np.ndarray:
        if self.key is None:
            return np.array(trace.output[position : position + 1], np.int32)
        return trace.tiers[self.key].at(depth)[position]

    def _lead(self, trace: Trace, position: int, depth: int) -> float:
        assert self.key is not None
        leads = trace.tiers[self.key].leads
        return float(leads[min(depth, len(leads) - 1), position])

    def _off_text(self, text: int, position: int) -> int:
        """What this tier picks after a text that is not the target's."""
        low, high = noise_keys(text + (self._level << 56), position)
        if self.above is not None and self.above.key is not None and high / 2**32 < self.agreement:
            return self.above._off_text(text, position)
        low, _ = noise_keys(text, position)
        return low + _SPACING * self._level

    def _not_stopping(self, token: int, trace: Trace) -> int:
        """A token of the vocabulary that does not end a text: few drafted tokens do."""
        token %= self.vocabulary
        while token in trace.stop_ids:
            token = (token + 1) % self.vocabulary
        return token
