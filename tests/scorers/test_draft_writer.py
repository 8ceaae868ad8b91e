"""A drafter that writes several tokens in one call: the bits, picks and caches of one token after the other."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hierspec
from hierspec import Plan, Sampling, TierPlan
from hierspec.backends.cpu.memory import _in_chunk
from hierspec.core.foresight import SUREST, lead_class
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.stats import TierStats
from hierspec.scorers.drafters import FeatureScorer, Layer
from hierspec.scorers.pool import StaircasePool
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_eagle, tiny_pack

FORMATS = [("llama", "float32", {}), ("qwen3", "int8", {}), ("mistral", "bfloat16", {"windows": (40,) * 3})]


@pytest.fixture(scope="module", params=FORMATS, ids=[family for family, _, _ in FORMATS])
def model(request, tmp_path_factory):
    family, format, changes = request.param
    folder = tmp_path_factory.mktemp(family)
    tiny_checkpoint(folder / "model", family, **{"layers": 3, "intermediate": 128, "eos_ids": (), **changes})
    tiny_pack(folder / "pack", folder / "model", exits=(1, 2), taps=(1,))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    dtype = "bfloat16" if format == "bfloat16" else "float32"
    loaded = hierspec.load(
        folder / "model", backend="compiled", dtype=dtype, device="cpu", pack=folder / "pack",
        weights="int8" if format == "int8" else "auto",
    )  # fmt: skip
    torch.set_num_threads(before)
    return loaded


def both(model, weights=None) -> tuple[FeatureScorer, FeatureScorer]:
    """The model's drafter, and the same one that writes one token a call, through its parts, with its own cache."""
    scorer = model.assembler.catalogue.feature("feature", weights=weights)
    assert scorer.writer is not None
    pool = StaircasePool(scorer.layer.decoder, scorer.layer.pool.budget)
    return scorer, replace(scorer, writer=None, layer=Layer(scorer.layer.decoder, pool))


def one_by_one(scorer: FeatureScorer, ask: Ask, count: int):
    """Picks and leads of so many tokens, each asked for after the ones before it."""
    found, context = [], ask.context
    for _ in range(count):
        [answer] = scorer.score([replace(ask, context=context, ahead=None)])
        found.append((answer.picks.tolist(), answer.leads.tolist()))
        context = np.append(context, answer.picks[0, 0]).astype(np.int32)
    return found


def held(scorer: FeatureScorer, request, entries: int):
    """Keys and values of a text's first entries, as they are in the memory, states, and which of those are there."""
    staircase = scorer.layer.pool._running[request]
    memory, slots = staircase.memory, staircase.slots[:entries]
    page, slot = np.divmod(slots, memory.page)
    block, lane = np.divmod(slot, 16)
    assert (staircase.heights[:entries] != 0).all()
    keys = memory._keys[page, :, :, block, :, lane]
    where = (
        (slice(None), slice(None), *_in_chunk(slot)) if memory.stored == "bfloat16" else (slice(None),) * 3 + (slot,)
    )
    values = memory._values[page, *where]
    there = staircase.heights[:entries] > 0
    return staircase.tokens[:entries].tolist(), keys.copy(), values.copy(), memory.state_numbers[:, slots], there


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=1.1, seed=6, top_k=30, top_p=0.9),
    Sampling(repetition_penalty=1.3),
    Sampling(logit_bias={5: 3.0}),
    Sampling(stop_ids=tuple(range(0, 300, 7))),
]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_bits_of_one_token_after_the_other(model, seed):
    """Texts that grow, go back and end, drafts of any length, other asks in between."""
    rng = random.Random(seed)
    scorer, reference = both(model, weights=rng.choice([None, "auto"]))
    sampling = rng.choice(SAMPLINGS)
    prompt = [rng.randrange(3, 259) for _ in range(rng.choice([1, 2, 40, 60, 130]))]
    request = model.request(prompt, "draft", sampling)
    for _ in range(8):
        if rng.random() < 0.25:  # another text that begins alike; its end was in the middle before
            text, ended = [*prompt, *request.output], request
            prompt = [*text[: rng.randrange(1, len(text) + 1)]]
            request = model.request(prompt, "draft", sampling)
            if rng.random() < 0.5:
                ended.cancel()
                reference.release(ended)
        written = np.array([*prompt, *request.output], np.int32)
        most = rng.randrange(1, 10)
        ahead = np.array([[rng.random() < 0.8] * (SUREST + 1) for _ in range(most - 1)], bool).reshape(-1, SUREST + 1)
        ask = Ask(scorer, written, NOTHING, request, rng.randrange(1, 4), False, TierStats(""), True, False, ahead)
        kind = rng.random()
        if kind < 0.15:  # a tree in between
            ask = replace(ask, proposal=Proposal((5, 6, 7), (-1, 0, 0)))
        elif kind < 0.3:  # whole distributions
            ask = replace(ask, distributions=True, leads=False)
        [answer], [expected] = scorer.score([ask]), reference.score([replace(ask, ahead=None)])
        if ask.proposal.tokens or ask.distributions:
            assert answer.ahead == ()
            for one, other in ((answer.picks, expected.picks), (answer.distributions, expected.distributions)):
                assert (one is None and other is None) or np.array_equal(one, other)
        else:
            answers = [answer, *answer.ahead]
            steps = one_by_one(reference, ask, len(answers))
            assert [(each.picks.tolist(), each.leads.tolist()) for each in answers] == steps
            assert len(answers) <= most
            entries = len(written) + len(answers) - 1
            tokens, keys, values, states, there = held(scorer, request, entries)
            right_tokens, right_keys, right_values, right_states, _ = held(reference, request, entries)
            assert tokens == right_tokens
            assert np.array_equal(keys, right_keys)
            assert np.array_equal(values, right_values)
            assert np.array_equal(states[:, there], right_states[:, there])
            assert there[len(written) - 1 :].all()
        request.output += [rng.randrange(3, 259) for _ in range(rng.randrange(1, 5))]
        if answer.picks is not None and rng.random() < 0.5:  # part of the draft is accepted
            drafted = [int(each.picks[0, 0]) for each in (answer, *answer.ahead)]
            request.output[-len(drafted) :] = drafted
    request.cancel()
    reference.release(request)


def test_it_goes_on_where_the_ask_says_so(model):
    scorer, _ = both(model)
    request = model.request([5, 6, 7, 8], "draft", Sampling())
    scorer.forget()

    def steps(ahead, sampling=None, room=True) -> int:
        if sampling is not None:
            request.sampling = sampling
        ask = Ask(scorer, request.prompt, NOTHING, request, 1, False, TierStats(""), True, False, ahead)
        [answer] = scorer.score([ask])
        scorer.layer.pool.clear()
        for each in (answer, *answer.ahead)[:-1]:
            leads.append(lead_class(float(each.leads[0])))
        return 1 + len(answer.ahead)

    leads: list[int] = []
    everywhere = np.ones((5, SUREST + 1), bool)
    assert steps(None) == 1
    assert steps(everywhere[:0]) == 1
    assert steps(everywhere) == 6
    lowest = np.minimum.accumulate(leads)
    only = everywhere.copy()
    only[3, lowest[3]] = False
    assert steps(only) == 4
    only = ~everywhere
    only[np.arange(5), lowest] = True
    assert steps(only) == 6
    assert steps(everywhere, Sampling(temperature=1.0, seed=1)) == 1
    request.cancel()


def test_it_ends_at_a_stop_token_and_at_the_end_of_the_page(model):
    scorer, _ = both(model)
    everywhere = np.ones((9, SUREST + 1), bool)
    request = model.request([5, 6, 7, 8], "draft", Sampling())
    request.stop_ids = frozenset()  # which tokens are picked depends on the CPU's arithmetic
    ask = Ask(scorer, request.prompt, NOTHING, request, 1, False, TierStats(""), True, False, everywhere)
    scorer.forget()
    [free] = scorer.score([ask])
    drafted = [int(each.picks[0, 0]) for each in (free, *free.ahead)]
    assert len(drafted) == 10
    stop = drafted[3]
    request.stop_ids = frozenset({stop})
    scorer.forget()
    scorer.head.release(request)
    [stopped] = scorer.score([ask])
    expected = drafted[: drafted.index(stop) + 1]
    assert [int(each.picks[0, 0]) for each in (stopped, *stopped.ahead)] == expected
    request.cancel()
    long = model.request([5] * 60, "draft", Sampling())
    [answer] = scorer.score([replace(ask, context=long.prompt, request=long)])
    assert len(answer.ahead) <= 4  # 60 entries, and four of a page of 64 are left
    long.cancel()


def test_a_head_that_joins_with_a_bias(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama", layers=3, intermediate=128, eos_ids=())
    loaded = hierspec.load(folder, backend="compiled", device="cpu", dtype="float32")
    eagle = tiny_eagle(tmp_path / "eagle", loaded.config, bias=True)
    # Without its first norm the layer runs through torch: nothing is written ahead, and nothing breaks.
    plan = Plan(tiers=(TierPlan(draft=str(eagle), gather=4),))
    assert loaded.assembler.catalogue.feature(str(eagle)).writer is None
    expected = loaded.generate([5, 6, 7], plan="plain", max_tokens=12).tokens
    assert loaded.generate([5, 6, 7], plan=plan, max_tokens=12).tokens == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_drafts_are_verified_in_fewer_calls(model, temperature, monkeypatch):
    """By count, so that no clock decides."""
    plan = Plan(tiers=(TierPlan(draft="feature", gather=5, candidates=2),), budget=12)
    sampling = Sampling(max_tokens=60, temperature=temperature, seed=3)
    scorer = model.assembler.catalogue.feature("feature")
    calls = []
    score = FeatureScorer.score
    monkeypatch.setattr(FeatureScorer, "score", lambda self, asks: calls.append(1) or score(self, asks))
    found = []
    for writer in (scorer.writer, None):
        calls.clear()
        model.forget()
        object.__setattr__(scorer, "writer", writer)
        generation = [model.generate([7, 8, 9, number], plan=plan, sampling=sampling) for number in range(3)]
        tiers = [[{**tier.to_json(), "seconds": 0} for tier in each.stats.tiers] for each in generation]
        found.append(([each.tokens for each in generation], tiers, len(calls)))
        if writer is not None:
            kept = writer
    object.__setattr__(scorer, "writer", kept)
    (tokens, tiers, few), (tokens_stepping, tiers_stepping, many) = found
    assert tokens == tokens_stepping
    assert tiers == tiers_stepping
    assert few < 0.6 * many if temperature == 0 else few == many
