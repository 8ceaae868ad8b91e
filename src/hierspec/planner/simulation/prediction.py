"""What a plan will do, without running it: the real recursion on recorded text, timed by measured costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.interfaces import Ask
from hierspec.core.plan import Plan
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats
from hierspec.core.verify import BY_DISTRIBUTION
from hierspec.planner.simulation.acceptance import TARGET, agreement
from hierspec.planner.simulation.cost_table import CostTable
from hierspec.planner.simulation.distributions import ladder_picks
from hierspec.planner.simulation.priced import PricedScorers
from hierspec.planner.simulation.trace_scorer import TraceOfRequest, TraceScorer, trace_map
from hierspec.planner.simulation.traces import Trace, scorer_key
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel


@dataclass(frozen=True)
class Overhead:
    """The time outside of passes: stores, verification, counters.

    A simulation really does that work, so its time is measured. Next to real passes, which fill the CPU caches, it
    takes longer.
    """

    factor: float = 2.0  # on the time that the loop took in the simulation
    per_pass: float = 0.0  # seconds for each pass of the target
    # By `scorer_key`: seconds for each row of a pass, under rules that compare whole distributions.
    per_row: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Prediction:
    """Seconds and tokens after the first step of every text, as in `decode_tokens_per_second`.

    Counters are of whole texts.
    """

    plan: Plan
    tokens: int = 0
    seconds: float = 0.0
    by_tier: dict[str, float] = field(default_factory=dict)  # seconds of passes, the target's first
    loop: float = 0.0  # seconds of everything else
    stats: Stats = field(default_factory=Stats)
    tasks: dict[str, tuple[int, float]] = field(default_factory=dict)  # tokens and seconds

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.stats.tokens_per_pass

    def shares(self) -> dict[str, float]:
        """Shares of the time, by tier and for the loop."""
        parts = {**self.by_tier, "loop": self.loop}
        return {name: seconds / self.seconds if self.seconds else 0.0 for name, seconds in parts.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "ms_per_token": round(1e3 * self.seconds_per_token, 4),
            "tokens_per_pass": round(self.tokens_per_pass, 3),
            "shares": {name: round(share, 4) for name, share in self.shares().items()},
            "tasks": {task: round(1e3 * s / max(n, 1), 4) for task, (n, s) in self.tasks.items()},
            "tiers": self.stats.to_json(),
        }


def predict(
    model: LanguageModel,
    plan: Plan,
    traces: Sequence[Trace],
    table: CostTable,
    overhead: Overhead = Overhead(),  # noqa: B008
    batch: int = 1,
    progress: Progress = silent,
) -> Prediction:
    """Simulate the plan on these texts, `batch` of them at a time. The model does not run.

    Its stores, appraisers and policies start with nothing but what was built on disk. A plan with the rule residual or
    block needs traces with distributions; runners-up are left out under these rules.
    """
    by_distribution = plan.rule in BY_DISTRIBUTION and bool(plan.tiers)
    if by_distribution and not all(trace.distributions for trace in traces):
        raise HierspecError(
            f"These traces hold picks, which only the rule coupled compares; record distributions to predict "
            f"{plan.rule}."
        )
    if plan.synthetic:
        raise HierspecError("A plan with agrees in it cannot be predicted: its tiers do not pick what traces recorded.")
    real = model.apart().hierarchy(plan)
    if by_distribution:
        traces = [_with_picks(trace, real, plan.rule) for trace in traces]
    simulation = _Simulation.of(real, traces, table, overhead.per_row if by_distribution else {})
    prediction = Prediction(plan)
    for start in range(0, len(traces), batch):
        simulation.run(traces[start : start + batch], overhead, prediction)
        progress("Simulating a plan", min(start + batch, len(traces)), len(traces))
    return prediction


def measured_overhead(model: LanguageModel, trace: Trace, table: CostTable) -> Overhead:
    """How much longer the loop takes next to real passes: one text is written by plain decoding, and simulated."""
    plan = Plan()
    sampling = Sampling(max_tokens=trace.most, temperature=trace.temperature, seed=trace.seed)
    request = model.apart().request(list(trace.prompt), plan, sampling)
    outside, before = [], 0.0
    for _, step in Engine().run([request]):
        pass_seconds = request.stats.tiers[0].seconds
        outside.append(step.seconds - (pass_seconds - before))
        before = pass_seconds
    simulated = predict(model, plan, [trace], table, Overhead(1.0))
    if len(outside) < 2 or not simulated.loop:
        return Overhead()
    # The median: other programs on the machine stretch single steps.
    return Overhead(max(1.0, float(np.median(outside[1:])) * (len(outside) - 1) / simulated.loop))


@dataclass(frozen=True)
class _Simulation:
    """A plan's hierarchy with trace scorers, and the priced copies of the scorers that they stand in for."""

    hierarchy: Hierarchy
    scorers: Sequence[TraceScorer]
    prices: PricedScorers
    trace_of: TraceOfRequest

    @staticmethod
    def of(
        real: Hierarchy, traces: Sequence[Trace], table: CostTable, per_row: Mapping[str, float] | None = None
    ) -> _Simulation:
        prices, trace_of = PricedScorers(table), trace_map()
        scorers = _trace_scorers(real, traces, _Prices(prices, per_row or {}), trace_of)
        tiers = tuple(replace(tier, scorer=scorer) for tier, scorer in zip(real.tiers, scorers, strict=True))
        return _Simulation(Hierarchy(tiers), scorers, prices, trace_of)

    def run(self, traces: Sequence[Trace], overhead: Overhead, prediction: Prediction) -> None:
        """Write these texts as one batch, and add its time to the prediction."""
        self.prices.forget()
        requests = []
        for trace in traces:
            sampling = Sampling(max_tokens=trace.most, temperature=trace.temperature, seed=trace.seed)
            request = Request(trace.prompt, sampling, self.hierarchy, trace.stop_ids)
            self.trace_of[request] = trace
            requests.append(request)
        after_first: list[float] | None = None  # the clocks after the first step of every text
        waiting = set(map(id, requests))
        tokens, passes = 0, 0
        for request, step in Engine(self._predicted_seconds).run(requests):
            if after_first is not None:
                tokens += len(step.tokens)
                passes += 1
            waiting.discard(id(request))
            if after_first is None and not waiting:
                after_first = self._clocks()
        for request in requests:
            if request.error is not None:
                raise request.error
            prediction.stats.add(request.stats)
        assert after_first is not None
        *by_tier, loop = (after - before for before, after in zip(after_first, self._clocks(), strict=True))
        loop = overhead.factor * loop + overhead.per_pass * passes
        for level, (scorer, seconds) in enumerate(zip(self.scorers, by_tier, strict=True)):
            names_above = {above.name for above in self.scorers[:level]}
            name = scorer.name if scorer.name not in names_above else f"{scorer.name} ({level})"
            prediction.by_tier[name] = prediction.by_tier.get(name, 0.0) + seconds
        prediction.loop += loop
        prediction.tokens += tokens
        prediction.seconds += sum(by_tier) + loop
        for trace in traces:  # texts written at once share the time evenly
            before_tokens, before_seconds = prediction.tasks.get(trace.task, (0, 0.0))
            share = 1 / len(traces)
            prediction.tasks[trace.task] = (
                before_tokens + round(tokens * share),
                before_seconds + (sum(by_tier) + loop) * share,
            )

    def _predicted_seconds(self) -> float:
        """The clock by which paces learn what passes cost: that of the simulated passes, not of the simulation."""
        return sum(scorer.seconds for scorer in self.scorers)

    def _clocks(self) -> list[float]:
        """Predicted seconds of each tier's passes, then measured seconds of the loop."""
        loop = time.thread_time() - sum(scorer.simulation_seconds for scorer in self.scorers)
        return [*(scorer.seconds for scorer in self.scorers), loop]


@dataclass(frozen=True)
class _Prices:
    """Seconds of passes, and of the distributions that they return if a rule needs those."""

    scorers: PricedScorers
    per_row: Mapping[str, float]

    def of(self, scorer: StateScorer) -> Callable[[Sequence[Ask]], float]:
        copy, each = self.scorers.copy(scorer), self.per_row.get(scorer_key(scorer), 0.0)

        def seconds(asks: Sequence[Ask]) -> float:
            return self.scorers.seconds(copy, asks) + each * sum(1 + len(ask.proposal) for ask in asks)

        return seconds


def _with_picks(trace: Trace, real: Hierarchy, rule: str) -> Trace:
    """The trace with what the tiers of this hierarchy draft under a rule that compares distributions."""
    keys = []
    for tier in real.tiers[1:]:
        assert isinstance(tier.scorer, StateScorer)
        keys.append(scorer_key(tier.scorer))
        if keys[-1] not in trace.distributions:
            raise HierspecError(f"The traces do not contain {tier.scorer.name}; name its tier when they are recorded.")
    if (rule, *keys) not in trace.ladders:  # many plans stack the same tiers
        trace.ladders[rule, *keys] = ladder_picks(trace, keys, TARGET, rule)
    return replace(trace, tiers=dict(zip(keys, trace.ladders[rule, *keys], strict=True)))


def _trace_scorers(
    real: Hierarchy, traces: Sequence[Trace], prices: _Prices, trace_of: TraceOfRequest
) -> list[TraceScorer]:
    scorers: list[TraceScorer] = []
    for level, tier in enumerate(real.tiers):
        scorer = tier.scorer
        assert isinstance(scorer, StateScorer)
        price = prices.of(scorer)
        key = scorer_key(scorer) if level else None
        if key is not None and not all(key in trace.tiers for trace in traces):
            raise HierspecError(f"The traces do not contain {scorer.name}; name its tier when they are recorded.")
        above = scorers[-1] if scorers else None
        share = agreement(traces, key, above.key) if key is not None and above is not None else 1.0
        scorers.append(TraceScorer(scorer.name, scorer.vocabulary, trace_of, key, above, share, price))
    return scorers
