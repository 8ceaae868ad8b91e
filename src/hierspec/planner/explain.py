"""A choice of plans, for people: pictures, and why each tier is in or out."""

from __future__ import annotations

from collections.abc import Iterator

from hierspec.core.plan import Plan, TierPlan
from hierspec.planner.choose import Choice, Tried
from hierspec.planner.formula.figures import Rung
from hierspec.planner.formula.latency import RungScore, Score
from hierspec.planner.formula.picture import picture
from hierspec.planner.simulation.acceptance import TARGET
from hierspec.plot import Axis, Chart, Line


def charts(choice: Choice) -> dict[str, str]:
    """Predicted against measured, and the best hierarchy with where its time goes; SVG text by name."""
    run = [one for one in choice.tried if one.measured is not None]
    points = sorted((1e3 * one.predicted.seconds_per_token, 1e3 * (one.measured or 0.0)) for one in run)
    most = max(max(point) for point in points)
    lines = [
        Line("plans", points, joined=False),
        Line("as predicted", [(0.0, 0.0), (most, most)], dashed=True),
    ]
    compared = Chart(
        "Predicted against measured", Axis("predicted ms a token"), Axis("measured ms a token"), lines,
        f"{len(run)} plans that were run, after the prompt",
    )  # fmt: skip
    return {"predicted": compared.svg(), "hierarchy": picture(choice.figures, as_played(choice.best), choice.best.name)}


def as_played(tried: Tried) -> Score:
    """What a plan did while it was played, as the picture of a ladder takes it: for one token of the target."""
    found, tokens = tried.predicted, max(tried.predicted.stats.tiers[0].written, 1)
    rungs, ladder = [], []
    seconds = list(found.by_tier.values())
    for level, (tier, own) in enumerate(zip(found.stats.tiers, (tried.plan, *tried.plan.tiers), strict=True)):
        above = found.stats.tiers[level - 1]
        handed = above.proposed[tier.name] if level else tier.written
        rungs.append(
            RungScore(
                tier.name, tier.calls / tokens, seconds[level] / max(found.tokens, 1), tier.store_seconds / tokens,
                1 + sum(tier.proposed.values()) / max(tier.calls, 1),
                handed / max(above.calls if level else tier.calls, 1),
                above.accepted[tier.name] / max(handed, 1) if level else 1.0,
                seconds[level] / found.seconds if found.seconds else 0.0,
            )
        )  # fmt: skip
        ladder.append(Rung(tier.name, own.gather if isinstance(own, TierPlan) else 1))
    return Score(tuple(ladder), found.seconds_per_token, found.tokens_per_pass, tuple(rungs))


def explained(choice: Choice) -> list[str]:
    """A sentence for each tier and store: the best plan with it against the best without it."""
    best = choice.best
    said = [f"{best.name} is the fastest of {len(choice.tried)} plans: {_figures(best)}."]
    for what, has in _parts(choice):
        inside = [one for one in choice.tried if has(one.plan)]
        outside = [one for one in choice.tried if not has(one.plan)]
        if not inside or not outside:
            continue
        one, other = (min(group, key=lambda tried: tried.seconds) for group in (inside, outside))
        verdict = "in" if has(best.plan) else "out"
        said.append(
            f"{what} is {verdict}: the best plan with it is {one.name} ({_figures(one)}), without it {other.name} "
            f"({_figures(other)})."
        )
    for key, name in choice.names.items():
        if key != TARGET:
            share = choice.acceptance.share(key)
            costs = choice.figures.tier(key).costs.seconds(1)
            said.append(f"{name}: {100 * share.rate:.0f}% of its guesses stand, a pass takes {1e3 * costs:.2f} ms.")
    return said


def _parts(choice: Choice) -> Iterator[tuple[str, _Has]]:
    sources = dict.fromkeys(_source(tier) for one in choice.tried for tier in one.plan.tiers)
    stores = dict.fromkeys(store for one in choice.tried for store in one.plan.stores)
    for source in sources:
        yield source, _Has(source)
    for store in stores:
        yield f"the store {store.removesuffix('?')}", _Has(store)


class _Has:
    """Whether a plan has this tier or store."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, plan: Plan) -> bool:
        stores = {*plan.stores, *(store for tier in plan.tiers for store in tier.stores)}
        return self._what in stores or self._what in map(_source, plan.tiers)


def _source(tier: TierPlan) -> str:
    if tier.exit_layer is not None:
        return f"exit {tier.exit_layer}"
    return f"draft {tier.draft}" if tier.draft is not None else "skipped layers"


def _figures(one: Tried) -> str:
    how = "predicted" if one.measured is None else "measured"
    return f"{1e3 * one.seconds:.2f} ms a token {how}, {one.predicted.tokens_per_pass:.2f} tokens a pass"
