"""The output law equals plain decoding's, exactly: every outcome of the real program is enumerated.

METHODS section 5 says what must hold; the negative controls at the end break those points one by one and show that
this harness sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from enumerate_distributions import (
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
from hierspec.core.proposal import Distribution, Proposal
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.verify import RULES, Answer, Candidate, Verdict
from hierspec.testing.fakes import FakeStore, markov_logits, random_trees

EXACT = 1e-12
SEEN = 1e-6  # a wrong rule must be off by more than this
SHAPES = [shape for nodes in range(7) for shape in forests(nodes)]
PROMPT = [1, 0, 1]


def random_sampling(generator: np.random.Generator, vocabulary: int, max_tokens: int) -> Sampling:
    """Any law a user can ask for; most settings are off in a case, so that each also stands alone."""

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
            target._distributions.clear()
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
        vocabulary = max(v for v in (2, 3, 4) if v == 2 or drawings(parents, v) <= 150)
        target = markov("target", vocabulary, place)
        draft = markov("draft", vocabulary, place, noise=float(generator.uniform(0.2, 2)))
        sampling = random_sampling(generator, vocabulary, 7)
        # Any law may be drawn from, if it is the one handed up: the draft needs no penalties, filters or temperature.
        drawn_with = sampling if generator.random() < 0.5 else Sampling(temperature=1.0)

        def tiers(
            branches: Branches,
            parents: tuple[int, ...] = parents,
            target: EnumeratingScorer = target,
            draft: EnumeratingScorer = draft,
            drawn_with: Sampling = drawn_with,
        ) -> tuple[Tier, ...]:
            return (Tier(target, stores=(DrawnTree("draft", parents, draft, drawn_with, branches),)),)

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
                candidates=int(generator.integers(1, 4)) if level else 1,
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
        if leaves < 4:
            continue  # nearly greedy: shows little
        largest, cases, outcomes = max(largest, error), cases + 1, outcomes + leaves
        assert error < EXACT, (attempt, sampling)
        if cases == wanted:
            break
    report(record_property, cases, outcomes, largest)
    assert cases == wanted


# Negative controls: each is a rule that looks reasonable and is wrong.


def drafted(change: Callable[[Proposal, EnumeratingScorer], Proposal], parents: tuple[int, ...]) -> float:
    """The error of a hierarchy whose drawn proposal was changed on the way."""
    target, draft = markov("target", 3, 7), markov("draft", 3, 7, noise=1.0)
    sampling = Sampling(max_tokens=3, temperature=1.0, seed=0)

    class Changed(DrawnTree):
        def propose(self, context: np.ndarray, budget: int) -> Proposal:
            return change(super().propose(context, budget), target)

    def tiers(branches: Branches) -> tuple[Tier, ...]:
        return (Tier(target, stores=(Changed("draft", parents, draft, sampling, branches),)),)

    error, _ = errors(tiers, "residual", sampling, step=False)
    return error


def test_control_nothing_changed() -> None:
    assert drafted(lambda proposal, target: proposal, (-1, -1, 0)) < EXACT


def test_control_dropped_for_its_value() -> None:
    assert drafted(lambda proposal, target: proposal if proposal.tokens[0] else Proposal(), (-1,)) > SEEN


def test_control_a_law_it_was_not_drawn_from() -> None:
    def lie(proposal: Proposal, target: EnumeratingScorer) -> Proposal:
        uniform = np.full(target.vocabulary, 1 / target.vocabulary)
        return Proposal(proposal.tokens, proposal.parents, proposal.sources, (uniform,) * len(proposal))

    assert drafted(lie, (-1,)) > SEEN


def test_drawn_guesses_taken_as_chosen() -> None:
    """Not wrong: a guess without a law is exact whatever it depends on, but the target's randomness. Only slower."""

    def forget(proposal: Proposal, target: EnumeratingScorer) -> Proposal:
        return Proposal(proposal.tokens, proposal.parents, proposal.sources)

    assert drafted(forget, (-1, -1, 0)) < EXACT


def wrong_hierarchy(rule: str, merge: bool = False) -> float:
    """Three tiers, a store beside the first draft, runners-up: exact as it stands (see the first control)."""
    tiers = tuple(
        Tier(
            markov(f"tier{level}", 3, 5, noise=0.8 * level, noise_seed=level + 1),
            gather=2,
            stores=(FakeStore("store", random_trees(3, seed=4, silence=0.0)),) if merge and level == 0 else (),
            merge=merge,
            candidates=2 if rule == "coupled" else 1,
        )
        for level in range(3)
    )
    error, _ = errors(lambda branches: tiers, rule, Sampling(max_tokens=3, temperature=1.0, seed=0), step=False)
    return error


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("merge", [False, True])
def test_control_hierarchy_as_it_is(rule: str, merge: bool) -> None:
    assert wrong_hierarchy(rule, merge) < EXACT


def test_control_merged_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored guesses first, and drawn ones dropped where they equal a stored one."""

    def stored_first(self: Proposal, other: Proposal, nodes: int) -> Proposal:
        if not other.tokens or not self.tokens:
            return self if self.tokens else other
        tokens, parents, distributions = list(other.tokens), list(other.parents), list(other.distributions)
        moved = {-1: -1}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            siblings = [i for i, p in enumerate(parents) if p == moved[parent] and tokens[i] == token]
            moved[node] = siblings[0] if siblings else len(tokens)
            if not siblings:
                tokens.append(token)
                parents.append(moved[parent])
                distributions.append(self.distributions[node])
        return Proposal(tuple(tokens), tuple(parents), (), tuple(distributions))

    monkeypatch.setattr(Proposal, "merge", stored_first)
    assert wrong_hierarchy("residual", merge=True) > SEEN


def test_control_handed_up_with_the_law_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    def law_from_below(proposal: Proposal, answer: Answer, dice: Dice, candidates: int) -> Verdict:
        verdict = verify_module.residual(proposal, answer, dice, candidates)
        written = [list(found) for found in verdict.written]
        for position, node in enumerate(verdict.accepted):
            if proposal.distributions[node] is not None:
                written[position][0] = (written[position][0][0], proposal.distributions[node])
        return Verdict(verdict.accepted, written)

    monkeypatch.setitem(RULES, "residual", law_from_below)
    assert wrong_hierarchy("residual") > SEEN


def test_control_refused_guess_stays_in_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(weights: np.ndarray, otherwise: Distribution) -> Distribution:
        return otherwise

    monkeypatch.setattr(verify_module, "_normalised", kept)
    assert wrong_hierarchy("residual") > SEEN


def test_control_runner_up_stands_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coupled rule with a guess taken when it is any of the scorer's candidates."""

    def lenient(proposal: Proposal, answer: Answer, dice: Dice, candidates: int) -> Verdict:
        assert answer.picks is not None
        accepted: list[int] = []
        written: list[list[Candidate]] = []
        node = -1
        while True:
            found = answer.picks[node + 1].tolist()
            node = next((c for c in proposal.children()[node + 1] if proposal.tokens[c] in found), -1)
            if node < 0:
                return Verdict(accepted, [*written, [(found[0], None)]])
            accepted.append(node)
            written.append([(proposal.tokens[node], None)])

    monkeypatch.setitem(RULES, "coupled", lenient)
    assert wrong_hierarchy("coupled") > SEEN


def test_control_stops_drafting_after_seeing_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that does not hand up a last token it finds unlikely: decided after the draw, so wrong."""
    honest = hierarchy_module._handed_up

    def shy(written: list[tuple[list[Candidate], str]], tier: str) -> Proposal:
        token, own = written[-1][0][0]
        assert own is not None
        return honest(written[:-1] if own[token] < 0.4 and len(written) > 1 else written, tier)

    monkeypatch.setattr(hierarchy_module, "_handed_up", shy)
    assert wrong_hierarchy("residual") > SEEN


def tokens_a_pass(rule: str, seed: int) -> float:
    """Expected tokens of the first pass over a drafted block, exactly."""
    target, draft = markov("target", 3, seed), markov("draft", 3, seed, noise=1.0)
    tiers = (Tier(target), Tier(draft, gather=3))
    made: list[Request] = []

    def make(branches: Branches) -> Request:
        made.append(Request(PROMPT, Sampling(max_tokens=8, temperature=1.0, seed=0), Hierarchy(tiers, rule)))
        return made[-1]

    found, _ = step_law(make, 1_000_000)
    return sum(weight * len(tokens) for tokens, weight in found.items())


@pytest.mark.parametrize("seed", range(4))
def test_a_block_brings_no_fewer_tokens(seed: int) -> None:
    assert tokens_a_pass("block", seed) > tokens_a_pass("residual", seed) - EXACT


def test_a_block_brings_more_tokens_on_the_whole() -> None:
    assert sum(tokens_a_pass("block", seed) - tokens_a_pass("residual", seed) for seed in range(4)) > 0.01
