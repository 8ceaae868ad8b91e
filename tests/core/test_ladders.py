"""Ladders of four scorers: their distribution is plain decoding's, exactly, whatever their tiers decide on the way.

Four tiers need four tokens of room before the lowest one is asked at all, so these cases are selected, not left to
chance: in every one of them the lowest tier drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from enumerate_distributions import Branches, TooManyBranches
from paced_tiers import costs, ladder_costs, ladder_policies, paced
from random_hierarchies import EXACT, SEEN, errors, markov, random_hierarchy, random_sampling, report

from hierspec.core import hierarchy as hierarchy_module
from hierspec.core.hierarchy import Tier
from hierspec.core.interfaces import Written
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Sampling
from hierspec.core.verify import BY_DISTRIBUTION, RULES
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.blocks import UntilCorrection, WhileWorthwhile
from hierspec.testing.fakes import FakeScorer

FOUR = 4


class Counting(Appraiser):
    """An appraiser that counts how often it left something out."""

    left_out = 0

    def choose(self, proposals: Iterable[Proposal], budget: int, speed: float, requests: int = 1) -> Proposal:
        given = list(proposals)
        chosen = super().choose(given, budget, speed, requests)
        Counting.left_out += any(len(proposal) > len(chosen) for proposal in given)
        return chosen


def ladder(generator: np.random.Generator, vocabulary: int, seed: int, with_stores: bool) -> tuple[Tier, ...]:
    """Four tiers; one with runners-up, and no block so long that outcomes are too many to visit."""
    tiers = random_hierarchy(generator, FOUR, vocabulary, seed, with_stores)
    beside = int(generator.integers(1, FOUR))
    return tuple(
        replace(tier, gather=min(tier.gather, 2), merge=tier.merge or level < 2, candidates=2 if level == beside else 1)
        for level, tier in enumerate(tiers)
    )


def deciding(tiers: tuple[Tier, ...], kinds: list[str], dear: float) -> tuple[Tier, ...]:
    """The same tiers, which end blocks and leave drafts out by what they have seen; each begins with nothing learnt."""
    policies = ladder_policies(tiers, kinds, eager=True)
    for level, policy in enumerate(policies, 1):
        if isinstance(policy, WhileWorthwhile):  # drafting pays to begin with at every level, a second round seldom
            policy._round, policy._gains[-1] = [1.0, 1.0, 0.6 / level], [8.0, 8.0]
    appraisers = {level: Counting(costs(1.0 / (level + 1), dear)) for level in range(FOUR - 1)}
    return paced(tiers, ladder_costs(tiers), policies, appraisers=appraisers)


@pytest.mark.parametrize("decides", [False, True], ids=["fixed", "deciding"])
@pytest.mark.parametrize("with_stores", [False, True], ids=["drafts", "stores"])
@pytest.mark.parametrize("rule", RULES)
def test_ladders_of_four(
    rule: str,
    with_stores: bool,
    decides: bool,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first pass of the target to its full depth, and whole outputs."""
    ended = 0
    for kind in (WhileWorthwhile, UntilCorrection):
        honest = kind.go_on

        def watched(
            self: WhileWorthwhile, block: list[Written], requests: int = 1, honest: Callable[..., bool] = honest
        ) -> bool:
            nonlocal ended
            going_on = honest(self, block, requests)
            ended += bool(block) and not going_on
            return going_on

        monkeypatch.setattr(kind, "go_on", watched)
    Counting.left_out = 0
    wanted, largest, cases, outcomes = 3, 0.0, 0, 0
    for attempt in range(30 * wanted):
        generator = np.random.default_rng([17, with_stores, attempt])
        vocabulary, step = 3 if generator.random() < 0.2 else 2, attempt % 2 == 0
        sampling = random_sampling(generator, vocabulary, 5 if step else 4)
        tiers = ladder(generator, vocabulary, attempt, with_stores)
        kinds = [str(kind) for kind in generator.choice(["correction", "worth", "worth"], FOUR - 1)]
        dear = float(generator.choice([0.05, 0.35]))

        def built(
            branches: Branches, tiers: tuple[Tier, ...] = tiers, kinds: list[str] = kinds, dear: float = dear
        ) -> tuple[Tier, ...]:
            return deciding(tiers, kinds, dear) if decides else tiers

        try:
            error, leaves = errors(built, rule, sampling, step, 600)
        except TooManyBranches:
            continue
        lowest = tiers[-1].scorer
        assert isinstance(lowest, FakeScorer)
        if leaves < 30 or not lowest.calls:
            continue  # nearly greedy, or a ladder of fewer
        assert error < EXACT, (attempt, sampling)
        largest, cases, outcomes = max(largest, error), cases + 1, outcomes + leaves
        if cases == wanted:
            break
    report(record_property, cases, outcomes, largest)
    assert cases == wanted
    if decides:
        assert ended > 0
        assert Counting.left_out > 0 or not with_stores  # what was sampled always stays


@pytest.mark.parametrize("rule", sorted(BY_DISTRIBUTION))
def test_control_a_ladder_that_keeps_a_token_back(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sampled must be handed up: to leave it out for its value changes the distribution, and is seen."""
    tiers = tuple(
        Tier(markov(f"tier{level}", 2, 5, noise=0.8 * level, noise_seed=level + 1), gather=2) for level in range(FOUR)
    )
    sampling = Sampling(max_tokens=5, temperature=1.0, seed=0)

    def off() -> float:
        return errors(lambda branches: tiers, rule, sampling, step=True)[0]

    assert off() < EXACT
    honest = hierarchy_module._proposal

    def shy(written: list[Written], tier: str) -> Proposal:
        token, distribution = written[-1].candidates[0]
        assert distribution is not None
        return honest(written[:-1] if distribution[token] < 0.5 and len(written) > 1 else written, tier)

    monkeypatch.setattr(hierarchy_module, "_proposal", shy)
    assert off() > SEEN
