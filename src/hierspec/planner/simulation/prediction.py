"""What a plan will do, without running it: the real recursion on played scorers, timed by measured costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.plan import Plan
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.stats import Stats
from hierspec.planner.simulation.acceptance import agreement
from hierspec.planner.simulation.cost_table import CostTable
from hierspec.planner.simulation.played import PlayedScorer, Script, new_script
from hierspec.planner.simulation.priced import PricedScorers
from hierspec.planner.simulation.traces import Trace, scorer_key
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel


@dataclass(frozen=True)
class Overhead:
    """What is not a pass: stores, verification, counters. Played runs really do it, so their time is taken; beside
    passes that fill the caches it takes longer, and text is made of tokens."""

    factor: float = 2.0  # on the time that the loop took while it was played
    per_pass: float = 0.0  # seconds for each pass of the target


@dataclass
class Prediction:
    """After the first step of every text, as `decode_tokens_per_second` of a bench; counters are of whole texts."""

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
        """Of the time, by tier, and of all that is not a pass."""
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
    """Run the plan on these texts, `batch` of them side by side, with its own stores, appraisers and policies, which
    begin with nothing but what was built on disk. Nothing of the model runs."""
    if plan.rule != "coupled":
        raise HierspecError(
            f"Traces hold picks, which only the rule coupled compares; {plan.rule} cannot be predicted."
        )
    if plan.synthetic:
        raise HierspecError("A plan with agrees in it cannot be predicted: its tiers do not say what traces recorded.")
    prices = PricedScorers(table)
    real, script = model.apart().hierarchy(plan), new_script()
    hierarchy = Hierarchy(
        tuple(
            replace(tier, scorer=scorer)
            for tier, scorer in zip(real.tiers, _played(real, traces, prices, script), strict=True)
        )
    )
    found = Prediction(plan)
    for start in range(0, len(traces), batch):
        _run(hierarchy, traces[start : start + batch], prices, script, overhead, found)
        progress("Playing a plan", min(start + batch, len(traces)), len(traces))
    return found


def measured_overhead(model: LanguageModel, trace: Trace, table: CostTable) -> Overhead:
    """From one text, written plainly and played: how much longer the loop takes beside real passes."""
    plan = Plan()
    sampling = Sampling(max_tokens=trace.most, temperature=trace.temperature, seed=trace.seed)
    request = model.apart().request(list(trace.prompt), plan, sampling)
    outside, before = [], 0.0
    for _, step in Engine().run([request]):
        judging = request.stats.tiers[0].seconds
        outside.append(step.seconds - (judging - before))
        before = judging
    played = predict(model, plan, [trace], table, Overhead(1.0))
    if len(outside) < 2 or not played.loop:
        return Overhead()
    # The median: what else runs on the machine stretches single steps.
    return Overhead(max(1.0, float(np.median(outside[1:])) * (len(outside) - 1) / played.loop))


def _played(real: Hierarchy, traces: Sequence[Trace], prices: PricedScorers, script: Script) -> list[PlayedScorer]:
    found: list[PlayedScorer] = []
    for level, tier in enumerate(real.tiers):
        scorer = tier.scorer
        assert isinstance(scorer, StateScorer)
        price = partial(prices.seconds, prices.copy(scorer))
        key = scorer_key(scorer) if level else None
        if key is not None and not all(key in trace.tiers for trace in traces):
            raise HierspecError(f"The traces know nothing of {scorer.name}; name its tier when they are recorded.")
        above = found[-1] if found else None
        share = agreement(traces, key, above.key) if key is not None and above is not None else 1.0
        found.append(PlayedScorer(scorer.name, scorer.vocabulary, script, key, above, share, price))
    return found


def _run(
    hierarchy: Hierarchy, traces: Sequence[Trace], prices: PricedScorers, script: Script, overhead: Overhead,
    found: Prediction,
) -> None:  # fmt: skip
    scorers = [tier.scorer for tier in hierarchy.tiers]
    assert all(isinstance(scorer, PlayedScorer) for scorer in scorers)
    prices.forget()
    requests = []
    for trace in traces:
        sampling = Sampling(max_tokens=trace.most, temperature=trace.temperature, seed=trace.seed)
        request = Request(trace.prompt, sampling, hierarchy, trace.stop_ids)
        script[request] = trace
        requests.append(request)

    def state() -> list[float]:
        played: list[PlayedScorer] = scorers  # type: ignore[assignment]
        loop = time.thread_time() - sum(scorer.playing for scorer in played)
        return [*(scorer.seconds for scorer in played), loop]

    first: list[float] | None = None
    waiting = set(map(id, requests))
    tokens, passes = 0, 0
    for request, step in Engine().run(requests):
        if first is not None:
            tokens += len(step.tokens)
            passes += 1
        waiting.discard(id(request))
        if first is None and not waiting:
            first = state()
    for request in requests:
        if request.error is not None:
            raise request.error
        found.stats.add(request.stats)
    assert first is not None
    *by_tier, loop = (after - before for before, after in zip(first, state(), strict=True))
    loop = overhead.factor * loop + overhead.per_pass * passes
    for level, (scorer, seconds) in enumerate(zip(scorers, by_tier, strict=True)):
        name = scorer.name if scorer.name not in {s.name for s in scorers[:level]} else f"{scorer.name} ({level})"
        found.by_tier[name] = found.by_tier.get(name, 0.0) + seconds
    found.loop += loop
    found.tokens += tokens
    found.seconds += sum(by_tier) + loop
    for trace in traces:  # side by side: shared evenly
        before = found.tasks.get(trace.task, (0, 0.0))
        share = 1 / len(traces)
        found.tasks[trace.task] = before[0] + round(tokens * share), before[1] + (sum(by_tier) + loop) * share
