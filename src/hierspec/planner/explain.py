"""A choice of plans, for people: pictures, and why each tier is in or out."""

from __future__ import annotations

from hierspec.core.plan import Plan, TierPlan
from hierspec.planner.choose import Choice, PlanResult
from hierspec.planner.formula.figures import TierConfig
from hierspec.planner.formula.latency import Score, TierScore
from hierspec.planner.formula.picture import picture
from hierspec.planner.simulation.acceptance import TARGET
from hierspec.plot import Axis, Chart, Line


def charts(choice: Choice) -> dict[str, str]:
    """Predicted against measured, and the best hierarchy with where its time goes; SVG text by name."""
    run = [result for result in choice.results if result.measured is not None]
    points = sorted((1e3 * result.predicted.seconds_per_token, 1e3 * (result.measured or 0.0)) for result in run)
    most = max(max(point) for point in points)
    lines = [
        Line("plans", points, joined=False),
        Line("as predicted", [(0.0, 0.0), (most, most)], dashed=True),
    ]
    compared = Chart(
        "Predicted against measured",
        Axis("predicted ms per token"),
        Axis("measured ms per token"),
        lines,
        f"{len(run)} plans that were run, after the prompt",
    )
    best = picture(choice.figures, simulated_score(choice.best), choice.best.name)
    return {"predicted": compared.svg(), "hierarchy": best}


def simulated_score(result: PlanResult) -> Score:
    """What a plan did in its simulation, for one token of the target, in the form that `picture` draws."""
    predicted, tokens = result.predicted, max(result.predicted.stats.tiers[0].written, 1)
    tiers, configs = [], []
    seconds = list(predicted.by_tier.values())
    plans = (result.plan, *result.plan.tiers)
    for level, (stats, plan) in enumerate(zip(predicted.stats.tiers, plans, strict=True)):
        above = predicted.stats.tiers[level - 1]
        handed_up = above.proposed[stats.name] if level else stats.written
        tiers.append(
            TierScore(
                tier=stats.name,
                passes=stats.calls / tokens,
                seconds=seconds[level] / max(predicted.tokens, 1),
                store_seconds=stats.store_seconds / tokens,
                rows=1 + sum(stats.proposed.values()) / max(stats.calls, 1),
                block_tokens=handed_up / max(above.calls if level else stats.calls, 1),
                accepted=above.accepted[stats.name] / max(handed_up, 1) if level else 1.0,
                share=seconds[level] / predicted.seconds if predicted.seconds else 0.0,
            )
        )
        configs.append(TierConfig(stats.name, plan.gather if isinstance(plan, TierPlan) else 1))
    return Score(tuple(configs), predicted.seconds_per_token, predicted.tokens_per_pass, tuple(tiers))


def explained(choice: Choice) -> list[str]:
    """A sentence for each tier and store: the best plan with it against the best without it."""
    best = choice.best
    sentences = [f"{best.name} is the fastest of {len(choice.results)} plans: {_figures(best)}."]
    if choice.fastest is not best:
        sentences = [
            f"{best.name} is the simplest of {len(choice.results)} plans that are as fast as the fastest, as far as "
            f"the clock can tell: {_figures(best)}; {choice.fastest.name} took {1e3 * choice.fastest.seconds:.2f} ms."
        ]
    tiers = dict.fromkeys(_tier_name(tier) for result in choice.results for tier in result.plan.tiers)
    stores = dict.fromkeys(store for result in choice.results for store in result.plan.stores)
    labels = {tier: tier for tier in tiers} | {store: f"the store {store.removesuffix('?')}" for store in stores}
    for part, label in labels.items():
        using = [result for result in choice.results if _uses(result.plan, part)]
        others = [result for result in choice.results if not _uses(result.plan, part)]
        if not using or not others:
            continue
        with_it, without_it = (min(group, key=lambda result: result.seconds) for group in (using, others))
        verdict = "in" if _uses(best.plan, part) else "out"
        sentences.append(
            f"{label} is {verdict}: the best plan with it is {with_it.name} ({_figures(with_it)}), "
            f"without it {without_it.name} ({_figures(without_it)})."
        )
    for key, name in choice.names.items():
        if key != TARGET:
            rate = choice.acceptance.count(key).rate
            seconds = choice.figures.tier(key).costs.seconds(1)
            sentences.append(
                f"{name}: {100 * rate:.0f}% of its drafted tokens are accepted, a pass takes {1e3 * seconds:.2f} ms."
            )
    return sentences


def _uses(plan: Plan, part: str) -> bool:
    """Whether a plan has this tier or store."""
    stores = {*plan.stores, *(store for tier in plan.tiers for store in tier.stores)}
    return part in stores or part in map(_tier_name, plan.tiers)


def _tier_name(tier: TierPlan) -> str:
    if tier.exit_layer is not None:
        return f"exit {tier.exit_layer}"
    return f"draft {tier.draft}" if tier.draft is not None else "skipped layers"


def _figures(result: PlanResult) -> str:
    how = "predicted" if result.measured is None else "measured"
    return f"{1e3 * result.seconds:.2f} ms per token {how}, {result.predicted.tokens_per_pass:.2f} tokens per pass"
