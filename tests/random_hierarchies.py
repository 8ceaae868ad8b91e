"""Random hierarchies over fakes, and how far the distribution of what they write is from plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from enumerate_distributions import (
    Branches,
    EnumeratingScorer,
    distribution_error,
    output_distribution,
    plain_distribution,
    step_distribution,
    step_error,
)

from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Scorer
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeStore, markov_logits, random_trees

EXACT = 1e-12
SEEN = 1e-6  # a wrong rule must be off by more than this
PROMPT = [1, 0, 1]


def random_sampling(generator: np.random.Generator, vocabulary: int, max_tokens: int) -> Sampling:
    """Any settings a user can ask for; most are off in a case, so that each is also seen alone."""

    def sometimes(value: Any, off: Any) -> Any:
        return value if generator.random() < 0.3 else off

    return Sampling(
        max_tokens=max_tokens,
        temperature=float(generator.choice([0.6, 1.0, 1.5])),
        top_k=sometimes(int(generator.integers(2, vocabulary + 1)), 0),
        top_p=sometimes(float(generator.uniform(0.5, 1)), 1.0),
        min_p=sometimes(float(generator.uniform(0, 0.3)), 0.0),
        repetition_penalty=sometimes(float(generator.uniform(0.7, 2)), 1.0),
        presence_penalty=sometimes(float(generator.uniform(-1, 1)), 0.0),
        frequency_penalty=sometimes(float(generator.uniform(-1, 1)), 0.0),
        logit_bias=sometimes({int(generator.integers(vocabulary)): float(generator.normal())}, None),
        stop_ids=sometimes((int(generator.integers(vocabulary)),), ()),
        seed=0,
    )


def markov(name: str, vocabulary: int, seed: int, noise: float = 0.0, noise_seed: int = 1) -> EnumeratingScorer:
    logits = markov_logits(vocabulary, seed, order=2, sharpness=1.0, noise=noise, noise_seed=noise_seed)
    return EnumeratingScorer(name, vocabulary, logits)


def random_hierarchy(
    generator: np.random.Generator, depth: int, vocabulary: int, seed: int, with_stores: bool
) -> tuple[Tier, ...]:
    tiers = []
    for level in range(depth):
        noise = 0.0 if level == 0 else float(generator.uniform(0.1, 1.5))
        scorer = markov(f"tier{level}", vocabulary, seed, noise, noise_seed=level + 1)
        stores = tuple(
            FakeStore(f"store{level}.{i}", random_trees(vocabulary, seed=10 * seed + 3 * level + i, silence=0.4))
            for i in range(int(generator.integers(0, 3)) if with_stores else 0)
        )
        tiers.append(
            Tier(
                scorer,
                gather=int(generator.integers(1, 4)),
                stores=stores,
                budget=int(generator.integers(1, 7)),
                merge=bool(generator.integers(2)),
                candidates=int(generator.integers(1, 4)) if level else 1,
            )
        )
    return tuple(tiers)


def errors(
    tiers: Callable[[Branches], tuple[Tier, ...]], rule: str, sampling: Sampling, step: bool, most: int = 1_000_000
) -> tuple[float, int]:
    """How far a hierarchy's distribution is from plain decoding's, of its first step or of the whole output; and the
    number of outcomes."""
    targets: list[Scorer] = []

    def make(branches: Branches) -> Request:
        built = tiers(branches)
        targets.append(built[0].scorer)
        return Request(PROMPT, sampling, Hierarchy(built, rule))

    weights, leaves = (step_distribution if step else output_distribution)(make, most)
    target = targets[0]
    assert isinstance(target, EnumeratingScorer)
    if step:
        return step_error(weights, target, PROMPT, sampling), leaves
    return distribution_error(weights, plain_distribution(target, PROMPT, sampling)), leaves


def report(record: Callable[[str, object], None], cases: int, outcomes: int, largest: float) -> None:
    """Numbers for the JUnit file, and for `pytest -s`."""
    record("cases", cases)
    record("outcomes", outcomes)
    record("largest_error", largest)
    print(f"\n{cases} cases, {outcomes} outcomes, largest error of a probability {largest:.1e}")
