"""Whatever fails or is interrupted, it costs at most the request that it came into, and never another text."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError, OutOfMemory
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Answer, Ask
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer, FakeStore, markov_logits

VOCABULARY = 12


def run(*requests: Request) -> None:
    for _ in Engine().run(requests):
        pass


def texts_alone(scorer: FakeScorer, prompts: Sequence[list[int]], sampling: Sampling) -> list[list[int]]:
    alone = [Request(prompt, sampling, Hierarchy((Tier(scorer),))) for prompt in prompts]
    for request in alone:
        run(request)
    return [request.output for request in alone]


# Memory.


class Narrow(FakeScorer):
    """Has memory for so many asks at once."""

    most = 2
    error: type[Exception] = MemoryError

    def score(self, asks: Sequence[Ask]) -> list[Answer]:
        if len(asks) > self.most:
            raise self.error("Unable to allocate 1.00 GiB")
        return super().score(asks)


@pytest.mark.parametrize("error", [MemoryError, OutOfMemory])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_requests_wait_where_memory_is_short_for_all(error, count):
    scorer = Narrow("narrow", VOCABULARY)
    scorer.error = error
    sampling, prompts = Sampling(max_tokens=9), [[number, 1] for number in range(count)]
    expected = texts_alone(scorer, prompts, sampling)
    requests = [Request(prompt, sampling, Hierarchy((Tier(scorer),))) for prompt in prompts]
    scorer.packed.clear()
    run(*requests)
    assert [request.output for request in requests] == expected
    assert scorer.asks == 9 * count
    assert scorer.calls <= 9 * (count + 1)
    assert max(scorer.packed) <= 2 < count + 1


def test_those_that_came_first_are_answered_first_and_none_is_forgotten():
    scorer, engine, ends = Narrow("narrow", VOCABULARY), Engine(), []
    requests = [Request([number], Sampling(max_tokens=4), Hierarchy((Tier(scorer),))) for number in range(6)]
    for request in requests[:3]:
        engine.submit(request)
    while engine.busy:
        engine.step()
        if len(requests) > 3 and requests[3].ended is None and scorer.calls == 2:
            for request in requests[3:]:
                engine.submit(request)
        ends += [request for request in requests if request.ended and request not in ends]
    assert [requests.index(request) for request in ends] == sorted(range(len(ends)))
    assert len(ends) == 6


def test_a_request_that_waits_can_be_cancelled():
    scorer, engine = Narrow("narrow", VOCABULARY), Engine()
    scorer.most = 1
    first, second = (Request([number], Sampling(max_tokens=3), Hierarchy((Tier(scorer),))) for number in range(2))
    engine.submit(first)
    engine.submit(second)
    engine.step()
    second.cancel()
    while engine.busy:
        engine.step()
    assert (first.ended, second.ended, len(first.output)) == ("length", "cancelled", 3)


def test_one_request_too_large_fails_alone_and_says_what_to_do():
    class Selective(FakeScorer):
        def score(self, asks: Sequence[Ask]) -> list[Answer]:
            if any(len(ask.context) > 6 for ask in asks):
                raise MemoryError
            return super().score(asks)

    scorer = Selective("selective", VOCABULARY)
    hierarchy = Hierarchy((Tier(scorer),))
    small, large, other = (Request(prompt, Sampling(max_tokens=4), hierarchy) for prompt in ([1], [2] * 7, [3]))
    run(small, large, other)
    assert (small.ended, large.ended, other.ended) == ("length", "error", "length")
    assert isinstance(large.error, OutOfMemory)
    assert "--kv-memory" in str(large.error)
    assert isinstance(large.error.__cause__, MemoryError)


# Ctrl-C.


def test_an_interrupted_step_loses_no_request_and_no_step():
    """The engine goes on with those that were not being answered, and hands out what was already written."""
    good, slow = FakeScorer("good", VOCABULARY), FakeScorer("slow", VOCABULARY, seed=1)
    sampling, prompts = Sampling(max_tokens=5), [[1], [2], [3]]
    expected = [*texts_alone(good, prompts[:2], sampling), *texts_alone(slow, prompts[2:], sampling)]
    requests = [
        Request(prompt, sampling, Hierarchy((Tier(scorer),)))
        for prompt, scorer in zip(prompts, (good, good, slow), strict=True)
    ]
    engine, written, score = Engine(), {request: [] for request in requests}, slow.score
    for request in requests:
        engine.submit(request)

    def interrupted(asks: Sequence[Ask]) -> list[Answer]:
        slow.score = score
        raise KeyboardInterrupt

    interruptions = 0
    while engine.busy:
        if interruptions == 0 and slow.calls == 2 + 5:  # five passes were those of the text alone
            slow.score = interrupted
        try:
            for request, step in engine.step():
                written[request] += step.tokens
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions == 1
    assert [written[request] for request in requests] == expected


def test_a_request_that_is_interrupted_while_it_goes_on_is_cancelled():
    class Interrupting(FakeStore):
        def learn(self, tokens: Sequence[int]) -> None:
            raise KeyboardInterrupt

    scorer, engine = FakeScorer("fake", VOCABULARY), Engine()
    store = Interrupting("interrupting", lambda context, budget: Proposal())
    request = Request([1], Sampling(max_tokens=5), Hierarchy((Tier(scorer, stores=(store,)),)))
    engine.submit(request)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert request.ended == "cancelled"
    assert scorer.released == [request]
    assert [step.tokens for _, step in engine.step()] == [tuple(request.output)]  # it was complete before
    assert not engine.busy


def test_every_store_and_scorer_is_told_of_the_end_whatever_one_of_them_does():
    class Interrupting(FakeStore):
        def end(self) -> None:
            raise KeyboardInterrupt

    ended = []

    class Ending(FakeStore):
        def end(self) -> None:
            ended.append(self.name)

    scorer = FakeScorer("fake", VOCABULARY)
    stores = (Interrupting("first", _nothing), Ending("second", _nothing), Ending("third", _nothing))
    request = Request([1], Sampling(max_tokens=5), Hierarchy((Tier(scorer, stores=stores),)))
    with pytest.raises(KeyboardInterrupt):
        request.cancel()
    assert request.ended == "cancelled"
    assert sorted(ended) == ["second", "third"]
    assert scorer.released == [request]


def _nothing(context: np.ndarray, budget: int) -> Proposal:
    return Proposal()


# Logits that are not numbers.


def broken_after(token: int, value: float = math.nan, sound: bool = True):
    """Logits that are not numbers after this token."""
    logits = markov_logits(VOCABULARY, order=1)

    def broken(text: np.ndarray) -> np.ndarray:
        z = logits(text).copy()
        if text[-1] == token:
            z[:] = value
        elif sound:
            z[token] = -20.0  # plain decoding does not come there
        return z

    return broken


def trees_with(token: int):
    """Trees in which this token comes first among siblings, has children, and the likely tokens come after it."""

    def draft(context: np.ndarray, budget: int) -> Proposal:
        likely = int(np.argmax(broken_after(token)(context)))
        next_one = int(np.argmax(broken_after(token)(np.array([likely]))))
        tokens, parents = (token, likely, 1, token, next_one, token), (-1, -1, 0, 1, 1, 4)
        return Proposal(tokens, parents).first(budget)

    return draft


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_whose_logits_are_not_numbers_does_no_harm(rule, value, temperature):
    scorer = FakeScorer("target", VOCABULARY, broken_after(5, value))
    sampling = Sampling(max_tokens=20, temperature=temperature, seed=3)
    [expected] = texts_alone(scorer, [[1, 2]], sampling)
    store = FakeStore("bad", trees_with(5))
    request = Request([1, 2], sampling, Hierarchy((Tier(scorer, stores=(store,)),), rule))
    run(request)
    assert request.error is None
    assert len(request.output) == 20
    if rule == "coupled" or temperature == 0:
        assert request.output == expected
    assert sum(request.stats.tiers[0].accepted.values()) > 5  # good drafts beside the bad ones still count


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
def test_where_plain_decoding_cannot_go_on_neither_can_any_plan_and_both_say_so_there(rule):
    """What can be written before it is handed out first."""
    logits = markov_logits(VOCABULARY, order=1)
    [text] = texts_alone(FakeScorer("sound", VOCABULARY, logits), [[1, 2]], Sampling(max_tokens=20))
    last = text[6]
    where = text.index(last)

    def broken(text: np.ndarray) -> np.ndarray:
        return logits(text) if text[-1] != last else np.full(VOCABULARY, np.nan)

    def draft(context: np.ndarray, budget: int) -> Proposal:
        return Proposal.chain(text[len(context) - 2 :][:budget])

    for stores in ((), (FakeStore("right", draft),)):
        scorer = FakeScorer("target", VOCABULARY, broken)
        request = Request([1, 2], Sampling(max_tokens=20), Hierarchy((Tier(scorer, stores=stores),), rule))
        run(request)
        assert request.output == text[: where + 1]
        assert request.ended == "error"
        assert f"not numbers at position {2 + where + 1};" in str(request.error)


def test_a_stop_id_before_a_row_that_is_not_numbers_ends_the_text():
    scorer = FakeScorer("target", VOCABULARY, broken_after(5, sound=False))
    scorer.logits = lambda text: np.full(VOCABULARY, np.nan) if text[-1] == 5 else np.eye(VOCABULARY)[5] * 9
    store = FakeStore("right", lambda context, budget: Proposal.chain([5, 6]))
    sampling = Sampling(max_tokens=9, stop_ids=(5,))
    request = Request([1, 2], sampling, Hierarchy((Tier(scorer, stores=(store,)),)))
    run(request)
    assert (request.output, request.ended) == ([5], "stop")


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
@pytest.mark.parametrize("broken", ["always", "sometimes"])
def test_a_drafter_whose_logits_are_not_numbers_drafts_nothing(rule, broken):
    target = FakeScorer("target", VOCABULARY, markov_logits(VOCABULARY, order=1))

    def logits(text: np.ndarray) -> np.ndarray:
        bad = broken == "always" or text[-1] % 3 == 0
        return np.full(VOCABULARY, np.nan) if bad else target.logits(text)

    tiers = (Tier(target), Tier(FakeScorer("draft", VOCABULARY, logits), gather=4, candidates=2))
    sampling = Sampling(max_tokens=20)
    [expected] = texts_alone(target, [[1, 2]], sampling)
    request = Request([1, 2], sampling, Hierarchy(tiers, rule))
    run(request)
    assert request.output == expected
    assert (sum(request.stats.tiers[0].accepted.values()) > 0) == (broken == "sometimes")


# Stores that fail.


@pytest.mark.parametrize("method", ["begin", "propose", "learn", "observe", "end"])
@pytest.mark.parametrize("rule", ["coupled", "residual"])
def test_a_request_goes_on_without_a_store_that_fails(method, rule, caplog):
    class Failing(FakeStore):
        calls = 0

    def fail(self, *arguments):
        type(self).calls += 1
        raise KeyError("unexpected")

    setattr(Failing, method, fail)
    scorer = FakeScorer("target", VOCABULARY)
    [expected] = texts_alone(scorer, [[1, 2]], Sampling(max_tokens=10))
    good = FakeStore("good", lambda context, budget: Proposal.chain(expected[len(context) - 2 :][:budget]))
    bad = Failing("bad", lambda context, budget: Proposal.chain([1]))
    tier = Tier(scorer, stores=(bad, good), merge=True, budget=4)
    request = Request([1, 2], Sampling(max_tokens=10), Hierarchy((tier,), rule))
    with caplog.at_level(logging.WARNING, "hierspec"):
        run(request)
    assert (request.output, request.ended, request.error) == (expected, "length", None)
    assert Failing.calls == 1
    assert [record.message for record in caplog.records] == [
        "The store bad failed; the request goes on without its drafts and writes the same text."
    ]
    assert request.stats.tiers[0].accepted["good"] > 3


def test_a_store_that_returns_something_else_is_left_out(caplog):
    scorer = FakeScorer("target", VOCABULARY)
    [expected] = texts_alone(scorer, [[1, 2]], Sampling(max_tokens=6))

    class Odd(FakeStore):
        def propose(self, context: np.ndarray, budget: int) -> Proposal:
            return [1, 2]  # type: ignore[return-value]

    request = Request([1, 2], Sampling(max_tokens=6), Hierarchy((Tier(scorer, stores=(Odd("odd", _nothing),)),)))
    run(request)
    assert request.output == expected
    assert "odd" in caplog.text


def test_what_a_store_tells_the_user_fails_its_request():
    class Told(FakeStore):
        def propose(self, context: np.ndarray, budget: int) -> Proposal:
            raise HierspecError("The corpus is damaged; build it again.")

    hierarchy = Hierarchy((Tier(FakeScorer("target", VOCABULARY), stores=(Told("told", _nothing),)),))
    request = Request([1, 2], Sampling(max_tokens=6), hierarchy)
    run(request)
    assert str(request.error) == "The corpus is damaged; build it again."


# Odd options.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("stop_ids", odd)
            for odd in (None, "a", ("a",), (None,), 3.5, (3.5,), True, (True,), (b"a",), ((1,),), {1.5: 2})
        ),
        *(("stop", odd) for odd in (None, 5, (5,), ("",), "", b"a", (b"a",), (None,), True)),
        *(("logit_bias", odd) for odd in (5, "a", True, [(5, 1.0)], (), {5}, [])),
        *(("logit_bias", {key: 1.0}) for key in ("a", None, 1.5, True, -1, (1,))),
        *(("logit_bias", {5: odd}) for odd in ("x", None, True, math.nan, math.inf, 10**400, 1j, [1.0], np.nan)),
        *(("seed", odd) for odd in ("a", 1.0, True, (1,))),
        *(("max_tokens", odd) for odd in (None, "5", 5.0, True, 0, -1, math.nan)),
        *(("top_k", odd) for odd in (None, 1.0, True, -1)),
        *(("temperature", odd) for odd in (None, "1", True, -1, math.nan, math.inf, 10**400, -(10**400))),
        pytest.param("temperature", 10**5000, id="thousands of digits"),
        *(("presence_penalty", odd) for odd in (None, math.nan, 10**400, 1j, [1])),
        *(("repetition_penalty", odd) for odd in (0, 10**400, math.nan)),
    ],
)
def test_odd_options_are_told_in_one_sentence(name, value):
    with pytest.raises(HierspecError, match=f"^{name} must be [^\n]*$") as told:
        Sampling(**{name: value})
    assert len(str(told.value)) < 250


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stop_ids": (token for token in (3, 4))}, {"stop_ids": (3, 4)}),
        ({"stop_ids": np.array([3, 4])}, {"stop_ids": (3, 4)}),
        ({"stop_ids": 7}, {"stop_ids": (7,)}),
        ({"stop_ids": {7}}, {"stop_ids": (7,)}),
        ({"stop_ids": (10**30, -5)}, {"stop_ids": (10**30, -5)}),
        ({"stop": (text for text in ("a", "b"))}, {"stop": ("a", "b")}),
        ({"logit_bias": {np.int64(5): np.float32(2)}}, {"logit_bias": {5: 2.0}}),
        ({"logit_bias": {}}, {"logit_bias": {}}),
        ({"seed": np.int64(-3)}, {"seed": -3}),
        ({"seed": 2**200}, {"seed": 2**200}),
        ({"max_tokens": np.int32(5), "temperature": np.float32(0.5)}, {"max_tokens": 5, "temperature": 0.5}),
        ({"top_k": 2**70, "max_tokens": 2**70}, {"top_k": 2**70, "max_tokens": 2**70}),
    ],
)
def test_options_of_other_types_that_mean_the_same_are_taken(options, expected):
    sampling = Sampling(**options)
    for name, value in expected.items():
        assert getattr(sampling, name) == value
        assert type(getattr(sampling, name)) is type(value)
    request = Request([1, 2], sampling, Hierarchy((Tier(FakeScorer("fake", VOCABULARY)),)))
    request.limit = min(request.limit, 5)
    run(request)
    assert request.error is None


def test_a_bias_that_forbids_every_token_is_told_at_once():
    hierarchy = Hierarchy((Tier(FakeScorer("fake", VOCABULARY)),))
    forbidden = dict.fromkeys(range(VOCABULARY), -math.inf)
    with pytest.raises(HierspecError, match="logit_bias forbids every token"):
        Request([1], Sampling(logit_bias=forbidden), hierarchy)
    request = Request([1], Sampling(logit_bias={**forbidden, 4: 0.0}, max_tokens=3), hierarchy)
    run(request)
    assert request.output == [4, 4, 4]
