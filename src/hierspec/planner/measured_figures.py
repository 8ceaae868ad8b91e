"""The input of the search, from what was measured: costs of passes, and how often which tier accepts which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hierspec.pacing.costs import Costs
from hierspec.planner.formula.figures import AcceptanceRates, Figures, TierFigures
from hierspec.planner.simulation.acceptance import Acceptance
from hierspec.planner.simulation.cost_table import WIDTHS, CostTable
from hierspec.planner.simulation.traces import scorer_key
from hierspec.scorers.base import StateScorer

_CONTEXT = 256  # tokens before the passes whose costs the search uses
_DEPTHS = 4  # positions in a block whose acceptance rates the search is given


def figures_of(
    scorers: Sequence[StateScorer],
    keys: Sequence[str],
    table: CostTable,
    accepted: Acceptance,
    per_row: Mapping[str, float] | None = None,
) -> Figures:
    """The input of the search, from measured tables. Of two tiers, the more expensive one may verify the other.

    `per_row` are the seconds that each row takes on top of a pass, by `scorer_key`.
    """
    more = {key: (per_row or {}).get(scorer_key(scorer), 0.0) for key, scorer in zip(keys, scorers, strict=True)}
    costs = {
        key: _with_more(table.of(scorer).costs(_CONTEXT), more[key]) for key, scorer in zip(keys, scorers, strict=True)
    }
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
                over[lower] = _with_more(costs_over, more[key])
            for above in order[:level]:
                if (lower, key, above) in accepted.by_middle_tier:
                    count = accepted.by_middle_tier[lower, key, above]
                    triples[above, key, lower] = AcceptanceRates(
                        rates(key, above), (count.accepted.rate,), (count.corrected.rate,)
                    )
        tiers.append(TierFigures(key, costs[key], over))
    return Figures(tuple(tiers), pairs, {}, triples)


def _with_more(costs: Costs, per_row: float) -> Costs:
    return costs if per_row == 0 else Costs(WIDTHS, [costs.seconds(rows) + per_row * rows for rows in WIDTHS])


def _costs_over(upper: StateScorer, lower: StateScorer, table: CostTable) -> Costs | None:
    """Costs of verifying drafts of an exit, which has already run the first layers; None if it is no such exit."""
    parts, below = table.of(upper), table.of(lower)
    if upper.pool is not lower.pool or not 0 < lower.layers < upper.layers or parts.base is None or below.base is None:
        return None
    saved = [below.base.seconds(rows, _CONTEXT) - below.base.seconds(1, _CONTEXT) for rows in WIDTHS]
    return Costs(
        WIDTHS, [parts.seconds(rows, _CONTEXT) - max(less, 0.0) for rows, less in zip(WIDTHS, saved, strict=True)]
    )
