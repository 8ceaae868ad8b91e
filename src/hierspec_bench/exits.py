"""Which exit should draft and which should verify: every pair of a model's exits, measured beside the formula.

This is HiSpec's figure 5 on a model of one's own. Pairs run in the paper's fixed blocks (two tokens drafted, four
handed to the target), single exits in the length that the formula finds best for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.language_model import LanguageModel
from hierspec.pacing.pace import AdaptivePace
from hierspec.plot import Axis, Chart, Line
from hierspec.progress import Progress, silent
from hierspec.scorers.base import StateScorer
from hierspec_bench.synthetic import predicted_speedup

DRAFTED, VERIFIED = 2, 4  # tokens of a block, as in the paper
_LONGEST = 6  # tokens that an exit alone is tried with


def check_exits(exits: Sequence[int], layers: int) -> None:
    if len(exits) < 2 or list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] >= layers:
        raise HierspecError(
            f"--exits takes two or more rising layer numbers between 1 and {layers - 1}, separated by commas, not "
            f"{','.join(map(str, exits))}."
        )


def exit_plans(
    model: LanguageModel, exits: Sequence[int], agreement: Mapping[str, float], progress: Progress = silent
) -> tuple[dict[str, Plan], dict[str, float]]:
    """A plan for each exit alone and for each pair, and the speed-up over plain that the formula gives for it.

    `agreement` has, as `train.examine` counts them, "exit 4" (with the target) and "exit 4 with exit 8".
    """
    target: StateScorer = model.scorer(model.config.layers)
    scorers: dict[int, StateScorer] = {}
    for layer in exits:
        found = model.hierarchy(Plan(tiers=(TierPlan(exit_layer=layer),))).tiers[1].scorer
        assert isinstance(found, StateScorer)
        scorers[layer] = found
    wanted = [(target, layer) for layer in exits] + [(scorers[layer], 0) for layer in exits]
    wanted += [(scorers[high], low) for low, high in combinations(exits, 2)]
    model.costs.measure_anew(wanted, progress)
    plans: dict[str, Plan] = {}
    predicted: dict[str, float] = {}
    for layer in exits:
        own = {}
        for length in range(1, _LONGEST + 1):
            plan = Plan(tiers=(TierPlan(exit_layer=layer, gather=length),))
            own[length] = _predicted(model, plan, [agreement[f"exit {layer}"]])
        best = max(own, key=lambda length: own[length])
        plans[f"{layer} alone"] = Plan(tiers=(TierPlan(exit_layer=layer, gather=best),))
        predicted[f"{layer} alone"] = own[best]
    for low, high in combinations(exits, 2):
        tiers = TierPlan(exit_layer=high, gather=VERIFIED), TierPlan(exit_layer=low, gather=DRAFTED)
        name = f"{low} under {high}"
        plans[name] = Plan(tiers=tiers)
        predicted[name] = _predicted(
            model, plans[name], [agreement[f"exit {high}"], agreement[f"exit {low} with exit {high}"]]
        )
    return plans, predicted


def _predicted(model: LanguageModel, plan: Plan, chances: Sequence[float]) -> float:
    weighing = replace(plan, tiers=tuple(replace(tier, until="worth") for tier in plan.tiers))
    costs = [tier.pace.costs for tier in model.hierarchy(weighing).tiers if isinstance(tier.pace, AdaptivePace)]
    return predicted_speedup(costs, chances, [tier.gather for tier in plan.tiers])


def running_requests(
    result: Mapping[str, Any], plans: Mapping[str, Plan], predicted: Mapping[str, float]
) -> list[dict[str, Any]]:
    """For each plan: draft and verifier layer, speed-up after the prompt, and what the formula gives."""
    rows = []
    plain = result["plans"]["plain"]["decode_tokens_per_second"]
    for name, plan in plans.items():
        figures = result["plans"][name]
        rows.append(
            {
                "draft": plan.tiers[-1].exit_layer,
                "verifier": plan.tiers[0].exit_layer if len(plan.tiers) > 1 else None,
                "gather": [tier.gather for tier in plan.tiers],
                "measured": round(figures["decode_tokens_per_second"] / plain, 3),
                "formula": round(predicted[name], 3),
                "tokens_per_pass": figures["tokens_per_pass"],
            }
        )
    return rows


def chart(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """A line for each draft layer over the verifier's, measured and (dashed) by the formula; alone: over itself."""
    lines = []
    for number, draft in enumerate(sorted({row["draft"] for row in rows})):
        own = sorted(
            (row["verifier"] or draft, row["measured"], row["formula"]) for row in rows if row["draft"] == draft
        )
        lines.append(Line(f"draft {draft}", [(layer, measured) for layer, measured, _ in own], colour=number))
        lines.append(
            Line(f"draft {draft}, formula", [(layer, value) for layer, _, value in own], dashed=True, colour=number)
        )
    return Chart(
        "Draft layer and verifier layer", Axis("verifier layer (its own: no verifier)"), Axis("speed-up over plain"),
        lines, "after the prompt; dashed: the latency formula",
    )  # fmt: skip
