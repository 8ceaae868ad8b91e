"""The results of a search for people: rows of tables, and why each tier and store is in or out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hierspec.planner.formula.figures import Figures, HierarchyConfig, in_words
from hierspec.planner.formula.latency import Score, score
from hierspec.planner.formula.monte_carlo import MonteCarloResult
from hierspec.planner.formula.search import USUAL, Limits, ScoredHierarchy, search
from hierspec.progress import Progress, silent


@dataclass(frozen=True)
class Compared:
    """A hierarchy in the list of those that were scored."""

    name: str  # empty: from the search
    score: Score
    speedup: float  # over plain decoding, predicted
    monte_carlo: MonteCarloResult | None = None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"name": self.name} if self.name else {}
        document |= {
            "hierarchy": in_words(self.score.hierarchy),
            "rungs": [vars(config) for config in self.score.hierarchy],
            "predicted_ms": round(1e3 * self.score.seconds, 4),
            "speedup": round(self.speedup, 4),
            "tokens_per_pass": round(self.score.tokens_per_pass, 4),
        }
        if self.monte_carlo is not None:
            document["played_ms"] = round(1e3 * self.monte_carlo.seconds, 4)
            document["error_ms"] = round(1e3 * self.monte_carlo.error, 4)
        return document


def compared(
    figures: Figures,
    searched: Sequence[ScoredHierarchy],
    named: Mapping[str, HierarchyConfig] | None = None,
    monte_carlo: Mapping[HierarchyConfig, MonteCarloResult] | None = None,
) -> list[Compared]:
    """The hierarchies of a search and those given by name, the fastest first."""
    plain = figures.target.seconds(1)
    scores = [("", scored.score) for scored in searched]
    scores += [(name, score(figures, hierarchy)) for name, hierarchy in (named or {}).items()]
    listed = [
        Compared(name, scored, plain / scored.seconds, (monte_carlo or {}).get(scored.hierarchy))
        for name, scored in scores
    ]
    return sorted(listed, key=lambda row: row.score.seconds)


def tier_rows(figures: Figures, best: Score) -> list[dict[str, Any]]:
    """A row for each tier of a hierarchy.

    `pass_ms` is its average pass. `token_ms` is the time of a token that it writes, lower tiers included (for the
    target: the prediction for the whole hierarchy).
    """
    rows = []
    for level, (config, tier) in enumerate(zip(best.hierarchy, best.tiers, strict=True)):
        rows.append(
            {
                "tier": config.tier,
                "store": config.store,
                "gather": config.gather if level else None,
                "pass_ms": round(1e3 * tier.seconds / tier.passes, 4) if tier.passes else 0.0,
                "rows": round(tier.rows, 2),
                "passes_per_token": round(tier.passes, 4),
                "stands": round(tier.accepted, 4) if level else None,
                "gathered": round(tier.block_tokens, 3),
                "share": round(tier.share, 4),
                "token_ms": round(1e3 * score(figures, best.hierarchy[level:]).seconds, 4),
            }
        )
    return rows


def explained(
    figures: Figures, searched: Sequence[ScoredHierarchy], limits: Limits = USUAL, progress: Progress = silent
) -> list[str]:
    """A sentence for each tier and store: what leaving it out, or putting it in, would cost by the formula."""
    best = searched[0].score
    plain = figures.target.seconds(1)
    if len(best.hierarchy) == 1 and best.hierarchy[0].store is None:
        sentences = [f"{figures.target.name}: nothing is faster than the target alone, {_ms(plain)} per token."]
    else:
        fastest = f"{in_words(best.hierarchy)} takes {_ms(best.seconds)}, {plain / best.seconds:.2f}x"
        sentences = [f"{figures.target.name}: alone it takes {_ms(plain)} per token; {fastest}."]
    stores = list(dict.fromkeys(store.name for listed in figures.stores.values() for store in listed))
    total = len(figures.tiers) - 1 + len(stores)
    for number, tier in enumerate(figures.tiers[1:]):
        progress("Comparing tiers", number, total)
        sentences.append(_explained_tier(figures, best, tier.name, limits))
    for number, store in enumerate(stores, len(figures.tiers) - 1):
        progress("Comparing tiers", number, total)
        sentences.append(_explained_store(figures, best, store, limits))
    progress("Comparing tiers", total, total)
    return sentences


def _explained_tier(figures: Figures, best: Score, name: str, limits: Limits) -> str:
    if any(config.tier == name for config in best.hierarchy):
        other = search(figures.without(name), limits)[0].score
        return f"{name} is in: without it the best is {_against(other, best)}."
    with_tier = search(figures, limits, required=name)
    if not with_tier:
        return f"{name} is out: nothing is known about how often a tier above accepts its tokens."
    other = with_tier[0].score
    level = next(level for level, config in enumerate(other.hierarchy) if config.tier == name)
    tier, above = other.tiers[level], other.hierarchy[level - 1].tier
    token_seconds = score(figures, other.hierarchy[level:]).seconds
    return (
        f"{name} is out: the best with it is {_against(other, best)}. "
        f"There a token of it costs {_ms(token_seconds)}, and of {tier.block_tokens:.1f} drafted "
        f"{tier.block_tokens * tier.accepted:.1f} are accepted by {above}."
    )


def _explained_store(figures: Figures, best: Score, name: str, limits: Limits) -> str:
    asked_by = [config.tier for config in best.hierarchy if config.store == name]
    if asked_by:
        other = search(figures.without_store(name), limits)[0].score
        return f"{name} is in, under {' and '.join(asked_by)}: without it the best is {_against(other, best)}."
    tiers = [tier for tier, stores in figures.stores.items() if any(store.name == name for store in stores)]
    scores = [best_score for tier in tiers if (best_score := _with_store(figures, tier, name, limits)) is not None]
    if not scores:
        return f"{name} is out: it proposes only to tiers whose acceptance is not known."
    other = min(scores, key=lambda scored: scored.seconds)
    return f"{name} is out: the best with it is {_against(other, best)}."


def _with_store(figures: Figures, tier: str, name: str, limits: Limits) -> Score | None:
    """The best hierarchy in which this tier asks this store."""
    scores = []
    for scored in search(figures, limits, required=tier):
        changed = tuple(replace(config, store=name) if config.tier == tier else config for config in scored.hierarchy)
        scores.append(score(figures, changed))
    return min(scores, key=lambda scored: scored.seconds, default=None)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _against(other: Score, best: Score) -> str:
    slower = 100 * (other.seconds / best.seconds - 1)
    verdict = f"{slower:.1f}% slower" if slower >= 0.05 else "as fast"
    if slower <= -0.05:  # tuning in steps may stop at a local minimum
        verdict = f"{-slower:.1f}% faster: the search missed it"
    return f"{in_words(other.hierarchy)} at {_ms(other.seconds)}, {verdict}"
