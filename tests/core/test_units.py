"""The parts of the core, each against something simpler. All randomness is fixed: these tests cannot flake."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer
from hierspec.core.proposal import Distribution, Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Dice, Sampling, adjust, distribution, gumbel, noise_keys, picks, softmax
from hierspec.core.stats import Stats, TierStats
from hierspec.core.verify import RULES, coupled, residual
from hierspec.testing.fakes import FakeScorer

FEW = settings(max_examples=150, deadline=None, derandomize=True)


# Proposals


@st.composite
def trees(draw: Any, most: int = 8) -> Proposal:
    size = draw(st.integers(0, most))
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return Proposal(tuple(tokens), tuple(draw(st.integers(-1, node - 1)) for node in range(size)))


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    """A proposal as the set of texts it can add: what merging is about, without nodes and orders."""
    return {tuple(proposal.path(node)) for node in range(len(proposal))}


def test_proposal_is_checked() -> None:
    assert len(Proposal()) == 0
    assert Proposal((1, 2), (-1, 0)).sources == ("?", "?")
    assert Proposal((1, 2), (-1, 0)).distributions == (None, None)
    with pytest.raises(ValueError, match="differ in length"):
        Proposal((1, 2), (-1,))
    with pytest.raises(ValueError, match="differ in length"):
        Proposal((1,), (-1,), ("a", "b"))
    for parents in ((0,), (-2,), (-1, 1), (-1, 2)):
        with pytest.raises(ValueError, match="parents come before"):
            Proposal(tuple(range(len(parents))), parents)


def test_chain() -> None:
    chain = Proposal.chain(np.array([5, 6, 7]), "store")
    assert chain == Proposal((5, 6, 7), (-1, 0, 1), ("store",) * 3)
    assert all(type(token) is int for token in chain.tokens)
    assert Proposal.chain([]) == Proposal()


def test_paths_depths_children() -> None:
    tree = Proposal((1, 2, 3, 4, 5), (-1, 0, 0, -1, 2))
    assert [tree.path(node) for node in range(-1, 5)] == [[], [1], [1, 2], [1, 3], [4], [1, 3, 5]]
    assert tree.depths() == [0, 1, 1, 0, 2]
    assert tree.children() == [[0, 3], [1, 2], [], [4], [], []]


@FEW
@given(trees(), st.integers(0, 9))
def test_cut_and_first(tree: Proposal, size: int) -> None:
    assert tree.depths() == [len(tree.path(node)) - 1 for node in range(len(tree))]
    cut = tree.cut(size)
    assert sorted(map(tuple, map(cut.path, range(len(cut))))) == sorted(
        tuple(tree.path(node)) for node in range(len(tree)) if len(tree.path(node)) <= size
    )
    first = tree.first(size)
    assert [first.path(node) for node in range(len(first))] == [tree.path(n) for n in range(min(size, len(tree)))]
    for child, nodes in enumerate(tree.children()):
        assert nodes == [node for node in range(len(tree)) if tree.parents[node] == child - 1]


@FEW
@given(trees(), trees(), st.integers(1, 20))
def test_merge(first: Proposal, other: Proposal, nodes: int) -> None:
    merged = first.merge(other, nodes)
    if first.tokens:  # self stays as it is: a sampled token is never dropped
        assert merged.tokens[: len(first)] == first.tokens
        assert merged.parents[: len(first)] == first.parents
        assert len(merged) <= max(nodes, len(first))
    else:
        assert len(merged) <= nodes
    assert paths(first) <= paths(merged) <= paths(first) | paths(other)
    if nodes >= len(first) + len(other):
        assert paths(merged) == paths(first) | paths(other)
    elif first.tokens and len(merged) < nodes:
        assert paths(other) <= paths(merged)  # what was left out, was left out for want of room
    if first.tokens and len(paths(first)) == len(first):
        assert len(paths(merged)) == len(merged)  # nothing twice


def test_merge_keeps_sources_and_distributions() -> None:
    sampled_from = np.array([0.5, 0.5])
    sampled = Proposal((1, 0), (-1, 0), ("draft",) * 2, (sampled_from,) * 2)
    fixed = Proposal((1, 0, 1, 0), (-1, 0, 0, -1), ("store",) * 4)
    merged = sampled.merge(fixed, 8)
    assert merged.tokens == (1, 0, 1, 0)
    assert merged.parents == (-1, 0, 0, -1)
    assert merged.sources == ("draft", "draft", "store", "store")
    assert [distribution is sampled_from for distribution in merged.distributions] == [True, True, False, False]
    with pytest.raises(ValueError, match="must come first"):
        fixed.merge(sampled, 8)


# Sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("stop", ("",)),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
    ],
)
def test_bad_sampling_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(HierspecError, match=f"^{name} must be .*, not .*\\.$"):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_sampling_takes_one_stop_for_a_tuple() -> None:
    sampling = Sampling(stop="END", stop_ids=3)  # type: ignore[arg-type]
    assert sampling.stop == ("END",)
    assert sampling.stop_ids == (3,)
    assert Sampling(stop=["a", "b"], stop_ids=[1, 2]).stop_ids == (1, 2)  # type: ignore[arg-type]


def naive(logits: list[float], text: list[int], prompt_length: int, s: Sampling) -> list[float]:
    """Adjusted distribution in plain Python, setting by setting, on probabilities where `adjust` works on logits."""
    z = list(logits)
    for token in range(len(z)):
        if token in text:
            z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
        written = text[prompt_length:].count(token)
        z[token] -= s.frequency_penalty * written + (s.presence_penalty if written else 0)
        z[token] += (s.logit_bias or {}).get(token, 0)
    p = [math.exp(value / s.temperature) for value in z]
    ranked = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if s.top_k:
        p = [value if value >= p[ranked[min(s.top_k, len(p)) - 1]] else 0.0 for value in p]
    if s.top_p < 1:
        nucleus, mass = set[int](), 0.0
        for token in ranked:
            if mass >= s.top_p:
                break
            nucleus.add(token)
            mass += p[token] / sum(p)
        p = [value if token in nucleus else 0.0 for token, value in enumerate(p)]
    p = [value if value >= s.min_p * max(p) else 0.0 for value in p]
    return [value / sum(p) for value in p]


def test_adjusted_distribution() -> None:
    """2,000 random settings. Not by hypothesis: its round numbers are at the edges of filters, where logits and
    probabilities may round to different sides."""
    for case in range(2000):
        generator = np.random.default_rng(case)

        def sometimes(value: Any, off: Any, generator: np.random.Generator = generator) -> Any:
            return value if generator.random() < 0.5 else off

        logits = generator.normal(0, 2, 6)
        text = generator.integers(0, 6, int(generator.integers(0, 9)))
        prompt_length = int(generator.integers(0, len(text) + 1))
        sampling = Sampling(
            temperature=float(generator.uniform(0.3, 2)),
            top_k=sometimes(int(generator.integers(1, 9)), 0),
            top_p=sometimes(float(generator.uniform(0.1, 1)), 1.0),
            min_p=sometimes(float(generator.uniform(0, 0.5)), 0.0),
            repetition_penalty=sometimes(float(generator.uniform(0.5, 2)), 1.0),
            presence_penalty=sometimes(float(generator.uniform(-1, 1)), 0.0),
            frequency_penalty=sometimes(float(generator.uniform(-1, 1)), 0.0),
            logit_bias=sometimes({int(generator.integers(6)): float(generator.normal(0, 3))}, None),
        )
        before = logits.tolist()
        adjusted = distribution(adjust(logits, text, prompt_length, sampling), sampling)
        assert logits.tolist() == before  # a scorer's logits are not written to
        expected = naive(before, text.tolist(), prompt_length, sampling)
        np.testing.assert_allclose(adjusted, expected, atol=1e-12, err_msg=str(case))


def test_filters_by_hand() -> None:
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    text = np.array([0])

    def possible(**settings: Any) -> list[int]:
        return np.flatnonzero(
            distribution(adjust(logits, text, 1, s := Sampling(temperature=1.0, **settings)), s)
        ).tolist()

    assert possible() == [0, 1, 2, 3]
    assert possible(top_k=2) == [0, 1]
    assert possible(top_k=9) == [0, 1, 2, 3]
    assert possible(top_p=0.6) == [0, 1]
    assert possible(top_p=0.01) == [0]  # the most likely token always stays
    assert possible(min_p=0.25) == [0, 1, 2]
    assert possible(min_p=1.0) == [0]
    assert possible(logit_bias={0: -math.inf}) == [1, 2, 3]


def test_temperature_zero_is_the_best_token() -> None:
    sampling = Sampling(seed=1)
    z = np.array([1.0, 3.0, 3.0, 2.0])
    assert distribution(z, sampling).tolist() == [0, 1, 0, 0]  # of equals the first
    assert picks(z, sampling, seed=1, position=0) == [1]
    assert picks(z, sampling, seed=1, position=0, count=3) == [1, 2, 3]


def test_runners_up_begin_with_the_pick() -> None:
    sampling = Sampling(temperature=0.8)
    for seed in range(200):
        z = np.random.default_rng(seed).standard_normal(9)
        three = picks(z, sampling, seed, 5, 3)
        assert three[:1] == picks(z, sampling, seed, 5)
        assert len(set(three)) == 3


# Noise


def chi_square(counts: np.ndarray, expected: Distribution) -> float:
    total = counts.sum()
    return float(((counts - total * expected) ** 2 / (total * expected)).sum())


@pytest.mark.parametrize("over", ["positions", "seeds", "large seeds"])
def test_distribution_of_the_pick(over: str) -> None:
    """Over neighbouring positions and over neighbouring seeds the picks have the distribution of softmax."""
    sampling, draws = Sampling(temperature=1.0), 20_000
    z = np.array([0.3, -1.0, 1.2, 0.0, -0.4, -3.0])
    counts = np.zeros(6)
    for i in range(draws):
        seed, position = {"positions": (7, i), "seeds": (i, 40), "large seeds": (2**63 + i, 3)}[over]
        counts[picks(z, sampling, seed, position)[0]] += 1
    assert chi_square(counts, softmax(z)) < 20.5  # 5 degrees of freedom: passed by chance once in 1,000


def test_runners_up_are_sampled_without_replacement() -> None:
    """The first two picks together have the distribution of two samples without replacement."""
    sampling, z = Sampling(temperature=1.0), np.array([0.3, -1.0, 1.2, 0.0])
    p = softmax(z)
    counts = np.zeros((4, 4))
    for position in range(20_000):
        first, second = picks(z, sampling, 11, position, 2)
        counts[first, second] += 1
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    expected = np.array([p[a] * p[b] / (1 - p[a]) for a, b in pairs])
    assert chi_square(np.array([counts[pair] for pair in pairs]), expected) < 31.3  # 11 degrees, once in 1,000


def test_noise_is_gumbel() -> None:
    """Kolmogorov's distance of 200,000 values to the Gumbel distribution, and its mean and spread."""
    noise = np.sort(np.concatenate([gumbel(seed, 17, 2000) for seed in range(100)]))
    ranks = (np.arange(len(noise)) + 0.5) / len(noise)
    assert np.abs(np.exp(-np.exp(-noise)) - ranks).max() < 1.95 / math.sqrt(len(noise))  # once in 1,000
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03


def test_noise_of_neighbours_is_independent() -> None:
    """Neighbouring positions, seeds and tokens, and position against seed: no correlation, nothing repeated."""
    size = 50_000
    here = gumbel(123, 1000, size)
    others = {
        "next position": gumbel(123, 1001, size),
        "next seed": gumbel(124, 1000, size),
        "seed and position exchanged": gumbel(1000, 123, size),
        "seed up, position down": gumbel(124, 999, size),
        "next token": np.roll(here, 1),
        "seed above 32 bits": gumbel(123 + 2**32, 1000, size),
        "negative seed": gumbel(-123, 1000, size),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(here, other)[0, 1]) < 4 / math.sqrt(size), name
        # Correlation sees only straight lines; who is on top together sees more.
        both = np.mean((here > np.median(here)) & (other > np.median(other)))
        assert abs(both - 0.25) < 4 * math.sqrt(0.25 * 0.75 / size), name
    one_token = np.array([[gumbel(seed, position, 3)[2] for position in range(200)] for seed in range(200)])
    for axis in (0, 1):
        a, b = np.delete(one_token, -1, axis).ravel(), np.delete(one_token, 0, axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(len(a))


def test_noise_does_not_depend_on_the_vocabulary() -> None:
    whole = gumbel(5, 6, 10_000)
    for size in (1, 2, 17, 9_999):
        assert np.array_equal(gumbel(5, 6, size), whole[:size])
    assert np.isfinite(whole).all()


def test_noise_keys_differ() -> None:
    keys = {noise_keys(seed, position) for seed in range(300) for position in range(300)}
    assert len(keys) == 300 * 300
    assert all(0 <= word < 2**32 for pair in list(keys)[:100] for word in pair)


def test_noise_stays_what_it_is() -> None:
    """Texts are reproducible from their seeds over versions: these numbers must never change."""
    assert noise_keys(0, 0) == (3341716840, 966571147)
    assert noise_keys(42, 7) == (161846950, 2849158607)
    assert gumbel(42, 7, 3).tolist() == pytest.approx(
        [0.5257589591576026, -1.1160987520242922, 0.5363152445965015], abs=1e-12
    )


# Dice


def test_dice_choose_has_the_distribution() -> None:
    p = np.array([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    dice, counts = Dice(9), np.zeros(6)
    for _ in range(20_000):
        counts[dice.choose(p)] += 1
    assert counts[p == 0].sum() == 0
    assert chi_square(counts[p > 0], p[p > 0]) < 13.8  # 2 degrees of freedom, once in 1,000
    assert abs(np.mean([dice.accept(0.3) for _ in range(20_000)]) - 0.3) < 0.011


def test_dice_keep_to_the_possible() -> None:
    class Edge(Dice):
        def __init__(self, value: float) -> None:
            self._generator = type("Fixed", (), {"random": lambda self: value})()

    p = np.array([0.0, 0.1, 0.2, 0.7, 0.0])
    assert Edge(0.0).choose(p) == 1
    assert Edge(1 - 2**-53).choose(p) == 3
    thirds = np.array([1 / 3] * 3 + [0.0])
    assert Edge(1 - 2**-53).choose(thirds) == 2
    assert not Edge(0.0).accept(0.0)
    assert Edge(1 - 2**-53).accept(1.0)


def test_dice_are_repeatable() -> None:
    p = np.full(50, 1 / 50)
    dice, same, other = Dice(-3), Dice(-3), Dice(4)
    first = [dice.choose(p) for _ in range(30)]
    assert first == [same.choose(p) for _ in range(30)]
    assert first != [other.choose(p) for _ in range(30)]


# Verify


class Fixed(Dice):
    """Dice that fall as given."""

    def __init__(self, accepts: list[bool], choices: list[int] | None = None) -> None:
        self.accepts, self.choices = list(accepts), list(choices or [])
        self.probabilities: list[float] = []
        self.distributions: list[list[float]] = []

    def accept(self, probability: float) -> bool:
        self.probabilities.append(probability)
        return self.accepts.pop(0)

    def choose(self, distribution: Distribution) -> int:
        self.distributions.append(distribution.tolist())
        return self.choices.pop(0)


@pytest.mark.parametrize("rule", RULES)
def test_no_proposal_gives_one_token(rule: str) -> None:
    answer = Answer(picks=np.array([[2]]), distributions=np.array([[0.0, 0.0, 1.0]]))
    verdict = RULES[rule](Proposal(), answer, Dice(0), 1)
    assert verdict.accepted == []
    assert [[token for token, _ in candidates] for candidates in verdict.written] == [[2]]


def test_coupled_walks_the_tree() -> None:
    tree = Proposal((4, 5, 6, 7, 5), (-1, -1, 1, 2, 1))
    after = {-1: 5, 0: 0, 1: 6, 2: 9, 3: 0, 4: 0}
    answer = Answer(picks=np.array([[after[node], 1] for node in range(-1, 5)]))
    verdict = coupled(tree, answer, Dice(0), 2)
    assert verdict.accepted == [1, 2]
    assert verdict.written == [[(5, None), (1, None)], [(6, None), (1, None)], [(9, None), (1, None)]]
    assert coupled(tree, answer, Dice(0), 1).written == [[(5, None)], [(6, None)], [(9, None)]]


def test_coupled_follows_the_first_of_equal_siblings() -> None:
    twins = Proposal((3, 3, 8), (-1, -1, 0))
    answer = Answer(picks=np.array([[3], [8], [8], [1]]))
    assert coupled(twins, answer, Dice(0), 1).accepted == [0, 2]


def test_residual_with_a_fixed_draft() -> None:
    p = np.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    draft = Proposal((1,), (-1,))
    dice = Fixed([True], [2])
    verdict = residual(draft, Answer(distributions=p), dice, 1)
    assert verdict.accepted == [0]
    assert dice.probabilities == [0.5]
    assert [candidates[0][0] for candidates in verdict.written] == [1, 2]
    assert verdict.written[0][0][1] is not None
    dice = Fixed([False], [0])
    verdict = residual(draft, Answer(distributions=p), dice, 1)
    assert verdict.accepted == []
    assert dice.distributions[0] == pytest.approx([0.4, 0, 0.6])
    np.testing.assert_array_equal(verdict.written[0][0][1], p[0])  # it hands up its own distribution, not what was left


def test_residual_with_sampled_drafts() -> None:
    p, q = np.array([[0.2, 0.5, 0.3]] * 3), np.array([0.6, 0.2, 0.2])
    rest = np.array([0, 0.5, 0.5])
    dice = Fixed([False, False], [1])
    verdict = residual(Proposal((0, 2), (-1, -1), (), (q, rest)), Answer(distributions=p), dice, 1)
    assert dice.probabilities == pytest.approx([1 / 3, (0.1 / 0.4) / 0.5])
    assert dice.distributions[0] == pytest.approx([0, 1, 0])
    assert verdict.written[0][0][0] == 1
    dice = Fixed([True], [0])
    residual(Proposal((1,), (-1,), (), (q,)), Answer(distributions=p), dice, 1)
    assert dice.probabilities == [1.0]  # likelier to the scorer than to the draft: always right


def test_residual_runners_up_are_sampled_without_replacement() -> None:
    p = np.array([[0.2, 0.5, 0.3, 0.0]])
    dice = Fixed([], [1, 0, 2])
    candidates = residual(Proposal(), Answer(distributions=p), dice, 9).written[0]
    assert [token for token, _ in candidates] == [1, 0, 2]  # three tokens are possible, so no more than three
    distributions = [sampled_from.tolist() for _, sampled_from in candidates if sampled_from is not None]
    assert distributions == [
        pytest.approx([0.2, 0.5, 0.3, 0]),
        pytest.approx([0.4, 0, 0.6, 0]),
        pytest.approx([0, 0, 1, 0]),
    ]


def test_residual_survives_a_certain_draft_rejected_by_rounding() -> None:
    p = np.array([[0.0, 1.0], [0.5, 0.5]])
    for distributions in ((None,), (np.array([0.0, 1.0]),)):
        verdict = residual(Proposal((1,), (-1,), (), distributions), Answer(distributions=p), Fixed([False], [1]), 1)
        assert verdict.written[0][0][0] == 1


# Stats


def test_stats_count_add_and_tell() -> None:
    tier = TierStats("target")
    tier.count(Proposal((1, 2, 3), (-1, 0, -1), ("a", "a", "b")), [0], 2)
    tier.count(Proposal(), [], 1)
    total = Stats()
    total.add(Stats([tier]))
    total.add(Stats([tier, TierStats("exit 4")]))
    assert total.passes == 4
    assert total.tokens_per_pass == 1.5
    assert total.to_json()[0] == {
        "tier": "target",
        "calls": 4,
        "written": 6,
        "proposed": {"a": 4, "b": 2},
        "accepted": {"a": 2},
        "proposed_by_depth": [4, 2],
        "accepted_by_depth": [2, 0],
        "seconds": 0.0,
        "store_seconds": 0.0,
    }
    assert [entry["tier"] for entry in total.to_json()] == ["target", "exit 4"]
    assert tier.calls == 2  # what was added is not changed
    assert Stats().passes == 0
    assert Stats().tokens_per_pass == 0.0


class FailsOn(FakeScorer):
    """Fails where a text begins with one of these tokens, whoever else is in the pass."""

    def __init__(self, name: str, first: int, error: Exception) -> None:
        super().__init__(name)
        self._first, self._error = first, error

    def score(self, asks):
        if any(ask.context[0] == self._first for ask in asks):
            raise self._error
        return super().score(asks)


@pytest.mark.parametrize("error", [HierspecError("There is no memory."), ValueError("a defect")])
def test_a_failing_request_takes_no_other_down(error):
    """Not those of its pass, not those of other scorers in the round; and every step is handed out."""
    first, failing, last = FakeScorer("first"), FailsOn("failing", 9, error), FakeScorer("last")
    requests = [
        Request([start, 2, 3], Sampling(max_tokens=6), Hierarchy((Tier(scorer),)))
        for scorer, start in ((first, 1), (failing, 1), (failing, 9), (failing, 4), (last, 1))
    ]
    handed: dict[int, list[int]] = {id(request): [] for request in requests}
    engine = Engine()
    for request in requests:
        engine.submit(request)
    while engine.busy:
        for request, step in engine.step():
            handed[id(request)] += step.tokens
    assert [request.ended for request in requests] == ["length", "length", "error", "length", "length"]
    assert all(handed[id(request)] == request.output for request in requests)
    assert requests[2].error is error or requests[2].error.__cause__ is error
    alone = Request([1, 2, 3], Sampling(max_tokens=6), Hierarchy((Tier(FakeScorer("failing")),)))
    for _ in Engine().run([alone]):
        pass
    assert requests[1].output == alone.output


def test_stop_ids_that_the_model_has_no_row_for_are_left_out():
    request = Request([1], Sampling(max_tokens=3, stop_ids=(99, 5)), Hierarchy((Tier(FakeScorer()),)), stop_ids=(2, 16))
    assert request.stop_ids == {2, 5}
