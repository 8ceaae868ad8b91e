"""What drafts are worth: acceptance rates learnt from verdicts, costs between the measured widths, and the choice of
nodes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.proposal import CERTAIN, Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.pacing.acceptance import AcceptanceRates
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.costs import ALONE, Costs, Load
from hierspec.pacing.pace import AdaptivePace
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees


def table(rates: dict[str, float]) -> AcceptanceRates:
    """Acceptance rates that are given, by source."""

    class Given(AcceptanceRates):
        def rate(self, source, evidence, depth):
            return rates[source]

    return Given()


def test_rates_approach_what_happens():
    rates, rng = AcceptanceRates(), np.random.default_rng(0)
    draft = Proposal((7, 8), (-1, 0), ("store", "store"), evidence=(3, 3))
    first = rates.rate("store", 3, 0)
    assert 0.2 < first < 0.6
    for _ in range(2000):
        if rng.random() < 0.9:
            rates.learn(draft, [7, 8] if rng.random() < 0.25 else [7, 1])
        else:
            rates.learn(draft, [1])
    assert rates.rate("store", 3, 0) == pytest.approx(0.9, abs=0.05)
    assert rates.rate("store", 3, 1) == pytest.approx(0.25, abs=0.07)
    # Classes that were never seen lean on the source as a whole; other sources learn nothing from it.
    assert 0.4 < rates.rate("store", 9, 0) < 0.8
    assert rates.rate("other", 3, 0) == first


def test_only_what_the_text_shows_is_a_trial():
    rates = AcceptanceRates()
    #  after the context: 1 -> 2 -> 3 and 4 -> 5; the scorer wrote 1, 9
    draft = Proposal((1, 2, 3, 4, 5), (-1, 0, 1, -1, 3), ("s",) * 5, evidence=(1, 2, 3, 4, 5))
    rates.learn(draft, [1, 9])
    seen = {key[1]: counts for key, counts in rates._counts.items() if key[1] > 0 and key[2] >= 0}
    assert seen == {1: [1, 1], 2: [1, 0], 4: [1, 0]}  # nothing is known of 3 and 5


def test_time_is_worth_the_average_speed():
    appraiser = Appraiser(Costs((1, 2, 4), (1.0, 1.0, 2.0)))
    assert appraiser.speed(0, 0.0) == pytest.approx(1.0)  # nothing is known: plain decoding's
    for _ in range(3000):
        appraiser.learn([], [1, 2, 3], nodes=1)
    assert appraiser.speed(0, 0.0) == pytest.approx(3.0, rel=0.01)
    assert appraiser.speed(64, 64.0) == pytest.approx(2.0, rel=0.01)  # a request of its own kind


def test_costs_between_and_beyond_the_measured_widths():
    costs = Costs((1, 2, 4), (10.0, 12.0, 11.0))  # the last is noise
    assert [costs.seconds(rows) for rows in (1, 2, 3, 4)] == [10.0, 12.0, 12.0, 12.0]
    assert costs.seconds(16) == pytest.approx(12 + 12 * 2 / 3)
    assert costs.seconds(10_000) >= costs.seconds(16)
    assert [costs.under(ALONE).least(nodes)[0] for nodes in (1, 2, 3, 4)] == [2.0, 0.0, 0.0, 0.0]
    rising = Costs((1, 2, 4), (10.0, 13.0, 15.0))
    assert [rising.under(ALONE).least(nodes)[0] for nodes in (1, 2, 3)] == [3.0, 1.0, 1.0]
    assert 0 <= rising.under(ALONE).least(10_000)[0] <= 1.0


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 6), speed=st.sampled_from([0.01, 0.05, 0.2, 1.0]))
def test_the_choice_is_the_best_tree(seed, budget, speed):
    """Against every subtree of the merged proposals."""
    rng = np.random.default_rng(seed)
    rate = {"a": float(rng.uniform(0.05, 0.95)), "b": float(rng.uniform(0.05, 0.95))}
    seconds = np.cumsum(rng.uniform(0.1, 3.0, 8))
    costs = Costs(range(1, 9), seconds.tolist())
    first, second = (
        Proposal(tree.tokens, tree.parents, (name,) * len(tree))
        for name, tree in (
            (name, random_trees(3, seed + shift, silence=0)(np.array([1]), 4)) for name, shift in (("a", 0), ("b", 1))
        )
    )
    chosen = Appraiser(costs, table(rate)).choose([first, second], budget, speed)
    assert len(chosen) <= budget
    best = 0.0
    first_paths, second_paths = ({tuple(t.path(n)) for n in range(len(t))} for t in (first, second))

    def gain(tree: Proposal) -> float:
        total, probabilities = 0.0, []
        for node, parent in enumerate(tree.parents):
            # Both may have drafted the same node: the first one's rate counts.
            source = rate["a" if tuple(tree.path(node)) in first_paths else "b"]
            probabilities.append(source * (probabilities[parent] if parent >= 0 else 1.0))
            total += probabilities[-1]
        return total - speed * (costs.seconds(1 + len(tree)) - costs.seconds(1))

    paths = sorted(first_paths | second_paths, key=len)  # equal nodes are one node
    for size in range(1, budget + 1):
        for subset in itertools.combinations(paths, size):
            if all(len(path) == 1 or path[:-1] in subset for path in subset):
                parents = [subset.index(path[:-1]) if len(path) > 1 else -1 for path in subset]
                best = max(best, gain(Proposal(tuple(path[-1] for path in subset), tuple(parents))))
    assert gain(chosen) == pytest.approx(best, abs=1e-9)


def test_sampled_tokens_are_never_left_out():
    distribution = np.array([0.5, 0.5])
    sampled = Proposal((0, 1), (-1, 0), ("draft", "draft"), (distribution, distribution))
    fixed = Proposal((1, 0), (-1, 0), ("store", "store"))
    dear = Costs((1, 2, 3, 4), (1.0, 10.0, 20.0, 30.0))
    chosen = Appraiser(dear, table({"draft": 0.01, "store": 0.01})).choose([sampled, fixed], 7, 1.0)
    assert chosen.tokens == (0, 1)
    assert chosen.distributions[0] is distribution


def test_what_hangs_below_sampled_tokens_is_no_likelier_than_they():
    distribution = np.array([0.5, 0.5])
    sampled = Proposal((0,), (-1,), ("draft",), (distribution,))
    fixed = Proposal((0, 1), (-1, 0), ("store", "store"))
    costs = Costs((1, 2, 3), (1.0, 1.0, 1.2))
    for rate, tokens in ((0.3, (0,)), (0.9, (0, 1))):  # 0.3 x 0.5 is not worth 0.2, 0.9 x 0.5 is
        chosen = Appraiser(costs, table({"draft": rate, "store": 0.5})).choose([sampled, fixed], 7, 1.0)
        assert chosen.tokens == tokens


@pytest.mark.parametrize("rule", ["coupled", "residual"])
def test_what_is_written_stays_the_same_and_dear_drafts_are_dropped(rule):
    scorer = FakeScorer("target", 12, seed=3)
    store = FakeStore("trees", random_trees(12, 5, silence=0))

    def run(tier: Tier, temperature: float) -> Request:
        request = Request([1, 2, 3], Sampling(max_tokens=60, temperature=temperature, seed=4), Hierarchy((tier,), rule))
        for _ in Engine().run([request]):
            pass
        return request

    def adaptive(costs: Costs) -> Tier:
        return Tier(scorer, 1, (store,), 7, pace=AdaptivePace(costs, Appraiser(costs)))

    free = adaptive(Costs((1, 32), (1.0, 1.0)))
    dear = adaptive(Costs((1, 2, 32), (1.0, 2.0, 32.0)))
    plain = run(Tier(scorer), 0.0)
    for temperature in (0.0, 0.9) if rule == "coupled" else (0.0,):
        expected = run(Tier(scorer), temperature).output
        for tier in (free, dear):
            assert run(tier, temperature).output == expected
    wide = run(free, 0.0)
    narrow = run(dear, 0.0)
    assert wide.output == narrow.output == plain.output
    assert sum(narrow.stats.tiers[0].proposed.values()) < sum(wide.stats.tiers[0].proposed.values()) / 4


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=6), st.integers(1, 20), st.integers(1, 40))
def test_requests_that_run_together_share_a_pass(steps, requests, rows):
    """A share is an equal part of the wide pass."""
    widths = [1, 2, 4, 8, 16, 32][: len(steps)]
    costs = Costs(widths, np.cumsum(steps).tolist())
    shared = costs.under(Load(requests))
    assert shared.seconds(rows) == pytest.approx(costs.seconds(requests * rows) / requests)
    assert shared.seconds(rows) <= shared.seconds(rows + 1) + 1e-12
    assert costs.under(ALONE).seconds(rows) == costs.seconds(rows)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 10_000))
def test_a_long_text_adds_to_its_own_rows_alone(requests, rows, context):
    """A straight line in the context, the same whoever else is in the pass, and nothing before the measured one."""
    costs = Costs((1, 8, 32), (1.0, 2.0, 5.0), (0.001, 0.004, 0.02), context=128)
    added = costs.under(Load(requests, context)).seconds(rows) - costs.under(Load(requests)).seconds(rows)
    of_a_token = np.interp(rows, costs.rows, costs.growth) + max(rows - 32, 0) * 0.019 / 31
    assert added == pytest.approx(max(context - 128, 0) * of_a_token, abs=1e-9)
    share = costs.under(Load(requests, context))
    steps = [share.seconds(1 + node) - share.seconds(node) for node in range(1, rows + 1)]
    step, mean = share.least(rows)
    assert step <= min(steps) + 1e-9
    assert mean <= min(np.cumsum(steps) / np.arange(1, rows + 1)) + 1e-9


def test_after_a_long_text_fewer_drafts_are_verified():
    """The same drafts, whose rows are nearly free after a short context and dear after a long one."""
    costs = Costs((1, 8, 32), (1.0, 1.1, 1.6), (0.0001, 0.0008, 0.0032), context=128)
    appraiser = Appraiser(costs, table({"store": 0.6}))
    draft = Proposal.chain([1, 2, 3, 4, 5, 6, 7], "store")
    loads = [Load(1, context) for context in (0, 128, 1000, 2000, 4000, 16_000)]
    sizes = [len(appraiser.choose([draft], 7, appraiser.speed(0, 0.0, load), load)) for load in loads]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == sizes[1] >= 4
    assert 0 < sizes[3] < sizes[1]
    assert sizes[-1] == 0


def test_a_full_batch_verifies_less():
    costs = Costs((1, 8, 64), (1.0, 1.0, 8.0))  # eight rows for the price of one, then a price for each
    appraiser = Appraiser(costs, table({"store": 0.7}))
    draft = Proposal.chain([1, 2, 3, 4], "store")
    sizes = [len(appraiser.choose([draft], 7, appraiser.speed(0, 0.0, Load(n)), Load(n))) for n in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4
    assert sizes[-1] == 0


def forced(tokens, *evidence):
    return Proposal(tokens, tuple(range(-1, len(tokens) - 1)), ("grammar",) * len(tokens), (), evidence)


def test_certain_drafts_are_verified_while_a_row_costs_less_than_a_pass():
    """However fast texts are written otherwise: they will be written, and each takes a row some time."""
    proposal = forced((1, 2, 3), CERTAIN, CERTAIN, CERTAIN)
    cheap, dear = Appraiser(Costs((1, 2, 8), (1.0, 1.9, 7.3))), Appraiser(Costs((1, 2, 8), (1.0, 2.1, 9.0)))
    assert cheap.choose([proposal], 8, speed=5.0) == proposal
    assert cheap.choose([proposal], 2, speed=5.0).tokens == (1, 2)
    assert not dear.choose([proposal], 8, speed=5.0).tokens


def test_what_is_certain_only_after_a_guess_is_worth_what_the_guess_is():
    appraiser = Appraiser(Costs((1, 2, 8), (1.0, 1.9, 7.3)))
    assert not appraiser.choose([forced((1, 2), 0, CERTAIN)], 8, speed=5.0).tokens
    assert appraiser.choose([forced((1, 2), CERTAIN, 0)], 8, speed=5.0).tokens == (1,)


def test_certain_drafts_teach_nothing_about_others_of_their_source():
    rates = AcceptanceRates()
    before = rates.rate("grammar", 0, 0)
    for _ in range(50):
        rates.learn(forced((1,), CERTAIN), [1])
    assert rates.rate("grammar", 0, 0) == before
    assert rates.rate("grammar", CERTAIN, 3) == 1.0
    rates.learn(forced((1, 2), CERTAIN, 0), [1, 2])
    assert rates.rate("grammar", 0, 1) > before
