"""Tiers of fakes with paces that decide by made-up costs, and scorers whose text is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hierspec.core.hierarchy import Tier
from hierspec.core.interfaces import Answer, Ask, RequestView
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.blocks import BlockPolicy, WhileWorthwhile, open_policy
from hierspec.pacing.costs import Costs
from hierspec.pacing.pace import AdaptivePace
from hierspec.pacing.routing import Route, Router
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees

ROWS = tuple(range(1, 33))
TOKENS = 1500
TEXT = np.random.default_rng(5).integers(0, 1000, TOKENS + 100).tolist()


def costs(narrow: float, each: float = 0.0) -> Costs:
    return Costs(ROWS, [narrow + each * (rows - 1) for rows in ROWS])


def random_tiers(rng: np.random.Generator, depth: int, seed: int, gather: int) -> tuple[Tier, ...]:
    """A ladder of fakes that agree less the lower they are, each with at most so many tokens to gather."""
    return tuple(
        Tier(
            FakeScorer(f"tier{k}", 8, seed=seed, noise=0.4 * k, noise_seed=k),
            gather=int(rng.integers(1, gather + 1)),
            stores=(FakeStore(f"store{k}", random_trees(8, seed + k)),) if rng.random() < 0.3 else (),
            merge=bool(rng.integers(2)),
            candidates=int(rng.integers(1, 3)),
        )
        for k in range(depth)
    )


def paced(
    tiers: Sequence[Tier],
    prices: Sequence[Costs],
    policies: Sequence[BlockPolicy],
    routers: Mapping[int, Router] | None = None,
    appraisers: Mapping[int, Appraiser] | None = None,
) -> tuple[Tier, ...]:
    """The same tiers with paces that join these parts.

    `prices` are of the passes of each tier, `policies` of the tiers below the target. A tier without a router has the
    next tier draft where its policy finds that it pays.
    """
    joined = dict(routers or {})
    for level, policy in enumerate(policies):
        if level not in joined and isinstance(policy, WhileWorthwhile):
            joined[level] = Router([Route(policy, prices[level])])
    result = []
    for level, tier in enumerate(tiers):
        ends = {0: policies[level - 1]} if level else {}
        for above, router in joined.items():
            if 0 <= level - 1 - above < len(router.routes):
                ends[level - 1 - above] = router.routes[level - 1 - above].policy
        pace = AdaptivePace(prices[level], (appraisers or {}).get(level), joined.get(level), ends)
        result.append(replace(tier, pace=pace))
    return tuple(result)


def ladder_costs(tiers: Sequence[Tier]) -> list[Costs]:
    return [costs(1.0 / (level + 1), 0.05) for level in range(len(tiers))]


def ladder_policies(tiers: Sequence[Tier], kinds: Sequence[str], eager: bool = False) -> list[BlockPolicy]:
    """Policies that know nothing yet; an eager one decides from its first block on."""
    policies = [open_policy(kind, price) for kind, price in zip(kinds, ladder_costs(tiers), strict=False)]
    for level, policy in enumerate(policies, 1):
        if eager and isinstance(policy, WhileWorthwhile):
            policy._blocks, policy._idle = 100, 0.0
            policy.learn_round(1, 0.6)  # near the edge: one draft that is rejected, and the next is left out
            policy._gains[-1] = [8.0, 2.5 if level == 1 else 8.0]
    return policies


def with_policies(tiers: tuple[Tier, ...], kinds: Sequence[str], eager: bool = False) -> tuple[Tier, ...]:
    """The same tiers, which decide when they hand up; each begins with nothing learnt."""
    return paced(tiers, ladder_costs(tiers), ladder_policies(tiers, kinds, eager))


def policy_of(tier: Tier) -> BlockPolicy:
    """When this tier hands up to the next tier above."""
    assert isinstance(tier.pace, AdaptivePace)
    return tier.pace.ends[0]


class Reciting:
    """Answers with the token of a text at each position, whatever came before: a target whose text is known."""

    vocabulary = 1000

    def __init__(self, name: str, text: list[int]) -> None:
        self.name, self.text = name, text

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        return [self.answer(ask) for ask in asks]

    def answer(self, ask: Ask) -> Answer:
        depths = [0, *(depth + 1 for depth in ask.proposal.depths())]
        return Answer(picks=np.array([[self.text[len(ask.context) + depth]] for depth in depths]))

    def release(self, request: RequestView) -> None:
        pass
