"""What a search found, for people: rows of tables, and why each tier and store is in or out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hierspec.planner.formula.figures import Figures, Ladder, in_words
from hierspec.planner.formula.latency import Score, score
from hierspec.planner.formula.search import USUAL, Candidate, Limits, search
from hierspec.planner.formula.simulate import Played
from hierspec.progress import Progress, silent


@dataclass(frozen=True)
class Compared:
    """A hierarchy in the list of those that were looked at."""

    name: str  # empty: found by the search
    score: Score
    speedup: float  # over plain decoding, predicted
    played: Played | None = None  # with coins

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name} if self.name else {}
        found |= {
            "hierarchy": in_words(self.score.ladder), "rungs": [vars(rung) for rung in self.score.ladder],
            "predicted_ms": round(1e3 * self.score.seconds, 4), "speedup": round(self.speedup, 4),
            "tokens_per_pass": round(self.score.tokens_per_pass, 4),
        }  # fmt: skip
        if self.played is not None:
            found |= {"played_ms": round(1e3 * self.played.seconds, 4), "error_ms": round(1e3 * self.played.error, 4)}
        return found


def compared(
    figures: Figures,
    found: Sequence[Candidate],
    given: Mapping[str, Ladder] | None = None,
    played: Mapping[Ladder, Played] | None = None,
) -> list[Compared]:
    """What the search found and what was given by name, the fastest first."""
    plain = figures.target.seconds(1)
    scores = [("", one.score) for one in found]
    scores += [(name, score(figures, ladder)) for name, ladder in (given or {}).items()]
    listed = [Compared(name, one, plain / one.seconds, (played or {}).get(one.ladder)) for name, one in scores]
    return sorted(listed, key=lambda one: one.score.seconds)


def tier_rows(figures: Figures, best: Score) -> list[dict[str, Any]]:
    """A row for each tier of a hierarchy. `pass_ms`: its average pass; `token_ms`: a token that it writes, whatever is
    below it included, which for the target is what is predicted of the whole."""
    rows = []
    for level, (rung, found) in enumerate(zip(best.ladder, best.rungs, strict=True)):
        rows.append(
            {
                "tier": rung.tier, "store": rung.store, "gather": rung.gather if level else None,
                "pass_ms": round(1e3 * found.seconds / found.passes, 4) if found.passes else 0.0,
                "rows": round(found.rows, 2), "passes_per_token": round(found.passes, 4),
                "stands": round(found.stands, 4) if level else None, "gathered": round(found.gathered, 3),
                "share": round(found.share, 4),
                "token_ms": round(1e3 * score(figures, best.ladder[level:]).seconds, 4),
            }
        )  # fmt: skip
    return rows


def explained(
    figures: Figures, found: Sequence[Candidate], limits: Limits = USUAL, progress: Progress = silent
) -> list[str]:
    """A sentence for each tier and store: what leaving it out, or putting it in, would cost by the formula."""
    best = found[0].score
    plain = figures.target.seconds(1)
    if len(best.ladder) == 1 and best.ladder[0].store is None:
        said = [f"{figures.target.name}: nothing is faster than it alone, {_ms(plain)} a token."]
    else:
        found_best = f"{in_words(best.ladder)} takes {_ms(best.seconds)}, {plain / best.seconds:.2f}x"
        said = [f"{figures.target.name}: alone it takes {_ms(plain)} a token; {found_best}."]
    stores = list(dict.fromkeys(store.name for listed in figures.stores.values() for store in listed))
    total = len(figures.tiers) - 1 + len(stores)
    for number, tier in enumerate(figures.tiers[1:]):
        progress("Weighing tiers", number, total)
        said.append(_tier(figures, best, tier.name, limits))
    for number, store in enumerate(stores, len(figures.tiers) - 1):
        progress("Weighing tiers", number, total)
        said.append(_store(figures, best, store, limits))
    progress("Weighing tiers", total, total)
    return said


def _tier(figures: Figures, best: Score, name: str, limits: Limits) -> str:
    if any(rung.tier == name for rung in best.ladder):
        other = search(figures.without(name), limits)[0].score
        return f"{name} is in: without it the best is {_against(other, best)}."
    forced = search(figures, limits, through=name)
    if not forced:
        return f"{name} is out: nothing is known of its tokens at any tier above it."
    other = forced[0].score
    level = next(place for place, rung in enumerate(other.ladder) if rung.tier == name)
    rung, above = other.rungs[level], other.ladder[level - 1].tier
    costs = score(figures, other.ladder[level:]).seconds
    return (
        f"{name} is out: the best with it is {_against(other, best)}. "
        f"There a token of it costs {_ms(costs)}, and of {rung.gathered:.1f} handed up "
        f"{rung.gathered * rung.stands:.1f} stand at {above}."
    )


def _store(figures: Figures, best: Score, name: str, limits: Limits) -> str:
    where = [rung.tier for rung in best.ladder if rung.store == name]
    if where:
        other = search(figures.without_store(name), limits)[0].score
        return f"{name} is in, under {' and '.join(where)}: without it the best is {_against(other, best)}."
    tiers = [tier for tier, stores in figures.stores.items() if any(store.name == name for store in stores)]
    tried = [_with_store(figures, tier, name, limits) for tier in tiers]
    reached = [one for one in tried if one is not None]
    if not reached:
        return f"{name} is out: it stands only under tiers that nothing is known of."
    other = min(reached, key=lambda one: one.seconds)
    return f"{name} is out: the best with it is {_against(other, best)}."


def _with_store(figures: Figures, tier: str, name: str, limits: Limits) -> Score | None:
    """The best hierarchy found in which this tier asks this store."""
    found = search(figures, limits, through=tier)
    levels = [(one.ladder, [rung.tier for rung in one.ladder].index(tier)) for one in found]
    scores = [
        score(figures, (*ladder[:level], replace(ladder[level], store=name), *ladder[level + 1 :]))
        for ladder, level in levels
    ]
    return min(scores, key=lambda one: one.seconds, default=None)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _against(other: Score, best: Score) -> str:
    slower = 100 * (other.seconds / best.seconds - 1)
    said = f"{slower:.1f}% slower" if slower >= 0.05 else "as fast"
    if slower <= -0.05:  # tuning by steps does not always end at the very best
        said = f"{-slower:.1f}% faster: the search missed it"
    return f"{in_words(other.ladder)} at {_ms(other.seconds)}, {said}"
