"""Picks and distributions on the device equal the one-row reference in core."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hierspec.backends.cpu import answers
from hierspec.backends.cpu.threads import ThreadTeam
from hierspec.backends.torch import pick
from hierspec.core import sampling as reference
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Ask
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import NO_TOKEN, Sampling
from hierspec.core.stats import TierStats

VOCABULARY = 96
LARGE = 49_152


class NoScorer:
    name = "none"

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self.vocabulary = vocabulary

    def score(self, asks):
        return []

    def release(self, request):
        pass


def ask_for(
    sampling: Sampling, prompt, written=(), tree=None, vocabulary=VOCABULARY, distributions=False, candidates=1
) -> Ask:
    scorer = NoScorer(vocabulary)
    request = Request(list(prompt), sampling, Hierarchy((Tier(scorer),)))
    context = np.array([*prompt, *written], np.int32)
    return Ask(scorer, context, tree or Proposal(), request, candidates, distributions, TierStats("x"))


def make_ask(rng: random.Random, sampling: Sampling, vocabulary=VOCABULARY, distributions=False, candidates=1) -> Ask:
    def tokens(count: int) -> list[int]:
        return rng.choices(range(vocabulary), k=count)

    nodes = rng.randrange(7)
    tree = Proposal(tuple(tokens(nodes)), tuple(rng.randrange(-1, node) for node in range(nodes)))
    return ask_for(
        sampling, tokens(rng.randrange(1, 30)), tokens(rng.randrange(20)), tree, vocabulary, distributions, candidates
    )


def expected_row(ask: Ask, logits: np.ndarray, row: int) -> np.ndarray:
    """The reference's adjusted logits of one row. [vocabulary] float64"""
    text = np.append(ask.context, ask.proposal.path(row - 1)).astype(np.int64)
    return reference.adjust(logits[row], text, len(ask.request.prompt), ask.request.sampling)


def expected_picks(ask: Ask, z: np.ndarray, row: int) -> list[int]:
    position = len(ask.context) + len(ask.proposal.path(row - 1))
    return reference.picks(z, ask.request.sampling, ask.request.seed, position, ask.candidates)


def is_on_the_edge(ask: Ask, logits: np.ndarray, row: int) -> bool:
    """Whether the last digit of a sum decides what top-p keeps."""
    sampling = ask.request.sampling
    if sampling.temperature == 0 or sampling.top_p == 1:
        return False
    options = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    wide = ask_for(Sampling(**{**options, "top_p": 1.0, "min_p": 0.0}), ask.request.prompt, vocabulary=logits.shape[1])
    z = expected_row(replace(ask, request=wide.request), logits, row)
    probabilities = np.sort(reference.softmax(z))[::-1]
    before = np.cumsum(probabilities) - probabilities
    return bool(np.abs(before - sampling.top_p).min() < 1e-9)


def random_sampling(rng: random.Random) -> Sampling:
    if rng.random() < 0.4:  # nothing but temperature
        return Sampling(temperature=rng.choice([0, 0.3, 1.0, 1.7]), seed=rng.randrange(1 << 40))
    return Sampling(
        temperature=rng.choice([0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 200]),
        top_p=rng.choice([1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, -0.2]),
        logit_bias=rng.choice([None, {3: 2.5, 11: -100.0}]),
        seed=rng.randrange(1 << 40),
    )


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("backend", [answers, pick], ids=["compiled", "torch"])
def test_picks_and_distributions_equal_the_reference(seed, backend):
    rng = random.Random(seed)
    ask = make_ask(rng, random_sampling(rng), distributions=bool(seed % 2), candidates=rng.choice([1, 3]))
    logits = torch.randn(1 + len(ask.proposal), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    answer = backend.answer(ask, logits)
    for row in range(len(logits)):
        z = expected_row(ask, logits.numpy(), row)
        if ask.distributions:
            assert np.abs(answer.distributions[row] - reference.distribution(z, ask.request.sampling)).max() < 1e-6
        else:
            possible = int(np.isfinite(z).sum())  # past these, runners-up have no probability and any order is right
            assert answer.picks[row].tolist()[:possible] == expected_picks(ask, z, row)[:possible]


# Penalties and logits that are sums of few powers of two, so that float32 and float64 adjust them to the same values
# and ties stay ties.
EXACT_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 0.25, 1.0, 1.5, 40.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 999]),
    top_p=st.sampled_from([1.0, 0.987, 0.7, 0.31, 0.02]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.6, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.75, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.sampled_from([None, {3: 2.5, 4: -np.inf}, {0: -np.inf, 1: 0.5, 2: -0.5}]),
    seed=st.integers(0, 1 << 50),
)


@given(EXACT_SAMPLINGS, st.sampled_from([5, 16, 37, 300, 1000]), st.integers(0, 1 << 30), st.data())
@settings(max_examples=300, deadline=None)
def test_compiled_answers_are_the_reference_s_where_many_logits_are_equal(sampling, vocabulary, seed, data):
    rng = random.Random(seed)
    ask = make_ask(rng, sampling, vocabulary, candidates=data.draw(st.sampled_from([1, 2, 5])))
    levels = data.draw(st.lists(st.integers(-60, 60), min_size=1, max_size=12))
    shape = (1 + len(ask.proposal), vocabulary)
    logits = np.random.default_rng(seed).choice(np.array(levels) / 4, shape).astype(np.float32)
    even = logits[:, ::2]
    even[even == 0] = -0.0  # the same number
    assume(not any(is_on_the_edge(ask, logits, row) for row in range(shape[0])))
    picks = answers.answer(ask, torch.from_numpy(logits)).picks
    distributions = answers.answer(replace(ask, distributions=True), torch.from_numpy(logits)).distributions
    for row in range(shape[0]):
        z = expected_row(ask, logits, row)
        distribution = reference.distribution(z, sampling)
        assert picks[row].tolist() == expected_picks(ask, z, row)
        assert np.array_equal(distributions[row] > 0, distribution > 0)
        assert np.abs(distributions[row] - distribution).max() < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 50},
        {"temperature": 0.8, "top_k": 20_000},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.2, "top_p": 0.9999},
        {"temperature": 1.0, "top_p": 0.05},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 300.0, "top_p": 0.5},
        {"temperature": 0.01, "top_p": 0.9},
        {
            "temperature": 0.9,
            "top_k": 400,
            "top_p": 0.97,
            "min_p": 1e-4,
            "frequency_penalty": 0.3,
            "logit_bias": {7: 4},
        },
    ],
)
def test_compiled_answers_are_the_reference_s_on_a_large_vocabulary(options):
    """From rows where one token leads by far to rows where all are nearly equal."""
    sampling = Sampling(seed=5, **options)
    rng = np.random.default_rng(3)
    spread = np.array([12, 5, 3.5, 1, 0.01])[:, None]
    logits = (rng.standard_normal((5, LARGE)) * spread).astype(np.float32)
    text, tree = rng.integers(0, LARGE, 700), Proposal((9, 9, 8, 7), (-1, 0, 0, -1))
    ask = ask_for(sampling, text[:500], text[500:], tree, LARGE, candidates=4)
    picks = answers.answer(ask, torch.from_numpy(logits)).picks
    distributions = answers.answer(replace(ask, distributions=True), torch.from_numpy(logits)).distributions
    for row in range(len(logits)):
        z = expected_row(ask, logits, row)
        assert picks[row].tolist() == expected_picks(ask, z, row)
        distribution = reference.distribution(z, sampling)
        assert np.array_equal(distributions[row] > 0, distribution > 0)
        assert np.abs(distributions[row] - distribution).max() < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 3.0])
def test_best_tokens_are_the_reference_s(temperature):
    """Also where one token leads by far, where all are equal, and where the best is the first or the last."""
    seed = 12
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, LARGE, generator=generator) * torch.linspace(0.01, 12, 40)[:, None]
    logits[3, 0], logits[4, -1], logits[5] = 90.0, 90.0, 1.0
    chain = Proposal((0,) * 39, tuple(range(-1, 38)))
    ask = ask_for(Sampling(temperature=temperature, seed=seed), [0], tree=chain, vocabulary=LARGE)
    picks = answers.answer(ask, logits).picks[:, 0]
    for row in range(40):
        assert [picks[row]] == expected_picks(ask, expected_row(ask, logits.numpy(), row), row)


def test_all_tokens_are_in_order_of_their_scores():
    """Also one whose noise is near the smallest there is."""
    vocabulary, prompt = 4096, [1, 2, 3]
    seed = next(s for s in range(1000) if reference.gumbel(s, len(prompt), vocabulary).min() < -2.6)
    ask = ask_for(Sampling(temperature=1.0, seed=seed), prompt, vocabulary=vocabulary, candidates=vocabulary)
    logits = np.random.default_rng(0).standard_normal((1, vocabulary)).astype(np.float32)
    picks = answers.answer(ask, torch.from_numpy(logits)).picks
    assert picks[0].tolist() == expected_picks(ask, expected_row(ask, logits, 0), 0)


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_depends_on_its_row_only(seed):
    """A row of a tree is answered as if alone after its text, and threads change nothing."""
    rng = random.Random(seed)
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.8, 1.1]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 9]),
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=rng.choice([0.0, 0.4]),
        logit_bias={3: 1.5},
        seed=seed,
    )
    ask = make_ask(rng, sampling, distributions=bool(seed % 2), candidates=2)
    logits = torch.randn(1 + len(ask.proposal), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    together, shared = answers.answer(ask, logits), answers.answer(ask, logits, ThreadTeam(3))
    for row in range(len(logits)):
        context = np.append(ask.context, ask.proposal.path(row - 1)).astype(np.int32)
        context.flags.writeable = False
        alone = answers.answer(replace(ask, context=context, proposal=Proposal()), logits[row : row + 1])
        for kind in ("picks", "distributions"):
            single, all_rows = getattr(alone, kind), getattr(together, kind)
            missing = kind == ("picks" if ask.distributions else "distributions")
            assert (single is None) == (all_rows is None) == missing
            if single is not None:
                assert np.array_equal(single[0], all_rows[row])
                assert np.array_equal(all_rows, getattr(shared, kind))


def test_tokens_outside_the_vocabulary_do_not_matter():
    sampling = Sampling(temperature=1.0, repetition_penalty=2.0, frequency_penalty=0.5, logit_bias={40: 9.0}, seed=3)
    ask = ask_for(sampling, [1, 2, 50, 2], [60, 5], Proposal((70,), (-1,)), candidates=32)
    logits = torch.randn(2, 32)
    picks = answers.answer(ask, logits).picks
    for row in range(2):
        without_bias = Sampling(**{**sampling.__dict__, "logit_bias": None})
        z = reference.adjust(logits[row].numpy(), np.array([1, 2, 2, 5]), 3, without_bias)
        assert picks[row].tolist() == reference.picks(z, without_bias, 3, 6 + row, 32)


def test_logits_are_not_changed():
    ask = make_ask(random.Random(1), Sampling(repetition_penalty=2.0, logit_bias={3: 1.5}, temperature=1.0, top_p=0.5))
    logits = torch.randn(1 + len(ask.proposal), VOCABULARY)
    before = logits.clone()
    answers.answer(ask, logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e300])
def test_any_temperature_gives_a_pick(temperature):
    ask = make_ask(random.Random(0), Sampling(temperature=temperature, top_p=0.9, min_p=0.1, seed=4))
    logits = torch.randn(1 + len(ask.proposal), VOCABULARY)
    picks = answers.answer(ask, logits).picks[:, 0]
    assert picks.tolist() == logits.argmax(dim=1).tolist() or temperature > 1
    assert ((picks >= 0) & (picks < VOCABULARY)).all()


def test_equal_logits_give_the_lowest_token():
    logits = torch.zeros(1, 64)
    logits[0, [37, 21, 53]] = 2.0
    picks = answers.answer(ask_for(Sampling(), [0], vocabulary=64), logits).picks
    assert picks[0] == 21


def test_noise_equals_the_reference():
    for seed, position in [(0, 0), (7, 1), (2**63, 12345), (-3, 9)]:
        ours = pick.gumbel(seed, position, 50_000, torch.device("cpu")).double().numpy()
        theirs = reference.gumbel(seed, position, 50_000)
        assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("answer", [answers.answer, pick.answer], ids=["compiled", "torch"])
def test_logits_that_are_not_numbers_give_no_token_and_harm_no_other_row(bad, options, answer):
    for distributions in (False, True):
        ask = replace(make_ask(random.Random(0), Sampling(**options)), distributions=distributions)
        logits = torch.randn(1 + len(ask.proposal), VOCABULARY, generator=torch.Generator().manual_seed(1))
        sound = answer(ask, logits)
        logits[-1, 5] = bad
        found = answer(ask, logits)
        if distributions:
            assert np.isnan(found.distributions[-1]).all()
            assert (found.distributions[:-1] == sound.distributions[:-1]).all()
        else:
            assert (found.picks[-1] == NO_TOKEN).all()
            assert (found.picks[:-1] == sound.picks[:-1]).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_is_an_impossible_token(temperature):
    ask = ask_for(Sampling(temperature=temperature, seed=1), [1], candidates=3)
    logits = torch.full((1, VOCABULARY), -float("inf"))
    logits[0, [70, 20]] = torch.tensor([5.0, 2.0])
    picks = answers.answer(ask, logits).picks
    assert sorted(picks[0, :2].tolist()) == [20, 70]
    assert picks[0, 2] == 0


@pytest.mark.parametrize("answer", [answers.answer, pick.answer], ids=["compiled", "torch"])
def test_a_row_without_a_possible_token_gives_none(answer):
    ask = ask_for(Sampling(logit_bias={5: -np.inf}), [1])
    logits = torch.full((1, VOCABULARY), -np.inf)
    logits[0, 5] = 2.0
    assert answer(ask, logits).picks.tolist() == [[NO_TOKEN]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("backend", [answers, pick], ids=["compiled", "torch"])
def test_a_lead_is_that_of_the_best_over_the_second(seed, backend):
    rng = random.Random(seed)
    sampling = Sampling(temperature=rng.choice([0, 0.7]), seed=seed)
    ask = make_ask(rng, sampling, candidates=rng.choice([1, 3]))
    logits = torch.randn(1 + len(ask.proposal), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    without, answer = backend.answer(ask, logits), backend.answer(replace(ask, leads=True), logits)
    assert without.leads is None
    assert np.array_equal(answer.picks[:, : ask.candidates], without.picks)
    scores = pick.perturbed(logits, ask).sort(dim=1, descending=True).values
    assert np.allclose(answer.leads, (scores[:, 0] - scores[:, 1]).numpy(), atol=1e-3)
