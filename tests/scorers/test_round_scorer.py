"""A checkpoint and its feature drafter in one call, on a device of torch alone; and the room that such calls need."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hierspec
from hierspec import Sampling
from hierspec.backends.base import Batch, DraftedRound
from hierspec.core.draft_tree import likely_tree
from hierspec.core.engine import Engine
from hierspec.core.hierarchy import FixedPace, Hierarchy, Tier
from hierspec.core.interfaces import RUNNER_UP, UNDRAFTED, Answer, Ask, Block
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.request import Request
from hierspec.core.stats import TierStats
from hierspec.core.verify import coupled
from hierspec.scorers.drafters import Layer
from hierspec.scorers.pool import StaircasePool
from hierspec.scorers.rounds import FeatureRounds
from hierspec.scorers.staircase import KEYS_ONLY, Staircase
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_pack

PAGE = 64
PROMPT = [5, 9, 40, 17, 3, 8, 11, 30]
GREEDY, SAMPLED = likely_tree(7, 3, 3, 0.7), likely_tree(5, 2, 3, 0.5)
SAMPLINGS = [Sampling(max_tokens=44), Sampling(max_tokens=44, temperature=0.9, seed=5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    tiny_checkpoint(folder / "model", "llama", layers=3, intermediate=64, eos_ids=())
    tiny_pack(folder / "pack", folder / "model", exits=(1,), taps=(1,))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield hierspec.load(folder / "model", backend="torch", dtype="float32", pack=folder / "pack", kv_memory=1 << 23)
    torch.set_num_threads(before)


class Reader:
    """Of a `DraftWriter` what a fused round needs: keys and values of earlier entries, but none of their states."""

    def __init__(self, layers):
        self._layers = layers
        self.entries = 0

    def read(self, memory, batch, hidden):
        self.entries += len(batch.positions)
        self._layers.run(memory, batch, hidden, 0, self._layers.config.layers)
        memory.states[:, torch.as_tensor(batch.slots)] = torch.nan


class TorchRounds:
    """A `RoundWriter` that computes in the memories which it is given, by the decoders that everything else uses.

    `hints` is a text. With probability `hinted` a draft that follows it goes on with its next token, since drafters
    with random weights are never right.
    """

    def __init__(self, target, drafter, tree, hints=(), hinted=0.0):
        self.tree, self.reread = tree, tree.depth + 1
        self._target, self._drafter = target, drafter
        self._hints, self._hinted, self._dice = list(hints), hinted, random.Random(3)
        self.flight = None
        self.accepted: list[tuple[int, ...]] = []

    def takes(self, request, position):
        return not request.sampling.penalised and position >= self.reread

    def begun(self, request, position):
        return self.flight == (request, position)

    def write(self, ask, rows, extra):
        draft, leads = self._draft(ask, rows, extra)
        picks = self._verified(ask, rows, draft)
        answer = Answer(picks[:, None])
        accepted = tuple(coupled(draft, answer, ask.request.dice).accepted)
        self.accepted.append(accepted)
        count = len(ask.context)
        if accepted:
            to = rows.slots[count : count + len(accepted)]
            rows.memory.copy(to, rows.slots[[count + node for node in accepted]])
        self.flight = (ask.request, count + len(accepted)) if ask.goes_on else None
        return DraftedRound(np.array(draft.tokens), np.array(leads), picks, accepted)

    def _draft(self, ask, rows, extra):
        drafter, context, skipped, tree = self._drafter, ask.context, rows.skipped, self.tree
        count = len(context) - skipped  # entries of the drafter
        entries = np.arange(count - self.reread, count)
        before = entries + skipped - 1
        features = np.where(before < 0, -1, rows.slots[before])
        states, taps = rows.memory.states, rows.taps
        hidden = drafter.first(context[skipped:][entries], states, taps, features, drafter.first_norms)
        paths = [()] * len(entries)
        last = self._run_drafter(rows, entries, rows.draft_slots[entries], entries + 1, paths, hidden)[-1:]
        ranked = {-1: self._ranked(ask, [], extra, last)}
        right = {parent: self._dice.randrange(2) for parent in (-1, *tree.parents)}  # the pick that is right, if any is
        texts, slots, own = {-1: []}, {-1: ()}, {-1: rows.draft_slots[count - 1]}
        tokens, leads = [], []
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
            picked, lead = ranked[parent]
            token = self._hint([*context.tolist(), *texts[parent]]) if rank == right[parent] else None
            tokens.append(int(picked[rank]) if token is None else token)
            leads.append(lead)
            texts[node], own[node] = [*texts[parent], tokens[-1]], rows.draft_slots[count + node]
            slots[node] = (*slots[parent], own[node])
            if node in tree.parents:
                feature, taken = own[parent], np.array([tokens[-1]], np.int32)
                hidden = drafter.join(taken, rows.drafts.states, [0], np.array([feature]), drafter.norm)
                at, own_slot = np.array([count + tree.depths[node]]), np.array([own[node]])
                state = self._run_drafter(rows, at, own_slot, np.array([count]), [slots[node]], hidden)
                ranked[node] = self._ranked(ask, texts[node], extra, state)
        return Proposal(tuple(tokens), tree.parents), leads

    def _hint(self, text):
        follows = self._hints[: len(text)] == text and len(self._hints) > len(text)
        return self._hints[len(text)] if follows and self._dice.random() < self._hinted else None

    def _run_drafter(self, rows, positions, slots, lengths, paths, hidden):
        layers = self._drafter.layer.decoder
        batch = a_batch(positions, slots, rows.draft_table, lengths, paths)
        return layers.run(rows.drafts, batch, hidden, 0, layers.config.layers)

    def _ranked(self, ask, path, extra, state):
        """The drafter's picks after this path, best first, and the lead of the best."""
        head = self._drafter.head
        logits = head.shortlist.logits(state, head.norm, [extra], [1])
        context = np.append(ask.context, path).astype(np.int32)
        [answer] = self._target.decoder.backend.pick([replace(ask, context=context, candidates=4, leads=True)], logits)
        return answer.picks[0], float(answer.leads[0])

    def _verified(self, ask, rows, draft):
        decoder, count = self._target.decoder, len(ask.context)
        numbers = np.arange(len(draft) + 1)
        slots, depths = rows.slots[count - 1 + numbers], np.array([0, *(1 + depth for depth in draft.depths())])
        paths = [()]
        for node, parent in enumerate(draft.parents):
            paths.append((*paths[1 + parent], slots[1 + node]))
        batch = a_batch(count - 1 + depths, slots, rows.table, np.full(len(numbers), count), paths)
        hidden = decoder.embed(np.array([ask.context[-1], *draft.tokens]))
        states = decoder.run(rows.memory, batch, hidden, 0, self._target.layers)
        [answer] = decoder.backend.pick([replace(ask, proposal=draft)], decoder.logits(states, rows.norm))
        return answer.picks[:, 0]


def a_batch(positions, slots, table, lengths, paths):
    starts = np.cumsum([0, *map(len, paths)])
    path_slots = np.array([slot for path in paths for slot in path], np.int64)
    ends, nothing = np.array([0, len(positions)]), np.empty(0, np.int64)
    return Batch(positions, slots, ends, table[None], np.asarray(lengths), starts, path_slots, nothing)


def make_rounds(model, hints=(), hinted=0.0, skips_first=False, budget=None):
    """Fused rounds with a cache of their own for the drafter."""
    target, feature = model.assembler.catalogue.whole(3), model.assembler.catalogue.feature("feature")
    model.forget()
    layers = feature.layer.decoder
    pool = StaircasePool(layers, feature.layer.pool.budget if budget is None else budget)
    drafter = replace(feature, layer=Layer(layers, pool), skips_first=skips_first, writer=Reader(layers))
    writers = (TorchRounds(target, drafter, tree, hints, hinted) for tree in (GREEDY, SAMPLED))
    return FeatureRounds(target, drafter, *writers)


def step_by_step(drafter):
    """The same drafter through its parts, with a cache of its own."""
    pool = StaircasePool(drafter.layer.decoder, drafter.layer.pool.budget)
    return replace(drafter, writer=None, layer=Layer(drafter.layer.decoder, pool))


def plain_text(model, sampling, prompt=PROMPT):
    written = model.generate(prompt, plan="plain", sampling=sampling).tokens
    model.forget()
    return [*prompt, *written]


def an_ask(scorer, text, request, **changes):
    return Ask(scorer, np.array(text, np.int32), NOTHING, request, 1, False, TierStats(""), **changes)


def begin(rounds, model, sampling, text, prompt=PROMPT):
    """A request whose first token is written, and what there is of its text."""
    request = model.request(prompt, "plain", sampling)
    rounds.target.score([an_ask(rounds.target, prompt, request)])
    request.output = text[len(prompt) : len(prompt) + 1]
    return request, text[: len(prompt) + 1]


def go_on(rounds, request, text, goes_on=False):
    """One round. The answer, and what is accepted with the model's own next token."""
    [answer] = rounds.score([an_ask(rounds, text, request, goes_on=goes_on)])
    written = [each[0][0] for each in coupled(answer.draft, answer, request.dice).written]
    request.output = [*request.output, *written]
    return answer, [*text, *written]


@pytest.mark.parametrize("skips_first", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_drafts_are_the_drafters_and_the_text_is_the_models(model, sampling, skips_first):
    text = plain_text(model, sampling)
    rounds = make_rounds(model, skips_first=skips_first)
    tree, alone = rounds.writer(model.request(PROMPT, "plain", sampling)).tree, step_by_step(rounds.drafter)
    request, so_far = begin(rounds, model, sampling, text)
    while len(so_far) < len(text):
        context = so_far
        other = model.request(PROMPT, "plain", sampling)  # nothing is kept from round to round
        other.output = request.output
        answer, so_far = go_on(rounds, request, so_far)
        assert so_far == text[: len(so_far)]
        assert answer.draft.parents == tree.parents
        assert [position.token for position in answer.chain] == list(answer.draft.tokens[: tree.depth])
        hows = [evidence % 4 for evidence in answer.draft.evidence]
        assert hows == [RUNNER_UP if rank else UNDRAFTED for rank in tree.ranks]
        assert [position.lead for position in answer.chain] == [each // 4 for each in answer.draft.evidence][
            : tree.depth
        ]
        picked = {}
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
            if parent not in picked:
                path = [] if parent < 0 else answer.draft.path(parent)
                ask = an_ask(alone, [*context, *path], other, leads=True)
                [picked[parent]] = alone.score([replace(ask, candidates=4)])
            assert answer.draft.tokens[node] == picked[parent].picks[0][rank]
        other.cancel()
    assert len(rounds.writer(request).accepted) > 10


@pytest.mark.parametrize("skips_first", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_what_is_accepted_is_kept_as_if_the_model_had_written_it(model, sampling, skips_first):
    """Keys, values and states of both, though accepted nodes were computed in other slots."""
    text = plain_text(model, sampling)
    rounds = make_rounds(model, text, 0.8, skips_first)
    request, so_far = begin(rounds, model, sampling, text)
    rows = []
    while len(so_far) < len(text):
        layer_rows = rounds.target.decoder.layer_rows
        _, so_far = go_on(rounds, request, so_far)
        rows.append((rounds.target.decoder.layer_rows - layer_rows) // 3)
        assert so_far == text[: len(so_far)] or len(so_far) > len(text)
    accepted = rounds.writer(request).accepted
    depth = rounds.writer(request).tree.depth
    assert {len(nodes) for nodes in accepted} >= {0, depth}
    assert any(node >= depth for nodes in accepted for node in nodes)  # a runner-up, whose rows had to be moved
    assert set(rows) == {1 + len(rounds.writer(request).tree.parents)}  # each round computes its own rows alone
    count = len(so_far) - 1  # the last token is not computed
    fresh = StaircasePool(rounds.target.decoder, rounds.target.pool.budget)
    for layer in rounds.target.pool.taps:
        fresh.add_tap(layer)
    right = replace(rounds.target, pool=fresh)
    right.score([an_ask(right, so_far[:count], request)])
    staircase, expected = (pool._running[request] for pool in (rounds.target.pool, fresh))
    assert staircase.tokens[:count].tolist() == so_far[:count]
    assert (staircase.heights[:count] == 3).all()
    mine, others = staircase.slots[:count], expected.slots[:count]
    alike(staircase.memory.numbers[:, :, :, mine], expected.memory.numbers[:, :, :, others])
    alike(staircase.memory.states[:, mine], expected.memory.states[:, others])
    alone = step_by_step(rounds.drafter)
    alone.score([an_ask(alone, so_far[:count], request)])
    drafted = rounds.drafter.layer.pool._running[request]
    done = drafted.chain
    assert done == len(so_far) - len(accepted[-1]) - 1 - skips_first  # what it drafted last is not read yet
    assert (drafted.heights[:done] == KEYS_ONLY).all()
    same_keys(rounds.drafter, request, alone, request, done)


def test_the_tree_depends_on_the_temperature(model):
    rounds = make_rounds(model)
    greedy, sampled = (model.request(PROMPT, "plain", sampling) for sampling in SAMPLINGS)
    assert (rounds.writer(greedy).tree, rounds.writer(sampled).tree) == (GREEDY, SAMPLED)
    assert (rounds.name, rounds.vocabulary, rounds.depth) == ("target", rounds.target.vocabulary, 3)
    assert [rounds.takes(greedy, at) for at in (3, 4)] == [False, True]
    assert [rounds.takes(sampled, at) for at in (2, 3)] == [False, True]
    penalised = model.request(PROMPT, "plain", Sampling(presence_penalty=1.0))
    assert not rounds.takes(penalised, 40)


def test_a_round_in_flight_is_known_to_be_there(model):
    text = plain_text(model, SAMPLINGS[0])
    rounds = make_rounds(model, text, 0.8)
    request, so_far = begin(rounds, model, SAMPLINGS[0], text)
    other = model.request(PROMPT, "plain", SAMPLINGS[0])
    for goes_on in (True, True, False, True):
        _, so_far = go_on(rounds, request, so_far, goes_on)
        assert rounds.begun(request, len(so_far) - 1) == goes_on
        assert not rounds.begun(request, len(so_far))
        assert not rounds.begun(other, len(so_far) - 1)


def alike(one, other):
    """Up to rounding: passes have other widths."""
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


# Where it cannot draft, it answers with a plain pass.


def answers_plainly(rounds, request, text, expected):
    [answer] = rounds.score([an_ask(rounds, text, request, goes_on=True)])
    assert answer.draft is NOTHING
    assert answer.chain == ()
    assert answer.picks.shape == (1, 1)
    assert answer.picks[0, 0] == expected
    assert rounds.greedy.accepted == []


def test_a_text_that_the_model_has_not_read_gets_a_plain_pass(model):
    text = plain_text(model, SAMPLINGS[0])
    rounds = make_rounds(model, text, 1.0)
    request = model.request(PROMPT, "plain", SAMPLINGS[0])
    request.output = text[len(PROMPT) : len(PROMPT) + 4]
    so_far = text[: len(PROMPT) + 4]
    answers_plainly(rounds, request, so_far, text[len(so_far)])
    so_far = text[: len(so_far) + 1]  # now only the last token is missing
    request.output = so_far[len(PROMPT) :]
    answer, _ = go_on(rounds, request, so_far)
    assert answer.draft.tokens
    # Two tokens more than it has read: the round's own, which is not computed, and another one.
    again = [*so_far, *text[len(so_far) : len(so_far) + 6]]
    rounds.greedy.accepted.clear()
    request.output = again[len(PROMPT) :]
    answers_plainly(rounds, request, again, text[len(again)])


def test_a_text_whose_last_token_is_computed_gets_a_plain_pass(model):
    text = plain_text(model, SAMPLINGS[0])
    rounds = make_rounds(model, text, 1.0)
    request, so_far = begin(rounds, model, SAMPLINGS[0], text)
    rounds.target.score([an_ask(rounds.target, so_far, request)])
    answers_plainly(rounds, request, so_far, text[len(so_far)])


def test_two_texts_get_plain_passes(model):
    text = plain_text(model, SAMPLINGS[0])
    rounds = make_rounds(model, text, 1.0)
    asks = []
    for _ in range(2):
        request, so_far = begin(rounds, model, SAMPLINGS[0], text)
        asks.append(an_ask(rounds, so_far, request))
    answers = rounds.score(asks)
    assert [answer.picks.tolist() for answer in answers] == [[[text[len(so_far)]]]] * 2
    assert all(answer.draft is NOTHING for answer in answers)


@pytest.mark.parametrize("full", ["model", "drafter"])
def test_without_room_for_a_draft_it_gets_a_plain_pass(model, full):
    prompt = (PROMPT * 8)[:62]
    text = plain_text(model, SAMPLINGS[0], prompt)
    page = model.assembler.catalogue.feature("feature").layer.pool.pages.memory.bytes_per_page
    rounds = make_rounds(model, text, 1.0, budget=page if full == "drafter" else None)
    if full == "model":
        pool = StaircasePool(rounds.target.decoder, rounds.target.pool.pages.memory.bytes_per_page)
        for layer in rounds.target.pool.taps:
            pool.add_tap(layer)
        rounds = replace(rounds, target=replace(rounds.target, pool=pool), drafter=replace(rounds.drafter, pool=pool))
    request, so_far = begin(rounds, model, SAMPLINGS[0], text, prompt)
    assert rounds.takes(request, len(so_far) - 1)
    answers_plainly(rounds, request, so_far, text[len(so_far)])
    assert not rounds.takes(request, len(so_far))  # from now on it is drafted tier by tier


@pytest.mark.parametrize("skips_first", [False, True])
@pytest.mark.parametrize("pause", [0, 1, 2, 3, 4, 5, 9, 20])
def test_a_drafter_that_has_missed_much_reads_it_first(model, pause, skips_first):
    """It keeps only keys of what it reads then, and its draft is what it would have been."""
    text = plain_text(model, SAMPLINGS[0])
    rounds = make_rounds(model, skips_first=skips_first)
    request, so_far = begin(rounds, model, SAMPLINGS[0], text)
    _, so_far = go_on(rounds, request, so_far)
    assert rounds.drafter.writer.entries == len(PROMPT) - skips_first  # the last token is the call's own
    while pause:
        [answer] = rounds.target.score([an_ask(rounds.target, so_far, request)])
        so_far, pause = [*so_far, int(answer.picks[0, 0])], pause - 1
        request.output = so_far[len(PROMPT) :]
    context = so_far
    answer, so_far = go_on(rounds, request, so_far)
    assert so_far == text[: len(so_far)]
    alone, other = step_by_step(rounds.drafter), model.request(PROMPT, "plain", SAMPLINGS[0])
    other.output, drafted = context[len(PROMPT) :], []
    for _ in range(GREEDY.depth):
        [step] = alone.score([an_ask(alone, [*context, *drafted], other)])
        drafted.append(int(step.picks[0, 0]))
    assert answer.draft.tokens[: GREEDY.depth] == tuple(drafted)
    same_keys(rounds.drafter, request, alone, other, len(context) - skips_first)


def same_keys(one, request, other, other_request, entries):
    """Two drafters hold the same keys and values of a text's first entries."""
    mine, others = one.layer.pool._running[request], other.layer.pool._running[other_request]
    assert mine.tokens[:entries].tolist() == others.tokens[:entries].tolist()
    own, theirs = mine.slots[:entries], others.slots[:entries]
    alike(mine.memory.numbers[:, :, :, own], others.memory.numbers[:, :, :, theirs])


# Whole plans.


class Changeable(FixedPace):
    """Drafts in one call, tier by tier, or not at all, by dice."""

    def __init__(self, seed):
        self._dice = random.Random(seed)

    def drafts(self, round):
        return self._dice.random() < 0.85

    def route(self, round):
        round.fused = round.fused and self._dice.random() < 0.7
        return Block() if round.fused or self._dice.random() < 0.7 else None

    def goes_on(self, round):
        return self._dice.random() < 0.5


def test_all_kinds_of_rounds_in_turn_write_the_plain_text(model):
    """Both ways to draft share their caches, and other texts that begin alike begin and end meanwhile."""
    seen = Counter()

    @settings(max_examples=5, deadline=None)
    @given(seed=st.integers(0, 10_000))
    def check(seed):
        dice, wanted = random.Random(seed), []
        for number in range(4):
            temperature, most = dice.choice([0.0, 0.9]), dice.randrange(1, 50)
            sampling = Sampling(max_tokens=most, temperature=temperature, seed=seed + number)
            wanted.append((PROMPT[: dice.randrange(1, 9)] * dice.randrange(1, 9), sampling))
        expected = [plain_text(model, sampling, prompt) for prompt, sampling in wanted]
        rounds = make_rounds(model, expected[0], 0.8, dice.random() < 0.5)
        drafter = replace(rounds.drafter, writer=None)
        top = Tier(rounds.target, pace=Changeable(seed), rounds=rounds)
        hierarchy = Hierarchy((top, Tier(drafter, dice.randrange(1, 5), candidates=2)))
        engine, requests = Engine(), []
        for number, (prompt, sampling) in enumerate(wanted):
            for writer in (rounds.greedy, rounds.sampled):
                writer._hints = [] if dice.random() < 0.3 else expected[number]
            stop_ids = model.request(prompt, "plain", sampling).stop_ids
            requests.append(Request(prompt, sampling, hierarchy, stop_ids))
            engine.submit(requests[-1])
            for _ in range(dice.choice([3, 60])):
                engine.step()
        while engine.busy:
            engine.step()
        assert [request.error for request in requests] == [None] * 4
        assert [[*request.prompt.tolist(), *request.output] for request in requests] == expected
        for writer in (rounds.greedy, rounds.sampled):
            seen["rounds"] += len(writer.accepted)
            seen["accepted"] += sum(map(len, writer.accepted))
        seen["read"] += rounds.drafter.writer.entries
        calls = sum(request.stats.tiers[1].calls for request in requests)
        seen["tier by tier"] += calls - sum(len(writer.accepted) for writer in (rounds.greedy, rounds.sampled))

    check()
    assert min(seen[each] for each in ("rounds", "accepted", "read", "tier by tier")) > 8, seen


# Room for entries that a device writes by itself.


class Nobody:
    name, vocabulary = "nobody", 320

    def score(self, asks):
        return []

    def release(self, request):
        pass


def a_request():
    return Request([1, 2, 3], Sampling(), Hierarchy((Tier(Nobody()),)))


@pytest.fixture(scope="module")
def decoder(model):
    return model.decoder


def a_pool(decoder, pages):
    return StaircasePool(decoder, pages * decoder.memory((3,), 0).bytes_per_page)


def prepare(pool, request, length, first=0) -> Staircase:
    [staircase] = pool.prepare([(request, np.arange(first, first + length, dtype=np.int32) % 320, NOTHING)])
    staircase.heights[:length] = 3
    return staircase


def test_what_is_reserved_is_there(decoder):
    pool, request = a_pool(decoder, 4), a_request()
    staircase = prepare(pool, request, 60)
    before = staircase.slots.copy()
    for entries in (1, 64, 65, 200, 256):
        assert pool.reserve(staircase, entries)
        assert len(staircase.slots) >= entries
        assert len(set(staircase.slots.tolist())) == len(staircase.slots)
        assert staircase.slots[:64].tolist() == before.tolist()
    assert (staircase.chain, staircase.used, staircase.heights[:60].tolist()) == (60, 60, [3] * 60)
    assert not pool.reserve(staircase, 257)
    assert len(staircase.slots) == 256
    assert prepare(pool, request, 256) is staircase  # and it can be used


def test_room_is_made_from_ended_texts_alone(decoder):
    pool, ended, running, request = a_pool(decoder, 4), a_request(), a_request(), a_request()
    prepare(pool, ended, 60)
    other = prepare(pool, running, 60, first=100)
    pool.release(ended)
    staircase = prepare(pool, request, 60, first=200)
    assert pool.reserve(staircase, 128)
    assert pool.known(np.arange(60, dtype=np.int32)) == 60  # a free page was enough
    assert pool.reserve(staircase, 192)
    assert pool.known(np.arange(60, dtype=np.int32)) == 0
    assert not pool.reserve(staircase, 193)
    pool.release(request)
    assert not pool.reserve(other, 10_000)
    assert pool.known(np.arange(200, 260, dtype=np.int32)) == 60  # what would not be enough is not evicted
    staircase = prepare(pool, request, 60, first=200)
    assert pool.staircases() == [other, staircase]
    assert pool._running[running] is other
    assert prepare(pool, running, 60, first=100) is other
    assert other.tokens[:60].tolist() == list(range(100, 160))
    assert not set(other.slots.tolist()) & set(staircase.slots.tolist())


def test_a_page_that_only_ended_texts_share_can_be_freed(decoder):
    pool, one, other, running = a_pool(decoder, 4), a_request(), a_request(), a_request()
    prepare(pool, one, 64)
    prepare(pool, other, 70)
    for ended in (one, other):
        pool.release(ended)
    assert pool.reserve(prepare(pool, running, 60, first=100), 256)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_reserving_never_harms_a_running_text(decoder, seed):
    """Texts that share their beginnings begin, go on and end, some with more room than they need."""
    dice = random.Random(seed)
    pool, running = a_pool(decoder, 6), {}
    for _ in range(30):
        kind = dice.random()
        if kind < 0.3 and len(running) < 3:
            running[a_request()] = dice.randrange(1, 100)
        if not running:
            continue
        request = dice.choice([*running])
        if kind < 0.45:
            pool.release(request)
            del running[request]
            continue
        staircase = prepare(pool, request, running[request])
        if kind < 0.7:
            continue
        texts = {each: (each.tokens[: each.used].tolist(), each.slots[: each.used].tolist()) for each in pool._use}
        still = {pool._running[each] for each in running if each in pool._running}
        entries, free = dice.randrange(1, 400), pool.pages.free
        reserved = pool.reserve(staircase, entries)
        assert reserved == (len(staircase.slots) >= entries)
        if entries <= PAGE * (len(staircase.table) + free):
            assert reserved
        for each in still:
            assert each in pool._use
            assert (each.tokens[: each.used].tolist(), each.slots[: each.used].tolist()) == texts[each]
        pages = [set(each.table.tolist()) for each in pool._use]
        assert pool.pages.in_use == len(set().union(*pages))
        if reserved:  # what comes after the text is nobody else's
            own = set(staircase.table[-(-staircase.used // PAGE) :].tolist())
            assert not any(own & set(each.table.tolist()) for each in pool._use if each is not staircase)
        running[request] += dice.randrange(0, 30)
