"""Chooses the fastest hierarchy for a model on this machine: measures, searches, predicts, and runs the best.

1. Traces: the target writes, and every available tier records what it would have picked (`recording`).
2. Costs of passes, in parts (`cost_table`).
3. A shortest path over tiers and block lengths lists hierarchies (`search`). They become plans: with fixed lengths,
   with lengths that adapt while drafting, and with stores. Named plans join them, plain decoding always.
4. Every plan is simulated on the traces with the real recursion (`prediction`), and the best are run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hierspec.assembly.auto import beside_stores
from hierspec.checkpoints.packs import FEATURE, SMALL
from hierspec.core.errors import DifferentTexts, HierspecError
from hierspec.core.plan import NAMED, Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import AcceptanceRates, Figures, HierarchyConfig, TierFigures
from hierspec.planner.formula.search import Limits, search
from hierspec.planner.memory import added_weights
from hierspec.planner.simulation.acceptance import TARGET, Acceptance, acceptance
from hierspec.planner.simulation.cost_measuring import WIDTHS, cost_table
from hierspec.planner.simulation.cost_table import CostTable
from hierspec.planner.simulation.prediction import Prediction, measured_overhead, predict
from hierspec.planner.simulation.recording import cached_traces, scorers_of
from hierspec.planner.simulation.traces import Trace, scorer_key
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompt_ids import Prompt

PLAIN = "plain"
_CONTEXT = 256  # tokens before the passes whose costs the search uses
_HIERARCHIES = 3  # of the search's results, made into plans
_LIMITS = Limits(longest=6, deepest=3)
_FIRST_TRACES = 6  # that all plans are simulated on
_FINALISTS = 8  # plans that are then simulated on all traces
_SHORTEST = 4  # tokens of the longest answer: the first step is not counted
_LONGEST_BLOCK = 8  # tokens, where a policy ends a tier's blocks
_DEPTHS = 4  # positions in a block whose acceptance rates the search is given


@dataclass
class PlanResult:
    """A plan with the predicted and, if it was run, the measured seconds per token after the prompt."""

    name: str
    plan: Plan
    predicted: Prediction
    measured: float | None = None
    tokens: int = 0  # written while measuring

    @property
    def seconds(self) -> float:
        return self.predicted.seconds_per_token if self.measured is None else self.measured


@dataclass
class Choice:
    """All plans: first those that were run, the fastest first, then the others by their prediction."""

    results: list[PlanResult]
    figures: Figures
    acceptance: Acceptance
    table: CostTable
    names: Mapping[str, str]  # of tiers, for people, by `scorer_key`
    seconds: dict[str, float] = field(default_factory=dict)  # that the steps took

    @property
    def best(self) -> PlanResult:
        return self.results[0]

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
            "shares": {tier: round(share, 4) for tier, share in predicted.shares().items()},
            "plan": result.plan.to_toml(),
        }


def candidate_tiers(model: LanguageModel, max_memory: int | None = None) -> list[TierPlan]:
    """Everything that could draft for this model and adds at most so many bytes to its memory."""
    pack, tiers = model.pack, list[TierPlan]()
    if pack is not None:
        tiers += [TierPlan(exit_layer=layer) for layer in sorted({*pack.exits(), *pack.exits_with_norm()})]
        tiers += [TierPlan(draft="feature")] if pack.has(FEATURE) else []
        tiers += [TierPlan(draft="small")] if pack.has(SMALL) else []
    elif model.config.early_exit is not None:
        tiers.append(TierPlan(exit_layer=model.config.early_exit))
    if max_memory is None:
        return tiers

    def added(tier: TierPlan) -> int:
        return sum(size or 0 for size in added_weights(model, Plan(tiers=(tier,))).values())

    return [tier for tier in tiers if added(tier) <= max_memory]


def choose(
    model: LanguageModel,
    prompts: Sequence[tuple[str, Prompt]],
    sampling: Sampling,
    max_tokens: int = 64,
    runs: int = 3,
    seconds: float = 8.0,
    max_memory: int | None = None,
    progress: Progress = silent,
) -> Choice:
    """The best plan for such prompts: the `runs` plans with the best predictions are run, `seconds` each."""
    clock, took = time.perf_counter, dict[str, float]()
    prompts = _interleaved(prompts)
    tiers = candidate_tiers(model, max_memory)
    started = clock()
    traces = cached_traces(model, prompts, tiers, max_tokens, sampling, progress)
    if max(len(trace.output) for trace in traces) < _SHORTEST:
        raise HierspecError(
            f"No answer to these prompts has {_SHORTEST} tokens, too few to measure anything; give other prompts."
        )
    took["traces"], started = clock() - started, clock()
    scorers = scorers_of(model, tiers)
    table = cost_table(model, scorers, sampling.temperature > 0, progress)
    took["costs"], started = clock() - started, clock()
    accepted = acceptance(traces)
    keys = [TARGET, *(scorer_key(scorer) for scorer in scorers[1:])]
    figures = figures_of(scorers, keys, table, accepted)
    by_key = dict(zip(keys[1:], tiers, strict=True))
    plans = _plans(model, tiers, [scored.hierarchy for scored in search(figures, _LIMITS)], by_key)
    took["search"], started = clock() - started, clock()
    results = _simulated(model, plans, traces, table, max(_FINALISTS, runs), progress)
    took["playing"], started = clock() - started, clock()
    chosen = results[:runs] + [result for result in results[runs:] if result.plan == Plan()]
    _run(model, chosen, prompts, replace(sampling, max_tokens=max_tokens), seconds, progress)
    took["running"] = clock() - started
    results.sort(key=lambda result: (result.measured is None, result.seconds))
    names = {key: scorer.name for key, scorer in zip(keys, scorers, strict=True)}
    return Choice(results, figures, accepted, table, names, took)


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
    finalists: int,
    progress: Progress,
) -> list[PlanResult]:
    """All plans on the first traces, the best `finalists` and plain decoding on all; the fastest first."""
    overhead = measured_overhead(model, traces[0], table)
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


def figures_of(scorers: Sequence[StateScorer], keys: Sequence[str], table: CostTable, accepted: Acceptance) -> Figures:
    """The input of the search, from measured tables. Of two tiers the one that costs more may verify the other."""
    costs = {key: table.of(scorer).costs(_CONTEXT) for key, scorer in zip(keys, scorers, strict=True)}
    scorer_of = dict(zip(keys, scorers, strict=True))
    order = [keys[0], *sorted(keys[1:], key=lambda key: -costs[key].seconds(1))]

    def rates(drafter: str, verifier: str) -> tuple[float, ...]:
        return tuple(accepted.count(drafter, verifier, depth).rate for depth in range(_DEPTHS))

    tiers: list[TierFigures] = []
    pairs: dict[tuple[str, str], AcceptanceRates] = {}
    triples: dict[tuple[str, str, str], AcceptanceRates] = {}
    for level, key in enumerate(order):
        over = {}
        for lower in order[level + 1 :]:
            pairs[key, lower] = AcceptanceRates(rates(lower, key))
            if (costs_over := _costs_over(scorer_of[key], scorer_of[lower], table)) is not None:
                over[lower] = costs_over
            for above in order[:level]:
                if (lower, key, above) in accepted.by_middle_tier:
                    count = accepted.by_middle_tier[lower, key, above]
                    triples[above, key, lower] = AcceptanceRates(
                        rates(key, above), (count.accepted.rate,), (count.corrected.rate,)
                    )
        tiers.append(TierFigures(key, costs[key], over))
    return Figures(tuple(tiers), pairs, {}, triples)


def _costs_over(upper: StateScorer, lower: StateScorer, table: CostTable) -> Costs | None:
    """Costs of verifying drafts of an exit, which have been through the first layers already; None: of no such exit."""
    parts, below = table.of(upper), table.of(lower)
    if upper.pool is not lower.pool or not 0 < lower.layers < upper.layers or parts.base is None or below.base is None:
        return None
    saved = [below.base.seconds(rows, _CONTEXT) - below.base.seconds(1, _CONTEXT) for rows in WIDTHS]
    return Costs(
        WIDTHS, [parts.seconds(rows, _CONTEXT) - max(less, 0.0) for rows, less in zip(WIDTHS, saved, strict=True)]
    )


def _plans(
    model: LanguageModel,
    tiers: Sequence[TierPlan],
    hierarchies: Sequence[HierarchyConfig],
    by_key: Mapping[str, TierPlan],
) -> dict[str, Plan]:
    """By name, each once: named plans that can run, the search's hierarchies, and both with adaptive lengths."""
    plans: dict[str, Plan] = {PLAIN: Plan()}
    sources = {(tier.exit_layer, tier.draft) for tier in tiers}
    for name in NAMED:
        plan = model.plan(name)
        if set(plan.stores) & {"lookahead", "corpus"}:
            continue  # lookahead learns from the target's picks after rejected tokens, which no trace has
        if all((tier.exit_layer, tier.draft) in sources for tier in plan.tiers):
            plans[name] = plan
    for hierarchy in [hierarchy for hierarchy in hierarchies if len(hierarchy) > 1][:_HIERARCHIES]:
        configs = hierarchy[1:]
        below = [by_key[config.tier] for config in configs]
        lengths = " < ".join(f"{_name(tier)} {config.gather}" for tier, config in zip(below, configs, strict=True))
        fixed = tuple(
            replace(tier, gather=config.gather, until=config.until, candidates=config.candidates)
            for tier, config in zip(below, configs, strict=True)
        )
        adaptive = tuple(replace(tier, gather=_LONGEST_BLOCK, until="worth") for tier in below)
        names = " < ".join(map(_name, below))
        plans[f"ladder {lengths}"] = Plan(tiers=fixed)
        plans[f"ladder {names}, while it is worth it"] = Plan(budget=12, adapt=True, tiers=adaptive)
        plans[f"stores and {names}"] = beside_stores(adaptive, model.config.layers)
    for tier in tiers:
        for candidates in (1, 2):
            drafter = replace(tier, gather=_LONGEST_BLOCK, until="worth", candidates=candidates)
            suffix = f", {candidates} candidates" if candidates > 1 else ""
            plans[f"stores and {_name(tier)}{suffix}"] = beside_stores((drafter,), model.config.layers)
    distinct: dict[str, Plan] = {}
    for name, plan in plans.items():
        if plan not in distinct.values():
            distinct[name] = plan
    return distinct


def _name(tier: TierPlan) -> str:
    return f"exit {tier.exit_layer}" if tier.exit_layer is not None else str(tier.draft)


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
        if model.decoder.backend.exact and len(set(texts)) > 1:  # elsewhere widths may round differently
            raise DifferentTexts("Two plans wrote different texts; this is a defect, please report it.")
    progress("Running the best", 1000, 1000)
    for result, taken, tokens in zip(chosen, spent, written, strict=True):
        result.measured, result.tokens = taken / tokens if tokens else None, tokens
