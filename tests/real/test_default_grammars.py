"""The default model under grammars: every plan writes what plain writes, and it is valid."""

import json

import pytest
from jsonschema import validate

from hierspec import Grammar, Sampling

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "stadt": {"enum": ["Köln", "東京", "São Paulo"]},
        "likes": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{3,8}$"},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["name", "age", "stadt", "likes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_plan_writes_what_plain_writes_under_a_grammar(default_model, temperature):
    sampling = Sampling(max_tokens=90, temperature=temperature, seed=7, grammar=Grammar.json_schema(PERSON))
    prompt = "Describe a person from Tokyo as JSON."
    plain = default_model.generate(prompt, plan="plain", sampling=sampling)
    assert plain.ended == "stop"
    validate(json.loads(plain.text), PERSON)
    for plan in ("auto", "lookup", "layerskip", "eagle", "hsd", "hd"):
        drafted = default_model.generate(prompt, plan=plan, sampling=sampling)
        assert drafted.tokens == plain.tokens, plan
        assert drafted.stats.tiers[0].calls < len(plain.tokens)
        assert "grammar" in drafted.sources


def test_a_batch_with_and_without_grammars(default_model):
    grammars = [Grammar.json_schema(PERSON), None, Grammar.choice(["yes", "no"]), Grammar("regex", "[0-9]{2,4} km")]
    samplings = [Sampling(max_tokens=40, temperature=0.8, seed=3, grammar=grammar) for grammar in grammars]
    prompts = ["Describe a person.", "Name a river.", "Is fire cold?", "How far is it?"]
    alone = [
        default_model.generate(prompt, plan="plain", sampling=sampling).tokens
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    together = default_model.generate_many(prompts, plan="eagle", sampling=samplings)
    assert [each.tokens for each in together] == alone
