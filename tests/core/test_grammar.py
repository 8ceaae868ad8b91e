"""A grammar as a request names it: validated at once, in one sentence."""

import pytest

from hierspec import HierspecError
from hierspec.core.grammar import Grammar
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.options import split
from hierspec.testing.fakes import FakeScorer

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("yaml", "", "kinds are"),
        ("json_object", "{}", "no text"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", DEEP, "nested too deeply"),
        ("regex", "", "is empty"),
        ("lark", "", "is empty"),
        ("regex", "a" * 1_000_001, "characters"),
        ("regex", "\ud800", "surrogate"),
        ("regex", 7, "must be a text"),
        ("choice", "{}", "list of at least one"),
        ("choice", "[]", "list of at least one"),
        ("choice", '["a", 1]', "list of at least one"),
        ("choice", '["a", ""]', "may not be empty"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(kind, text, reason):
    with pytest.raises(HierspecError, match=reason) as refused:
        Grammar(kind, text)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


def test_equal_grammars_are_one_key():
    assert len({Grammar("regex", "a"), Grammar("regex", "a"), Grammar("lark", "a")}) == 2
    assert Grammar.json_schema({"type": "null"}) == Grammar.json_schema('{"type": "null"}')


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        ({"json": True}, Grammar("json_object")),
        ({"json": False}, None),
        ({"json_schema": {"type": "null"}}, Grammar("json_schema", '{"type": "null"}')),
        ({"json_schema": True}, Grammar("json_schema", "true")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"regex": None, "choice": ["é"]}, Grammar("choice", '["é"]')),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"grammar": Grammar("json_object")}, Grammar("json_object")),
    ],
)
def test_options_by_name_become_a_grammar(options, grammar):
    changes, _ = split(options)
    assert Sampling(**changes).grammar == grammar


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json": True, "regex": "a"}, "json and regex"),
        ({"json": {"type": "null"}}, "json_schema"),
        ({"json_schema": {"a": {1, 2}}}, "what JSON has not"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": 3}, "list of texts"),
        ({"regex": 3}, "must be a text"),
        ({"regexp": "a"}, "did you mean 'regex'"),
    ],
)
def test_options_that_are_wrong_are_refused(options, reason):
    with pytest.raises(HierspecError, match=reason):
        split(options)


def test_a_request_never_ignores_its_grammar():
    with pytest.raises(HierspecError, match="constraint"):
        Request([1], Sampling(grammar=Grammar("regex", "a")), Hierarchy((Tier(FakeScorer()),)))
    with pytest.raises(HierspecError, match="a Grammar or None"):
        Sampling(grammar="a+")
