"""A model that runs layers, head and picks in one call, for several tokens: the bits, picks and caches of one part and
one token after the other."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scorers.test_draft_writer import FORMATS, SAMPLINGS, one_by_one

import hierspec
from hierspec import Sampling
from hierspec.backends.cpu import passes
from hierspec.backends.cpu.embedding import EmbeddingTable
from hierspec.core.foresight import SUREST
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import NOTHING, Proposal
from hierspec.core.stats import TierStats
from hierspec.scorers.pool import StaircasePool
from hierspec.testing.checkpoints import tiny_checkpoint


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A call may take as long as it likes: how many tokens it writes must not depend on this machine."""
    monkeypatch.setattr(passes, "_CALL_SECONDS", 1e9)


class MadeRows:
    """A table whose rows are made one by one, as a GGUF file's are."""

    dtype = torch.float32

    def __init__(self, table: torch.Tensor) -> None:
        self._table, self.shape = table, table.shape

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._table[rows]


@pytest.fixture(scope="module", params=[*FORMATS, ("llama", "made", {})], ids=lambda param: f"{param[0]}-{param[1]}")
def model(request, tmp_path_factory):
    family, format, changes = request.param
    folder = tmp_path_factory.mktemp(family)
    sizes = {"layers": 3, "intermediate": 128, "eos_ids": (), **changes}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    dtype = "bfloat16" if format == "bfloat16" else "float32"
    loaded = hierspec.load(
        tiny_checkpoint(folder / "model", family, **sizes), backend="compiled", dtype=dtype, device="cpu", pack=None,
        weights="int8" if format == "int8" else "auto",
    )  # fmt: skip
    torch.set_num_threads(before)
    if format == "made":
        loaded.decoder.embedding_table = EmbeddingTable(MadeRows(loaded.decoder.embedding))
    return loaded


def both(model, layers):
    """The model, or an exit of it, and the same one by parts with a cache of its own."""
    scorer = model.assembler.catalogue.whole(layers)
    assert scorer.writer is not None
    pool = StaircasePool(scorer.decoder, scorer.pool.budget)
    for tap in scorer.pool.taps:
        pool.add_tap(tap)
    return scorer, replace(scorer, writer=None, pool=pool)


def held(scorer, request, entries):
    """Tokens and states of a text's first entries, which are all computed, by others too where texts begin alike."""
    staircase = scorer.pool._running[request]
    assert (staircase.heights[:entries] >= scorer.layers).all()
    slots, tap = staircase.slots[:entries], scorer.pool.taps.index(scorer.layers)
    states = staircase.memory.state_numbers[tap, slots].copy()
    return staircase.tokens[:entries].tolist(), states


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_bits_of_one_part_after_the_other(model, seed):
    rng = random.Random(seed)
    whole = model.decoder.config.layers
    scorer, reference = both(model, rng.choice([whole, whole, whole - 1]))
    sampling = rng.choice(SAMPLINGS)
    vocabulary = model.decoder.config.vocabulary
    prompt = [rng.randrange(vocabulary) for _ in range(rng.choice([1, 2, 40, 60, 130]))]
    request = model.request(prompt, "plain", sampling)
    for _ in range(6):
        written = np.array([*prompt, *request.output], np.int32)
        most = rng.randrange(1, 10)
        ahead = np.array([[rng.random() < 0.8] * (SUREST + 1) for _ in range(most - 1)], bool).reshape(-1, SUREST + 1)
        leads = rng.random() < 0.5
        ask = Ask(scorer, written, NOTHING, request, rng.randrange(1, 4), False, TierStats(""), True, False, ahead)
        tree = rng.random() < 0.4
        if tree:
            tokens = tuple(rng.randrange(vocabulary) for _ in range(rng.randrange(1, 9)))
            parents = tuple(rng.randrange(-1, node) for node in range(len(tokens)))
            ask = replace(ask, proposal=Proposal(tokens, parents, ("",) * len(tokens)), leads=leads)
        [answer] = scorer.score([ask])
        if tree:
            assert answer.ahead == ()
            [expected] = reference.score([replace(ask, ahead=None)])
            assert np.array_equal(answer.picks, expected.picks)
            assert not leads or np.array_equal(answer.leads, expected.leads)
        else:
            answers = [answer, *answer.ahead]
            assert len(answers) <= most
            steps = one_by_one(reference, ask, len(answers))
            assert [(each.picks.tolist(), each.leads.tolist()) for each in answers] == steps
        entries = len(written) + len(answer.ahead)
        tokens, states = held(scorer, request, entries)
        right_tokens, right_states = held(reference, request, entries)
        assert tokens == right_tokens
        assert np.array_equal(states, right_states)
        request.output += [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.5:  # what it wrote
            picked = [int(each.picks[0, 0]) for each in (answer, *answer.ahead)]
            request.output[-len(picked) :] = picked
    request.cancel()
    reference.release(request)


def ask_of(model, sampling):
    """An ask for the token after a text of which only the last token is not computed yet, and for seven more."""
    model.forget()
    request = model.request([5, 6, 7], "plain", sampling)
    ahead = np.ones((7, SUREST + 1), bool)
    scorer = model.assembler.target
    scorer.score([Ask(scorer, request.prompt[:-1], NOTHING, request, 1, False, TierStats(""))])
    return request, Ask(scorer, request.prompt, NOTHING, request, 1, False, TierStats(""), False, False, ahead)


def tokens_of(model, sampling) -> list[int]:
    """What one call writes after a text that is computed already."""
    request, ask = ask_of(model, sampling)
    [answer] = model.assembler.target.score([ask])
    request.cancel()
    return [int(each.picks[0, 0]) for each in (answer, *answer.ahead)]


def seen(model, tokens) -> None:
    """Have the embeddings of these, as if texts had used them."""
    model.decoder.embedding_table.add((np.array(tokens),))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_stop_token_ends_a_call(model, temperature):
    seen(model, range(model.decoder.config.vocabulary))
    for seed in range(10):
        sampling = Sampling(temperature=temperature, seed=seed)
        free = tokens_of(model, sampling)
        stop = free[len(free) // 2]
        stopped = tokens_of(model, replace(sampling, stop_ids=(stop,)))
        assert stopped == free[: 1 + free.index(stop)]
        if len(free) == 8:  # else the text ended by itself
            return
    pytest.fail("no text has eight tokens")


def test_a_token_whose_embedding_was_never_used_ends_a_call(model):
    table = model.decoder.embedding_table
    if table._source is None:
        assert table.made.all()
        return
    free = model.generate([5, 6, 7], plan="plain", max_tokens=30).tokens
    table.made[:] = False
    first = tokens_of(model, Sampling())
    assert len(first) == 1
    seen(model, first)
    assert len(tokens_of(model, Sampling())) > 1
    table.made[:] = False
    assert model.generate([5, 6, 7], plan="plain", max_tokens=30).tokens == free


@pytest.mark.parametrize(
    "sampling", [Sampling(repetition_penalty=1.3), Sampling(logit_bias={5: 3.0})], ids=["penalty", "bias"]
)
def test_what_changes_logits_goes_part_by_part(model, sampling):
    request, ask = ask_of(model, sampling)
    assert not model.assembler.target.in_one_call([ask])
    request.cancel()


@pytest.mark.parametrize(("step_seconds", "tokens"), [(0.01, 3), (2.0, 1)])
def test_a_call_ends_in_time(model, monkeypatch, step_seconds, tokens):
    """Somebody may want to stop it: where passes are slow there is one token a call."""
    seen(model, range(model.decoder.config.vocabulary))
    request, ask = ask_of(model, Sampling())
    monkeypatch.setattr(passes, "_CALL_SECONDS", 0.03)
    monkeypatch.setattr(model.assembler.target.writer, "_step_seconds", step_seconds)
    [answer] = model.assembler.target.score([ask])
    assert 1 + len(answer.ahead) == tokens
    request.cancel()


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_texts_end_where_they_end_part_by_part(model, temperature, monkeypatch):
    """Tokens that a call wrote ahead are read one by one: half a character is shown at the end alone, and nothing after
    a stop string."""
    seen(model, range(model.decoder.config.vocabulary))
    prompt = list(range(5, 40))
    free = model.generate(prompt, plan="plain", max_tokens=40, temperature=temperature, seed=4)
    stops = [free.text[at : at + size] for at in range(0, len(free.text), 5) for size in (1, 3)]
    limits = [{"max_tokens": most} for most in range(1, 40, 4)]
    cases = [*({"stop": [stop], "max_tokens": 40} for stop in stops), *limits]
    one_call = [model.generate(prompt, plan="plain", temperature=temperature, seed=4, **case) for case in cases]
    monkeypatch.setattr(passes.CpuPassWriter, "takes", lambda *given: False)
    for case, answer in zip(cases, one_call, strict=True):
        expected = model.generate(prompt, plan="plain", temperature=temperature, seed=4, **case)
        assert (answer.text, answer.tokens, answer.ended) == (expected.text, expected.tokens, expected.ended)


def test_no_thread_reads_rows_that_another_has_not_finished(tmp_path):
    """In a wide pass each thread computes rows of its own, and then all of them share the head. Here one has a quarter
    more rows than the other, and the products behind attention take long."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    folder = tiny_checkpoint(tmp_path / "model", "llama", layers=2, intermediate=4096, eos_ids=())
    model = hierspec.load(folder, backend="compiled", device="cpu", pack=None, weights="int8")
    torch.set_num_threads(before)
    scorer, reference = both(model, model.decoder.config.layers)
    request = model.request([5, 6, 7], "plain", Sampling())
    rng, vocabulary = random.Random(1), model.decoder.config.vocabulary
    calls = []
    answers, scorer.writer.answers = scorer.writer.answers, lambda *given: calls.append(given) or answers(*given)
    written = request.prompt
    for _ in range(40):
        proposal = Proposal.chain(np.array([rng.randrange(vocabulary) for _ in range(26)]))
        ask = Ask(scorer, written, proposal, request, 1, False, TierStats(""), leads=True)
        [answer], [expected] = scorer.score([ask]), reference.score([ask])
        written = np.append(written, rng.randrange(vocabulary)).astype(np.int32)
        assert np.array_equal(answer.picks, expected.picks)
        assert np.array_equal(answer.leads, expected.leads)
    assert len(calls) >= 39
    request.cancel()
    reference.release(request)
