"""Finds the right hierarchy for a model on this machine: measures, searches, predicts, and runs the best.

1. Traces: the target writes, and every tier that there is says what it would have picked (`recording`).
2. Costs of passes, in parts (`cost_table`).
3. A shortest path over tiers and lengths lists ladders (`search`); with stores, and with lengths that follow what is
   learnt on the way, they become plans. Named plans stand beside them, plain decoding always.
4. Every plan is played on the traces with the real recursion (`prediction`), and the best are really run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hierspec.assembly.auto import beside_stores
from hierspec.checkpoints.packs import FEATURE, SMALL
from hierspec.core.errors import HierspecError
from hierspec.core.plan import NAMED, Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.pacing.appraisal import Costs
from hierspec.planner.formula.figures import Figures, Ladder, Survival, TierFigures
from hierspec.planner.formula.search import Limits, search
from hierspec.planner.memory import added_weights
from hierspec.planner.simulation.acceptance import TARGET, Acceptance, acceptance
from hierspec.planner.simulation.cost_measuring import WIDTHS, cost_table
from hierspec.planner.simulation.cost_table import CostTable
from hierspec.planner.simulation.prediction import Overhead, Prediction, measured_overhead, predict
from hierspec.planner.simulation.recording import kept_traces, scorers_of
from hierspec.planner.simulation.traces import Trace, scorer_key
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel, Prompt

PLAIN = "plain"
_CONTEXT = 256  # tokens before the passes whose costs the search goes by
_LADDERS = 3  # of those that the search finds, made into plans
_LIMITS = Limits(longest=6, deepest=3)
_SOME, _PLAYED = 6, 8  # traces that all plans are played on first, and plans that are then played on all
_SHORTEST = 4  # tokens of the longest answer: the first step is not counted
_MOST = 8  # tokens that a tier gathers whose policy ends its blocks


@dataclass
class Tried:
    """A plan, what it should take and, where it was run, what it took: seconds a token after the prompt."""

    name: str
    plan: Plan
    predicted: Prediction
    measured: float | None = None
    tokens: int = 0  # that were written in measuring

    @property
    def seconds(self) -> float:
        return self.predicted.seconds_per_token if self.measured is None else self.measured


@dataclass
class Choice:
    """What was found. The fastest of those that were run comes first, then the others by what is predicted."""

    tried: list[Tried]
    figures: Figures
    acceptance: Acceptance
    table: CostTable
    names: Mapping[str, str]  # of tiers, for people, by their keys
    seconds: dict[str, float] = field(default_factory=dict)  # that the steps took

    @property
    def best(self) -> Tried:
        return self.tried[0]

    @property
    def plain(self) -> Tried:
        return next(one for one in self.tried if one.plan == Plan())

    def to_json(self) -> dict[str, Any]:
        plain = self.plain
        return {
            "best": self.best.name,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "plans": [
                {
                    "name": one.name, "predicted_ms": round(1e3 * one.predicted.seconds_per_token, 4),
                    "measured_ms": None if one.measured is None else round(1e3 * one.measured, 4),
                    "predicted_speedup": round(plain.predicted.seconds_per_token / one.predicted.seconds_per_token, 4),
                    "measured_speedup": None if one.measured is None or plain.measured is None
                    else round(plain.measured / one.measured, 4),
                    "tokens_per_pass": round(one.predicted.tokens_per_pass, 3),
                    "shares": {tier: round(share, 4) for tier, share in one.predicted.shares().items()},
                    "plan": one.plan.to_toml(),
                }
                for one in self.tried
            ],
        }  # fmt: skip


def candidate_tiers(model: LanguageModel, max_memory: int | None = None) -> list[TierPlan]:
    """Everything that could draft for this model, by what it adds to the memory at most."""
    pack, found = model.pack, list[TierPlan]()
    if pack is not None:
        found += [TierPlan(exit_layer=layer) for layer in sorted({*pack.exits(), *pack.exits_with_norm()})]
        found += [TierPlan(draft="feature")] if pack.has(FEATURE) else []
        found += [TierPlan(draft="small")] if pack.has(SMALL) else []
    elif model.config.early_exit is not None:
        found.append(TierPlan(exit_layer=model.config.early_exit))
    if max_memory is None:
        return found

    def needs(tier: TierPlan) -> int:
        return sum(size or 0 for size in added_weights(model, Plan(tiers=(tier,))).values())

    return [tier for tier in found if needs(tier) <= max_memory]


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
    """The best plan for such prompts: `runs` of those that are predicted to be fast are run, `seconds` each."""
    clock, took = time.perf_counter, dict[str, float]()
    prompts = _in_turn(prompts)
    tiers = candidate_tiers(model, max_memory)
    began = clock()
    traces = kept_traces(model, prompts, tiers, max_tokens, sampling, progress)
    if max(len(trace.output) for trace in traces) < _SHORTEST:
        raise HierspecError(
            f"No answer to these prompts has {_SHORTEST} tokens, too few to measure anything; give other prompts."
        )
    took["traces"], began = clock() - began, clock()
    scorers = scorers_of(model, tiers)
    table = cost_table(model, scorers, sampling.temperature > 0, progress)
    took["costs"], began = clock() - began, clock()
    found = acceptance(traces)
    keys = [TARGET, *(scorer_key(scorer) for scorer in scorers[1:])]
    figures = figures_of(scorers, keys, table, found)
    by_key = dict(zip(keys[1:], tiers, strict=True))
    plans = _plans(model, tiers, [one.ladder for one in search(figures, _LIMITS)], by_key)
    took["search"], began = clock() - began, clock()
    overhead = measured_overhead(model, traces[0], table)
    tried = _played(model, plans, traces, table, overhead, max(_PLAYED, runs), progress)
    took["playing"], began = clock() - began, clock()
    chosen = tried[:runs]
    chosen += [one for one in tried[runs:] if one.plan == Plan()]
    _run(model, chosen, prompts, replace(sampling, max_tokens=max_tokens), seconds, progress)
    took["running"] = clock() - began
    tried.sort(key=lambda one: (one.measured is None, one.seconds))
    names = {key: scorer.name for key, scorer in zip(keys, scorers, strict=True)}
    return Choice(tried, figures, found, table, names, took)


def _in_turn(prompts: Sequence[tuple[str, Prompt]]) -> list[tuple[str, Prompt]]:
    """One of each task after another, so that the first few are like all of them."""
    seen: dict[str, int] = {}
    places = []
    for place, (task, _) in enumerate(prompts):
        seen[task] = seen.get(task, 0) + 1
        places.append((seen[task], place))
    return [prompts[place] for _, place in sorted(places)]


def _played(
    model: LanguageModel, plans: Mapping[str, Plan], traces: Sequence[Trace], table: CostTable, overhead: Overhead,
    most: int, progress: Progress,
) -> list[Tried]:  # fmt: skip
    """All plans on some of the traces, the best `most` of them and plain on all; the fastest first."""
    some = traces[:_SOME]
    total = len(plans) + most + 1
    tried = []
    for number, (name, plan) in enumerate(plans.items()):
        progress("Playing plans", number, total)
        tried.append(Tried(name, plan, predict(model, plan, some, table, overhead)))
    tried.sort(key=lambda one: one.predicted.seconds_per_token)
    if len(some) < len(traces):
        best = [one for place, one in enumerate(tried) if place < most or one.plan == Plan()]
        for number, one in enumerate(best, len(plans)):
            progress("Playing plans", number, total)
            one.predicted = predict(model, one.plan, traces, table, overhead)
        best.sort(key=lambda one: one.predicted.seconds_per_token)
        tried = best + [one for one in tried if all(one is not other for other in best)]
    progress("Playing plans", total, total)
    return tried


def figures_of(scorers: Sequence[StateScorer], keys: Sequence[str], table: CostTable, found: Acceptance) -> Figures:
    """What the search goes by, from tables. Of two tiers the one that costs more may verify the other."""
    costs = {key: table.of(scorer).costs(_CONTEXT) for key, scorer in zip(keys, scorers, strict=True)}
    scorer_of = dict(zip(keys, scorers, strict=True))
    order = [keys[0], *sorted(keys[1:], key=lambda key: -costs[key].seconds(1))]
    tiers, survivals, through = [], dict[tuple[str, str], Survival](), dict[tuple[str, str, str], Survival]()
    for place, key in enumerate(order):
        over = {}
        for lower in order[place + 1 :]:
            rates = tuple(found.share(lower, key, depth).rate for depth in range(4))
            survivals[key, lower] = Survival(rates)
            if (shared := _over(scorer_of[key], scorer_of[lower], table)) is not None:
                over[lower] = shared
            for above in order[:place]:
                if (lower, key, above) in found.dependence:
                    known = found.dependence[lower, key, above]
                    own = tuple(found.share(key, above, depth).rate for depth in range(4))
                    through[above, key, lower] = Survival(own, (known.stood.rate,), (known.corrected.rate,))
        tiers.append(TierFigures(key, costs[key], over))
    return Figures(tuple(tiers), survivals, {}, through)


def _over(upper: StateScorer, lower: StateScorer, table: CostTable) -> Costs | None:
    """Costs of a tier whose guesses have been through the first layers already, with an exit below it."""
    parts, below = table.of(upper), table.of(lower)
    if upper.pool is not lower.pool or not 0 < lower.layers < upper.layers or parts.base is None or below.base is None:
        return None
    saved = [below.base.seconds(rows, _CONTEXT) - below.base.seconds(1, _CONTEXT) for rows in WIDTHS]
    return Costs(
        WIDTHS, [parts.seconds(rows, _CONTEXT) - max(more, 0.0) for rows, more in zip(WIDTHS, saved, strict=True)]
    )


def _plans(
    model: LanguageModel, tiers: Sequence[TierPlan], ladders: Sequence[Ladder], by_key: Mapping[str, TierPlan]
) -> dict[str, Plan]:
    """By name, each once: named plans that can run, ladders as they were found, and both with what adapts."""
    found: dict[str, Plan] = {PLAIN: Plan()}
    sources = {(tier.exit_layer, tier.draft) for tier in tiers}
    for name in NAMED:
        plan = model.plan(name)
        if set(plan.stores) & {"lookahead", "corpus"}:
            continue  # a window of guesses learns from what the target says of them, which no trace has
        if all((tier.exit_layer, tier.draft) in sources for tier in plan.tiers):
            found[name] = plan
    for ladder in [one for one in ladders if len(one) > 1][:_LADDERS]:
        below = [by_key[rung.tier] for rung in ladder[1:]]
        words = " < ".join(f"{_called(tier)} {rung.gather}" for tier, rung in zip(below, ladder[1:], strict=True))
        fixed = tuple(
            replace(tier, gather=rung.gather, until=rung.until, candidates=rung.candidates)
            for tier, rung in zip(below, ladder[1:], strict=True)
        )
        adaptive = tuple(replace(tier, gather=_MOST, until="worth") for tier in below)
        called = " < ".join(_called(tier) for tier in below)
        found[f"ladder {words}"] = Plan(tiers=fixed)
        found[f"ladder {called}, while it is worth it"] = Plan(budget=12, adapt=True, tiers=adaptive)
        found[f"stores and {called}"] = beside_stores(adaptive, model.config.layers)
    for tier in tiers:
        for candidates in (1, 2):
            own = replace(tier, gather=_MOST, until="worth", candidates=candidates)
            also = f", {candidates} candidates" if candidates > 1 else ""
            found[f"stores and {_called(tier)}{also}"] = beside_stores((own,), model.config.layers)
    unlike: dict[str, Plan] = {}
    for name, plan in found.items():
        if plan not in unlike.values():
            unlike[name] = plan
    return unlike


def _called(tier: TierPlan) -> str:
    return f"exit {tier.exit_layer}" if tier.exit_layer is not None else str(tier.draft)


def _run(
    model: LanguageModel, chosen: Sequence[Tried], prompts: Sequence[tuple[str, Prompt]], sampling: Sampling,
    seconds: float, progress: Progress,
) -> None:  # fmt: skip
    """Prompt by prompt, the plans in rotating order, each with stores of its own, until time is up."""
    sampling = replace(sampling, seed=0 if sampling.seed is None else sampling.seed)
    models = [model.apart() for _ in chosen]
    spent, written = [0.0] * len(chosen), [0] * len(chosen)
    total, began = seconds * len(chosen), time.perf_counter()
    for turn, (_, prompt) in enumerate(prompts):
        used = time.perf_counter() - began
        progress("Running the best", int(1000 * min(used / total, 1.0)), 1000)
        if turn >= 2 and used > total * turn / (turn + 1):
            break  # another round would take longer than there is
        order = [(turn + place) % len(chosen) for place in range(len(chosen))]
        texts: list[tuple[int, ...]] = []
        for place in order:
            model.forget()
            answer = models[place].generate(prompt, plan=chosen[place].plan, sampling=sampling)
            spent[place] += answer.seconds - answer.first_seconds
            written[place] += len(answer.tokens) - answer.first_tokens
            texts.append(answer.tokens)
        if model.decoder.backend.exact and len(set(texts)) > 1:  # elsewhere widths may round differently
            raise HierspecError("Two plans wrote different texts; this is a defect, please report it.")
    progress("Running the best", 1000, 1000)
    for one, own_seconds, tokens in zip(chosen, spent, written, strict=True):
        one.measured, one.tokens = own_seconds / tokens if tokens else None, tokens
