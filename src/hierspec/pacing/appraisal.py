"""Which guesses are worth verifying: how often such guesses stood, against what a wider pass costs.

Nothing here can change what is written, only how fast. It learns from every verdict, also about guesses that were
not verified: what the scorer wrote in their place shows whether they would have stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hierspec.core.proposal import NOTHING, Distribution, Proposal

_DEEPEST = 8  # guesses further out than this are counted together
_DOUBT = 16.0  # trials that a class must have seen to weigh as much as the wider class it belongs to
_FIRST_CHANCE = 0.4  # of a source that nothing is known of
_FADING_PASSES = 0.998  # what a pass counts for after the next
_USUAL_PASSES = 64.0  # that a request is taken to have made before its first, at the usual rate
_FADING = 4000.0  # trials after which older ones count half: texts change
_NEVER = (0.0, 0.0)


class Chances:
    """How often a guess stood, given that the one before it did: by source, evidence and depth."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], list[float]] = {}  # (trials, stood); -1 stands for all
        self._known: dict[tuple[str, int, int], float] = {}  # chances, until something more is learnt

    def chance(self, source: str, evidence: int, depth: int) -> float:
        key = source, evidence, depth if depth < _DEEPEST else _DEEPEST
        return self._known[key] if key in self._known else self._work_out(key)

    def _work_out(self, key: tuple[str, int, int]) -> float:
        """What a class has shown, on top of what the wider class around it leads to expect."""
        known, (source, evidence, depth) = self._known, key
        if evidence < 0:
            expected = _FIRST_CHANCE
        else:
            wider = (source, -1, -1) if depth < 0 else (source, evidence, -1)
            expected = known[wider] if wider in known else self._work_out(wider)
        trials, stood = self._seen.get(key, _NEVER)
        known[key] = chance = (stood + _DOUBT * expected) / (trials + _DOUBT)
        return chance

    def learn(self, proposal: Proposal, written: Sequence[int]) -> None:
        """What came in place of a proposal. A node is a trial where all before it on its path were written."""
        depths = {-1: 0}  # of the nodes on the written path, and how many tokens stand before what comes after them
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            before = depths.get(parent, len(written))
            if before == len(written):
                continue
            stood = token == written[before]
            if stood:
                depths[node] = before + 1
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
        self._slope = float(rising[-1] - rising[0]) / max(1, rows[-1] - rows[0])
        widths = np.arange(4 * rows[-1] + 1)
        inside = np.interp(widths, rows, rising)
        self._seconds: list[float] = np.where(
            widths > rows[-1], rising[-1] + self._slope * (widths - rows[-1]), inside
        ).tolist()
        self._least_steps: list[float] = np.minimum.accumulate(np.diff(self._seconds[1:])).tolist()
        self._shared: dict[int, Costs] = {1: self}

    def seconds(self, rows: int) -> float:
        if rows < len(self._seconds):
            return self._seconds[rows]
        return self._seconds[-1] + self._slope * (rows - len(self._seconds) + 1)

    def shared(self, requests: int) -> Costs:
        """What falls to each of so many requests whose passes, all of one width, are run as one.

        Where width is nearly free it is less than the pass alone. Where a batch fills the machine a row costs what it
        costs anybody, and a guess must be nearly certain to be worth it.
        """
        if requests not in self._shared:
            # By single rows where guesses begin, so that no kink of the wide pass is lost.
            rows = sorted({*range(1, 9), *self.rows})
            self._shared[requests] = Costs(rows, [self.seconds(requests * count) / requests for count in rows])
        return self._shared[requests]

    def least_step(self, nodes: int) -> float:
        """The least that one of up to `nodes` nodes adds to a pass."""
        return self._least_steps[nodes - 1] if nodes <= len(self._least_steps) else 0.0


@dataclass
class Appraiser:
    """Chooses what a tier's scorer is asked to verify. Shared by all requests of a model.

    `requests` is how many are run side by side: they share the time of a pass.
    """

    costs: Costs
    chances: Chances = field(default_factory=Chances)
    written: float = 0.0  # tokens over all requests, older ones fading,
    seconds: float = 0.0  # and what their passes should have taken

    def learn(self, asked: Iterable[Proposal], written: Sequence[int], nodes: int, requests: int = 1) -> None:
        """What came of a pass over `nodes` nodes: the tokens in place of what was proposed."""
        for proposal in asked:
            self.chances.learn(proposal, written)
        self.written = _FADING_PASSES * self.written + len(written)
        costs = self.costs.shared(requests)
        relative = costs.seconds(1 + nodes) / costs.seconds(1)  # whatever the load, so that loads may change
        self.seconds = _FADING_PASSES * self.seconds + relative * self.costs.seconds(1)

    def rate(self, written: int, seconds: float, requests: int = 1) -> float:
        """Tokens a second that a request may expect: its own so far, beginning at that of those before it.

        Time is worth what could have been written in it; whoever counts it at the rate of plain decoding guesses
        too much.
        """
        alone, plain = self.costs.seconds(1), self.costs.shared(requests).seconds(1)
        usual = (self.written + 1) / (self.seconds + alone) * alone  # tokens in the time of a plain pass
        return (written + _USUAL_PASSES * usual) / (seconds + _USUAL_PASSES * plain)

    def choose(self, proposals: Iterable[Proposal], budget: int, rate: float, requests: int = 1) -> Proposal:
        """The best of several proposals as one tree of at most `budget` nodes."""
        return self.weighed(proposals, budget, rate, requests)[1]

    def weighed(
        self, proposals: Iterable[Proposal], budget: int, rate: float, requests: int = 1
    ) -> tuple[float, Proposal]:
        """The tree that `choose` gives, and before it what it should gain: tokens, less what its time is worth.

        A node earns its place while its chance to stand is worth more than the time that it adds to the pass, at
        `rate` tokens a second. Where several guess the same, the first one's chance counts: the better of two
        estimates is too often the luckier one. Drawn tokens always stay, and first: dropping one for its value would
        bend the law.
        """
        costs = self.costs.shared(requests)
        least = rate * costs.least_step(budget)  # no tree is better for a node of a smaller chance than this
        nodes: list[tuple[int, int, str, Distribution | None, int]] = []  # as in a proposal
        chances: list[float] = []  # of the whole path to a node
        depths: list[int] = []
        place: dict[tuple[int, int], int] = {}  # parent and token -> node; -1 where it is left out
        drawn = False
        chance = self.chances.chance
        for proposal in proposals:
            moved: list[int] = []
            for token, parent, source, distribution, evidence in proposal.nodes():
                after, depth, path = -1, 0, 1.0
                if parent >= 0:
                    after = moved[parent]
                    if after < 0:
                        moved.append(-1)
                        continue
                    depth, path = depths[after] + 1, chances[after]
                at = place.get((after, token)) if distribution is None else None
                if at is None:
                    path *= chance(source, evidence, depth)
                    at = len(nodes) if distribution is not None or path >= least else -1
                    place.setdefault((after, token), at)
                    if at >= 0:
                        nodes.append((token, after, source, distribution, evidence))
                        chances.append(path)
                        depths.append(depth)
                        drawn = drawn or distribution is not None
                moved.append(at)
        order = sorted(range(len(nodes)), key=chances.__getitem__, reverse=True)
        if drawn:
            order.sort(key=lambda node: nodes[node][3] is None)  # otherwise the order stays
        kept, best, gain = 0, 0.0, 0.0
        seconds = costs.seconds
        alone = seconds(1)
        for count, node in enumerate(order[:budget], 1):
            gain += chances[node]
            value = gain - rate * (seconds(count + 1) - alone)
            if value > best or nodes[node][3] is not None:
                kept, best = count, value
        if not kept:
            return 0.0, NOTHING
        chosen = sorted(order[:kept])
        new = {-1: -1} | {node: number for number, node in enumerate(chosen)}
        tokens, parents, sources, distributions, reasons = zip(*(nodes[node] for node in chosen), strict=True)
        return best, Proposal(tokens, tuple(new[parent] for parent in parents), sources, distributions, reasons)
