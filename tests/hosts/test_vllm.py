"""hierspec's proposer as vLLM calls it, against a host without a model."""

import importlib.util
import random
from pathlib import Path

import pytest
from model_free_host import Host, Text, own_text, owner, proposer

from hierspec.core.plan import Plan
from hierspec.hosts import vllm
from hierspec.hosts.rest import Rest
from hierspec.stores.context import ContextStore

LOOKUP = Plan(stores=("context",), merge=True)
STORES = Plan(stores=("context", "history"), merge=True)


def finish(host, text):
    host.batch = [text]
    while text.length < len(text.tokens):
        host.step()
    host.batch = []


def test_what_repeats_is_drafted_and_accepted():
    text = Text([1, 2, 3, 4, 5, 6, 7, 8] * 12, prompt=20)
    host = Host(proposer(LOOKUP))
    finish(host, text)
    assert host.accepted > 50
    assert all(len(draft) <= 4 for draft in host.drafts.values())


def test_a_later_request_is_drafted_what_an_earlier_one_wrote():
    tokens = random.Random(1).sample(range(1, 5000), 90)
    host = Host(proposer(STORES))
    finish(host, Text(tokens, prompt=20))
    assert host.accepted == 0
    finish(host, Text(tokens, prompt=20))
    assert host.accepted > 40


def test_no_namespace_sees_what_another_wrote():
    tokens = random.Random(1).sample(range(1, 5000), 90)
    one = Host(proposer(STORES, namespace="one"))
    finish(one, Text(tokens, prompt=20))
    one.step()  # a call without it: it has ended
    other = Host(proposer(STORES, namespace="other", beside=one.proposer))
    finish(other, Text(tokens, prompt=20))
    assert other.accepted == 0
    finish(one, Text(tokens, prompt=20))
    assert one.accepted > 40


def test_rows_move_come_and_go_and_get_no_token_of_another():
    rng = random.Random(5)
    host = Host(proposer(LOOKUP), rows=6)
    number, preempted = 0, []
    for _ in range(400):
        if len(host.batch) < host.rows and rng.random() < 0.4:
            number += 1
            text = preempted.pop() if preempted and rng.random() < 0.5 else own_text(number, rng)
            host.batch.append(text)
        if host.batch and rng.random() < 0.15:  # aborted, or preempted to come back later
            text = host.batch.pop(rng.randrange(len(host.batch)))
            if rng.random() < 0.5:
                preempted.append(text)
        rng.shuffle(host.batch)
        prefilling = frozenset(id(text) for text in host.batch if rng.random() < 0.1)
        drafts = host.step(prefilling, verified=rng.choice([0, 1, 2, 9]))
        for text in host.batch:
            mine = {owner(token) for token in text.tokens}
            assert {owner(token) for token in drafts[id(text)]} <= mine
        assert len(host.proposer._rows) <= host.rows
        host.batch = [text for text in host.batch if len(text.tokens) - text.length > 1]
    assert host.accepted > 300


def test_texts_at_the_end_of_the_context_draft_nothing_beyond_it():
    host = Host(proposer(LOOKUP))
    text = Text([1, 2, 3] * 171, prompt=500)  # 513 tokens: one more than there is room for
    host.batch = [text]
    while text.length < 511:
        draft = host.step()[id(text)]
        assert text.length + len(draft) < 512


def test_rows_without_anything_sampled_are_left_alone():
    host = Host(proposer(LOOKUP))
    text = Text([1, 2, 3] * 30, prompt=20)
    host.batch = [text]
    assert host.step(frozenset([id(text)])) == {id(text): []}
    assert host.step()[id(text)]


class Clock:
    """A machine on which a step takes a fixed time, and some more for each row."""

    def __init__(self, row):
        self.now, self.row = 0.0, row

    def __call__(self):
        return self.now


def run_with_costs(row, texts, steps):
    """Drafted tokens a row and step in the second half, where each further row costs `row` steps."""
    clock = Clock(row)
    host = Host(proposer(Plan(stores=("context",), merge=True, adapt=True), clock=clock), rows=len(texts))
    host.batch, drafted = texts, 0
    for step in range(steps):
        rows = len(texts) + sum(map(len, host.drafts.values()))
        clock.now += 1 + row * (rows - 1)
        host.step()
        if step >= steps // 2:
            drafted += sum(map(len, host.drafts.values()))
    return drafted / len(texts) / (steps - steps // 2)


def test_rows_that_cost_nothing_are_used_and_dear_ones_are_not():
    def texts(count):
        rng = random.Random(7)
        return [
            Text([rng.choice([base, base + 1, base + 2]) for _ in range(500)], 60) for base in range(1, 4 * count, 4)
        ]

    assert run_with_costs(0.0, texts(2), 100) > 2.5
    assert run_with_costs(1.0, texts(2), 100) < 0.5  # each row costs as much as a step, and few drafts are right
    assert run_with_costs(0.01, texts(1), 100) > run_with_costs(0.5, texts(8), 50)


def test_rests_end_where_drafts_have_become_worth_it_and_nobody_is_mixed_up():
    """While it rests nobody looks at the rows; then those that went on, moved or are new are told apart again."""
    rng = random.Random(3)
    clock = Clock(0.0)
    host = Host(proposer(Plan(stores=("context",), merge=True, adapt=True), clock=clock), rows=10)
    number, accepted, looked = 0, {}, {True: 0, False: 0}
    for step in range(1500):
        while len(host.batch) < host.rows:
            number += 1
            host.batch.append(own_text(number, rng, 400))
        rng.shuffle(host.batch)
        dear = step < 200
        clock.now += 1 + (2.0 if dear else 0.0) * sum(map(len, host.drafts.values()))
        drafts = host.step()
        looked[dear] += any(drafts.values())
        for text in host.batch:
            assert {owner(token) for token in drafts[id(text)]} <= {owner(token) for token in text.tokens}
        host.batch = [text for text in host.batch if len(text.tokens) - text.length > 1]
        accepted[dear] = host.accepted
    assert looked[True] < 100
    assert looked[False] > 500
    assert accepted[False] > 2 * accepted[True]


def test_where_looking_takes_longer_than_it_brings_nothing_is_looked_up_for_a_while():
    rest = Rest()
    assert not rest.drafts(64)  # with many one first sees what they write without
    drafted = [rest.drafts(4) and (rest.learn(0.1, 0.5) or True) for _ in range(2000)]
    assert 8 <= sum(drafted) < 100
    assert rest.drafts(1)  # another load begins anew
    rest = Rest()
    assert all(rest.drafts(4) and (rest.learn(0.5, 0.1) or True) for _ in range(2000))


@pytest.mark.parametrize("adapt", [True, False])
def test_a_store_that_fails_leaves_the_host_running(adapt, monkeypatch):
    host = Host(proposer(Plan(stores=("context",), adapt=adapt)))
    monkeypatch.setattr(ContextStore, "propose", lambda *_: 1 / 0)
    text = Text([1, 2, 3] * 30, prompt=20)
    host.batch = [text]
    for _ in range(20):
        assert host.step() == {id(text): []}


@pytest.fixture
def soak():
    """The harness of `make soak`, which runs 10,000 steps of each plan."""
    path = Path(__file__).parents[1] / "soak" / "vllm_rows.py"
    spec = importlib.util.spec_from_file_location("vllm_rows", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_few_steps_of_the_soak(soak):
    for name in soak.PLANS:
        failures, counts = soak.soak(name, random.Random(1), 120)
        assert failures == []
        assert min(counts[what] for what in ("requests", "aborted", "preempted", "moved", "drafted")) > 0
        assert name == "lookup, adapting" or counts["accepted"] > 0  # by the clock it may find nothing worth drafting


def test_the_soak_sees_a_token_of_another_request(soak, monkeypatch):
    propose = vllm.Proposer.propose

    def mixed_up(self, sampled, *arguments, **options):
        return propose(self, sampled, *arguments, **options)[::-1]

    monkeypatch.setattr(vllm.Proposer, "propose", mixed_up)
    failures, _ = soak.soak("lookup", random.Random(1), 60)
    assert any("in a text of" in failure for failure in failures)


def test_drafts_that_slow_the_requests_down_are_left_whatever_they_promise():
    def drafted(seconds, steps=400):
        rest, count = Rest(), 0
        for _ in range(steps):
            drafts = rest.drafts(16)
            count += drafts
            rest.saw(drafts, 24 if drafts else 16, seconds if drafts else 1.0)
            if drafts:
                rest.learn(8.0, 0.0)
        return count

    assert drafted(1.2) > 350  # 20 tokens a second instead of 16
    assert 4 <= drafted(2.0) < 40  # 12
