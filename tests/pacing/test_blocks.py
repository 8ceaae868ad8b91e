"""When a tier hands up: distributions and texts stay as they are, and what it decides is worth it."""

from __future__ import annotations

import numpy as np
import pytest
from enumerate_distributions import Branches, TooManyBranches
from hypothesis import given, settings
from hypothesis import strategies as st
from paced_tiers import TEXT, TOKENS, Reciting, costs, paced, policy_of, random_tiers, with_policies
from random_hierarchies import EXACT, errors, random_hierarchy, random_sampling

from hierspec.core.engine import Engine
from hierspec.core.foresight import lead_class
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import ACCEPTED, CORRECTED, UNDRAFTED, Written
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.pacing.blocks import UntilCorrection, UntilUnsure, WhileWorthwhile, open_policy
from hierspec.pacing.costs import ALONE, Costs, Load, Prefill
from hierspec.pacing.healing import HealingCosts
from hierspec.pacing.pace import AdaptivePace
from hierspec.scorers.synthetic import Rates, References, SyntheticScorer
from hierspec.testing.fakes import FakeScorer


@pytest.mark.parametrize("rule", ["residual", "coupled"])
@pytest.mark.parametrize("depth", [2, 3])
def test_the_distribution_is_plain_decodings(rule, depth):
    """Every outcome of hierarchies whose tiers decide when to hand up and whether to draft at all."""
    cases, ended_early = 0, 0
    for attempt in range(60):
        generator = np.random.default_rng([9, depth, attempt])
        vocabulary = int(generator.integers(2, 4))
        sampling = random_sampling(generator, vocabulary, int(generator.integers(2, 5)))
        plain = random_hierarchy(generator, depth, vocabulary, attempt, with_stores=attempt % 3 == 0)
        kinds = [str(kind) for kind in generator.choice(["correction", "unsure", "worth", "worth"], depth - 1)]
        built: list[tuple[Tier, ...]] = []

        def tiers(branches: Branches, plain=plain, kinds=kinds, built=built) -> tuple[Tier, ...]:
            built.append(with_policies(plain, kinds, eager=True))  # each run begins with nothing learnt
            return built[-1]

        try:
            error, leaves = errors(tiers, rule, sampling, False, 300)
        except TooManyBranches:
            continue
        if leaves < 4:
            continue
        assert error < EXACT, (attempt, sampling)
        policies = [policy_of(tier) for run in built for tier in run]
        ended_early += sum(isinstance(policy, WhileWorthwhile) and policy._idle > 0 for policy in policies)
        cases += 1
        if cases == 10:
            break
    assert cases == 10
    assert ended_early > 0  # some tier really was left out


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.0, 0.8]), depth=st.integers(2, 4))
def test_the_text_is_plain_decodings(seed, temperature, depth):
    rng = np.random.default_rng(seed)
    tiers = random_tiers(rng, depth, seed, 6)
    kinds = [str(kind) for kind in rng.choice(["count", "correction", "unsure", "worth"], depth - 1)]
    shared = Hierarchy(with_policies(tiers, kinds, eager=bool(rng.integers(2))))
    sampling = Sampling(max_tokens=40, temperature=temperature, seed=seed)
    plain = [Request([1, k], sampling, Hierarchy((Tier(tiers[0].scorer),))) for k in range(3)]
    fast = [Request([1, k], sampling, shared) for k in range(3)]  # together, over the same policies
    for requests in (plain, fast):
        for _ in Engine().run(requests):
            pass
    assert [request.output for request in fast] == [request.output for request in plain]


def block(*hows: int) -> list[Written]:
    return [Written([(token, None)], "exit", how) for token, how in enumerate(hows)]


def test_a_correction_ends_a_block():
    policy = UntilCorrection()
    assert policy.go_on(block(ACCEPTED, UNDRAFTED))
    assert not policy.go_on(block(ACCEPTED, ACCEPTED, CORRECTED))


def test_a_token_that_was_hardly_ahead_ends_a_block():
    sure, unsure = (Written([(3, None)], "exit", UNDRAFTED, lead_class(lead)) for lead in (1.1, 0.9))
    assert UntilUnsure().go_on([unsure, sure])
    assert not UntilUnsure().go_on([sure, unsure])


def test_the_hierarchy_says_how_each_token_came_about():
    """Against a draft that is always right or always wrong."""
    seen: list[list[int]] = []

    class Watching(UntilCorrection):
        def go_on(self, block, load=ALONE):
            seen.append([position.how for position in block])
            return True

    target, same, other = FakeScorer("t", 8, seed=1), FakeScorer("m", 8, seed=1), FakeScorer("w", 8, seed=2)
    for draft in (same, other):
        middle = Tier(same, gather=5, pace=AdaptivePace(ends={0: Watching()}))
        tiers = (Tier(target), middle, Tier(draft, gather=2))
        for _ in Engine().run([Request([1, 2], Sampling(max_tokens=30), Hierarchy(tiers))]):
            pass
    assert [ACCEPTED, ACCEPTED, UNDRAFTED] in seen
    assert [CORRECTED] in seen
    assert all(len(hows) < 5 for hows in seen)


def learnt(rate: float, cost: float) -> WhileWorthwhile:
    """A policy after many blocks of two rounds, accepted at this rate; a round takes `cost` plain passes."""
    policy, rng = WhileWorthwhile(costs(1.0)), np.random.default_rng(0)
    for _ in range(300):
        policy.begin()
        drafted = block(UNDRAFTED, UNDRAFTED)
        right = [rng.random() < rate for _ in drafted]
        accepted = 2 if all(right) else right.index(False)
        for _ in drafted:
            policy.learn_round(1, cost)
        policy.learn_block(drafted, [*range(accepted), 99], 1.0 + 2 * cost)
    return policy


def test_a_block_has_what_one_call_writes():
    policy = WhileWorthwhile(costs(1.0), at_once=4)
    for _ in range(100):
        assert policy.begin() == 4
        assert policy.begin(Load(2)) in (1, 4)  # several requests write token by token; 4: to try longer ones
    assert [WhileWorthwhile(costs(1.0), at_once=6).begin(Load(requests)) for requests in (1, 2)] == [6, 4]


def test_what_one_call_writes_is_weighed_as_a_whole():
    """A pass above takes 0.5 more for any draft: too much for one token, little for four in one call."""
    above = Costs((1, 2, 8), (1.0, 1.5, 1.5))
    one, four = (WhileWorthwhile(above, own=costs(0.1), at_once=at_once) for at_once in (1, 4))
    for policy in (one, four):
        for _ in range(40):
            policy.learn_round(1, 0.1)
            policy.learn_block(block(UNDRAFTED), [0, 99] if _ % 10 < 5 else [99], 1.6)
    assert not one.go_on(())
    for policy in (one, four):
        for number in range(60):
            policy.learn_round(1, 0.1)
            policy.learn_block(block(*[UNDRAFTED] * 4), [0, 1, 2, 3, 99] if number % 10 < 7 else [99], 1.9)
    assert four.go_on(())


def test_going_on_is_weighed_against_what_time_is_worth():
    assert learnt(0.9, 0.1).go_on(block(UNDRAFTED))
    assert not learnt(0.2, 0.1).go_on(block(UNDRAFTED, UNDRAFTED, UNDRAFTED))
    assert not learnt(0.6, 0.9).go_on(block(UNDRAFTED))
    assert learnt(0.6, 0.1).pays()


def test_what_does_not_pay_is_left_out_and_tried_again():
    policy = learnt(0.05, 0.5)
    decisions = [policy.pays() for _ in range(400)]
    assert 0 < sum(decisions) <= 400 / 20 + 1
    policy.idle(400)  # in which nobody asks: as long without a draft
    assert policy.pays()
    for _ in range(500):  # the text changes, and now every draft is accepted
        if policy.pays():
            policy.learn_round(1, 0.5)
            policy.learn_block(block(UNDRAFTED), [0, 1], 1.5)
        else:
            policy.learn_block([], [0], 1.0)
    assert sum(policy.pays() for _ in range(100)) == 100


def with_counts_of(rate: float, cost: float) -> WhileWorthwhile:
    """A policy of a new process, whose costs are not known yet, with the counts of an earlier one."""
    target = HealingCosts((1, 8), (1.0, 1.5))
    policy = WhileWorthwhile(target.again(), Prefill(0.02), costs(cost), undrafted=target)
    policy.begin_with(learnt(rate, cost).learnt())
    return policy


def test_drafts_that_should_not_pay_can_be_explored():
    """Another program may have run while passes were measured. Only passes over drafts can correct that."""
    policy = with_counts_of(0.6, 0.1)
    policy.above.observe(1, 1.0)
    for _ in range(60):
        policy.above.observe(8, 9.0)
    assert not policy.go_on(())
    for _ in range(2):  # at first whether they should pay or not, then where that is allowed
        for _ in range(4):
            assert policy.pays()
            policy.begin()
        assert not policy.pays()
        assert policy.explore(room=100)
    for _ in range(60):
        policy.above.observe(8, 1.5)
    assert policy.pays()


def test_a_long_prefill_is_not_explored_where_little_is_left_to_write():
    policy = WhileWorthwhile(costs(1.0), prefill=Prefill(0.01))
    assert not policy.explore(to_prefill=1000, room=10)
    assert policy.explore(to_prefill=1000, room=100)


def test_beside_better_drafts_a_tier_drafts_only_now_and_then():
    policy = learnt(0.6, 0.1)
    for _ in range(100):  # passes over both bring 2 tokens beyond the target's own, in the time of 1.5 passes
        policy.learn_block(block(UNDRAFTED), [0, 1, 2], 1.5, beside=True)
    assert policy.pays(other_gain=0.5)
    assert sum(policy.pays(other_gain=1.9) for _ in range(160)) == 10
    assert policy.pays()  # without other drafts as before


def test_how_far_ahead_a_draft_was_is_learnt():
    """Tokens that were far ahead are accepted and the others are not: only after the former a block goes on."""
    policy, hardly, far = WhileWorthwhile(costs(1.0)), 0, 7
    for number in range(600):
        policy.begin()
        lead = far if number % 2 else hardly
        policy.learn_round(1, 0.3)
        policy.learn_block([Written([(0, None)], "exit", UNDRAFTED, lead)], [0, 1] if lead else [9], 1.3)
    assert policy.go_on([Written([(0, None)], "exit", UNDRAFTED, far)])
    assert not policy.go_on([Written([(0, None)], "exit", UNDRAFTED, hardly)])


# A simulation: three tiers that agree at given rates, costs as a formula says, nothing timed.


def cost_per_token(rates: tuple[Rates, ...], prices: list[Costs], gathers: list[int], until: str) -> float:
    """Expected seconds a token of one long text."""
    references = References()
    tiers = [Tier(Reciting("target", TEXT), budget=40)]
    for level, gather in enumerate(gathers):
        scorer = SyntheticScorer(Reciting(f"exit {level}", TEXT), rates, level, references)
        tiers.append(Tier(scorer, gather, (), 40))
    policies = [open_policy(until, price) for price in prices[: len(gathers)]]
    request = Request(TEXT[:1], Sampling(max_tokens=TOKENS), Hierarchy(paced(tiers, prices, policies)))
    references[request] = TEXT[1:]
    for _ in Engine().run([request]):
        pass
    assert request.output == TEXT[1 : TOKENS + 1]
    return sum(tier.expected_seconds for tier in request.stats.tiers) / TOKENS


HISPEC = (Rates(0.80, 0.50), Rates(0.65, 0.65))


@pytest.mark.parametrize(
    ("rates", "prices"),
    [
        (HISPEC, [costs(1.0, 0.02), costs(0.3, 0.01), costs(0.15)]),
        ((Rates(0.95, 0.6), Rates(0.8, 0.8)), [costs(1.0, 0.01), costs(0.25, 0.01), costs(0.08)]),
        ((Rates(0.7, 0.7),), [costs(1.0, 0.1), costs(0.1)]),
    ],
)
def test_the_best_fixed_count_is_met_or_beaten(rates, prices):
    fixed = {
        (upper, lower): cost_per_token(rates, prices, [upper, lower][: len(rates)], "count")
        for upper in (1, 2, 3, 4, 6)
        for lower in ((1, 2) if len(rates) > 1 else (1,))
    }
    dynamic = cost_per_token(rates, prices, [12, 6][: len(rates)], "worth")
    assert dynamic < 1.03 * min(fixed.values()), (dynamic, fixed)
    assert dynamic < 0.97 * fixed[6, 1]


def test_a_bad_exit_costs_little():
    rates, prices = (Rates(0.03, 0.03),), [costs(1.0, 0.05), costs(0.4)]
    assert cost_per_token(rates, prices, [4], "count") > 2.0
    assert cost_per_token(rates, prices, [4], "worth") < 1.12


def test_a_batch_that_fills_the_machine_drafts_nothing():
    """Alone a wider pass is free, and drafting pays; sixteen together pay for every row, and it does not."""
    costs = Costs((1, 8, 9, 128), (1.0, 1.0, 1.1, 13.0))
    policy = WhileWorthwhile(costs)
    for trial in range(400):
        policy.begin()
        policy.learn_round(1, 0.1)
        policy.learn_block(block(UNDRAFTED), [0, 1] if trial % 10 < 6 else [9], 1.1)  # 6 of 10 are accepted
    assert policy.pays()
    assert policy.go_on(block())
    assert not policy.go_on(block(), Load(16))
    assert sum(policy.pays(load=Load(16)) for _ in range(100)) == 0
    assert not WhileWorthwhile(costs).pays(load=Load(16))  # not even to try
    assert WhileWorthwhile(costs).pays()
    assert policy.go_on(block())  # and alone again it goes on at once


def test_seconds_under_load_are_those_of_requests_alone():
    """One policy learns alone, one among eight whose shared passes cost an eighth each: both decide the same."""
    costs = Costs((1, 64), (1.0, 1.0))
    alone, among = WhileWorthwhile(costs), WhileWorthwhile(costs)
    for trial in range(200):
        written = [0, 1] if trial % 2 else [9]
        for policy, requests in ((alone, 1), (among, 8)):
            policy.learn_round(1, 0.2 / requests, Load(requests))
            policy.learn_block(block(UNDRAFTED), written, 1.2 / requests, load=Load(requests))
    assert alone._speed() == pytest.approx(among._speed())
    assert alone._extra_seconds(0) == pytest.approx(among._extra_seconds(0))


def test_a_long_prefill_is_begun_only_where_enough_is_left_to_write():
    policy = learnt(0.6, 0.1)
    policy.prefill = Prefill(0.01)  # of a plain pass, for each token
    unknown = WhileWorthwhile(costs(1.0), prefill=Prefill(0.01))
    for load in (Load(1), Load(2)):
        for each in (policy, unknown):
            assert each.pays(load=load, to_prefill=0, room=10)
            assert each.pays(load=load, to_prefill=1000, room=1000)
            assert not each.pays(load=load, to_prefill=1000, room=10)


def test_a_long_prefill_is_weighed_by_its_length():
    """A token after a long context takes longer to compute: twice as many take more than twice as long."""
    prefill = Prefill(0.001, 0.00001)
    assert prefill.seconds(1000, 1000) == pytest.approx(1000 * (0.001 + 500 * 0.00001))
    assert prefill.seconds(2000, 2000) > 3 * prefill.seconds(1000, 1000)
    assert prefill.seconds(10, 2000) == pytest.approx(10 * (0.001 + 1995 * 0.00001))
    policy = learnt(0.6, 0.1)
    policy.prefill = prefill
    assert policy.pays(load=Load(1, 1000), to_prefill=1000, room=100)
    assert not policy.pays(load=Load(1, 4000), to_prefill=4000, room=100)
    assert policy.pays(load=Load(1, 4000), to_prefill=100, room=100)


def test_prefill_is_as_slow_as_the_machine_is_now():
    """Everything takes four times as long as when it was measured, prefill too: what did not pay still does not."""
    target = HealingCosts((1, 32), (1.0, 1.5))
    policy = WhileWorthwhile(target.again(), Prefill(0.01), undrafted=target)
    policy._until_rest = 100
    assert not policy.pays(to_prefill=2000, room=30)
    for _ in range(100):
        for each in (policy.above, target):
            each.observe(1, 4.0)
            each.observe(4, 4.2)
    assert target.seconds(1) > 3.5
    assert not policy.pays(to_prefill=2000, room=30)
    assert policy.pays(to_prefill=200, room=30)


LONG_TEXT = np.random.default_rng(6).integers(0, 1000, 6000).tolist()
# After 128 tokens a draft costs little beside a plain pass, and after 4,096 both it and its verification cost much.
LONG_PRICES = [
    Costs((1, 8, 32), (1.0, 1.1, 1.5), (1e-4, 2.4e-3, 1e-2), context=128),
    Costs((1, 8, 32), (0.1, 0.2, 0.6), (5e-5, 4e-4, 2e-3), context=128),
]


def write_after(contexts: list[int], rate: float = 0.7) -> list[tuple[float, float]]:
    """Texts that begin with so many tokens, one after the other over the same paces: how often the drafter was asked
    for each pass of the target, and expected seconds a token."""
    references = References()
    drafter = SyntheticScorer(Reciting("draft", LONG_TEXT), (Rates(rate, rate),), 0, references)
    tiers = [Tier(Reciting("target", LONG_TEXT), budget=16), Tier(drafter, 8)]
    policy = WhileWorthwhile(LONG_PRICES[0], own=LONG_PRICES[1])
    built = paced(tiers, LONG_PRICES, [policy])
    results = []
    for context in contexts:
        request = Request(LONG_TEXT[:context], Sampling(max_tokens=400), Hierarchy(built))
        references[request] = LONG_TEXT[context:]
        for _ in Engine().run([request]):
            pass
        assert request.output == LONG_TEXT[context : context + 400]
        target, draft = request.stats.tiers
        results.append((draft.calls / target.calls, (target.expected_seconds + draft.expected_seconds) / 400))
    return results


def test_a_drafter_that_pays_after_a_short_context_rests_after_a_long_one():
    results = write_after([128, 4096, 128, 4096])
    plain = LONG_PRICES[0].under(Load(1, 4296)).seconds(1)
    for (drafts, seconds), (long_drafts, long_seconds) in zip(results[::2], results[1::2], strict=True):
        assert drafts > 0.8
        assert seconds < 0.9
        assert long_drafts < 0.1
        assert long_seconds < 1.04 * plain
    [(drafts, seconds)] = write_after([4096])  # also where it has learnt nothing yet
    assert drafts < 0.2
    assert seconds < 1.06 * plain


def test_a_pass_after_drafting_may_be_slower():
    """Where drafting slows the target's next pass down, a draft must bring more: without drafts passes are faster."""
    without = HealingCosts((1, 32), (1.0, 4.0))
    policy = WhileWorthwhile(without.again(), undrafted=without)
    same = WhileWorthwhile(without.again(), undrafted=without)
    for each in (policy, same):
        for trial in range(200):
            each.begin()
            each.learn_round(1, 0.1)
            each.learn_block(block(UNDRAFTED), [0, 1] if trial % 10 < 5 else [9], 1.2)  # half of them are accepted
    assert policy.go_on(())
    for _ in range(60):
        policy.above.observe(2, 1.8)  # beside 1.0 for a pass of one row without drafting
    assert not policy.go_on(())
    assert same.go_on(())
