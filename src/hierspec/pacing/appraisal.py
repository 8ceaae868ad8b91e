"""Which drafts are worth verifying: how often such drafts are accepted, against what a wider pass costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hierspec.core.proposal import CERTAIN, NOTHING, Distribution, Proposal
from hierspec.pacing.acceptance import AcceptanceRates
from hierspec.pacing.costs import ALONE, PROBE, Costs, Load

_DECAY = 0.998  # weight of earlier passes after each new one
_PROBES = (1, 3, 7)  # sizes of drafts that are verified only to time such passes
_PRIOR_PASSES = 64.0  # prior: every request starts as if it had already made 64 passes at the average speed


@dataclass
class Appraiser:
    """Chooses what a tier's scorer verifies. Shared by all requests of a model.

    Times are normalised to a single request after a short context, so what is learnt under one load serves another.
    """

    costs: Costs
    acceptance: AcceptanceRates = field(default_factory=AcceptanceRates)
    written: float = 0.0  # tokens over all requests, older ones decayed
    seconds: float = 0.0  # expected time of the passes that wrote them, decayed likewise
    _untried: float = 0.0  # seconds of plain passes since the last probe

    def learn(self, proposals: Iterable[Proposal], written: Sequence[int], nodes: int, load: Load = ALONE) -> None:
        """A pass over `nodes` nodes wrote these tokens where `proposals` had been drafted."""
        for proposal in proposals:
            self.acceptance.learn(proposal, written)
        self.written = _DECAY * self.written + len(written)
        costs = self.costs.under(load)
        relative = costs.seconds(1 + nodes) / costs.seconds(1)  # to a plain pass of the same load: loads may change
        self.seconds = _DECAY * self.seconds + relative * self.costs.seconds(1)

    def speed(self, written: int, seconds: float, load: Load = ALONE) -> float:
        """Expected tokens per second of a request: its own speed so far, with that of earlier requests as the prior.

        A second costs the tokens that would otherwise be written in it. Pricing it at plain decoding's speed would
        verify too many drafts.
        """
        alone, plain = self.costs.seconds(1), self.costs.under(load).seconds(1)
        average = (self.written + 1) / (self.seconds + alone) * alone  # tokens in the time of a plain pass
        return (written + _PRIOR_PASSES * average) / (seconds + _PRIOR_PASSES * plain)

    def learnt(self) -> dict[str, Any]:
        """The counts, with time in plain passes."""
        passes = self.seconds / (self.costs.seconds(1) or 1.0)
        return {"speed": [passes, self.written], "acceptance": self.acceptance.counts()}

    def begin_with(self, learnt: Mapping[str, Any]) -> None:
        """Take what was learnt before as a prior, which new rounds soon outweigh."""
        passes, written = (float(value) for value in learnt.get("speed", (0.0, 0.0)))
        weight = min(1.0, _PRIOR_PASSES / passes) if passes > 0 else 0.0
        self.seconds, self.written = weight * passes * self.costs.seconds(1), weight * written
        self.acceptance.begin_with(learnt["acceptance"])

    def choose(self, proposals: Iterable[Proposal], budget: int, speed: float, load: Load = ALONE) -> Proposal:
        """The best of several proposals as one tree of at most `budget` nodes."""
        return self.appraise(proposals, budget, speed, load)[1]

    def probe(self, proposal: Proposal, load: Load = ALONE) -> Proposal:
        """A draft to verify now and then although it does not pay: widths that are never tried are never timed.

        Mostly nothing, and nothing once the costs are known. Probes may take one second in `PROBE`.
        """
        if load.requests > 1 or not proposal.tokens:
            return NOTHING
        costs = self.costs.under(load)
        plain = costs.seconds(1)
        self._untried += plain
        if self._untried < PROBE * (costs.seconds(1 + _PROBES[0]) - plain):
            return NOTHING
        for nodes in _PROBES:
            if not self.costs.known(1 + nodes, load.context):
                if self._untried < PROBE * (costs.seconds(1 + nodes) - plain):
                    return NOTHING
                self._untried = 0.0
                return proposal.first(nodes)
        self._untried = 0.0  # all is known: there is nothing to try for a while
        return NOTHING

    def _any_worth(self, proposals: Sequence[Proposal], least: float) -> bool:
        """Whether any node is at least this probable; sampled tokens always count.

        The first token of a path is its most probable, so deeper ones need no look. Where drafts are poor this quick
        test mostly finds nothing.
        """
        rate = self.acceptance.rate
        for proposal in proposals:
            for parent, source, distribution, evidence in zip(
                proposal.parents, proposal.sources, proposal.distributions, proposal.evidence, strict=True
            ):
                if distribution is not None or (parent < 0 and rate(source, evidence, 0) >= min(least, 1.0)):
                    return True
        return False

    def appraise(
        self, proposals: Iterable[Proposal], budget: int, speed: float, load: Load = ALONE
    ) -> tuple[float, Proposal]:
        """The expected gain of the tree that `choose` returns (tokens, less the price of its time), and the tree.

        A node is worth verifying while the probability that its path is accepted exceeds the price of the time that it
        adds to the pass, at `speed` tokens per second. If several sources draft the same node, the acceptance rate of
        the first counts: the higher of two estimates is too often only the luckier one. Sampled tokens always stay and
        come first: dropping one for its value would change the distribution. Certain tokens stay while a row costs less
        than a pass: they will be written anyway, and each needs a row sooner or later.
        """
        costs, proposals = self.costs.under(load), tuple(proposals)
        step, mean = costs.least(budget)
        if not self._any_worth(proposals, speed * mean):
            return 0.0, NOTHING
        least = speed * step  # a node less probable than this improves no tree
        nodes: list[tuple[int, int, str, Distribution | None, int]] = []  # as in a proposal
        probabilities: list[float] = []  # that the whole path to a node is accepted
        depths: list[int] = []
        index: dict[tuple[int, int], int] = {}  # parent and token -> node; -1 where it is left out
        sampled = False
        rate = self.acceptance.rate
        for proposal in proposals:
            moved: list[int] = []
            for token, parent, source, distribution, evidence in proposal.nodes():
                after, depth, probability = -1, 0, 1.0
                if parent >= 0:
                    after = moved[parent]
                    if after < 0:
                        moved.append(-1)
                        continue
                    depth, probability = depths[after] + 1, probabilities[after]
                node = index.get((after, token)) if distribution is None else None
                if node is None:
                    probability *= rate(source, evidence, depth)
                    certain = evidence == CERTAIN and probability == 1.0  # as is the whole path to it
                    stays = distribution is not None or certain or probability >= least
                    node = len(nodes) if stays else -1
                    index.setdefault((after, token), node)
                    if node >= 0:
                        nodes.append((token, after, source, distribution, evidence))
                        probabilities.append(probability)
                        depths.append(depth)
                        sampled = sampled or distribution is not None
                moved.append(node)
        order = sorted(range(len(nodes)), key=probabilities.__getitem__, reverse=True)
        if sampled:
            order.sort(key=lambda node: nodes[node][3] is None)  # a stable sort: by probability within both
        size, best, expected = 0, 0.0, 0.0
        seconds = costs.seconds
        alone = seconds(1)
        before = alone
        for count, node in enumerate(order[:budget], 1):
            expected += probabilities[node]
            pass_seconds = seconds(count + 1)
            gain = expected - speed * (pass_seconds - alone)
            certain = nodes[node][4] == CERTAIN and probabilities[node] == 1.0
            if gain > best or nodes[node][3] is not None or (certain and pass_seconds - before < alone):
                size, best = count, gain
            before = pass_seconds
        if not size:
            return 0.0, NOTHING
        chosen = sorted(order[:size])
        number = {-1: -1} | {node: new for new, node in enumerate(chosen)}
        tokens, parents, sources, distributions, reasons = zip(*(nodes[node] for node in chosen), strict=True)
        return best, Proposal(tokens, tuple(number[parent] for parent in parents), sources, distributions, reasons)
