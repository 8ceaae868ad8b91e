"""Chooses the fastest hierarchy for a model on this machine: measures, searches, predicts, and runs the best.

1. Traces: the target writes, and every available tier records what it would have picked (`recording`).
2. Costs of passes, in parts (`cost_table`).
3. A shortest path over tiers and block lengths lists hierarchies (`search`). They become plans: with fixed lengths,
   with lengths that adapt while drafting, and with stores. Named plans join them, plain decoding always.
4. Every plan is simulated on the traces with the real recursion (`prediction`), and the best are run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hierspec.core.errors import DifferentTexts, HierspecError
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.core.verify import BY_DISTRIBUTION, RULES
from hierspec.planner.candidates import candidate_tiers
from hierspec.planner.formula.figures import Figures
from hierspec.planner.formula.search import Limits, search
from hierspec.planner.measured_figures import figures_of
from hierspec.planner.memory import added_weights
from hierspec.planner.plans_to_try import LONGEST, plans_to_try
from hierspec.planner.simulation.acceptance import TARGET, Acceptance, acceptance
from hierspec.planner.simulation.cost_measuring import cost_table
from hierspec.planner.simulation.cost_table import CostTable
from hierspec.planner.simulation.distribution_acceptance import expected_acceptance
from hierspec.planner.simulation.distribution_costs import distribution_seconds
from hierspec.planner.simulation.prediction import Overhead, Prediction, measured_overhead, predict
from hierspec.planner.simulation.recording import cached_traces, scorers_of
from hierspec.planner.simulation.traces import Trace, scorer_key
from hierspec.progress import Progress, silent

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompt_ids import Prompt

_FIRST_TRACES = 6  # traces on which all plans are simulated
_FINALISTS = 8  # plans that are then simulated on all traces
_NOISE = 0.03  # relative difference below which the clock cannot tell two plans apart
_SHORTEST = 4  # tokens that the longest answer must have: the first step is not counted


@dataclass
class PlanResult:
    """A plan with the predicted and, if it was run, the measured seconds per token after the prompt."""

    name: str
    plan: Plan
    predicted: Prediction
    measured: float | None = None
    tokens: int = 0  # written while measuring
    memory: int | None = 0  # bytes of weights that its tiers add; None: not known

    @property
    def seconds(self) -> float:
        return self.predicted.seconds_per_token if self.measured is None else self.measured


@dataclass
class Choice:
    """All plans: the best, then those that were run, fastest first, then the others by their prediction."""

    results: list[PlanResult]
    figures: Figures
    acceptance: Acceptance
    table: CostTable
    names: Mapping[str, str]  # names of tiers, for people, by `scorer_key`
    seconds: dict[str, float] = field(default_factory=dict)  # by step of the choice

    @property
    def best(self) -> PlanResult:
        return self.results[0]

    @property
    def fastest(self) -> PlanResult:
        """The fastest by the clock. The best may be a simpler one that the clock cannot tell from it."""
        run = [result for result in self.results if result.measured is not None]
        return min(run, key=lambda result: result.seconds, default=self.best)

    @property
    def plain(self) -> PlanResult:
        return next(result for result in self.results if result.plan == Plan())

    def to_json(self) -> dict[str, Any]:
        return {
            "best": self.best.name,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "plans": [self._row(result) for result in self.results],
        }

    def _row(self, result: PlanResult) -> dict[str, Any]:
        plain, predicted = self.plain, result.predicted
        speedup = None if result.measured is None or plain.measured is None else plain.measured / result.measured
        return {
            "name": result.name,
            "predicted_ms": round(1e3 * predicted.seconds_per_token, 4),
            "measured_ms": None if result.measured is None else round(1e3 * result.measured, 4),
            "predicted_speedup": round(plain.predicted.seconds_per_token / predicted.seconds_per_token, 4),
            "measured_speedup": None if speedup is None else round(speedup, 4),
            "tokens_per_pass": round(predicted.tokens_per_pass, 3),
            "added_memory": result.memory,
            "shares": {tier: round(share, 4) for tier, share in predicted.shares().items()},
            "plan": result.plan.to_toml(),
        }


def choose(
    model: LanguageModel,
    prompts: Sequence[tuple[str, Prompt]],
    sampling: Sampling,
    max_tokens: int = 64,
    runs: int = 3,
    seconds: float = 8.0,
    max_memory: int | None = None,
    progress: Progress = silent,
    drafts: Sequence[str] | None = None,
    rule: str = "coupled",
) -> Choice:
    """The best plan for such prompts: the `runs` plans with the best predictions are run, `seconds` each.

    `drafts` are the draft models to choose from (`candidate_tiers`). All plans verify by `rule`.
    """
    if rule not in RULES:
        raise HierspecError(f"There is no rule {rule!r}; rules are {', '.join(RULES)}.")
    clock, took = time.perf_counter, dict[str, float]()
    prompts = _interleaved(prompts)
    tiers = candidate_tiers(model, max_memory, drafts)
    by_distribution = rule in BY_DISTRIBUTION
    started = clock()
    traces = cached_traces(model, prompts, tiers, max_tokens, sampling, progress, by_distribution)
    if max(len(trace.output) for trace in traces) < _SHORTEST:
        raise HierspecError(
            f"No answer to these prompts has {_SHORTEST} tokens, too few to measure anything; give other prompts."
        )
    took["traces"], started = clock() - started, clock()
    scorers = scorers_of(model, tiers)
    table = cost_table(model, scorers, sampling.temperature > 0, progress)
    overhead = measured_overhead(model, traces[0], table)
    if by_distribution:
        overhead = replace(overhead, per_row=distribution_seconds(scorers, rule, sampling))
    took["costs"], started = clock() - started, clock()
    accepted = expected_acceptance(traces, rule) if by_distribution else acceptance(traces)
    keys = [TARGET, *(scorer_key(scorer) for scorer in scorers[1:])]
    figures = figures_of(scorers, keys, table, accepted, overhead.per_row)
    by_key = dict(zip(keys[1:], tiers, strict=True))
    found = search(figures, Limits(LONGEST, deepest=len(figures.tiers)))
    plans = plans_to_try(model, tiers, [scored.hierarchy for scored in found], by_key, rule)
    took["search"], started = clock() - started, clock()
    results = _simulated(model, plans, traces, table, overhead, max(_FINALISTS, runs), progress)
    for result in results:
        sizes = added_weights(model, result.plan).values()
        result.memory = None if None in sizes else sum(size or 0 for size in sizes)
    took["playing"], started = clock() - started, clock()
    chosen = results[:runs] + [result for result in results[runs:] if result.plan == Plan()]
    _run(model, chosen, prompts, replace(sampling, max_tokens=max_tokens), seconds, progress)
    took["running"] = clock() - started
    results = _best_first(results)
    names = {key: scorer.name for key, scorer in zip(keys, scorers, strict=True)}
    return Choice(results, figures, accepted, table, names, took)


def _best_first(results: Sequence[PlanResult]) -> list[PlanResult]:
    """Plans that were run, fastest first, then the others, with the best moved to the front.

    The best is the simplest of those that are as fast as the fastest, as far as the clock can tell: even tiers that
    never draft take memory.
    """
    ordered = sorted(results, key=lambda result: (result.measured is None, result.seconds))
    if ordered[0].measured is None:
        return ordered
    close = [
        each for each in ordered if each.measured is not None and each.seconds <= (1 + _NOISE) * ordered[0].seconds
    ]
    best = min(close, key=lambda each: (math.inf if each.memory is None else each.memory, len(each.plan.tiers)))
    return [best, *(each for each in ordered if each is not best)]


def _interleaved(prompts: Sequence[tuple[str, Prompt]]) -> list[tuple[str, Prompt]]:
    """One prompt of each task after another, so that the first few represent them all."""
    count: dict[str, int] = {}
    order = []
    for index, (task, _) in enumerate(prompts):
        count[task] = count.get(task, 0) + 1
        order.append((count[task], index))
    return [prompts[index] for _, index in sorted(order)]


def _simulated(
    model: LanguageModel,
    plans: Mapping[str, Plan],
    traces: Sequence[Trace],
    table: CostTable,
    overhead: Overhead,
    finalists: int,
    progress: Progress,
) -> list[PlanResult]:
    """All plans on the first traces, the best `finalists` and plain decoding on all; the fastest first."""
    first = traces[:_FIRST_TRACES]
    total = len(plans) + finalists + 1
    results = []
    for number, (name, plan) in enumerate(plans.items()):
        progress("Simulating plans", number, total)
        results.append(PlanResult(name, plan, predict(model, plan, first, table, overhead)))
    results.sort(key=lambda result: result.predicted.seconds_per_token)
    if len(first) < len(traces):
        best = [result for rank, result in enumerate(results) if rank < finalists or result.plan == Plan()]
        for number, result in enumerate(best, len(plans)):
            progress("Simulating plans", number, total)
            result.predicted = predict(model, result.plan, traces, table, overhead)
        best.sort(key=lambda result: result.predicted.seconds_per_token)
        results = best + [result for result in results if all(result is not other for other in best)]
    progress("Simulating plans", total, total)
    return results


def _run(
    model: LanguageModel,
    chosen: Sequence[PlanResult],
    prompts: Sequence[tuple[str, Prompt]],
    sampling: Sampling,
    seconds: float,
    progress: Progress,
) -> None:
    """Prompt by prompt, the plans in rotating order, each with its own stores, until the time is up."""
    sampling = replace(sampling, seed=0 if sampling.seed is None else sampling.seed)
    models = [model.apart() for _ in chosen]
    spent, written = [0.0] * len(chosen), [0] * len(chosen)
    # Rules that sample give the same distribution, not the same text; widths may round differently on some backends.
    coupled = sampling.temperature == 0 or all(result.plan.rule == "coupled" for result in chosen)
    comparable = coupled and model.decoder.backend.exact
    total, started = seconds * len(chosen), time.perf_counter()
    for round_number, (_, prompt) in enumerate(prompts):
        used = time.perf_counter() - started
        progress("Running the best", int(1000 * min(used / total, 1.0)), 1000)
        if round_number >= 2 and used > total * round_number / (round_number + 1):
            break  # another round would exceed the time
        texts: list[tuple[int, ...]] = []
        for offset in range(len(chosen)):
            index = (round_number + offset) % len(chosen)
            model.forget()
            answer = models[index].generate(prompt, plan=chosen[index].plan, sampling=sampling)
            spent[index] += answer.seconds - answer.first_seconds
            written[index] += len(answer.tokens) - answer.first_tokens
            texts.append(answer.tokens)
        if comparable and len(set(texts)) > 1:
            raise DifferentTexts("Two plans wrote different texts; this is a defect, please report it.")
    progress("Running the best", 1000, 1000)
    for result, taken, tokens in zip(chosen, spent, written, strict=True):
        result.measured, result.tokens = taken / tokens if tokens else None, tokens
