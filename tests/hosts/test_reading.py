"""How much of a text draft models read before they draft for a host: by what drafts save, and what prefill costs."""

from __future__ import annotations

import numpy as np
import pytest
from model_free_host import Host, Text

from hierspec.checkpoints.load import read_config
from hierspec.core.proposal import Proposal
from hierspec.hosts.host_pace import HostPace
from hierspec.hosts.opening import HostModel, open_guest
from hierspec.hosts.reading import Reading
from hierspec.hosts.vllm import Proposer
from hierspec.hosts.vllm_options import GuestOptions
from hierspec.pacing.costs import Prefill
from hierspec.scorers.base import StateScorer
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

CONTEXT = 512
PLAN = 'adapt = {}\n[[tier]]\ndraft = "small"\ngather = 4\nuntil = "worth"\nvocabulary = "full"\n'
PROMPT = np.random.default_rng(5).integers(1, 200, 300).tolist()


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


def price(each):
    return lambda tokens: each * tokens


def test_a_text_is_read_as_far_as_that_costs_a_part_of_what_drafts_save():
    reading = Reading()
    windows = [reading.window(price(each), 800, 100) for each in (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)]
    assert windows[0] == 800
    assert windows == sorted(windows, reverse=True)
    saved = 100 * 0.2  # of 100 tokens, before anything was learnt
    assert windows[1] == 0.25 * saved / 0.01
    assert windows[3] == 0.25 * saved / 0.1
    assert windows[4] == 32  # at least, while all of it is worth it
    assert windows[5] == 0
    assert reading.window(price(0.5), 20, 100) == 20  # a short one is read whole, or not at all
    assert reading.window(price(0.5), 20, 20) == 0  # where hardly anything is still to be written


def test_drafts_that_save_nothing_beyond_the_stores_are_not_read_for_until_texts_may_have_changed():
    reading = Reading()
    for _ in range(300):
        reading.learn(2, 0.0)
    assert reading.window(price(0.1), 800, 100) == 0
    unread = 0
    while not reading.window(price(0.1), 800, 100):
        reading.left_unread()
        unread += 1
    assert 4 < unread < 50


def test_drafts_that_save_much_are_read_for_further():
    reading = Reading()
    before = reading.window(price(0.1), 800, 100)
    for _ in range(300):
        reading.learn(2, 1.0)
    assert reading.window(price(0.1), 800, 100) > 2 * before


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("host") / "target", "llama")


@pytest.fixture(scope="module")
def pack(target):
    return tiny_pack(target.parent / "pack", target)


@pytest.fixture
def contexts(monkeypatch):
    """What draft models were asked about."""
    asked = []
    score = StateScorer.score

    def recorded(self, asks):
        asked.extend(ask.context.tolist() for ask in asks)
        return score(self, asks)

    monkeypatch.setattr(StateScorer, "score", recorded)
    return asked


def opened(target, pack, tmp_path, adapt, clock, each=0.0):
    """With a prefill that takes so many seconds a token, whatever this machine takes."""
    file = tmp_path / "plan.toml"
    file.write_text(PLAN.format(adapt))
    config = read_config(target)
    model = HostModel("tiny", target, str(target), config.layers, config.vocabulary, CONTEXT)
    guest = open_guest(model, GuestOptions(str(file), stores=str(tmp_path), pack=str(pack)), 4, clock=clock)
    if guest.pace.router is not None:
        guest.pace.router.routes[0].policy.prefill = Prefill(each)
    return guest


def written(guest, clock, text):
    """A host writes this text in steps of a second."""
    host = Host(Proposer.over(guest, CONTEXT), rows=1)
    host.batch, drafts = [text], []
    while text.length < len(text.tokens):
        clock.now += 1
        drafts += host.step().values()
    return drafts


@pytest.mark.parametrize(("each", "least", "most"), [(0.001, 300, 310), (0.1, 40, 80), (20.0, 0, 0)])
def test_of_a_long_prompt_as_much_is_read_as_its_prefill_is_worth(target, pack, tmp_path, contexts, each, least, most):
    clock = Clock()
    guest = opened(target, pack, tmp_path, "true", clock, each)
    contexts.clear()  # of measuring its costs
    text = PROMPT + np.random.default_rng(6).integers(1, 200, 20).tolist()
    written(guest, clock, Text(text, 300))
    if not most:
        assert not contexts
        return
    first = contexts[0]
    assert least <= len(first) <= most
    end = next(end for end in range(300, 321) if text[end - len(first) : end] == first)
    start = end - len(first)
    # Everything after it begins at the same token, so that nothing is read twice.
    assert all(context[: len(first)] == text[start:end] for context in contexts)


def test_a_text_that_is_read_from_the_middle_is_drafted_for_as_if_it_began_there(target, pack, tmp_path):
    guest = opened(target, pack, tmp_path, "false", Clock())
    drafts = []
    for begun, read_from in ((PROMPT, 250), (PROMPT[250:], 0)):
        request = guest.begin(np.array(begun, np.int32))
        request.read_from = read_from
        guest.draft([request])
        first = request.drafted
        assert guest.wrote(request, [*first[:2], (first[2] + 1) % 200])
        guest.draft([request])
        drafts.append((first, request.drafted))
        guest.end(request)
    assert drafts[0] == drafts[1]
    assert all(len(each) == 4 for each in drafts[0])


@pytest.mark.parametrize("told", [True, False])
def test_the_time_of_a_prefill_does_not_count_as_looking_for_drafts(told):
    """Else nothing would be drafted for a while after every long prompt."""
    clock = Clock()
    pace = HostPace(4, True, clock)
    draft = Proposal((1, 2), (-1, 0), ("store", "store"), (), (0, 0))
    drafting = []
    for step in range(40):
        clock.now += 1
        pace.step_begins(1, step > 0, 1)
        if pace.drafting:
            pace.chain([draft], 10)
        drafting.append(pace.drafting)
        if step == 10:
            clock.now += 50
            if told:
                pace.began_to_read(50)
        pace.step_ends(3 if pace.drafting else 1)
    assert all(drafting[4:11])
    after = sum(drafting[12:24])
    assert after >= 11 if told else not after  # one may be timed without drafts
