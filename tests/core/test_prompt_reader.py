"""Long prompts are read in pieces beside those who write: nobody waits long, nothing is read twice, no text changes."""

import numpy as np
import pytest

from hierspec.core.engine import Engine
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.testing.fakes import FakeScorer, FakeStore

BASE, EACH = 0.008, 0.0015  # seconds of a pass, and of each token in it that is not computed yet
RANDOM = np.random.default_rng(3)


class TimedScorer(FakeScorer):
    """Remembers prefixes as a KV cache does, and moves a clock by what it computes."""

    def __init__(self, name="fake", **options):
        super().__init__(name, **options)
        self.now = 0.0
        self.kept = []  # contexts that are computed
        self.rows = []  # of each pass

    def known(self, context):
        return max((_common(kept, context) for kept in self.kept), default=0)

    def score(self, asks):
        lacking = [max(len(ask.context) - self.known(ask.context), 1) + len(ask.proposal) for ask in asks]
        self.rows.append(sum(lacking))
        self.now += BASE + EACH * sum(lacking)
        self.kept = [*self.kept, *(ask.context for ask in asks)][-64:]
        return super().score(asks)


def _common(one, other):
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def prompt(length):
    return RANDOM.integers(0, 16, length).astype(np.int32)


def request_for(scorer, ids, tokens=10, seed=0):
    return Request(ids, Sampling(max_tokens=tokens, temperature=1.0, seed=seed), Hierarchy((Tier(scorer),)))


def written(ids, tokens, seed=0):
    """What plain decoding writes alone."""
    request = request_for(FakeScorer(), ids, tokens, seed)
    list(Engine().run([request]))
    return request.output


def run(engine, scorer, late=()):
    """Run to the end; (request, time) of every step. `late` are submitted after so many rounds each."""
    times, rounds, late = [], 0, list(late)
    while engine.busy or late:
        while late and late[0][0] <= rounds:
            engine.submit(late.pop(0)[1])
        times += [(request, scorer.now) for request, _ in engine.step()]
        rounds += 1
    return times


def test_a_long_prompt_makes_nobody_wait_long_and_is_soon_read():
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    prompts = [prompt(20) for _ in range(8)]
    streams = [request_for(scorer, ids, 250, seed) for seed, ids in enumerate(prompts)]
    for request in streams:
        engine.submit(request)
    long = prompt(1000)
    late = request_for(scorer, long, 5, 99)
    submitted = []
    late_ask, late.ask = late.ask, lambda answer: (submitted.append(scorer.now), late_ask(answer))[1]
    times = run(engine, scorer, [(100, late)])
    usual = BASE + 8 * EACH
    for request in streams:
        moments = [moment for each, moment in times if each is request]
        after = moments[moments.index(next(m for m in moments if m > 60 * usual)) :]
        assert max(np.diff(after)) <= 2.5 * usual
    first = next(moment for each, moment in times if each is late)
    assert first - submitted[0] <= 2 * (BASE + 1000 * EACH)
    assert late.output == written(long, 5, 99)
    for seed, (request, ids) in enumerate(zip(streams, prompts, strict=True)):
        assert request.output == written(ids, 250, seed)


def test_where_many_drafts_are_verified_less_is_read():
    """In every fifth pass all streams have a draft of three: such a pass is long enough already."""
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    drafted = Proposal((1, 2, 3), (-1, 0, 1))
    store = FakeStore("now and then", lambda context, budget: drafted if len(scorer.rows) % 5 == 0 else Proposal())
    hierarchy = Hierarchy((Tier(scorer, stores=(store,)),))
    for seed in range(8):
        engine.submit(Request(prompt(20), Sampling(max_tokens=250, temperature=1.0, seed=seed), hierarchy))
    long = prompt(1000)
    late = request_for(scorer, long, 5, 99)
    run(engine, scorer, [(100, late)])
    begin = next(number for number in range(100, 200) if scorer.rows[number] % 8) + 5  # it is being read
    rows = [scorer.rows[number : number + 5] for number in range(-(-begin // 5) * 5, begin + 20, 5)]
    for drafting, *others in rows:
        assert 8 + 24 < drafting <= 8 + 24 + 9  # a little of it beside all drafts
        assert min(others) > 8 + 14  # and more beside none
    assert late.output == written(long, 5, 99)


def test_alone_a_prompt_takes_as_many_passes_as_it_needs_anyway():
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    request = request_for(scorer, prompt(1200), 3)
    engine.submit(request)
    run(engine, scorer)
    assert scorer.rows == [512, 512, 176, 1, 1]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a stream"])
def test_what_prompts_have_in_common_is_read_once(beside):
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    shared = prompt(300)
    prompts = [np.concatenate((shared, prompt(20))) for _ in range(4)] + [prompt(50)]
    requests = [request_for(scorer, ids, 5, seed) for seed, ids in enumerate(prompts)]
    stream = request_for(scorer, prompt(5), 200, 9)
    engine.submit(stream if beside else requests[0])
    late = [(10 if beside else 0, request) for request in requests if beside or request is not requests[0]]
    run(engine, scorer, late)
    tokens = 5 * 5 + 200 * beside
    assert sum(scorer.rows) <= 300 + 4 * 20 + 50 + tokens + 5
    for seed, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
        assert request.output == written(ids, 5, seed)


def test_a_disturbed_pass_does_not_decide_how_much_is_read():
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    stream = request_for(scorer, prompt(5), 400)
    late = request_for(scorer, prompt(2000), 2)
    score, calls = scorer.score, []

    def disturbed(asks):
        calls.append(len(asks))
        if len(calls) == 40:
            scorer.now += 5.0
        return score(asks)

    scorer.score = disturbed
    engine.submit(stream)
    run(engine, scorer, [(20, late)])
    assert sum(rows > 1 for rows in scorer.rows) < 2000 / (1.4 * (BASE + EACH) / EACH) * 1.6


def test_many_prompts_at_once_are_all_read_soon():
    """Where many come together, reading is not held back by the first of them that writes."""
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    for seed in range(48):
        engine.submit(request_for(scorer, prompt(60), 60, seed))
    times = run(engine, scorer)
    firsts = {}
    for request, moment in times:
        firsts.setdefault(request, moment)
    assert max(firsts.values()) <= 1.6 * (48 * 60 * EACH + BASE)


def test_a_machine_that_was_slow_a_moment_ago_does_not_make_everybody_wait():
    """Passes without prefill were timed while the machine was slow. Prefill then seems to add nothing to a pass."""
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    streams = [request_for(scorer, prompt(20), 400, seed) for seed in range(8)]
    late = [request_for(scorer, prompt(400), 2, 50), request_for(scorer, prompt(2000), 2, 51)]
    score, slow = scorer.score, []

    def disturbed(asks):
        slow.append(60 <= len(scorer.rows) < 100)
        scorer.now += 3 * (BASE + 8 * EACH) if slow[-1] else 0.0
        return score(asks)

    scorer.score = disturbed
    for request in streams:
        engine.submit(request)
    times = run(engine, scorer, [(20, late[0]), (100, late[1])])
    moments = np.array([moment for request, moment in times if request is streams[0]])
    assert max(np.diff(moments[110:])) <= 12 * (BASE + 8 * EACH)  # 150 times where the prompt is read whole


def test_noise_neither_stops_the_streams_nor_the_prompt():
    """Passes that take 20% more or less at random, and tokens that cost more after a longer context, as attention
    does."""
    scorer = TimedScorer()
    engine = Engine(lambda: scorer.now, serving=True)
    noise = np.random.default_rng(5)
    streams = [request_for(scorer, prompt(20), 400, seed) for seed in range(8)]
    late = request_for(scorer, prompt(1000), 2, 50)
    known, score = scorer.known, scorer.score

    def noisy(asks):
        before = scorer.now
        answers = score(asks)
        longer = 1 + max(known(ask.context) for ask in asks) / 2000
        scorer.now = before + (scorer.now - before) * longer * noise.uniform(0.8, 1.2)
        return answers

    scorer.score = noisy
    for request in streams:
        engine.submit(request)
    submitted = []
    late_ask, late.ask = late.ask, lambda answer: (submitted.append(scorer.now), late_ask(answer))[1]
    times = run(engine, scorer, [(150, late)])
    moments = np.array([moment for request, moment in times if request is streams[0]])
    first = next(moment for request, moment in times if request is late)
    before, meanwhile = moments[moments <= submitted[0]], moments[(moments > submitted[0]) & (moments <= first)]
    assert max(np.diff(meanwhile)) <= 3.6 * np.median(np.diff(before[20:]))
    assert first - submitted[0] <= 2.2 * (BASE + 1000 * EACH * 1.25)
