"""The output law equals plain decoding's, exactly: every outcome of the real program is enumerated.

METHODS section 5 says what must hold; the negative controls at the end break those points one by one and show that
this harness sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from enumerate_laws import (
    Branches,
    DrawnTree,
    EnumeratingScorer,
    TooManyBranches,
    forests,
    law_error,
    output_law,
    plain_law,
    renumbered,
    step_error,
    step_law,
)

from hierspec.core import hierarchy as hierarchy_module
from hierspec.core import verify as verify_module
from hierspec.core.engine import Request
from hierspec.core.hierarchy import Hierarchy, Scorer, Tier
from hierspec.core.proposal import Law, Proposal
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.verify import RULES, Answer, Candidate, Verdict
from hierspec.testing_fakes import FakeStore, markov_logits, random_trees

EXACT = 1e-12
SEEN = 1e-6  # a wrong rule must be off by more than this
SHAPES = [shape for nodes in range(7) for shape in forests(nodes)]
PROMPT = [1, 0, 1]


def random_sampling(generator: np.random.Generator, vocabulary: int, max_tokens: int) -> Sampling:
    """Any law a user can ask for; half of the settings are off in a case, so that each also stands alone."""

    def sometimes(value: Any, off: Any) -> Any:
        return value if generator.random() < 0.4 else off

    return Sampling(
        max_tokens=max_tokens,
        temperature=float(generator.choice([0.6, 1.0, 1.5])),
        top_k=sometimes(int(generator.integers(1, vocabulary + 1)), 0),
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


def errors(
    tiers: Callable[[Branches], tuple[Tier, ...]], rule: str, sampling: Sampling, step: bool, most: int = 1_000_000
) -> tuple[float, int]:
    """How far a hierarchy's law is from plain decoding's, of its first step or of the whole output."""
    targets: list[Scorer] = []

    def make(branches: Branches) -> Request:
        built = tiers(branches)
        targets.append(built[0].scorer)
        return Request(PROMPT, sampling, Hierarchy(built, rule))

    found, leaves = (step_law if step else output_law)(make, most)
    target = targets[0]
    assert isinstance(target, EnumeratingScorer)
    if step:
        return step_error(found, target, PROMPT, sampling), leaves
    return law_error(found, plain_law(target, PROMPT, sampling)), leaves


def report(record: Callable[[str, object], None], cases: int, outcomes: int, largest: float) -> None:
    """Numbers for the JUnit file, and for `pytest -s`."""
    record("cases", cases)
    record("outcomes", outcomes)
    record("largest_error", largest)
    print(f"\n{cases} cases, {outcomes} outcomes, largest law error {largest:.1e}")


def test_number_of_shapes() -> None:
    assert [len(forests(nodes)) for nodes in range(7)] == [1, 1, 2, 5, 14, 42, 132]  # the Catalan numbers
    assert len(set(SHAPES)) == len(SHAPES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("equal_siblings", [False, True])
def test_every_guessed_tree(rule: str, equal_siblings: bool, record_property: Callable[[str, object], None]) -> None:
    """Every tree shape up to 6 nodes as a store's guess: the first pass to its full depth, and whole outputs."""
    largest, cases, outcomes = 0.0, 0, 0
    for place, shape in enumerate(SHAPES):
        generator = np.random.default_rng([1, equal_siblings, place])
        vocabulary = int(generator.integers(2, 5))
        tree = random_tokens(renumbered(shape, generator), vocabulary, equal_siblings, generator)
        target = markov("target", vocabulary, place)
        store = FakeStore("store", lambda context, budget, tree=tree: tree)  # type: ignore[misc]
        tiers = (Tier(target, stores=(store,)),)
        for step, length in ((True, 7), (False, int(generator.integers(2, 4)))):
            sampling = random_sampling(generator, vocabulary, length)
            target._laws.clear()
            error, leaves = errors(lambda branches, tiers=tiers: tiers, rule, sampling, step)  # type: ignore[misc]
            largest, cases, outcomes = max(largest, error), cases + 1, outcomes + leaves
            assert error < EXACT, (shape, tree, sampling)
    report(record_property, cases, outcomes, largest)


def random_tokens(
    parents: tuple[int, ...], vocabulary: int, equal_siblings: bool, generator: np.random.Generator
) -> Proposal:
    """Tokens for a shape. Siblings differ while there are tokens to go round, unless equal ones are wanted."""
    tokens: list[int] = []
    for parent in parents:
        used = {token for token, other in zip(tokens, parents, strict=False) if other == parent}
        free = [token for token in range(vocabulary) if equal_siblings or token not in used]
        tokens.append(int(generator.choice(free or range(vocabulary))))
    return Proposal(tuple(tokens), parents)


def test_every_drawn_tree(record_property: Callable[[str, object], None]) -> None:
    """Every tree shape up to 6 nodes drawn from a draft's law: residual rule, several candidates a position."""
    largest, cases, outcomes = 0.0, 0, 0
    for place, shape in enumerate(SHAPES):
        generator = np.random.default_rng([2, place])
        parents = renumbered(shape, generator)
        vocabulary = max(v for v in (2, 3, 4) if v == 2 or drawings(parents, v) <= 250)
        target = markov("target", vocabulary, place)
        draft = markov("draft", vocabulary, place, noise=float(generator.uniform(0.2, 2)))
        sampling = random_sampling(generator, vocabulary, 7)

        def tiers(
            branches: Branches,
            parents: tuple[int, ...] = parents,
            target: EnumeratingScorer = target,
            draft: EnumeratingScorer = draft,
            sampling: Sampling = sampling,
        ) -> tuple[Tier, ...]:
            return (Tier(target, stores=(DrawnTree("draft", parents, draft, sampling, branches),)),)

        error, leaves = errors(tiers, "residual", sampling, step=True)
        largest, cases, outcomes = max(largest, error), cases + 1, outcomes + leaves
        assert error < EXACT, (shape, sampling)
    report(record_property, cases, outcomes, largest)


def drawings(parents: tuple[int, ...], vocabulary: int) -> int:
    """In how many ways a tree can be drawn."""
    ways = 1
    for node, parent in enumerate(parents):
        ways *= max(1, vocabulary - parents[:node].count(parent))
    return ways


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
                candidates=int(generator.integers(1, 4)),
            )
        )
    return tuple(tiers)


# Outcomes grow with every tier; a case that would cost too much gives way to the next, never to none.
@pytest.mark.parametrize("with_stores", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_random_hierarchies(
    rule: str, depth: int, with_stores: bool, record_property: Callable[[str, object], None]
) -> None:
    """1 to 4 tiers with random gather, candidates, merging, stores, sampling and stop ids."""
    wanted, largest, cases, outcomes = 20, 0.0, 0, 0
    for attempt in range(5 * wanted):
        generator = np.random.default_rng([3, depth, with_stores, attempt])
        vocabulary = int(generator.integers(2, 5)) if depth < 3 else int(generator.integers(2, 4))
        sampling = random_sampling(generator, vocabulary, int(generator.integers(2, 5)))
        tiers = random_hierarchy(generator, depth, vocabulary, attempt, with_stores)
        try:
            error, leaves = errors(lambda branches, tiers=tiers: tiers, rule, sampling, False, 600)  # type: ignore[misc]
        except TooManyBranches:
            continue
        largest, cases, outcomes = max(largest, error), cases + 1, outcomes + leaves
        assert error < EXACT, (attempt, sampling)
        if cases == wanted:
            break
    report(record_property, cases, outcomes, largest)
    assert cases == wanted
