"""Any mixture of tiers on real (tiny) models writes what plain decoding writes; caches and batches change nothing."""

import json
import random
from dataclasses import replace

import pytest

import hierspec
from hierspec import Chat, HierspecError, Plan, Sampling, TierPlan
from hierspec.core.engine import Engine
from hierspec.equality import first_difference
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeStore


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    # The drafts share the target's seed, so their first weights agree and some guesses stand.
    tiny_checkpoint(root / "target", "llama", layers=6)
    tiny_checkpoint(root / "draft", "qwen3", layers=2, seed=1)
    tiny_checkpoint(root / "foreign", "llama", vocabulary=400)
    swapped = tiny_checkpoint(root / "swapped", "llama") / "tokenizer.json"  # as many tokens, two of them exchanged
    described = json.loads(swapped.read_text())
    words = described["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    swapped.write_text(json.dumps(described))
    return root


@pytest.fixture(scope="module", params=["compiled", "torch"])
def model(request, folders):
    return hierspec.load(folders / "target", backend=request.param)


def random_plan(rng: random.Random, draft: str) -> Plan:
    def stores() -> tuple[str, ...]:
        return rng.choice([(), ("context",)])

    tiers = tuple(
        TierPlan(
            **rng.choice([{"exit_layer": rng.randrange(1, 6)}, {"draft": draft}, {"skip_layers": (1, 3, 4)}]),
            gather=rng.randrange(1, 6),
            until=rng.choice(["count", "correction"]),
            stores=stores(),
            budget=rng.randrange(1, 12),
            merge=rng.random() < 0.5,
            candidates=rng.choice([1, 1, 2, 3]),
        )
        for _ in range(rng.randrange(4))
    )
    return Plan(stores=stores(), budget=rng.randrange(1, 16), merge=rng.random() < 0.5, tiers=tiers)


def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        max_tokens=rng.randrange(1, 40),
        temperature=rng.choice([0, 0, 0.7, 1.0]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.randrange(1000),
    )


def random_prompt(rng: random.Random) -> str:
    words = ["ab", "abc", "the ", "dog ", "cat ", "ran ", "é", "12", "\n"]
    return "".join(rng.choices(words, k=rng.randrange(1, 20)))


def assert_same(model, prompt, sampling, one, other):
    """Equal; a tie counts only where the decoder's bits depend on the width of a pass."""
    difference = first_difference(model, model.encode(prompt), one.tokens, other.tokens, sampling, sampling.seed)
    exact = model.decoder.backend.exact
    assert difference is None or (not exact and difference.gap < 1e-4), difference


@pytest.mark.parametrize("seed", range(40))
def test_any_plan_writes_what_plain_writes(model, folders, seed):
    rng = random.Random(seed)
    plan, sampling, prompt = random_plan(rng, str(folders / "draft")), random_sampling(rng), random_prompt(rng)
    plain = model.generate(prompt, plan="plain", sampling=sampling)
    fast = model.generate(prompt, plan=plan, sampling=sampling)
    assert_same(model, prompt, sampling, plain, fast)
    assert plain.stats.passes == len(plain.tokens)
    assert fast.stats.tiers[0].written == len(fast.tokens)


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_equals_each_alone_and_forgetting_changes_nothing(model, folders, seed):
    """Mixed requests in packed passes (four on the slow path, else eight), with every cache dropped at random between
    passes."""
    rng, count = random.Random(100 + seed), 8 if model.decoder.backend.exact else 4
    cases = [(random_prompt(rng), random_plan(rng, str(folders / "draft")), random_sampling(rng)) for _ in range(count)]
    alone = [model.generate(prompt, plan=plan, sampling=sampling) for prompt, plan, sampling in cases]
    requests = [model.request(prompt, plan, sampling) for prompt, plan, sampling in cases]
    for _ in Engine().run(requests):
        if rng.random() < 0.2:
            model.forget()
    for request, expected, (prompt, _, sampling) in zip(requests, alone, cases, strict=True):
        assert_same(model, prompt, sampling, expected, replace(expected, tokens=tuple(request.output)))


def test_a_small_budget_for_keys_and_values_changes_only_time(folders):
    tight = hierspec.load(folders / "target", kv_memory=400_000)
    roomy = hierspec.load(folders / "target")
    prompts = [f"{'word ' * n}and so on" for n in range(1, 7)]
    expected = roomy.generate_many(prompts, max_tokens=30, plan="hispec")
    # One at a time, all six open: each takes the memory that another one had.
    requests = [tight.request(prompt, tight.plan("hispec"), Sampling(max_tokens=30)) for prompt in prompts]
    engines = [Engine() for _ in requests]
    for engine, request in zip(engines, requests, strict=True):
        engine.submit(request)
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.step()
    assert tight.assembler.catalogue.pool.bytes_held() <= 400_000
    for prompt, request, one in zip(prompts, requests, expected, strict=True):
        assert_same(roomy, prompt, request.sampling, one, replace(one, tokens=tuple(request.output)))


def test_residual_rule_runs_on_real_models_with_every_kind_of_tier(model, folders):
    plan = Plan(
        rule="residual",
        stores=("context",),
        merge=True,
        tiers=(TierPlan(exit_layer=5, gather=3, candidates=2), TierPlan(draft=str(folders / "draft"), gather=2)),
    )
    greedy = model.generate("abc abc", plan=plan, max_tokens=30)
    plain = model.generate("abc abc", plan="plain", max_tokens=30)
    assert_same(model, "abc abc", Sampling(seed=0), plain, greedy)  # at temperature 0 there is only one law
    sampled = [model.generate("abc abc", plan=plan, max_tokens=30, temperature=1.0, seed=s).tokens for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_streams_hand_out_the_whole_text_and_who_guessed_it(model):
    stream = model.stream("abab abab abab", max_tokens=50)
    steps = list(stream)
    whole = stream.generation
    assert "".join(step.text for step in steps) == whole.text == "".join(piece.text for piece in whole.pieces)
    assert {piece.source for piece in whole.pieces} <= {"target", "context", "history"}
    assert sum(len(step.tokens) for step in steps) == len(whole.tokens) == 50
    assert len(steps) == whole.stats.passes


def test_leaving_a_stream_cancels_it(model):
    left, cancelled = model.stream("abc", max_tokens=50), model.stream("abc", max_tokens=50)
    for _ in left:
        break
    for _ in cancelled:
        cancelled.cancel()
    for stream in (left, cancelled):
        assert stream.generation.ended == "cancelled"
        assert 0 < len(stream.generation.tokens) < 50
        assert list(stream) == []


def test_stop_strings_end_the_text_the_same_way_under_every_plan(model):
    whole = model.generate("abc", max_tokens=60, plan="plain").text
    for place in (5, 11, 20):
        stop = whole[place : place + 3]
        for plan in ("plain", "lookup", "hispec"):
            found = model.generate("abc", max_tokens=60, plan=plan, stop=stop)
            assert found.text == whole[: whole.index(stop)]
            assert found.ended == "stop"


def test_stop_ids_end_the_text(model):
    whole = model.generate("abc", max_tokens=40, plan="plain").tokens
    stop = whole[17]
    for plan in ("plain", "lookup", "hispec"):
        found = model.generate("abc", max_tokens=40, plan=plan, stop_ids=stop)
        assert found.tokens == whole[: whole.index(stop) + 1]
        assert found.ended == "stop"


def test_a_chat_does_not_compute_earlier_turns_again(model):
    chat = Chat(model, plan="lookup", max_tokens=20)
    model.forget()
    for _ in chat.say("tell me " * 10):
        pass
    before = model.decoder.layer_rows
    for _ in chat.say("more"):
        pass
    assert chat.last is not None
    computed = (model.decoder.layer_rows - before) / model.config.layers
    assert chat.last.prompt_tokens > 100
    assert computed < 100  # the new turn and its answer only
    model.forget()
    again = model.generate(chat._written[1][: chat.last.prompt_tokens], max_tokens=20)
    assert again.tokens == chat.last.tokens


def test_a_turn_that_fails_or_stops_leaves_a_sound_chat(model):
    chat = Chat(model, max_tokens=8)
    for _ in chat.say("one"):
        pass
    with pytest.raises(HierspecError, match="shorten the prompt"):
        list(chat.say("x" * 600))
    assert len(chat.messages) == 2
    chat.sampling = replace(chat.sampling, stop=(model.generate("two", max_tokens=8).text[2:4],))
    for _ in chat.say("two"):
        pass
    assert chat.last is not None
    assert chat.messages[-1]["content"] == chat.last.text
    for _ in chat.say("three"):
        pass
    assert len(chat.messages) == 6


def test_draft_passes_of_several_requests_are_packed(model, folders):
    plan = Plan(tiers=(TierPlan(draft=str(folders / "draft"), gather=2),))
    assert model.hierarchy(plan).tiers[1].scorer is model.hierarchy(plan).tiers[1].scorer


def test_a_store_that_drafts_impossible_tokens_is_named(model):
    model.add_store(FakeStore("wild", lambda context, budget: hierspec.Proposal.chain([400])))
    with pytest.raises(HierspecError, match="'wild' drafted a token id outside"):
        model.generate("x", plan=Plan(stores=("wild",)))


def test_a_chat_reads_the_same_conversation_as_the_template(model):
    chat = Chat(model, "Be brief.", max_tokens=8)
    for text in ("one", "two", "three"):
        for _ in chat.say(text):
            pass
    rendered = model.tokenizer.render_chat(chat.messages, add_generation_prompt=False)
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]
    assert "three" in rendered


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda m, f: m.generate("x", plan="lokup"), "did you mean 'lookup'"),
        (lambda m, f: m.generate("x", temprature=1), "did you mean 'temperature'"),
        (lambda m, f: m.generate("x", temperature=-1), "temperature must be"),
        (lambda m, f: m.generate("x" * 600), "shorten the prompt"),
        (lambda m, f: m.generate([]), "prompt is empty"),
        (lambda m, f: m.generate([5000]), "outside the model's vocabulary"),
        (lambda m, f: m.generate("x", plan=Plan(tiers=(TierPlan(exit_layer=7),))), "6 layers"),
        (lambda m, f: m.generate("x", plan=Plan(stores=("contxt",))), "did you mean 'context'"),
        (lambda m, f: m.generate("x", plan=Plan(tiers=(TierPlan(draft=str(f / "foreign")),))), "another vocabulary"),
        (lambda m, f: m.generate("x", plan=Plan(tiers=(TierPlan(draft=str(f / "swapped")),))), "another vocabulary"),
        (lambda m, f: m.generate("x", logit_bias={9999: 1.0}), "outside the model's vocabulary"),
        (lambda m, f: hierspec.load(f / "nothing"), "no model at"),
        (lambda m, f: hierspec.load(f / "target", dtype="int3"), "Unknown dtype"),
    ],
)
def test_bad_input_is_told_in_one_sentence(model, folders, call, told):
    with pytest.raises(HierspecError, match=told) as error:
        call(model, folders)
    assert "\n" not in str(error.value)
