"""A step tells what its pass verified: the accepted nodes are the tokens written, whatever the hierarchy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from random_hierarchies import PROMPT, random_hierarchy, random_sampling

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.together import Together
from hierspec.testing.fakes import FakeScorer


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
@pytest.mark.parametrize("seed", range(12))
def test_the_accepted_nodes_are_the_tokens_but_the_last(rule, seed):
    generator = np.random.default_rng(seed)
    tiers = random_hierarchy(generator, depth=1 + seed % 3, vocabulary=4, seed=seed, with_stores=True)
    tiers = tuple(_with_fake(tier, level, seed) for level, tier in enumerate(tiers))
    request = Request(PROMPT, random_sampling(generator, 4, 12), Hierarchy(tiers, rule))
    steps = [step for _, step in Engine().run([request])]
    assert [token for step in steps for token in step.tokens] == request.output
    for number, step in enumerate(steps):
        drafted = [step.draft.tokens[node] for node in step.accepted]
        by_stop = number == len(steps) - 1 and request.ended == "stop" and len(drafted) == len(step.tokens)
        assert drafted == list(step.tokens if by_stop else step.tokens[:-1])
        assert [step.draft.sources[node] for node in step.accepted] == list(step.sources[: len(drafted)])
        # They are one path down the tree, from the context on.
        assert [step.draft.parents[node] for node in step.accepted] == [-1, *step.accepted][: len(drafted)]
        # Distributions are large, and whoever keeps steps should not keep them.
        assert set(step.draft.distributions) <= {None}
    counted = request.stats.tiers[0]
    assert sum(len(step.draft) for step in steps) == counted.proposed.total()
    assert sum(len(step.accepted) for step in steps) == counted.accepted.total()


def _with_fake(tier, level: int, seed: int):
    """The tier with a scorer that runs by dice instead of enumerating all of them."""
    noise = 0.5 * level
    return replace(tier, scorer=FakeScorer(f"tier{level}", 4, seed=seed, noise=noise, noise_seed=level + 1))


def test_all_time_of_steps_counts_for_their_requests_and_the_callers_does_not(monkeypatch):
    """Passes are not all that drafts cost: each further step of a round takes time too."""
    now = [0.0]

    class Slow(FakeScorer):
        def score(self, asks):
            now[0] += 10
            return super().score(asks)

    def choose(together, asks, before=Together.choose):
        now[0] += 3
        return before(together, asks)

    monkeypatch.setattr(Together, "choose", choose)
    request = Request([1], Sampling(max_tokens=6), Hierarchy((Tier(Slow("target", 8, seed=1)),)))
    engine, spent = Engine(clock=lambda: now[0]), []
    engine.submit(request)
    while engine.busy:
        engine.step()
        spent.append(request.spent)
        now[0] += 100
    assert [after - before for before, after in pairwise(spent)] == [13.0] * (len(spent) - 1)
    assert len(spent) > 2
