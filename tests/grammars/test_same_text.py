"""Under a grammar every hierarchy writes what plain decoding writes: with fakes, whose drafts may be of any kind."""

import json

import numpy as np
import pytest
from grammar_tokenizers import byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.grammar import Grammar
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.proposal import Proposal
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.grammars.compiler import GrammarCompiler
from hierspec.pacing.appraisal import Appraiser
from hierspec.pacing.costs import Costs
from hierspec.pacing.pace import AdaptivePace
from hierspec.testing.fakes import FakeScorer, FakeStore, markov_logits, random_trees

TOKENIZER = byte_level()
VOCABULARY = TOKENIZER.vocabulary_size
COMPILER = GrammarCompiler(TOKENIZER, VOCABULARY)
PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": -3, "maximum": 120},
        "größe": {"enum": ["日本", "日", "🎉", "é"]},
        "kind": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": 12}, "maxItems": 2}]},
    },
    "required": ["name", "age", "größe", "kind"],
    "additionalProperties": False,
}


def scorer(name, noise=0.0, seed=0):
    return FakeScorer(name, VOCABULARY, markov_logits(VOCABULARY, seed, noise=noise, sharpness=3.0))


def request(hierarchy, sampling):
    grammar = sampling.grammar
    constraint = None if grammar is None else COMPILER.constraint(grammar, TOKENIZER.stop_ids, sampling.stop_ids)
    return Request(PROMPT, sampling, hierarchy, TOKENIZER.stop_ids, constraint=constraint)


def write(hierarchy, sampling):
    written = request(hierarchy, sampling)
    for _ in Engine().run([written]):
        pass
    if written.error:
        raise written.error
    return written


def sampled(grammar, temperature=0.8, seed=3, **fields):
    return Sampling(max_tokens=120, temperature=temperature, seed=seed, grammar=grammar, **fields)


def plain(target):
    return Hierarchy((Tier(target),))


def text_of(written):
    return TOKENIZER.decode(written.output)


def hierarchies(target, rule="coupled"):
    """Stores whose trees ignore the grammar, drafters that know little, tiers above tiers, and a pace that chooses."""
    trees = FakeStore("trees", random_trees(VOCABULARY, 1, silence=0.1), fresh=True)
    pace = AdaptivePace(appraiser=Appraiser(Costs((1, 32), (1.0, 2.0))))
    drafter = Tier(scorer("drafter", 0.5), gather=4, candidates=3)
    middle = Tier(scorer("middle", 0.3), gather=3, budget=5, stores=(trees,), merge=True)
    return {
        "store": Hierarchy((Tier(target, stores=(trees,), budget=9),), rule),
        "drafter": Hierarchy((Tier(target, budget=12), drafter), rule),
        "both": Hierarchy((Tier(target, stores=(trees,), budget=16, merge=True), drafter), rule),
        "three": Hierarchy((Tier(target, budget=9), middle, drafter), rule),
        "paced": Hierarchy((Tier(target, stores=(trees,), budget=16, merge=True, pace=pace), drafter), rule),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["store", "drafter", "both", "three", "paced"])
def test_every_hierarchy_writes_what_plain_writes(name, temperature):
    target = scorer("target")
    for seed in range(4):
        sampling = sampled(Grammar.json_schema(SCHEMA), temperature, seed)
        expected, drafted = write(plain(target), sampling), write(hierarchies(target)[name], sampling)
        assert drafted.output == expected.output
        assert drafted.ended == "stop"
        validate(json.loads(text_of(drafted)), SCHEMA)
        assert "grammar" in drafted.sources
        assert set(expected.sources) == {"target"}


def test_forced_tokens_take_fewer_passes_and_are_all_accepted():
    target = scorer("target")
    silent = FakeStore("silent", lambda context, budget: Proposal())
    hierarchy = Hierarchy((Tier(target, stores=(silent,)),))
    written = write(hierarchy, sampled(Grammar.json_schema(SCHEMA)))
    stats = written.stats.tiers[0]
    assert stats.proposed["grammar"] == stats.accepted["grammar"] > 10
    assert stats.calls < len(written.output) / 2


leaf = st.sampled_from(
    [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer", "minimum": -5, "maximum": 17},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 2},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[ab]{1,3}é?$"},
        {"enum": ["name", "é", 12, None]},
        {"const": {"ab": [1]}},
    ]
)


def objects(inner):
    keys = st.lists(st.sampled_from(["name", "age", "ab", "é", '"', "日本"]), min_size=1, max_size=3, unique=True)
    properties = keys.flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(names, inner)))
    return properties.map(
        lambda each: {"type": "object", "properties": each, "required": list(each), "additionalProperties": False}
    )


schemas = st.recursive(
    leaf,
    lambda inner: (
        objects(inner)
        | inner.map(lambda each: {"type": "array", "items": each, "minItems": 1, "maxItems": 2})
        | st.lists(inner, min_size=2, max_size=2).map(lambda each: {"anyOf": each})
    ),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(schema=schemas, seed=st.integers(0, 99), name=st.sampled_from(["store", "both", "three", "paced"]))
def test_any_schema_is_kept_to_and_gives_the_text_of_plain(schema, seed, name):
    target = scorer("target", seed=seed)
    sampling = sampled(Grammar.json_schema(schema), seed=seed, top_k=50)
    expected, drafted = write(plain(target), sampling), write(hierarchies(target)[name], sampling)
    assert drafted.output == expected.output
    if drafted.ended == "stop":
        validate(json.loads(text_of(drafted)), schema)


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_rules_by_distribution_keep_to_the_grammar(rule):
    target = scorer("target")
    for seed in range(3):
        for hierarchy in hierarchies(target, rule).values():
            written = write(hierarchy, sampled(Grammar.json_schema(SCHEMA), seed=seed))
            validate(json.loads(text_of(written)), SCHEMA)


@pytest.mark.parametrize("rule", ["residual", "block"])
def test_the_distribution_under_a_grammar_is_that_of_masked_logits(rule):
    """Of a text of one token out of five, by frequency: far more often wrong than right would be seen."""
    target, counts = scorer("target"), dict.fromkeys(["a", "ab", "b", "ba", "c"], 0)
    grammar, draws = Grammar.choice(list(counts)), 300
    hierarchy = hierarchies(target, rule)["both"]
    reference = dict(counts)
    for seed in range(draws):
        counts[text_of(write(hierarchy, sampled(grammar, 1.0, seed)))] += 1
        reference[text_of(write(plain(target), sampled(grammar, 1.0, seed + draws)))] += 1
    spread = sum((counts[text] - reference[text]) ** 2 / max(counts[text] + reference[text], 1) for text in counts)
    assert spread < 25  # chi-squared with four degrees of freedom: beyond this once in twenty thousand


def test_a_batch_of_constrained_and_other_requests_writes_what_each_writes_alone():
    target = scorer("target")
    hierarchy = hierarchies(target)["both"]
    grammars = [Grammar.json_schema(SCHEMA), None, Grammar("regex", "(ab|é){1,9}"), None, Grammar("json_object")]
    samplings = [sampled(grammar, seed=seed, stop_ids=()) for seed, grammar in enumerate(grammars)]
    alone = [write(plain(target), sampling).output for sampling in samplings]
    together = [request(hierarchy, sampling) for sampling in samplings]
    for _ in Engine().run(together):
        pass
    assert [each.output for each in together] == alone
    assert max(target.packed) > 2


def test_drafts_across_the_end_and_stop_tokens_in_their_middle_change_nothing():
    target, stop = scorer("target"), 0
    expected = write(plain(target), sampled(Grammar.json_schema(SCHEMA)))
    beyond = [*expected.output[:-1], stop, *expected.output, stop, *expected.output]

    def draft(context, budget):
        place = len(context) - len(PROMPT)
        return Proposal.chain(beyond[place : place + budget])

    def early(context, budget):
        place = len(context) - len(PROMPT)
        return Proposal.chain([*beyond[place : place + 2], stop, *beyond[place + 2 : place + budget]])

    for script in (draft, early):
        hierarchy = Hierarchy((Tier(target, stores=(FakeStore("script", script),), budget=40),))
        written = write(hierarchy, sampled(Grammar.json_schema(SCHEMA)))
        assert written.output == expected.output
        assert written.ended == "stop"


def test_an_answer_that_is_cut_is_the_beginning_of_the_whole_one():
    target = scorer("target")
    whole = write(plain(target), sampled(Grammar.json_schema(SCHEMA)))
    for most in (1, 2, 7):
        sampling = Sampling(max_tokens=most, temperature=0.8, seed=3, grammar=Grammar.json_schema(SCHEMA))
        for hierarchy in (plain(target), *hierarchies(target).values()):
            cut = write(hierarchy, sampling)
            assert (cut.output, cut.ended) == (whole.output[:most], "length")


def test_logprobs_stay_those_of_the_raw_logits():
    target = scorer("target")
    written = request(hierarchies(target)["both"], sampled(Grammar.json_schema(SCHEMA), logprobs=1))
    entries = [entry for _, step in Engine().run([written]) for entry in step.logprobs]
    assert len(entries) == len(written.output)
    text = list(PROMPT)
    for token, entry in zip(written.output, entries, strict=True):
        logits = target.logits(np.array(text, np.int32))
        assert entry.logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()))
        text.append(token)


@pytest.mark.parametrize("name", ["plain", "both", "three"])
def test_where_no_token_is_allowed_the_request_fails_with_a_sentence(name):
    target = scorer("target")
    hierarchy = {"plain": plain(target), **hierarchies(target)}[name]
    bias = {token: -np.inf for token in range(VOCABULARY) if b"b" in TOKENIZER.piece(token)}
    with pytest.raises(HierspecError, match="The grammar allows no token at position"):
        write(hierarchy, sampled(Grammar("regex", "a?b"), logit_bias=bias))


def test_a_drafter_that_scores_nothing_that_is_allowed_ends_its_draft():
    target = scorer("target")
    few = FakeScorer("few", VOCABULARY, lambda text: np.where(np.arange(VOCABULARY) < 9, 0.0, -np.inf))
    hierarchy = Hierarchy((Tier(target), Tier(few, gather=4)))
    sampling = sampled(Grammar("regex", "[b-y]{9}"))
    assert write(hierarchy, sampling).output == write(plain(target), sampling).output
