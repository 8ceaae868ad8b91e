"""Grammars on a tiny model: every named plan, through the Python API, in batches, in a chat and on an event loop."""

import asyncio
import json
import re

import pytest
from jsonschema import validate

import hierspec
from hierspec import AsyncLanguageModel, Chat, Grammar, HierspecError, Plan, Sampling, TierPlan
from hierspec.core.plan import NAMED
from hierspec.testing.checkpoints import tiny_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "größe": {"enum": ["日本", "日", "🎉"]},
        "n": {"type": "integer", "minimum": 5, "maximum": 30},
    },
    "required": ["name", "größe", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierspec.load(
        tiny_checkpoint(tmp_path_factory.mktemp("tiny")), backend="torch", stores=tmp_path_factory.mktemp("s")
    )


def plans(model):
    for name in ("auto", *NAMED):
        try:
            model.hierarchy(model.plan(name))
        except HierspecError:
            continue  # it needs what this model has not
        yield name


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_plan_writes_what_plain_writes(model, temperature):
    sampling = Sampling(max_tokens=90, temperature=temperature, seed=5, grammar=Grammar.json_schema(SCHEMA))
    expected = model.generate("Who?", plan="plain", sampling=sampling)
    validate(json.loads(expected.text), SCHEMA)
    tried = list(plans(model))
    assert len(tried) > 6
    for name in tried:
        assert model.generate("Who?", plan=name, sampling=sampling).tokens == expected.tokens, name


@pytest.mark.parametrize("rule", ["coupled", "residual", "block"])
def test_exits_and_candidates_keep_to_the_grammar(model, rule):
    plan = Plan(stores=("context",), rule=rule, merge=True, tiers=(TierPlan(exit_layer=2, gather=4, candidates=2),))
    answer = model.generate("Who?", plan=plan, json_schema=SCHEMA, temperature=0.8, seed=2, max_tokens=90)
    validate(json.loads(answer.text), SCHEMA)


def test_every_option_by_name(model):
    assert model.generate("?", choice=["yes", "né"]).text in ("yes", "né")
    assert re.fullmatch("[a-c]{3}é", model.generate("?", regex="[a-c]{3}é").text)
    lark = 'start: "a" number\nnumber: /[0-9]/ | "(" number ")"'
    assert re.fullmatch(r"a\(*[0-9]\)*", model.generate("?", grammar=lark, temperature=1.0, seed=1).text)
    cut = model.generate("?", json=True, max_tokens=20)
    assert cut.text.startswith("{")


def test_batches_that_mix_grammars_and_none(model):
    grammars = [Grammar.json_schema(SCHEMA), None, Grammar("regex", "(ab){2,9}"), None, Grammar.choice(["x", "xyz"])]
    samplings = [
        Sampling(max_tokens=60, temperature=0.8, seed=seed, grammar=each) for seed, each in enumerate(grammars)
    ]
    prompts = [f"Question {number}?" for number in range(len(grammars))]
    alone = [
        model.generate(prompt, plan="plain", sampling=sampling).tokens
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    together = model.generate_many(prompts, plan="layerskip", sampling=samplings)
    assert [each.tokens for each in together] == alone


def test_logprobs_under_a_grammar_are_those_of_plain(model):
    options = {"json_schema": SCHEMA, "logprobs": 2, "max_tokens": 30}
    plain, drafted = (model.generate("Who?", plan=plan, **options) for plan in ("plain", "layerskip"))
    assert [entry.token for entry in drafted.logprobs] == list(plain.tokens)
    for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert any(entry.token not in dict(entry.top) for entry in plain.logprobs)  # the mask is not in them


def test_a_grammar_that_cannot_be_used_fails_alone(model):
    with pytest.raises(HierspecError, match="regex grammar cannot be used"):
        model.generate("?", regex="(")
    bad, good = Sampling(grammar=Grammar("regex", "(")), Sampling(grammar=Grammar("regex", "a"))
    first, second = model.generate_many(["?", "?"], sampling=[bad, good], errors="return")
    assert isinstance(first.error, HierspecError)
    assert second.text == "a"


def test_a_chat_answers_within_a_grammar(model):
    chat = Chat(model, choice=["yes", "no"])
    for question in ("Well?", "Sure?"):
        assert "".join(step.text for step in chat.say(question)) in ("yes", "no")


def test_a_cut_answer_within_a_grammar_does_not_begin_it_anew(model):
    chat = Chat(model, choice=["yes", "nono"], max_tokens=1)
    list(chat.say("Well?"))
    with pytest.raises(HierspecError, match="more max_tokens"):
        chat.go_on()


def test_an_event_loop_answers_within_grammars(model):
    async def answers():
        async with AsyncLanguageModel(model) as shared:
            return await asyncio.gather(
                shared.generate("Who?", json_schema=SCHEMA, max_tokens=90, seed=1),
                shared.generate("Well?", choice=["yes", "no"]),
                shared.generate("Well?", max_tokens=9),
            )

    structured, chosen, free = asyncio.run(answers())
    assert structured.tokens == model.generate("Who?", plan="plain", json_schema=SCHEMA, max_tokens=90, seed=1).tokens
    assert chosen.text in ("yes", "no")
    assert free.tokens == model.generate("Well?", plan="plain", max_tokens=9).tokens


def test_without_a_grammar_nothing_is_loaded_for_one(tmp_path):
    fresh = hierspec.load(tiny_checkpoint(tmp_path), backend="torch")
    fresh.generate("Who?", max_tokens=4)
    assert not {"_llguidance", "_bytes"} & vars(fresh.grammars).keys()
