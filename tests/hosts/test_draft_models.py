"""Draft models that run beside a host's target: what they draft, and when they are worth their time."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from model_free_host import Host, Text

import hierspec
from hierspec.checkpoints.load import read_config
from hierspec.core.errors import HierspecError
from hierspec.core.interfaces import Ask
from hierspec.core.plan import TierPlan
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.hosts.chains import compare
from hierspec.hosts.cores import on_all_cores
from hierspec.hosts.guest import Guest
from hierspec.hosts.host_costs import HostCosts
from hierspec.hosts.opening import HostModel, open_guest
from hierspec.hosts.vllm import Proposer
from hierspec.hosts.vllm_options import GuestOptions
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

CONTEXT = 512
SMALL = 'adapt = {}\n[[tier]]\ndraft = "small"\ngather = 4\nuntil = "worth"\n'


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("host") / "target", "llama")


@pytest.fixture(scope="module")
def pack(target):
    return tiny_pack(target.parent / "pack", target)


def opened(target, plan, tmp_path, most=4, clock=None, **options):
    file = tmp_path / "plan.toml"
    file.write_text(plan)
    config = read_config(target)
    model = HostModel("tiny", target, str(target), config.layers, config.vocabulary, CONTEXT)
    clocks = {} if clock is None else {"clock": clock}
    return open_guest(model, GuestOptions(str(file), stores=str(tmp_path), **options), most, **clocks)


class Clock:
    """Time that passes only in the host's steps."""

    now = 0.0

    def __call__(self):
        return self.now


def written_by(target, tier, pack, count):
    """What a draft of the target's pack writes by itself, as the target's own hierarchy has it."""
    model = hierspec.load(target, pack=pack, keep_learnt=False)
    scorer = model.assembler.tier_scorer(tier)
    text = list(range(1, 20))
    request = model.request(text, "plain", hierspec.Sampling(max_tokens=1))
    for _ in range(count):
        context = np.array(text, np.int32)
        ask = Ask(scorer, context, NOTHING, request, 1, False, request.stats.tiers[0])
        text.append(int(scorer.score([ask])[0].picks[0, 0]))
    return text


@pytest.mark.parametrize("vocabulary", ["small", "full"])
def test_the_small_model_of_a_pack_drafts_what_it_drafts_under_its_target(target, pack, vocabulary, tmp_path):
    plan = SMALL.format("false").replace('until = "worth"', f'vocabulary = "{vocabulary}"')
    guest = opened(target, plan, tmp_path, pack=str(pack))
    tier = TierPlan(draft="small", vocabulary=vocabulary)
    expected = written_by(target, tier, pack, 12)
    request, written = guest.begin(np.array(expected[:19], np.int32)), []
    for _ in range(3):
        guest.draft([request])
        assert len(request.drafted) == 4
        written += request.drafted
        assert guest.wrote(request, request.drafted)
    assert written == expected[19:31]


def steps_of(guest, clock, text, cost):
    """Drafted and accepted tokens of a host that writes this text; a step takes a second, each drafted token `cost`."""
    host = Host(Proposer.over(guest, CONTEXT), rows=1)
    host.batch, drafted = [text], 0
    while text.length < len(text.tokens):
        rows = sum(map(len, host.drafts.values()))
        drafted += rows
        clock.now += 1 + cost * rows
        host.step()
    return drafted, host.accepted


def test_a_draft_model_that_is_right_is_used_and_one_that_is_not_is_soon_left(target, pack, tmp_path):
    right = written_by(target, TierPlan(draft="small"), pack, 100)
    rng = np.random.default_rng(3)
    wrong = [*right[:19], *rng.integers(1, 200, 300).tolist()]
    for text, most, least in ((right, 150, 60), (wrong, 150, 0)):
        clock = Clock()
        guest = opened(target, SMALL.format("true"), tmp_path, clock=clock, pack=str(pack))
        drafted, accepted = steps_of(guest, clock, Text(text, 19), 0.1)
        assert least <= accepted <= drafted < most


def test_nothing_is_drafted_where_each_row_costs_a_step(target, pack, tmp_path):
    clock = Clock()
    guest = opened(target, SMALL.format("true"), tmp_path, clock=clock, pack=str(pack))
    text = written_by(target, TierPlan(draft="small"), pack, 400)
    drafted, _ = steps_of(guest, clock, Text(text, 19), 2.0)
    assert drafted < 200  # all would be accepted; it takes some wide steps to learn what they cost


def test_beside_stores_it_drafts_where_it_adds_to_them(target, pack, tmp_path, monkeypatch):
    """Where stores are always right it adds nothing; in a text that it writes itself and that never repeats it does."""
    plan = 'stores = ["context"]\nmerge = true\n' + SMALL.format("true")
    own = written_by(target, TierPlan(draft="small"), pack, 300)
    repeated = [*own[:19], *([7, 3, 9, 4, 8, 2, 6, 5] * 40)]
    calls = []
    score = Guest._score
    monkeypatch.setattr(Guest, "_score", lambda self, group: calls.append(1) or score(self, group))
    counts = []
    for text in (repeated, own):
        clock = Clock()
        guest = opened(target, plan, tmp_path, clock=clock, pack=str(pack))
        calls.clear()
        _, accepted = steps_of(guest, clock, Text(text, 19), 0.05)
        assert accepted > 150
        counts.append(len(calls))
    assert counts[0] < counts[1]


def test_a_model_without_a_small_one_is_refused_in_one_sentence(target, tmp_path):
    with pytest.raises(HierspecError, match="has no pack with a small model"):
        opened(target, SMALL.format("true"), tmp_path)


def test_a_named_pack_must_be_there(target, tmp_path):
    with pytest.raises(HierspecError, match="is not a pack"):
        opened(target, SMALL.format("true"), tmp_path, pack=str(tmp_path))


def test_what_was_learnt_serves_the_next_start(target, pack, tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HIERSPEC_LEARNT", raising=False)
    text = written_by(target, TierPlan(draft="small"), pack, 60)
    counts = []
    for _ in range(2):
        clock = Clock()
        guest = opened(target, SMALL.format("true"), tmp_path, clock=clock, pack=str(pack))
        counts.append(guest.pace.acceptance.counts())
        steps_of(guest, clock, Text(text, 19), 0.1)
        guest.close()
    assert not counts[0]
    assert counts[1]


def chain(tokens, evidence, source="model", parents=None):
    nodes = len(tokens)
    parents = tuple(range(-1, nodes - 1)) if parents is None else parents
    return Proposal(tokens, parents, (source,) * nodes, (), evidence)


def test_where_drafts_agree_and_where_they_do_not_is_learnt_apart():
    # After 1: both say 2. After 1, 2: the model says 3, the store 9 and, after that, 8; nobody contests the last.
    model, store = compare([chain((1, 2, 3, 4), (0, 0, 0, 0)), chain((1, 2, 9, 8), (5, 5, 5, 5), "store")])
    agreed, contested = model.evidence[0], model.evidence[2]
    assert model.evidence == (agreed, agreed, contested, 0)
    assert store.evidence == (5 + agreed, 5 + agreed, 5 + contested, 5)
    assert len({0, agreed, contested}) == 3
    # One of two stores agrees: nothing is contested.
    model, first, second = compare([chain((1,), (0,)), chain((7,), (5,), "a"), chain((1,), (5,), "b")])
    assert (model.evidence, first.evidence, second.evidence) == ((agreed,), (5 + contested,), (5 + agreed,))


def test_costs_of_a_host_begin_with_its_first_steps():
    costs = HostCosts()
    assert costs.again() is costs
    for seconds in (0.5, 0.2, 0.3):
        assert not costs.timed
        costs.observe(1, seconds)
    assert costs.timed
    assert costs.seconds(1) == pytest.approx(0.2)
    for _ in range(40):
        costs.observe(4, 0.8)
    assert costs.seconds(4) == pytest.approx(0.8, rel=0.1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned on this system")
def test_threads_of_a_pinned_one_may_run_on_all_cores_of_the_process():
    everywhere = os.sched_getaffinity(0)
    seen = []

    def pinned():
        os.sched_setaffinity(0, {min(everywhere)})
        with on_all_cores():
            started = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            started.start()
            started.join()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [everywhere, {min(everywhere)}]
