"""The output's distribution equals plain decoding's, exactly: every outcome of the real program is enumerated.

The negative controls at the end break what this rests on point by point and show that this harness sees it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from enumerate_distributions import (
    Branches,
    EnumeratingScorer,
    SampledTree,
    TooManyBranches,
    forests,
    renumbered,
    step_distribution,
)
from random_hierarchies import EXACT, PROMPT, SEEN, errors, markov, random_hierarchy, random_sampling, report

from hierspec.core import hierarchy as hierarchy_module
from hierspec.core import verify as verify_module
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Written
from hierspec.core.proposal import Candidate, Distribution, Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Dice, Sampling
from hierspec.core.verify import RULES, Verdict
from hierspec.testing.fakes import FakeStore, random_trees

SHAPES = [shape for nodes in range(7) for shape in forests(nodes)]


def test_number_of_shapes() -> None:
    assert [len(forests(nodes)) for nodes in range(7)] == [1, 1, 2, 5, 14, 42, 132]  # the Catalan numbers
    assert len(set(SHAPES)) == len(SHAPES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("equal_siblings", [False, True])
def test_every_drafted_tree(rule: str, equal_siblings: bool, record_property: Callable[[str, object], None]) -> None:
    """Every tree shape up to 6 nodes as a store's draft: the first pass to its full depth, and whole outputs."""
    largest, cases, outcomes = 0.0, 0, 0
    for index, shape in enumerate(SHAPES):
        generator = np.random.default_rng([1, equal_siblings, index])
        vocabulary = int(generator.integers(2, 5))
        tree = random_tokens(renumbered(shape, generator), vocabulary, equal_siblings, generator)
        target = markov("target", vocabulary, index)
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


def test_every_sampled_tree(record_property: Callable[[str, object], None]) -> None:
    """Every tree shape up to 6 nodes sampled from a draft model: residual rule, several candidates a position."""
    largest, cases, outcomes = 0.0, 0, 0
    for index, shape in enumerate(SHAPES):
        generator = np.random.default_rng([2, index])
        parents = renumbered(shape, generator)
        vocabulary = max(v for v in (2, 3, 4) if v == 2 or count_samples(parents, v) <= 150)
        target = markov("target", vocabulary, index)
        draft = markov("draft", vocabulary, index, noise=float(generator.uniform(0.2, 2)))
        sampling = random_sampling(generator, vocabulary, 7)
        # Any distribution may be sampled from, if it is the one handed up: a draft needs no penalties or filters.
        sampled_with = sampling if generator.random() < 0.5 else Sampling(temperature=1.0)

        def tiers(
            branches: Branches,
            parents: tuple[int, ...] = parents,
            target: EnumeratingScorer = target,
            draft: EnumeratingScorer = draft,
            sampled_with: Sampling = sampled_with,
        ) -> tuple[Tier, ...]:
            return (Tier(target, stores=(SampledTree("draft", parents, draft, sampled_with, branches),)),)

        error, leaves = errors(tiers, "residual", sampling, step=True)
        largest, cases, outcomes = max(largest, error), cases + 1, outcomes + leaves
        assert error < EXACT, (shape, sampling)
    report(record_property, cases, outcomes, largest)


def count_samples(parents: tuple[int, ...], vocabulary: int) -> int:
    """How many trees of this shape can be sampled."""
    count = 1
    for node, parent in enumerate(parents):
        count *= max(1, vocabulary - parents[:node].count(parent))
    return count


# Outcomes grow with every tier; a case that would cost too much gives way to the next, never to none.
@pytest.mark.parametrize("with_stores", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_random_hierarchies(
    rule: str, depth: int, with_stores: bool, record_property: Callable[[str, object], None]
) -> None:
    """1 to 4 tiers with random gather, candidates, merging, stores, sampling and stop ids."""
    wanted, largest, cases, outcomes = 14, 0.0, 0, 0
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
    """The error of a hierarchy whose sampled proposal was changed on the way."""
    target, draft = markov("target", 3, 7), markov("draft", 3, 7, noise=1.0)
    sampling = Sampling(max_tokens=3, temperature=1.0, seed=0)

    class Changed(SampledTree):
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


def test_control_a_distribution_it_was_not_sampled_from() -> None:
    def lie(proposal: Proposal, target: EnumeratingScorer) -> Proposal:
        uniform = np.full(target.vocabulary, 1 / target.vocabulary)
        return Proposal(proposal.tokens, proposal.parents, proposal.sources, (uniform,) * len(proposal))

    assert drafted(lie, (-1,)) > SEEN


def test_sampled_drafts_taken_as_fixed() -> None:
    """Not wrong: a draft without a distribution is exact, unless it depends on the target's randomness. Only slower."""

    def forget(proposal: Proposal, target: EnumeratingScorer) -> Proposal:
        return Proposal(proposal.tokens, proposal.parents, proposal.sources)

    assert drafted(forget, (-1, -1, 0)) < EXACT


def wrong_hierarchy(rule: str, merge: bool = False) -> float:
    """Three tiers, a store beside the first draft, runners-up: exact unless broken (see the first control)."""
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
    """Fixed drafts first, and sampled ones dropped where they equal a fixed one."""

    def fixed_first(self: Proposal, other: Proposal, nodes: int) -> Proposal:
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

    monkeypatch.setattr(Proposal, "merge", fixed_first)
    assert wrong_hierarchy("residual", merge=True) > SEEN


def test_control_handed_up_with_the_distribution_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution_from_below(proposal: Proposal, answer: Answer, dice: Dice, candidates: int) -> Verdict:
        verdict = verify_module.residual(proposal, answer, dice, candidates)
        written = [list(candidates) for candidates in verdict.written]
        for position, node in enumerate(verdict.accepted):
            if proposal.distributions[node] is not None:
                written[position][0] = (written[position][0][0], proposal.distributions[node])
        return Verdict(verdict.accepted, written)

    monkeypatch.setitem(RULES, "residual", distribution_from_below)
    assert wrong_hierarchy("residual") > SEEN


def test_control_a_rejected_draft_keeps_its_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchanged(weights: np.ndarray, otherwise: Distribution) -> Distribution:
        return otherwise

    monkeypatch.setattr(verify_module, "_normalised", unchanged)
    assert wrong_hierarchy("residual") > SEEN


def test_control_a_runner_up_is_accepted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coupled rule with a draft accepted when it is any of the scorer's candidates."""

    def lenient(proposal: Proposal, answer: Answer, dice: Dice, candidates: int) -> Verdict:
        assert answer.picks is not None
        accepted: list[int] = []
        written: list[list[Candidate]] = []
        node = -1
        while True:
            picks = answer.picks[node + 1].tolist()
            node = next((c for c in proposal.children()[node + 1] if proposal.tokens[c] in picks), -1)
            if node < 0:
                return Verdict(accepted, [*written, [(picks[0], None)]])
            accepted.append(node)
            written.append([(proposal.tokens[node], None)])

    monkeypatch.setitem(RULES, "coupled", lenient)
    assert wrong_hierarchy("coupled") > SEEN


def test_control_stops_drafting_after_seeing_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that does not hand up a last token it finds unlikely: decided after it was sampled, so wrong."""
    honest = hierarchy_module._proposal

    def shy(written: list[Written], tier: str) -> Proposal:
        token, distribution = written[-1].candidates[0]
        assert distribution is not None
        return honest(written[:-1] if distribution[token] < 0.4 and len(written) > 1 else written, tier)

    monkeypatch.setattr(hierarchy_module, "_proposal", shy)
    assert wrong_hierarchy("residual") > SEEN


def tokens_a_pass(rule: str, seed: int) -> float:
    """Expected tokens of the first pass over a drafted block, exactly."""
    target, draft = markov("target", 3, seed), markov("draft", 3, seed, noise=1.0)
    tiers = (Tier(target), Tier(draft, gather=3))
    made: list[Request] = []

    def make(branches: Branches) -> Request:
        made.append(Request(PROMPT, Sampling(max_tokens=8, temperature=1.0, seed=0), Hierarchy(tiers, rule)))
        return made[-1]

    weights, _ = step_distribution(make, 1_000_000)
    return sum(weight * len(tokens) for tokens, weight in weights.items())


@pytest.mark.parametrize("seed", range(4))
def test_a_block_brings_no_fewer_tokens(seed: int) -> None:
    assert tokens_a_pass("block", seed) > tokens_a_pass("residual", seed) - EXACT


def test_a_block_brings_more_tokens_on_the_whole() -> None:
    assert sum(tokens_a_pass("block", seed) - tokens_a_pass("residual", seed) for seed in range(4)) > 0.01
