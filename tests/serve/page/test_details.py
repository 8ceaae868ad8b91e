"""What the page is told about a pass, under every plan: pieces join to the text, and every draft is accounted for."""

from __future__ import annotations

import pytest

import hierspec
from hierspec.core.proposal import Proposal
from hierspec.generation import Piece, TextStep
from hierspec.serve.page.details import details
from hierspec.testing.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> hierspec.LanguageModel:
    folder = tmp_path_factory.mktemp("details")
    return hierspec.load(tiny_checkpoint(folder / "tiny"), stores=folder / "stores", keep_learnt=False)


@pytest.mark.parametrize("plan", ["plain", "lookup", "lookahead", "hd+", "layerskip", "hispec+"])
def test_every_drafted_token_is_written_or_rejected(model, plan):
    stream = model.stream("ab ab ab ab", plan=plan, max_tokens=40, seed=3, temperature=0.7, raw=True)
    steps = list(stream)
    told = [details(step, model.tokenizer) for step in steps]
    pieces = [piece for each in told for piece in each["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == stream.generation.text
    assert sum(each["tokens"] for each in told) == len(stream.generation.tokens)
    for step, each in zip(steps, told, strict=True):
        assert each["rows"] == 1 + len(step.accepted) + len(each["rejected"])
        assert all(0 <= entry["at"] < max(1, each["tokens"]) for entry in each["rejected"])
        assert all(entry["parent"] < place for place, entry in enumerate(each["rejected"]))
        assert each["seconds"] >= 0
    accepted = stream.generation.stats.tiers[0].accepted
    for source in {piece["source"] for piece in pieces if piece["depth"]}:
        assert accepted[source]
    if plan == "plain":
        assert {piece["depth"] for piece in pieces} == {0}


def test_branches_that_left_the_text_say_where(model):
    a, b, c, d = (model.tokenizer.encode(letter)[-1] for letter in "abcd")
    #        a      b      c after a  d after b  d after a
    draft = Proposal((a, b, c, d, d), (-1, -1, 0, 1, 0), ("copy", "ngram", "copy", "ngram", "feature"))
    pieces = (Piece("a", "copy", 1), Piece("c", "copy", 2), Piece("!", "target"))
    step = TextStep((a, c, b), pieces, 0.25, (), draft, (0, 2))
    assert details(step, model.tokenizer) == {
        "pieces": [
            {"text": "a", "source": "copy", "depth": 1},
            {"text": "c", "source": "copy", "depth": 2},
            {"text": "!", "source": "target", "depth": 0},
        ],
        "rejected": [
            {"text": "b", "source": "ngram", "at": 0, "parent": -1},
            {"text": "d", "source": "ngram", "at": 0, "parent": 0},
            {"text": "d", "source": "feature", "at": 1, "parent": -1},
        ],
        "tokens": 3,
        "rows": 6,
        "seconds": 0.25,
    }


def test_a_stop_string_keeps_depths(model):
    """Text that waits, since it may become a stop string, is told later with the depth it had."""
    whole = model.generate("ab ab ab ab", plan="lookup", max_tokens=40, seed=3, raw=True)
    stream = model.stream("ab ab ab ab", plan="lookup", max_tokens=40, seed=3, raw=True, stop=["\x00never\x00"])
    pieces = [piece for step in stream for piece in step.pieces]
    assert [(piece.text, piece.depth) for piece in pieces] == [(piece.text, piece.depth) for piece in whole.pieces]


def test_special_tokens_are_named(model):
    stop = next(iter(model.stop_ids))
    step = TextStep((1,), (), 0.0, (), Proposal.chain([stop], "copy"), ())
    assert details(step, model.tokenizer)["rejected"][0]["text"].startswith("<")
