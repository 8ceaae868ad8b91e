"""Over fakes: whatever the hierarchy, the batch and the load, a request writes what plain decoding writes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request, Step
from hierspec.core.sampling import Sampling, adjust, picks
from hierspec.core.stats import Stats
from hierspec.testing.fakes import FakeScorer, FakeStore, markov_logits, random_trees, scripted


def plain(scorer: FakeScorer, prompt: Sequence[int], sampling: Sampling, limit: int | None = None) -> list[int]:
    """Plain decoding with nothing of requests, hierarchies or engines in it."""
    assert sampling.seed is not None
    text, output = np.array(prompt, np.int32), list[int]()
    while len(output) < (limit or sampling.max_tokens):
        z = adjust(scorer.logits(text), text, len(prompt), sampling)
        token = picks(z, sampling, sampling.seed, len(text))[0]
        output.append(token)
        text = np.append(text, np.int32(token))
        if token in sampling.stop_ids:
            break
    return output


def run(*requests: Request) -> list[tuple[Request, Step]]:
    return list(Engine().run(requests))


def random_sampling(generator: np.random.Generator, vocabulary: int, temperature: float) -> Sampling:
    def sometimes(value: Any, off: Any) -> Any:
        return value if generator.random() < 0.25 else off

    return Sampling(
        max_tokens=int(generator.integers(1, 14)),
        temperature=temperature,
        top_k=sometimes(int(generator.integers(1, vocabulary + 1)), 0),
        top_p=sometimes(float(generator.uniform(0.3, 1)), 1.0),
        min_p=sometimes(float(generator.uniform(0, 0.3)), 0.0),
        repetition_penalty=sometimes(float(generator.uniform(0.7, 2)), 1.0),
        presence_penalty=sometimes(float(generator.uniform(-1, 1)), 0.0),
        frequency_penalty=sometimes(float(generator.uniform(-1, 1)), 0.0),
        logit_bias=sometimes({int(generator.integers(vocabulary)): float(generator.normal())}, None),
        stop_ids=sometimes((int(generator.integers(vocabulary)),), ()),
        seed=int(generator.integers(2**63)),
    )


def random_tiers(generator: np.random.Generator, scorers: Sequence[FakeScorer], script: list[int]) -> tuple[Tier, ...]:
    """Some of these scorers as tiers (the first is always the target), with random stores and settings."""
    vocabulary = scorers[0].vocabulary
    tiers = []
    for level in range(int(generator.integers(1, len(scorers) + 1))):
        seed = int(generator.integers(1000))
        stores = [
            FakeStore(f"random{level}", random_trees(vocabulary, seed), fresh=bool(generator.integers(2))),
            FakeStore(f"script{level}", scripted(script, wrong_every=int(generator.integers(0, 5)))),
        ]
        generator.shuffle(stores)
        tiers.append(
            Tier(
                scorers[level],
                gather=int(generator.integers(1, 6)),
                stores=tuple(stores[: int(generator.integers(0, 3))]),
                budget=int(generator.integers(1, 12)),
                merge=bool(generator.integers(2)),
                candidates=int(generator.integers(1, 4)),
            )
        )
    return tuple(tiers)


def check_stats(request: Request, steps: list[Step]) -> None:
    stats = request.stats
    target = stats.tiers[0]
    assert target.written == len(request.output) == len(request.sources) == sum(len(step.tokens) for step in steps)
    assert target.calls == stats.passes == len(steps)
    assert stats.tokens_per_pass == pytest.approx(len(request.output) / len(steps))
    assert [token for step in steps for token in step.tokens] == request.output
    assert [source for step in steps for source in step.sources] == request.sources
    for tier in stats.tiers:
        assert all(tier.accepted[source] <= tier.proposed[source] for source in tier.accepted)
        assert all(tier.accepted_at[depth] <= tier.proposed_at[depth] for depth in tier.accepted_at)
        assert sum(tier.accepted.values()) == sum(tier.accepted_at.values())
        assert sum(tier.proposed.values()) == sum(tier.proposed_at.values())
        # A pass adds one token of its own to what it accepts, but for a pass that ends on an accepted stop id.
        added = tier.written - sum(tier.accepted.values())
        assert added in (tier.calls, tier.calls - 1) or tier is not target
        assert added <= tier.calls


def make_scorers(seed: int, vocabulary: int, count: int, noise: float) -> list[FakeScorer]:
    return [
        FakeScorer(f"tier{level}", vocabulary, seed=seed, order=2, noise=noise * level, noise_seed=level)
        for level in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("part", range(4))
def test_random_hierarchies_write_plain_text(temperature: float, part: int) -> None:
    """2,004 hierarchies of 1 to 4 tiers under the coupled rule; greedy also under the residual rule."""
    accepted = 0
    for case in range(167):
        generator = np.random.default_rng([part, case, int(10 * temperature)])
        vocabulary = int(generator.integers(2, 13))
        scorers = make_scorers(case, vocabulary, 4, float(generator.choice([0.0, 0.3, 1.0])))
        prompt = generator.integers(0, vocabulary, int(generator.integers(1, 6))).tolist()
        sampling = random_sampling(generator, vocabulary, temperature)
        expected = plain(scorers[0], prompt, sampling)
        tiers = random_tiers(generator, scorers, prompt + expected)
        rule = ("coupled", "residual", "block")[case % 3] if temperature == 0 else "coupled"
        request = Request(prompt, sampling, Hierarchy(tiers, rule))
        steps = run(request)
        assert request.output == expected, (part, case)
        assert request.ended == ("stop" if expected[-1] in sampling.stop_ids else "length")
        check_stats(request, [step for _, step in steps])
        for request_store in request.stores.values():
            store = request_store.view  # type: ignore[attr-defined]
            assert isinstance(store, FakeStore)
            assert [token for tokens in store.learnt for token in tokens] == request.output
            steps_end = set(accumulate(len(step.tokens) for _, step in steps))
            assert steps_end.issuperset(accumulate(map(len, store.learnt)))  # whole steps, never inside the recursion
            assert store.prompts[-1].tolist() == prompt
        assert all(tier.scorer.released == [request] for tier in tiers)  # type: ignore[attr-defined]
        accepted += sum(request.stats.tiers[0].accepted.values())
    assert accepted > 167  # else nothing was shown


def mixed_requests(scorers: list[FakeScorer], seed: int, rules: Sequence[str] = ("coupled",)) -> list[Request]:
    """Eight requests that differ in everything but the scorers."""
    requests = []
    for number in range(8):
        generator = np.random.default_rng([seed, number])
        prompt = generator.integers(0, scorers[0].vocabulary, int(generator.integers(1, 9))).tolist()
        sampling = random_sampling(generator, scorers[0].vocabulary, float(generator.choice([0.0, 0.7, 1.0])))
        tiers = random_tiers(generator, scorers, prompt + plain(scorers[0], prompt, sampling))
        requests.append(Request(prompt, sampling, Hierarchy(tiers, rules[number % len(rules)])))
    return requests


@pytest.mark.parametrize("seed", range(25))
def test_a_batch_writes_what_each_writes_alone(seed: int) -> None:
    """Every rule: a request's dice are its own, so even residual text does not depend on what runs beside it."""
    rules = ("coupled", "residual", "block")
    scorers = make_scorers(seed, 9, 3, 0.4)
    alone = mixed_requests(scorers, seed, rules)
    for request in alone:
        run(request)
    calls_alone, asks_alone = sum(s.calls for s in scorers), sum(s.asks for s in scorers)
    scorers = make_scorers(seed, 9, 3, 0.4)
    together = mixed_requests(scorers, seed, rules)
    run(*together)
    assert [r.output for r in together] == [r.output for r in alone]
    assert [r.sources for r in together] == [r.sources for r in alone]
    assert sum(s.asks for s in scorers) == asks_alone
    assert sum(s.calls for s in scorers) < calls_alone
    assert max(max(s.packed, default=0) for s in scorers) > 1
    total = Stats()
    for request in together:
        total.add(request.stats)
    assert total.passes == sum(r.stats.passes for r in together)
    assert total.tiers[0].written == sum(len(r.output) for r in together)
    assert total.tokens_per_pass == pytest.approx(total.tiers[0].written / total.passes)


def test_requests_that_come_later_change_nothing() -> None:
    scorers = make_scorers(3, 9, 3, 0.4)
    expected = [plain(scorers[0], r.prompt.tolist(), r.sampling) for r in mixed_requests(scorers, 3)]
    requests, engine = mixed_requests(scorers, 3), Engine()
    waiting = list(requests)
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop())
        engine.step()
    assert [r.output for r in requests] == expected


@pytest.mark.parametrize("seed", range(10))
def test_cancelling_one_leaves_the_others(seed: int) -> None:
    scorers = make_scorers(seed, 9, 3, 0.4)
    expected = [plain(scorers[0], r.prompt.tolist(), r.sampling) for r in mixed_requests(scorers, seed)]
    requests, engine = mixed_requests(scorers, seed), Engine()
    for request in requests:
        engine.submit(request)
    leaving = max(requests, key=lambda r: r.limit)
    for _ in range(2):
        engine.step()
    if leaving.ended is None:
        leaving.cancel()
        leaving.cancel()  # twice is once
        assert leaving.ended == "cancelled"
    written = list(leaving.output)
    while engine.busy:
        engine.step()
    for request, text in zip(requests, expected, strict=True):
        if request is leaving:
            assert request.output == written == text[: len(written)]
        else:
            assert request.output == text
        assert scorers[0].released.count(request) == 1


def test_leaving_the_loop_cancels() -> None:
    scorer = FakeScorer()
    request = Request([1], Sampling(max_tokens=5, seed=0), Hierarchy((Tier(scorer),)))
    for _, step in Engine().run([request]):
        assert len(step.tokens) == 1
        break
    assert request.ended == "cancelled"
    assert scorer.released == [request]


class BrokenScorer(FakeScorer):
    """Works for some calls, then no more."""

    def __init__(self, name: str, vocabulary: int, good: int) -> None:
        super().__init__(name, vocabulary, seed=1, noise=0.5)
        self.good = good

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        if self.calls >= self.good:
            raise HierspecError("Out of memory; use a smaller batch.")
        return super().score(asks)


@pytest.mark.parametrize("good", [0, 1, 5])
def test_an_error_fails_only_its_requests(good: int) -> None:
    target, draft = FakeScorer("target", 9, seed=1), FakeScorer("draft", 9, seed=1, noise=0.5)
    broken = BrokenScorer("broken", 9, good)
    hierarchies = [Hierarchy((Tier(target), Tier(below, gather=3))) for below in (draft, broken)]
    samplings = [Sampling(max_tokens=20, temperature=1.0, seed=seed) for seed in range(6)]
    requests = [Request([seed], s, hierarchies[seed % 2]) for seed, s in enumerate(samplings)]
    run(*requests)
    for seed, (request, sampling) in enumerate(zip(requests, samplings, strict=True)):
        expected = plain(target, [seed], sampling)
        if seed % 2:
            assert request.ended == "error"
            assert str(request.error) == "Out of memory; use a smaller batch."
            assert request.output == expected[: len(request.output)]  # what was returned before stays
        else:
            assert request.error is None
            assert request.output == expected
        assert target.released.count(request) == 1
    assert set(broken.released) == set(requests[1::2])


@pytest.mark.parametrize("good", [0, 2])
@pytest.mark.parametrize("breaks", ["propose", "learn"])
def test_an_error_in_a_store_fails_only_its_request(good: int, breaks: str) -> None:
    class Broken(FakeStore):
        def propose(self, context: np.ndarray, budget: int) -> Proposal:
            if breaks == "propose" and len(self.learnt) >= good:
                raise HierspecError("The index file is gone; build it again.")
            return super().propose(context, budget)

        def learn(self, tokens: Sequence[int]) -> None:
            if breaks == "learn" and len(self.learnt) >= good:
                raise HierspecError("The index file is gone; build it again.")
            super().learn(tokens)

    target, sampling = FakeScorer("target", 9), Sampling(max_tokens=12, temperature=1.0, seed=3)
    store = Broken("broken", lambda context, budget: Proposal())
    requests = [Request([1], sampling, Hierarchy((Tier(target, stores=stores),))) for stores in ((), (store,), ())]
    run(*requests)
    assert [request.ended for request in requests] == ["length", "error", "length"]
    assert str(requests[1].error) == "The index file is gone; build it again."
    assert requests[0].output == requests[2].output == plain(target, [1], sampling)
    assert all(target.released.count(request) == 1 for request in requests)


def test_a_good_draft_saves_passes_and_is_named() -> None:
    scorer = FakeScorer("target", 9)
    sampling = Sampling(max_tokens=10, seed=0)
    text = plain(scorer, [3], sampling)
    store = FakeStore("script", scripted([3, *text]))
    request = Request([3], sampling, Hierarchy((Tier(scorer, stores=(store,), budget=4),)))
    steps = run(request)
    assert [len(step.tokens) for _, step in steps] == [5, 5]
    assert request.sources == (["script"] * 4 + ["target"]) * 2
    assert request.stats.tokens_per_pass == 5
    assert request.stats.to_json()[0]["accepted_by_depth"] == [2, 2, 2, 2]


def test_the_same_model_below_is_always_right() -> None:
    """Coupled: the noise is shared, so a draft equal to the target is never rejected, sampled or greedy."""
    scorers = [FakeScorer(name, 30, seed=4) for name in ("target", "middle", "bottom")]
    tiers = tuple(Tier(scorer, gather=3) for scorer in scorers)
    request = Request([5], Sampling(max_tokens=30, temperature=1.0, seed=8), Hierarchy(tiers))
    run(request)
    for tier in request.stats.tiers[:2]:
        assert tier.accepted == tier.proposed


def test_no_proposal_is_deeper_than_the_room() -> None:
    """Nothing is scored that could not be written."""
    deepest: list[int] = []

    class Watching(FakeScorer):
        def score(self, asks: Sequence[Ask]) -> list[Answer]:
            for ask in asks:
                depth = 1 + max(ask.proposal.depths(), default=-1)
                deepest.append(len(ask.context) + depth + 1 - len(ask.request.prompt))
            return super().score(asks)

    scorers = [Watching(f"tier{level}", 5, seed=2, noise=0.3 * level) for level in range(3)]
    store = FakeStore("long", lambda context, budget: Proposal.chain([1] * budget))
    tiers = tuple(Tier(scorer, gather=6, stores=(store,), merge=True, budget=20) for scorer in scorers)
    for limit in range(1, 8):
        deepest.clear()
        request = Request([0, 1], Sampling(max_tokens=limit, temperature=1.0, seed=limit), Hierarchy(tiers))
        run(request)
        assert len(request.output) == limit
        assert max(deepest) <= limit


def test_context_limits_the_output() -> None:
    scorer = FakeScorer()
    request = Request([1, 2, 3], Sampling(max_tokens=50, seed=0), Hierarchy((Tier(scorer),)), context=8)
    run(request)
    assert len(request.output) == 5
    assert request.ended == "length"


def test_stop_ids_of_model_and_sampling() -> None:
    scorer = FakeScorer(vocabulary=4, logits=markov_logits(4, sharpness=0.1))
    for stop in range(4):
        request = Request([0], Sampling(100, temperature=1.0, seed=stop), Hierarchy((Tier(scorer),)), stop_ids=[stop])
        run(request)
        assert request.ended == "stop"
        assert request.output.index(stop) == len(request.output) - 1


def test_requests_without_a_seed_differ_and_can_be_repeated() -> None:
    hierarchy = Hierarchy((Tier(FakeScorer(vocabulary=50, sharpness=0.1)),))
    sampling = Sampling(max_tokens=12, temperature=1.0)
    first, second = Request([0], sampling, hierarchy), Request([0], sampling, hierarchy)
    run(first, second)
    assert first.output != second.output
    again = Request([0], Sampling(max_tokens=12, temperature=1.0, seed=first.seed), hierarchy)
    run(again)
    assert again.output == first.output


@pytest.mark.parametrize(
    ("prompt", "sampling", "context", "says"),
    [
        ([], Sampling(), None, "prompt is empty"),
        ([16], Sampling(), None, "vocabulary of 16"),
        ([-1], Sampling(), None, "vocabulary of 16"),
        ([1], Sampling(logit_bias={16: 1.0}), None, "logit_bias"),
        ([1, 2, 3], Sampling(), 3, "context holds 3"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], sampling: Sampling, context: int | None, says: str) -> None:
    with pytest.raises(HierspecError, match=says):
        Request(prompt, sampling, Hierarchy((Tier(FakeScorer()),)), context=context)
