"""The default model gives the same answers under every plan, in a batch, and in transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import hierspec
from hierspec import Chat, Plan, Sampling, TierPlan
from hierspec.core.plan import NAMED
from hierspec.equality import first_difference
from hierspec.stores import Home, open_store
from hierspec.stores.corpus_build import build_corpus
from hierspec.stores.frequent import build_frequent
from hierspec_bench.peers import open_peer

pytestmark = pytest.mark.model

PROMPTS = [
    "Repeat this list in reverse order: apple, pear, plum, cherry, peach, apple, pear, plum, cherry, peach.",
    "Translate into French: The old bridge was closed for repairs in the spring.",
    "What is 17 plus 25? Explain each step.",
    "Name three rivers in Europe and the countries they run through.",
]
MIXTURE = Plan(stores=("context",), merge=True, tiers=(TierPlan(exit_layer=12, gather=3, stores=("context",)),))


@pytest.fixture(scope="module", params=[0.0, 0.8], ids=["greedy", "sampled"])
def plain(request, default_model):
    sampling = Sampling(max_tokens=24, temperature=request.param, seed=11)
    return sampling, [default_model.generate(prompt, plan="plain", sampling=sampling) for prompt in PROMPTS]


def assert_same(model, prompt, sampling, expected, tokens):
    """Ties are allowed only where passes round differently: in decoders whose bits depend on the batch."""
    difference = first_difference(model, model.encode(prompt), expected, tokens, sampling, sampling.seed)
    assert difference is None or (difference.is_tie and not model.decoder.backend.exact), difference


@pytest.fixture(scope="module")
def with_stores(default_model, tmp_path_factory):
    """The default model with a corpus and frequent n-grams, made from what it writes itself: so they draft well."""
    model, home = default_model.apart(), Home(tmp_path_factory.mktemp("stores"), default_model.home.vocabulary_hash)
    answers = [model.generate(prompt, plan="plain", max_tokens=24) for prompt in PROMPTS]
    written = home.folder / "answers.txt"
    written.write_text("\n\n".join(answer.text for answer in answers))
    build_corpus(home.corpus, [written], model.tokenizer.encode_batch, model.config.vocabulary, home.vocabulary_hash)
    build_frequent(home.frequent, [np.array(answer.tokens) for answer in answers], home.vocabulary_hash)
    for name in ("frequent", "corpus", "pairs"):
        model.add_store(open_store(name, home))
    return model


@pytest.mark.parametrize("plan", [*NAMED, MIXTURE], ids=lambda plan: str(plan)[:12])
def test_every_plan_writes_what_plain_writes(with_stores, plain, plan):
    """A rule by distributions keeps, under a temperature, the distribution alone: test_default_distributions.py."""
    sampling, answers = plain
    if with_stores.plan(plan).rule != "coupled":
        sampling = replace(sampling, temperature=0.0)
        answers = [with_stores.generate(prompt, plan="plain", sampling=sampling) for prompt in PROMPTS]
    # Each has prompts of its own, two where passes are narrow: wide ones take as long as many.
    first, wide = [*NAMED, MIXTURE].index(plan), plan in ("lookahead", "rest", "hd")
    for number in (first % 4,) if wide else (first % 4, (first + 1) % 4):
        tokens = 10 if wide else 24
        drafted = with_stores.generate(PROMPTS[number], plan=plan, sampling=replace(sampling, max_tokens=tokens))
        assert_same(with_stores, PROMPTS[number], sampling, answers[number].tokens[:tokens], drafted.tokens)


def test_a_batch_writes_what_each_writes_alone(default_model, plain):
    sampling, answers = plain
    batch = default_model.generate_many(PROMPTS, plan="lookup", sampling=sampling)
    for prompt, answer, batched in zip(PROMPTS, answers, batch, strict=True):
        assert_same(default_model, prompt, sampling, answer.tokens, batched.tokens)


def test_greedy_text_equals_that_of_transformers():
    model = hierspec.load(weights="float32")  # as transformers computes
    peer = open_peer("transformers", model.folder, "float32", "cpu", model.stop_ids)
    sampling = Sampling(max_tokens=24, seed=0)
    for prompt in PROMPTS:
        answer = model.generate(prompt, plan="plain", sampling=sampling)
        expected = peer.generate(model.encode(prompt), sampling)[0]
        difference = first_difference(model, model.encode(prompt), answer.tokens, expected, sampling, 0)
        assert difference is None or difference.is_tie, difference


def test_a_chat_turn_reuses_the_prefix_cache(default_model):
    # Plain decoding, so that what is computed does not depend on how many drafts are worth it on this machine.
    chat = Chat(default_model, plan="plain", max_tokens=16)
    for _ in chat.say("My cat is called Oscar. Say hello to him."):
        pass
    before = default_model.decoder.layer_rows
    for _ in chat.say("What is my cat called?"):
        pass
    assert chat.last is not None
    computed = (default_model.decoder.layer_rows - before) / default_model.config.layers
    assert computed < chat.last.prompt_tokens + len(chat.last.tokens) - 40
    assert "Oscar" in chat.last.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")
def test_plans_agree_on_a_gpu():
    import hierspec

    model = hierspec.load(device="cuda", dtype="float32")
    sampling = Sampling(max_tokens=24, temperature=0.8, seed=3)
    for prompt in PROMPTS:
        answer = model.generate(prompt, plan="plain", sampling=sampling)
        for plan in ("lookup", "layerskip"):
            drafted = model.generate(prompt, plan=plan, sampling=sampling)
            assert_same(model, prompt, sampling, answer.tokens, drafted.tokens)
