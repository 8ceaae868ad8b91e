"""What guesses are worth: chances learnt from verdicts, costs between the measured widths, and the choice of nodes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.engine import Engine, Request
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.sampling import Sampling
from hierspec.pacing.appraisal import Appraiser, Chances, Costs
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees


def table(chances: dict[str, float]) -> Chances:
    """Chances that are known for certain, by source."""

    class Known(Chances):
        def chance(self, source, evidence, depth):
            return chances[source]

    return Known()


def test_chances_approach_what_happens():
    chances, rng = Chances(), np.random.default_rng(0)
    guess = Proposal((7, 8), (-1, 0), ("store", "store"), evidence=(3, 3))
    first = chances.chance("store", 3, 0)
    assert 0.2 < first < 0.6
    for _ in range(2000):
        if rng.random() < 0.9:
            chances.learn(guess, [7, 8] if rng.random() < 0.25 else [7, 1])
        else:
            chances.learn(guess, [1])
    assert chances.chance("store", 3, 0) == pytest.approx(0.9, abs=0.05)
    assert chances.chance("store", 3, 1) == pytest.approx(0.25, abs=0.07)
    # Classes that were never seen lean on the source as a whole, other sources know nothing of it.
    assert 0.4 < chances.chance("store", 9, 0) < 0.8
    assert chances.chance("other", 3, 0) == first


def test_only_what_can_be_judged_is_a_trial():
    chances = Chances()
    #  after the context: 1 -> 2 -> 3 and 4 -> 5; the scorer wrote 1, 9
    guess = Proposal((1, 2, 3, 4, 5), (-1, 0, 1, -1, 3), ("s",) * 5, evidence=(1, 2, 3, 4, 5))
    chances.learn(guess, [1, 9])
    seen = {key[1]: counts for key, counts in chances._seen.items() if key[1] > 0 and key[2] >= 0}
    assert seen == {1: [1, 1], 2: [1, 0], 4: [1, 0]}  # nothing is known of 3 and 5


def test_time_is_worth_the_usual_rate():
    appraiser = Appraiser(Costs((1, 2, 4), (1.0, 1.0, 2.0)))
    assert appraiser.rate(0, 0.0) == pytest.approx(1.0)  # nothing is known: plain decoding's
    for _ in range(3000):
        appraiser.learn([], [1, 2, 3], nodes=1)
    assert appraiser.rate(0, 0.0) == pytest.approx(3.0, rel=0.01)
    assert appraiser.rate(64, 64.0) == pytest.approx(2.0, rel=0.01)  # a request of its own kind


def test_costs_between_and_beyond_the_measured_widths():
    costs = Costs((1, 2, 4), (10.0, 12.0, 11.0))  # the last is noise
    assert [costs.seconds(rows) for rows in (1, 2, 3, 4)] == [10.0, 12.0, 12.0, 12.0]
    assert costs.seconds(16) == pytest.approx(12 + 12 * 2 / 3)
    assert costs.seconds(10_000) >= costs.seconds(16)
    assert [costs.least_step(nodes) for nodes in (1, 2, 3, 4)] == [2.0, 0.0, 0.0, 0.0]
    rising = Costs((1, 2, 4), (10.0, 13.0, 15.0))
    assert [rising.least_step(nodes) for nodes in (1, 2, 3)] == [3.0, 1.0, 1.0]
    assert 0 <= rising.least_step(10_000) <= 1.0


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 6), rate=st.sampled_from([0.01, 0.05, 0.2, 1.0]))
def test_the_choice_is_the_best_tree(seed, budget, rate):
    """Against every subtree of the merged proposals."""
    rng = np.random.default_rng(seed)
    chance = {"a": float(rng.uniform(0.05, 0.95)), "b": float(rng.uniform(0.05, 0.95))}
    seconds = np.cumsum(rng.uniform(0.1, 3.0, 8))
    costs = Costs(range(1, 9), seconds.tolist())
    one, two = (
        Proposal(tree.tokens, tree.parents, (name,) * len(tree))
        for name, tree in (
            (name, random_trees(3, seed + shift, silence=0)(np.array([1]), 4)) for name, shift in (("a", 0), ("b", 1))
        )
    )
    found = Appraiser(costs, table(chance)).choose([one, two], budget, rate)
    assert len(found) <= budget
    best = 0.0
    paths_one, paths_two = ({tuple(t.path(n)) for n in range(len(t))} for t in (one, two))

    def own(tree: Proposal) -> float:
        total, chances = 0.0, []
        for node, parent in enumerate(tree.parents):
            # Both may have guessed the same node: the first one's chance counts.
            who = chance["a" if tuple(tree.path(node)) in paths_one else "b"]
            chances.append(who * (chances[parent] if parent >= 0 else 1.0))
            total += chances[-1]
        return total - rate * (costs.seconds(1 + len(tree)) - costs.seconds(1))

    paths = sorted(paths_one | paths_two, key=len)  # equal nodes are one node
    for size in range(1, budget + 1):
        for chosen in itertools.combinations(paths, size):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                parents = [chosen.index(path[:-1]) if len(path) > 1 else -1 for path in chosen]
                best = max(best, own(Proposal(tuple(path[-1] for path in chosen), tuple(parents))))
    assert own(found) == pytest.approx(best, abs=1e-9)


def test_drawn_tokens_are_never_left_out():
    distribution = np.array([0.5, 0.5])
    drawn = Proposal((0, 1), (-1, 0), ("draft", "draft"), (distribution, distribution))
    stored = Proposal((1, 0), (-1, 0), ("store", "store"))
    dear = Costs((1, 2, 3, 4), (1.0, 10.0, 20.0, 30.0))
    found = Appraiser(dear, table({"draft": 0.01, "store": 0.01})).choose([drawn, stored], 7, 1.0)
    assert found.tokens == (0, 1)
    assert found.distributions[0] is distribution


def test_what_hangs_below_drawn_tokens_has_their_chance_too():
    distribution = np.array([0.5, 0.5])
    drawn = Proposal((0,), (-1,), ("draft",), (distribution,))
    stored = Proposal((0, 1), (-1, 0), ("store", "store"))
    costs = Costs((1, 2, 3), (1.0, 1.0, 1.2))
    for likely, kept in ((0.3, (0,)), (0.9, (0, 1))):  # 0.3 x 0.5 is not worth 0.2, 0.9 x 0.5 is
        found = Appraiser(costs, table({"draft": likely, "store": 0.5})).choose([drawn, stored], 7, 1.0)
        assert found.tokens == kept


@pytest.mark.parametrize("rule", ["coupled", "residual"])
def test_what_is_written_stays_the_same_and_dear_guesses_are_dropped(rule):
    scorer = FakeScorer("target", 12, seed=3)
    store = FakeStore("trees", random_trees(12, 5, silence=0))

    def run(tier: Tier, temperature: float) -> Request:
        request = Request([1, 2, 3], Sampling(max_tokens=60, temperature=temperature, seed=4), Hierarchy((tier,), rule))
        for _ in Engine().run([request]):
            pass
        return request

    free = Appraiser(Costs((1, 32), (1.0, 1.0)))
    dear = Appraiser(Costs((1, 2, 32), (1.0, 2.0, 32.0)))
    plain = run(Tier(scorer), 0.0)
    for temperature in (0.0, 0.9) if rule == "coupled" else (0.0,):
        expected = run(Tier(scorer), temperature).output
        for appraiser in (free, dear):
            found = run(Tier(scorer, 1, (store,), 7, appraiser=appraiser), temperature)
            assert found.output == expected
    wide = run(Tier(scorer, 1, (store,), 7, appraiser=free), 0.0)
    narrow = run(Tier(scorer, 1, (store,), 7, appraiser=dear), 0.0)
    assert wide.output == narrow.output == plain.output
    assert sum(narrow.stats.tiers[0].proposed.values()) < sum(wide.stats.tiers[0].proposed.values()) / 4


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=6), st.integers(1, 20), st.integers(1, 40))
def test_requests_side_by_side_share_a_pass(steps, requests, rows):
    """A share is an equal part of the wide pass, at the widths that guesses have."""
    widths = [1, 2, 4, 8, 16, 32][: len(steps)]
    costs = Costs(widths, np.cumsum(steps).tolist())
    shared = costs.shared(requests)
    if rows <= 8 or rows in widths:
        assert shared.seconds(rows) == pytest.approx(costs.seconds(requests * rows) / requests)
    assert shared.seconds(rows) <= shared.seconds(rows + 1) + 1e-12
    assert costs.shared(1) is costs


def test_a_full_batch_guesses_less():
    costs = Costs((1, 8, 64), (1.0, 1.0, 8.0))  # eight rows for the price of one, then a price for each
    appraiser = Appraiser(costs, table({"store": 0.7}))
    guess = Proposal.chain([1, 2, 3, 4], "store")
    sizes = [len(appraiser.choose([guess], 7, appraiser.rate(0, 0.0, n), n)) for n in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4
    assert sizes[-1] == 0
