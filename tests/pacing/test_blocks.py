"""When a tier hands up: laws and texts stay as they are, and what it decides is worth it."""

from __future__ import annotations

import numpy as np
import pytest
from core.test_distributions import EXACT, Branches, TooManyBranches, errors, random_hierarchy, random_sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from hierspec.core.engine import Engine, Request
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.sampling import Sampling
from hierspec.core.verify import Answer
from hierspec.pacing.appraisal import Costs
from hierspec.pacing.blocks import CORRECTED, OWN, STOOD, UntilCorrection, WhileWorthwhile, Written, open_policy
from hierspec.scorers.synthetic import Rates, References, SyntheticScorer
from hierspec.testing.fakes import FakeScorer, FakeStore, random_trees

ROWS = tuple(range(1, 33))


def costs(narrow: float, each: float = 0.0) -> Costs:
    return Costs(ROWS, [narrow + each * (rows - 1) for rows in ROWS])


def with_policies(tiers: tuple[Tier, ...], kinds: list[str], eager: bool = False) -> tuple[Tier, ...]:
    """The same tiers with policies that know nothing yet; an eager one decides from its first block on."""
    found = []
    for level, tier in enumerate(tiers):
        own = costs(1.0 / (level + 1), 0.05)
        policy = open_policy(kinds[level - 1], costs(1.0 / level, 0.05)) if level else None
        if eager and isinstance(policy, WhileWorthwhile):
            policy._blocks, policy._idle = 100, 0.0
            policy.wrote(1, 0.6)  # near the edge: one draft that fails, and the next is left out
            policy._brought[-1] = [8.0, 2.5 if level == 1 else 8.0]
        found.append(
            Tier(
                tier.scorer,
                tier.gather,
                tier.stores,
                tier.budget,
                tier.merge,
                tier.candidates,
                policy=policy,
                costs=own,
            )
        )
    return tuple(found)


@pytest.mark.parametrize("rule", ["residual", "coupled"])
@pytest.mark.parametrize("depth", [2, 3])
def test_the_law_is_plain_decodings(rule, depth):
    """Every outcome of hierarchies whose tiers decide when to hand up and whether to draft at all."""
    cases, ended_early = 0, 0
    for attempt in range(60):
        generator = np.random.default_rng([9, depth, attempt])
        vocabulary = int(generator.integers(2, 4))
        sampling = random_sampling(generator, vocabulary, int(generator.integers(2, 5)))
        plain = random_hierarchy(generator, depth, vocabulary, attempt, with_stores=attempt % 3 == 0)
        kinds = [str(kind) for kind in generator.choice(["correction", "worth", "worth"], depth - 1)]
        built: list[tuple[Tier, ...]] = []

        def tiers(branches: Branches, plain=plain, kinds=kinds, built=built) -> tuple[Tier, ...]:
            built.append(with_policies(plain, kinds, eager=True))  # each run of an enumeration begins alike
            return built[-1]

        try:
            error, leaves = errors(tiers, rule, sampling, False, 300)
        except TooManyBranches:
            continue
        if leaves < 4:
            continue
        assert error < EXACT, (attempt, sampling)
        ended_early += sum(isinstance(t.policy, WhileWorthwhile) and t.policy._idle > 0 for run in built for t in run)
        cases += 1
        if cases == 10:
            break
    assert cases == 10
    assert ended_early > 0  # some tier really was left out


def random_tiers(rng: np.random.Generator, depth: int, seed: int, gather: int) -> tuple[Tier, ...]:
    """A ladder of fakes that agree less the lower they stand, each with at most so many tokens to gather."""
    return tuple(
        Tier(
            FakeScorer(f"tier{k}", 8, seed=seed, noise=0.4 * k, noise_seed=k),
            gather=int(rng.integers(1, gather + 1)),
            stores=(FakeStore(f"store{k}", random_trees(8, seed + k)),) if rng.random() < 0.3 else (),
            merge=bool(rng.integers(2)),
            candidates=int(rng.integers(1, 3)),
        )
        for k in range(depth)
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.0, 0.8]), depth=st.integers(2, 4))
def test_the_text_is_plain_decodings(seed, temperature, depth):
    rng = np.random.default_rng(seed)
    tiers = random_tiers(rng, depth, seed, 6)
    kinds = [str(kind) for kind in rng.choice(["count", "correction", "worth"], depth - 1)]
    shared = Hierarchy(with_policies(tiers, kinds, eager=bool(rng.integers(2))))
    sampling = Sampling(max_tokens=40, temperature=temperature, seed=seed)
    plain = [Request([1, k], sampling, Hierarchy((Tier(tiers[0].scorer),))) for k in range(3)]
    fast = [Request([1, k], sampling, shared) for k in range(3)]  # side by side, over one policy
    for requests in (plain, fast):
        for _ in Engine().run(requests):
            pass
    assert [request.output for request in fast] == [request.output for request in plain]


def block(*hows: int) -> list[Written]:
    return [Written([(place, None)], "exit", how) for place, how in enumerate(hows)]


def test_a_correction_ends_a_block():
    policy = UntilCorrection()
    assert policy.go_on(block(STOOD, OWN))
    assert not policy.go_on(block(STOOD, STOOD, CORRECTED))


def test_the_hierarchy_knows_how_each_token_came_about():
    """Against a draft that is always right or always wrong."""
    seen: list[list[int]] = []

    class Watching(UntilCorrection):
        def go_on(self, block, requests=1):
            seen.append([one.how for one in block])
            return True

    target, same, other = FakeScorer("t", 8, seed=1), FakeScorer("m", 8, seed=1), FakeScorer("w", 8, seed=2)
    for draft in (same, other):
        tiers = (Tier(target), Tier(same, gather=5, policy=Watching()), Tier(draft, gather=2))
        for _ in Engine().run([Request([1, 2], Sampling(max_tokens=30), Hierarchy(tiers))]):
            pass
    assert [STOOD, STOOD, OWN] in seen
    assert [CORRECTED] in seen
    assert all(len(hows) < 5 for hows in seen)


def learnt(standing: float, cost: float) -> WhileWorthwhile:
    """A policy after many blocks of two rounds, of which so many tokens stood; a round takes `cost` plain passes."""
    policy, rng = WhileWorthwhile(costs(1.0)), np.random.default_rng(0)
    for _ in range(300):
        policy.at_least()
        own = block(OWN, OWN)
        stood = [rng.random() < standing for _ in own]
        stands = 2 if all(stood) else stood.index(False)
        for _ in own:
            policy.wrote(1, cost)
        policy.verified(own, [*range(stands), 99], 1.0 + 2 * cost)
    return policy


def test_going_on_is_weighed_against_what_time_is_worth():
    assert learnt(0.9, 0.1).go_on(block(OWN))
    assert not learnt(0.2, 0.1).go_on(block(OWN, OWN, OWN))
    assert not learnt(0.6, 0.9).go_on(block(OWN))
    assert learnt(0.6, 0.1).pays()


def test_what_does_not_pay_is_left_out_and_tried_again():
    policy = learnt(0.05, 0.5)
    decisions = [policy.pays() for _ in range(400)]
    assert 0 < sum(decisions) <= 400 / 20 + 1
    for _ in range(500):  # the text changes, and now every draft stands
        if policy.pays():
            policy.wrote(1, 0.5)
            policy.verified(block(OWN), [0, 1], 1.5)
        else:
            policy.verified([], [0], 1.0)
    assert sum(policy.pays() for _ in range(100)) == 100


def test_beside_better_guesses_there_is_no_drafting_but_a_look_now_and_then():
    policy = learnt(0.6, 0.1)
    for _ in range(100):  # passes over a draft and other guesses bring 2 tokens beyond the target's own, in 1.5 passes
        policy.verified(block(OWN), [0, 1, 2], 1.5, beside=True)
    assert policy.pays(instead=0.5)
    assert sum(policy.pays(instead=1.9) for _ in range(160)) == 10
    assert policy.pays()  # without other guesses as before


def test_how_sure_a_draft_was_is_learnt():
    """Of tokens written alike, those that were far ahead stand and the others do not: only the sure ones go on."""
    policy, unsure, sure = WhileWorthwhile(costs(1.0)), 0, 7
    for number in range(600):
        policy.at_least()
        level = sure if number % 2 else unsure
        policy.wrote(1, 0.3)
        policy.verified([Written([(0, None)], "exit", OWN, level)], [0, 1] if level else [9], 1.3)
    assert policy.go_on([Written([(0, None)], "exit", OWN, sure)])
    assert not policy.go_on([Written([(0, None)], "exit", OWN, unsure)])


# A simulation: three tiers that agree at given rates, costs as a formula says, nothing timed.


class Reciting:
    """Says what stands in a text at each position, whatever came before: a target whose text is known."""

    vocabulary = 1000

    def __init__(self, name: str, text: list[int]) -> None:
        self.name, self.text = name, text

    def score(self, asks):
        return [self.answer(ask) for ask in asks]

    def answer(self, ask):
        depths = [0, *(depth + 1 for depth in ask.proposal.depths())]
        return Answer(picks=np.array([[self.text[len(ask.context) + depth]] for depth in depths]))

    def release(self, request):
        pass


TOKENS = 1500
TEXT = np.random.default_rng(5).integers(0, 1000, TOKENS + 100).tolist()


def cost_per_token(rates: tuple[Rates, ...], prices: list[Costs], gathers: list[int], until: str) -> float:
    """Expected seconds a token of one long text."""
    references = References()
    tiers = [Tier(Reciting("target", TEXT), budget=40, costs=prices[0])]
    for place, gather in enumerate(gathers):
        scorer = SyntheticScorer(Reciting(f"exit {place}", TEXT), rates, place, references)
        tiers.append(Tier(scorer, gather, (), 40, policy=open_policy(until, prices[place]), costs=prices[place + 1]))
    request = Request(TEXT[:1], Sampling(max_tokens=TOKENS), Hierarchy(tuple(tiers)))
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
    """Alone a wider pass is free, and drafting pays; sixteen side by side pay for every row, and it does not."""
    costs = Costs((1, 8, 9, 128), (1.0, 1.0, 1.1, 13.0))
    policy = WhileWorthwhile(costs)
    for trial in range(400):
        policy.at_least()
        policy.wrote(1, 0.1)
        policy.verified(block(OWN), [0, 1] if trial % 10 < 6 else [9], 1.1)  # 6 of 10 stand
    assert policy.pays()
    assert policy.go_on(block())
    assert not policy.go_on(block(), requests=16)
    assert sum(policy.pays(requests=16) for _ in range(100)) == 0
    assert not WhileWorthwhile(costs).pays(requests=16)  # not even to try
    assert WhileWorthwhile(costs).pays()
    assert policy.go_on(block())  # and alone again it goes on at once


def test_seconds_under_load_are_those_of_requests_alone():
    """Of two policies one learns alone, one among eight whose shared passes cost an eighth each: they decide alike."""
    costs = Costs((1, 64), (1.0, 1.0))
    alone, among = WhileWorthwhile(costs), WhileWorthwhile(costs)
    for trial in range(200):
        written = [0, 1] if trial % 2 else [9]
        for policy, requests in ((alone, 1), (among, 8)):
            policy.wrote(1, 0.2 / requests, requests)
            policy.verified(block(OWN), written, 1.2 / requests, requests=requests)
    assert alone._rate() == pytest.approx(among._rate())
    assert alone._extra(0) == pytest.approx(among._extra(0))


def test_a_text_that_takes_long_to_read_is_not_begun_beside_others():
    """A draft that pays is asked alone whatever there is to read; beside others only where enough is left to write."""
    policy = learnt(0.6, 0.1)
    policy.reading = 0.01  # of a plain pass, for each token
    assert policy.pays(unread=1000, room=10)
    assert policy.pays(requests=2, unread=0, room=10)
    assert policy.pays(requests=2, unread=1000, room=1000)
    assert not policy.pays(requests=2, unread=1000, room=10)
    unknown = WhileWorthwhile(costs(1.0), reading=0.01)
    assert unknown.pays(requests=2, unread=1000, room=1000)
    assert not unknown.pays(requests=2, unread=1000, room=10)
