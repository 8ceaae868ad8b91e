"""Which guesses are worth verifying: how often such guesses stood, against what a wider pass costs.

Nothing here can change what is written, only how fast. It learns from every verdict, also about guesses that were
not verified: what the scorer wrote in their place shows whether they would have stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hierspec.core.proposal import Law, Proposal

_DEEPEST = 8  # guesses further out than this are counted together
_DOUBT = 16.0  # trials that a class must have seen to weigh as much as the wider class it belongs to
_FIRST_CHANCE = 0.4  # of a source that nothing is known of
_FADING_PASSES = 0.998  # what a pass counts for after the next
_USUAL_PASSES = 64.0  # that a request is taken to have made before its first, at the usual rate
_FADING = 4000.0  # trials after which older ones count half: texts change


class Chances:
    """How often a guess stood, given that the one before it did: by source, evidence and depth."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], list[float]] = {}  # (trials, stood); -1 stands for all
        self._known: dict[tuple[str, int, int], float] = {}  # chances, until something more is learnt

    def chance(self, source: str, evidence: int, depth: int) -> float:
        key = source, evidence, min(depth, _DEEPEST)
        known = self._known.get(key)
        if known is None:
            known = _FIRST_CHANCE
            for wider in ((source, -1, -1), (source, evidence, -1), key):
                trials, stood = self._seen.get(wider, (0.0, 0.0))
                known = (stood + _DOUBT * known) / (trials + _DOUBT)
            self._known[key] = known
        return known

    def learn(self, proposal: Proposal, written: Sequence[int]) -> None:
        """What came in place of a proposal. A node is a trial where all before it on its path were written."""
        depths: list[int] = []  # of nodes on the written path; -1 for others
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            before = depths[parent] if parent >= 0 else 0
            if before < 0 or before >= len(written):
                depths.append(-1)
                continue
            stood = token == written[before]
            depths.append(before + 1 if stood else -1)
            source, evidence, depth = proposal.sources[node], proposal.evidence[node], min(before, _DEEPEST)
            for key in ((source, -1, -1), (source, evidence, -1), (source, evidence, depth)):
                counts = self._seen.setdefault(key, [0.0, 0.0])
                counts[0] += 1
                counts[1] += stood
                if counts[0] > _FADING:
                    counts[0] /= 2
                    counts[1] /= 2
        if proposal.tokens:
            self._known.clear()


class Costs:
    """Seconds of one pass by its rows: measured for some widths, straight lines in between and beyond."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        self.rows, self.measured = tuple(rows), tuple(seconds)
        rising = np.maximum.accumulate(seconds)  # a wider pass is never really cheaper
        slope = (rising[-1] - rising[0]) / max(1, rows[-1] - rows[0])
        widths = np.arange(4 * rows[-1] + 1)
        inside = np.interp(widths, rows, rising)
        self._seconds: list[float] = np.where(
            widths > rows[-1], rising[-1] + slope * (widths - rows[-1]), inside
        ).tolist()

    def seconds(self, rows: int) -> float:
        return self._seconds[min(rows, len(self._seconds) - 1)]


@dataclass
class Appraiser:
    """Chooses what a tier's scorer is asked to verify. Shared by all requests of a model."""

    costs: Costs
    chances: Chances = field(default_factory=Chances)
    written: float = 0.0  # tokens over all requests, older ones fading,
    seconds: float = 0.0  # and what their passes should have taken

    def learn(self, asked: Iterable[Proposal], written: Sequence[int], nodes: int) -> None:
        """What came of a pass over `nodes` nodes: the tokens in place of what was proposed."""
        for proposal in asked:
            self.chances.learn(proposal, written)
        self.written = _FADING_PASSES * self.written + len(written)
        self.seconds = _FADING_PASSES * self.seconds + self.costs.seconds(1 + nodes)

    def rate(self, written: int, seconds: float) -> float:
        """Tokens a second that a request may expect: its own so far, beginning at that of those before it.

        Time is worth what could have been written in it; whoever counts it at the rate of plain decoding guesses
        too much.
        """
        alone = self.costs.seconds(1)
        usual = (self.written + 1) / (self.seconds + alone) * alone  # tokens in the time of a plain pass
        return (written + _USUAL_PASSES * usual) / (seconds + _USUAL_PASSES * alone)

    def choose(self, proposals: Iterable[Proposal], budget: int, rate: float) -> Proposal:
        """The best of several proposals as one tree of at most `budget` nodes.

        A node earns its place while its chance to stand is worth more than the time that it adds to the pass, at
        `rate` tokens a second. Drawn tokens always stay, and first: dropping one for its value would bend the law.
        """
        tokens: list[int] = []
        parents: list[int] = []
        sources: list[str] = []
        laws: list[Law | None] = []
        evidence: list[int] = []
        chances: list[float] = []  # to stand, given that the parent does
        depths: list[int] = []
        place: dict[tuple[int, int], int] = {}
        for proposal in proposals:
            moved = [0] * len(proposal)
            for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
                after = moved[parent] if parent >= 0 else -1
                depth = depths[after] + 1 if after >= 0 else 0
                chance = self.chances.chance(proposal.sources[node], proposal.evidence[node], depth)
                at = place.get((after, token)) if proposal.laws[node] is None else None
                if at is None:
                    at = len(tokens)
                    place.setdefault((after, token), at)
                    tokens.append(token)
                    parents.append(after)
                    sources.append(proposal.sources[node])
                    laws.append(proposal.laws[node])
                    evidence.append(proposal.evidence[node])
                    chances.append(chance)
                    depths.append(depth)
                elif chance > chances[at]:
                    chances[at] = chance
                moved[node] = at
        if not tokens:
            return Proposal()
        for node, parent in enumerate(parents):
            if parent >= 0:
                chances[node] *= chances[parent]
            if laws[node] is not None:
                chances[node] = 2.0  # first of all
        order = sorted(range(len(tokens)), key=lambda node: -chances[node])[:budget]
        kept, best, gain = 0, 0.0, 0.0
        alone = self.costs.seconds(1)
        for count, node in enumerate(order, 1):
            gain += chances[node]
            value = gain - rate * (self.costs.seconds(count + 1) - alone)
            if value > best or laws[node] is not None:
                kept, best = count, value
        chosen = sorted(order[:kept])
        new = {-1: -1} | {node: number for number, node in enumerate(chosen)}
        return Proposal(
            tuple(tokens[n] for n in chosen),
            tuple(new[parents[n]] for n in chosen),
            tuple(sources[n] for n in chosen),
            tuple(laws[n] for n in chosen),
            tuple(evidence[n] for n in chosen),
        )
